"""The JSON schema of a file that a user names."""

from pathlib import Path
from typing import Any

from lowbit.formats.errors import RequestError
from lowbit.formats.files.strict_json import loads
from lowbit.formats.files.user_file import read_user_file

SCHEMA = "JSON schema"


def read_schema(path: Path) -> dict[str, Any]:
    """Read a JSON schema.

    Raises:
        RequestError: the file cannot be read, or holds no JSON object.
    """
    try:
        content = loads(read_user_file(path, SCHEMA))
    except ValueError as error:
        raise RequestError(f"{SCHEMA} `{path}`: {error}") from None
    if not isinstance(content, dict):
        raise RequestError(f"{SCHEMA} `{path}`: expected a JSON object")
    return content
