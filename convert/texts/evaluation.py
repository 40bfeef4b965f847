"""The texts that logits are compared on, as windows of tokens."""

import hashlib
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from lowbit.formats.errors import RequestError
from lowbit.formats.text.tokenizer import load_text_tokenizer

WINDOW = 512
LONGEST = 8192  # of a window for figures by position
LONG_TOKENS = 16384  # of all such windows
NOISY = 32  # windows of the first text that also pass through the original in BF16
BUNDLED = (
    ("prose", "WikiText-2 test, first 200 kB", "wikitext2-test-200kB.txt"),
    ("maths", "GSM8K test, first 40 kB", "gsm8k-test-40kB.txt"),
    ("code", "Python's standard library, 40 kB", "python-stdlib-evaluation-40kB.txt"),
)

LANGUAGES = (
    ("chinese", "Chinese prose", "chinese-evaluation.txt"),
    ("german", "German prose", "german-evaluation.txt"),
    ("spanish", "Spanish prose", "spanish-evaluation.txt"),
    ("russian", "Russian prose", "russian-evaluation.txt"),
)


@dataclass(frozen=True, slots=True)
class Text:
    """An evaluation text."""

    name: str  # short, by which a gate calls it: `maths`
    title: str  # shown in the report
    content: str  # all of it

    @property
    def sha256(self) -> str:
        """SHA-256 of the UTF-8 bytes."""
        return hashlib.sha256(self.content.encode()).hexdigest()


@dataclass(frozen=True, slots=True)
class EvalText:
    """A text as tokens."""

    text: Text
    ids: Tensor  # [tokens] int64
    window: int  # tokens of a window

    @property
    def windows(self) -> Tensor:
        """Consecutive windows [windows, window] int64; a rest that fills none is left out."""
        return _cut(self.ids, self.window, len(self.ids))

    def long_windows(self, context: int) -> Tensor:
        """A few windows as long as 8192 tokens, the context and the text allow: [windows, T] int64.

        None of them, [0, T], where that is shorter than two ordinary windows.
        """
        length = min(LONGEST, context, len(self.ids))
        return _cut(self.ids, length, LONG_TOKENS if length >= 2 * WINDOW else 0)


def default_texts() -> tuple[Text, ...]:
    """The bundled texts: prose, maths and code."""
    return _read(BUNDLED)


def vocabulary_texts() -> tuple[Text, ...]:
    """The bundled texts, and a window or more of other languages."""
    return _read((*BUNDLED, *LANGUAGES))


def _read(files: Sequence[tuple[str, str, str]]) -> tuple[Text, ...]:
    folder = Path(__file__).with_name("data")
    return tuple(
        Text(name, title, (folder / file).read_text(encoding="utf-8"))
        for name, title, file in files
    )


def bundled_hashes() -> frozenset[str]:
    """SHA-256 of the bundled texts; any other text is one of the user's own."""
    return frozenset(text.sha256 for text in default_texts())


def check_names(texts: Sequence[Text]) -> None:
    """Refuse texts that a report could not tell apart.

    Raises:
        RequestError: two have one name.
    """
    for name, count in Counter(text.name for text in texts).items():
        if count > 1:
            raise RequestError(f"{count} evaluation texts are named `{name}`", hint="rename them")


def tokenize(
    folder: Path, texts: Sequence[Text], context: int, longest: int = WINDOW
) -> tuple[EvalText, ...]:
    """Texts as tokens of a checkpoint's tokenizer, without special tokens.

    Args:
        texts: the first has at least two tokens, every other one a window.
        longest: tokens of a window at most; fewer where the context or the first text are shorter.

    Raises:
        CheckpointError: the folder has no tokenizer.json, or one that fails.
        RequestError: a text is too short.
    """
    tokenizer = load_text_tokenizer(folder, "the logit report")
    cut: list[EvalText] = []
    for text in texts:
        ids = tokenizer.encode(text.content)
        least = cut[0].window if cut else 2
        if len(ids) < least:
            raise RequestError(
                f"evaluation text `{text.name}` has {len(ids)} tokens, expected at least {least}",
                hint="give a longer --eval-text",
            )
        window = cut[0].window if cut else min(longest, context, len(ids))
        cut.append(EvalText(text, torch.tensor(ids), window))
    return tuple(cut)


def compared_windows(cut: Sequence[EvalText], context: int) -> tuple[Tensor, Tensor]:
    """Windows that logits are compared on: of all texts, and longer ones of the first or none."""
    return torch.cat([text.windows for text in cut]), cut[0].long_windows(context)


def _cut(ids: Tensor, window: int, most: int) -> Tensor:
    """Windows of at most `most` tokens in all."""
    count = min(len(ids), most) // window
    return ids[: count * window].view(count, window)
