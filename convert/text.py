"""Texts and the tokenizer that cuts them."""

from pathlib import Path
from typing import TYPE_CHECKING

from lowbit.formats.errors import CheckpointError, RequestError

if TYPE_CHECKING:
    from tokenizers import Tokenizer

TOKENIZER_FILE = "tokenizer.json"


def read_text_file(path: Path, what: str) -> str:
    """The content of a text file; line ends become LF.

    Args:
        path: of the file.
        what: names the file in messages: "evaluation text".

    Raises:
        RequestError: the file cannot be read as UTF-8 text.
    """
    try:
        return path.read_text(encoding="utf-8")
    except OSError as error:
        raise RequestError(f"{what} `{path}` cannot be read: {error.strerror}") from None
    except UnicodeDecodeError as error:
        raise RequestError(f"{what} `{path}` is not UTF-8: {error}") from None


def load_tokenizer(folder: Path, purpose: str) -> "Tokenizer":
    """The tokenizer of an original checkpoint.

    Args:
        folder: with tokenizer.json.
        purpose: what needs it, for the message: "calibration".

    Raises:
        CheckpointError: the folder has no tokenizer.json, or one that cannot be read.
    """
    from tokenizers import Tokenizer

    path = folder / TOKENIZER_FILE
    if not path.is_file():
        raise CheckpointError(
            f"`{folder}` has no {TOKENIZER_FILE}, which {purpose} needs",
            hint="copy it from the original model",
        )
    text = path.read_text(encoding="utf-8")
    try:
        return Tokenizer.from_str(text)
    except Exception as error:  # the library raises nothing narrower
        raise CheckpointError(f"`{path}` is not a tokenizer: {error}") from None
