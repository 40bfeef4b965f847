"""Silence advice that transformers logs and its reader has no use for, on speed above all."""

import logging
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial

ADVICE = (
    "is falling back to its reference",
    "fast path is not available",
    # Of YaRN as model cards give it: max_position_embeddings stays as it was.
    "does not match the ratio implicitly set",
)
NO_CONTEXT = "Attempting to run cuBLAS, but there was no current CUDA context"


@contextmanager
def without_advice() -> Iterator[None]:
    """Keep ADVICE off the terminal; every other line still comes through.

    One warning is kept off, too: PyTorch's of a thread that computes gradients and is the first to
    multiply on a GPU. It is harmless, and nobody can act on it.
    """
    import transformers  # noqa: F401  # sets its handlers up

    # A handler sees the lines of all loggers below it, a filter of a logger only its own.
    handlers = tuple(logging.getLogger("transformers").handlers)
    own = partial(_is_no_advice)  # a filter apiece, so that the end of an inner one ends no other
    for handler in handlers:
        handler.addFilter(own)
    try:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", message=NO_CONTEXT)
            yield
    finally:
        for handler in handlers:
            handler.removeFilter(own)


def _is_no_advice(record: logging.LogRecord) -> bool:
    message = record.getMessage()
    return not any(words in message for words in ADVICE)
