"""Text files that a user names."""

from pathlib import Path

from lowbit.formats.errors import RequestError


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
