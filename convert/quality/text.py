"""The text that logits are compared on, as windows of tokens."""

import hashlib
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from lowbit.formats.errors import CheckpointError, RequestError

DEFAULT_NAME = "WikiText-2 test, first 200 kB"
DEFAULT_FILE = "wikitext2-test-200kB.txt"
TOKENIZER_FILE = "tokenizer.json"
WINDOW = 512


@dataclass(frozen=True, slots=True)
class EvalText:
    """A text cut into non-overlapping windows.

    Attributes:
        name: shown in the report.
        sha256: of its UTF-8 bytes.
        tokens: of the whole text.
        windows: [windows, tokens of one] int64; what does not fill a window at the end is left out.
    """

    name: str
    sha256: str
    tokens: int
    windows: Tensor


def default_text() -> tuple[str, str]:
    """The bundled text and its name."""
    return Path(__file__).with_name(DEFAULT_FILE).read_text(encoding="utf-8"), DEFAULT_NAME


def cut_windows(folder: Path, text: str, name: str, context: int) -> EvalText:
    """Tokenize a text with a checkpoint's tokenizer, without special tokens, and cut it.

    Args:
        folder: of the original checkpoint.
        text: at least two tokens.
        name: shown in the report.
        context: longest sequence of the model; windows have min(512, context, tokens) tokens.

    Raises:
        CheckpointError: the folder has no tokenizer.json.
        RequestError: the text has fewer than two tokens.
    """
    from tokenizers import Tokenizer

    path = folder / TOKENIZER_FILE
    if not path.is_file():
        raise CheckpointError(
            f"`{folder}` has no {TOKENIZER_FILE}, which the logit report needs",
            hint="copy it from the original model",
        )
    tokenizer = Tokenizer.from_file(str(path))
    ids = tokenizer.encode(text, add_special_tokens=False).ids
    if len(ids) < 2:
        raise RequestError(
            f"evaluation text `{name}` has {len(ids)} tokens, expected at least 2",
            hint="give a longer --eval-text",
        )
    window = min(WINDOW, context, len(ids))
    count = len(ids) // window
    return EvalText(
        name=name,
        sha256=hashlib.sha256(text.encode()).hexdigest(),
        tokens=len(ids),
        windows=torch.tensor(ids[: count * window]).view(count, window),
    )
