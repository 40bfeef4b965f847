"""Prompts that a model is asked to get text in its own words.

Four kinds, in equal shares: mathematical questions, passages of prose and pieces of code of the
bundled calibration text with a task each, and short requests of everyday use.
"""

import random
import re
import textwrap
from collections.abc import Iterable, Sequence
from itertools import cycle, islice
from pathlib import Path

from lowbit.convert.texts.calibration import CODE_FILE, PARAGRAPH_END, WHAT
from lowbit.formats.files.user_file import read_text_file

PASSAGE_TASKS = (
    "Continue this text:\n\n{}",
    "Summarize this text:\n\n{}",
    "Explain this text to a child:\n\n{}",
)
CODE_TASKS = (
    "Explain this code and improve it:\n\n```python\n{}\n```",
    "Write tests for this code:\n\n```python\n{}\n```",
)
LENGTHS = range(200, 1601)  # characters of a passage or a piece of code
ITEM_END = re.compile(r"^####.*\n", re.MULTILINE)  # the result of a question
# A blank line before a function, a method or a class.
CODE_END = re.compile(r"\n\n+(?= *(?:@|(?:async )?def |class ))")


def prompts(count: int, seed: int) -> list[str]:
    """Prompts of all kinds, mixed; the same for the same seed.

    Args:
        count: any number; beyond 240, prompts of the smaller kinds are repeated.
    """
    order = random.Random(seed)
    kinds = [_shuffled(kind, order) for kind in _kinds()]
    shares = [count // len(kinds) + (n < count % len(kinds)) for n in range(len(kinds))]
    chosen = [
        text
        for kind, share in zip(kinds, shares, strict=True)
        for text in islice(cycle(kind), share)
    ]
    return _shuffled(chosen, order)


def _kinds() -> tuple[list[str], ...]:
    """All prompts of each kind; a passage or a piece of code comes with one of its tasks."""
    items = ITEM_END.split(_read("gsm8k-train-sample.txt"))
    questions = [item.strip().partition("\n")[0] for item in items if item.strip()]
    passages = _of_length(PARAGRAPH_END.split(_read("simplewiki.txt")))
    pieces = _of_length(map(textwrap.dedent, CODE_END.split(_read(CODE_FILE))))
    return (
        questions,
        [task.format(text) for task, text in zip(cycle(PASSAGE_TASKS), passages, strict=False)],
        [task.format(text) for task, text in zip(cycle(CODE_TASKS), pieces, strict=False)],
        _read("everyday-prompts.txt").splitlines(),
    )


def _read(name: str) -> str:
    return read_text_file(Path(__file__).with_name("data") / name, WHAT)


def _of_length(texts: Iterable[str]) -> list[str]:
    stripped = (text.strip("\n") for text in texts)
    return [text for text in stripped if len(text) in LENGTHS]


def _shuffled(texts: Sequence[str], order: random.Random) -> list[str]:
    return order.sample(texts, len(texts))
