"""Text files that a user names."""

from pathlib import Path

from lowbit.convert.user_file import read_user_file
from lowbit.formats.errors import RequestError


def read_text_file(path: Path, what: str) -> str:
    """The content of a text file that a user named; line ends become LF.

    Args:
        path: of the file.
        what: names the file in messages: "evaluation text".

    Raises:
        RequestError: the file cannot be read as UTF-8 text; see `read_user_file`.
    """
    try:
        text = read_user_file(path, what).decode()
    except UnicodeDecodeError as error:
        raise RequestError(f"{what} `{path}` is not UTF-8: {error}") from None
    return text.replace("\r\n", "\n").replace("\r", "\n")
