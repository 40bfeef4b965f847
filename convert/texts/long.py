"""Text that cannot be predicted without what stands far before: passages repeated, lines looked up.

A repeated window is a passage, then the same passage again. A searched window is a text with lines
like `The colors of Mary are red white blue pink.` hidden in it at equal distances; at its end they
all come again, in the same order, so that the first is looked up farthest back.
"""

import random
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from lowbit.convert.texts.evaluation import Text
from lowbit.formats.errors import RequestError
from lowbit.formats.text.tokenizer import TextTokenizer, load_text_tokenizer

LONGEST = 32_768  # tokens of a window
LEAST = 1024  # below this the lines to be looked up leave no room for text
ALL_TOKENS = 98_304  # of all windows, a third of them repeated
MOST_REPEATED, MOST_SEARCHED = 2, 4  # windows
NAMES = ("Mary", "John", "Lucy", "Peter", "Anna", "Tom", "Sarah", "Ben")  # one a line
# Most tokenizers have a token for each of these words.
COLORS = ("red", "blue", "green", "yellow", "black", "white", "brown", "pink", "orange", "purple")
ASKED = 4  # colors of a line
SEED = 7


@dataclass(frozen=True, slots=True)
class Lookup:
    """A line that comes a second time."""

    window: int  # number of the searched window
    line: int  # which of the hidden ones, from the first
    answer: slice  # positions of the tokens that only the first time tells
    distance: int  # tokens between the two


@dataclass(frozen=True, slots=True)
class LongText:
    """Windows of T tokens."""

    repeated: Tensor  # [windows, T] int64
    searched: Tensor  # [windows, T] int64
    lookups: tuple[Lookup, ...]  # every line of every searched window

    @property
    def length(self) -> int:
        """Tokens of a window, T."""
        return self.repeated.shape[1]


@dataclass(frozen=True, slots=True)
class Line:
    """A hidden line as tokens, of which [start, stop) are the colors."""

    ids: tuple[int, ...]
    start: int
    stop: int


def long_text(folder: Path, text: Text, context: int) -> LongText:
    """Windows as long as 32,768 tokens, the context and the text allow.

    Raises:
        CheckpointError: the folder has no tokenizer.json, or one that fails.
        RequestError: context or text have fewer than 1024 tokens.
    """
    tokenizer = load_text_tokenizer(folder, "the long report")
    ids = tokenizer.encode(text.content)
    length = min(LONGEST, context, len(ids)) // 2 * 2
    if length < LEAST:
        raise RequestError(
            f"a long report takes windows of at least {LEAST} tokens; the model has {context} "
            f"positions and evaluation text `{text.name}` {len(ids)} tokens",
            hint="leave out --long" if context < LEAST else "give a longer --eval-text",
        )
    count = min(MOST_REPEATED, max(1, ALL_TOKENS // 3 // length))
    passages = _spread(ids, length // 2, count)
    chance = random.Random(SEED)
    windows, lookups = [], []
    count = min(MOST_SEARCHED, max(1, ALL_TOKENS // 3 * 2 // length))
    for number, filling in enumerate(_spread(ids, length, count)):
        lines = [_line(tokenizer, name, chance.sample(COLORS, ASKED)) for name in NAMES]
        window, placed = _hide(filling, lines, number)
        windows.append(window)
        lookups += placed
    return LongText(
        repeated=torch.tensor([passage * 2 for passage in passages]),
        searched=torch.tensor(windows),
        lookups=tuple(lookups),
    )


def _spread(ids: list[int], length: int, count: int) -> list[list[int]]:
    """Stretches of a text, the first at its beginning and the last at its end."""
    step = (len(ids) - length) // max(1, count - 1)
    count = count if step else 1
    return [ids[number * step :][:length] for number in range(count)]


def _line(tokenizer: TextTokenizer, name: str, colors: list[str]) -> Line:
    """A line, and which of its tokens nobody could guess."""
    before = f"\nThe colors of {name} are"
    listed = "".join(f" {color}" for color in colors)
    whole = tokenizer.encode(f"{before}{listed}.\n")
    start, stop = (_shared(whole, tokenizer.encode(part)) for part in (before, before + listed))
    return Line(tuple(whole), start, max(stop, start + 1))


def _shared(a: list[int], b: list[int]) -> int:
    """Tokens that two texts begin with alike, which not every tokenizer cuts where they part."""
    pairs = zip(a, b, strict=False)
    return next((n for n, (x, y) in enumerate(pairs) if x != y), min(len(a), len(b)))


def _hide(filling: list[int], lines: list[Line], number: int) -> tuple[list[int], list[Lookup]]:
    """A window as long as its filling, with every line in it twice."""
    T = len(filling)
    room = T - 2 * sum(len(line.ids) for line in lines)
    window: list[int] = []
    first: list[int] = []
    for index, line in enumerate(lines):
        first.append(len(window))
        window += line.ids
        window += filling[room * index // len(lines) : room * (index + 1) // len(lines)]
    lookups = []
    for index, line in enumerate(lines):
        here = len(window)
        answer = slice(here + line.start, here + line.stop)
        lookups.append(Lookup(number, index, answer, here - first[index]))
        window += line.ids
    return window, lookups
