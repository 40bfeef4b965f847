"""Names of models on the Hub: `org/name`, `org/name@revision`, and addresses of pages."""

import os
import re
from urllib.parse import unquote, urlsplit

from lowbit.formats.errors import CheckpointError

HUB_ID = re.compile(r"[a-z0-9_][\w.-]*/[a-z0-9_][\w.-]*", re.ASCII | re.IGNORECASE)
HOSTS = ("huggingface.co", "www.huggingface.co", "hf.co")
ENDPOINT = "HF_ENDPOINT"  # variable that names another Hub
OF_REVISIONS = ("tree", "blob", "resolve", "raw", "commit", "commits")
NO_MODELS = {"datasets": "a data set", "spaces": "a space", "collections": "a collection"}


def hub_id(source: str, revision: str | None = None) -> tuple[str, str | None] | None:
    """Id and revision of `org/name`, `org/name@revision` or a page; None for any other text.

    Args:
        source: as the user wrote it; the caller has checked that it is not a folder.

    Raises:
        CheckpointError: two different revisions, or a page of something else than a model.
    """
    repo, mark, named = without_address(source).partition("@")
    if not HUB_ID.fullmatch(repo) or bool(mark) != bool(named):
        return None
    if named and revision not in (None, named):
        raise CheckpointError(f"`{source}` names a revision, and `{revision}` is another")
    return repo, named or revision


def without_address(source: str) -> str:
    """`org/name` or `org/name@revision` of a model's page on the Hub; other text as it is.

    Raises:
        CheckpointError: the page of a data set or a space, or a subfolder of a repository.
    """
    path = _path_on_hub(source)
    if path is None:
        return source
    parts = [unquote(part) for part in path.split("/") if part]
    if parts and parts[0] in NO_MODELS:
        raise CheckpointError(f"`{source}` is {NO_MODELS[parts[0]]}, expected a model")
    if len(parts) < 2:
        raise CheckpointError(
            f"`{source}` names no model", hint="an address is https://huggingface.co/ORG/NAME"
        )
    repo = "/".join(parts[:2])
    kind, revision = (*parts[2:4], "", "")[:2]
    if kind == "tree" and len(parts) > 4:
        raise CheckpointError(
            f"`{source}` is a folder inside a repository; models are read from its top level"
        )
    return f"{repo}@{revision}" if kind in OF_REVISIONS and revision else repo


def _path_on_hub(source: str) -> str | None:
    """Path of an address on the Hub; None where the text is no such address."""
    hosts = (*HOSTS, urlsplit(os.environ.get(ENDPOINT, "")).netloc)
    scheme, mark, rest = source.partition("://")
    if not mark:
        rest = source
    elif scheme.lower() not in ("http", "https"):
        return None
    host, _, path = re.split(r"[?#]", rest, maxsplit=1)[0].partition("/")
    if not host or host.lower() not in hosts:
        return None
    return path
