"""Silence the advice on speed that transformers logs: a report's reader has no use for it."""

import logging
import warnings
from collections.abc import Iterator
from contextlib import contextmanager

ADVICE = ("is falling back to its reference", "fast path is not available")
NO_CONTEXT = "Attempting to run cuBLAS, but there was no current CUDA context"


@contextmanager
def without_advice() -> Iterator[None]:
    """Keep lines about faster kernels off the terminal; every other line still comes through.

    One warning is kept off, too: PyTorch's of a thread that computes gradients and is the first to
    multiply on a GPU. It is harmless, and nobody can act on it.
    """
    # A handler sees the lines of all loggers below it, a filter of a logger only its own.
    handlers = tuple(logging.getLogger("transformers").handlers)
    for handler in handlers:
        handler.addFilter(_is_no_advice)
    try:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", message=NO_CONTEXT)
            yield
    finally:
        for handler in handlers:
            handler.removeFilter(_is_no_advice)


def _is_no_advice(record: logging.LogRecord) -> bool:
    message = record.getMessage()
    return not any(words in message for words in ADVICE)
