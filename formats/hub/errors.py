"""Failures of huggingface_hub as one sentence and a hint."""

import errno
from collections.abc import Iterator
from contextlib import contextmanager
from difflib import get_close_matches
from itertools import islice
from pathlib import Path

from lowbit.formats.errors import CheckpointError, LowbitError, ResourceError

EXPECTED = "give a folder or a Hub id, `org/name`"
MOST_NAMES = 1000  # of a folder that are compared with a mistyped one


@contextmanager
def explained(repo: str, revision: str | None = None) -> Iterator[None]:
    """Turn every failure of huggingface_hub inside the block into a LowbitError about `repo`."""
    from huggingface_hub.errors import EntryNotFoundError, HFValidationError, HTTPError

    # HTTPError is that of httpx or httpx2, whichever the library uses, and covers broken
    # connections. The transfer engine raises RuntimeError for those; OSError is a disk or a socket.
    try:
        yield
    except HFValidationError:
        raise not_found(repo) from None
    except (HTTPError, EntryNotFoundError, OSError, RuntimeError) as error:
        raise _explain(error, repo, revision) from error


def not_found(source: str) -> CheckpointError:
    """The error for a source that is neither a folder nor a model on the Hub."""
    return CheckpointError(
        f"`{source}` is neither a folder nor a model on the Hub",
        hint=_likely(source),
    )


def _likely(source: str) -> str:
    """The likely mistake in the name of a model: a folder spelled otherwise, quotes, a bad path."""
    if source.startswith("~"):
        return f"`~` is the home folder only where it stands outside of quotes; {EXPECTED}"
    path = Path(source)
    try:
        if not path.exists():
            near = _near(path)
            if near is not None:
                return f"did you mean `{near}`? Otherwise {EXPECTED}"
            if path.is_absolute() or source.startswith("."):
                first = next(each for each in (*reversed(path.parents), path) if not each.exists())
                return f"`{first}` does not exist; {EXPECTED}"
    except (OSError, ValueError):  # no permission; a NUL byte
        pass
    return f"{EXPECTED}; a private one needs `hf auth login`"


def _near(path: Path) -> Path | None:
    """The folder beside `path` whose name is the most like its own; None if none is."""
    if not path.name or not path.parent.is_dir():
        return None
    entries = islice(path.parent.iterdir(), MOST_NAMES)
    folders = [each.name for each in entries if each.is_dir()]
    found = get_close_matches(path.name, folders, n=1, cutoff=0.75)
    return path.with_name(found[0]) if found else None


def not_cached(repo: str, reason: str) -> CheckpointError:
    """The error for a model that neither the Hub nor the local cache can supply."""
    return CheckpointError(
        f"`{repo}` is not (wholly) in the local cache, and the Hub cannot be reached: {reason}",
        hint="check the network and HF_HUB_OFFLINE, or give a folder",
    )


def _explain(error: Exception, repo: str, revision: str | None) -> LowbitError:
    from huggingface_hub.errors import (
        GatedRepoError,
        HfHubHTTPError,
        LocalEntryNotFoundError,
        OfflineModeIsEnabled,
        RepositoryNotFoundError,
        RevisionNotFoundError,
    )

    looked_in_cache = isinstance(error, LocalEntryNotFoundError)
    cause = error.__cause__ if looked_in_cache and error.__cause__ is not None else error
    if isinstance(cause, GatedRepoError):
        return CheckpointError(
            f"`{repo}` is gated, and this account has no access to it",
            hint="accept its terms on its Hub page, then log in with `hf auth login`",
        )
    if isinstance(cause, RepositoryNotFoundError):
        return not_found(repo)
    if isinstance(cause, RevisionNotFoundError):
        return CheckpointError(
            f"`{repo}` has no revision `{revision}`",
            hint="give a branch, a tag or a full commit sha of the repository",
        )
    if isinstance(cause, HfHubHTTPError):
        status = cause.response.status_code
        answer = f"the Hub answers HTTP {status} for `{repo}`"
        if cause.server_message:
            answer += f": {first_line(cause.server_message)}"
        if status in (401, 403):
            return CheckpointError(answer, hint="check the id, and the token: `hf auth login`")
        return CheckpointError(answer, hint="try again later; finished files are kept")
    if isinstance(cause, OfflineModeIsEnabled):
        return not_cached(repo, "HF_HUB_OFFLINE is set")
    if looked_in_cache:
        return not_cached(repo, "no connection" if cause is error else describe(cause))
    if isinstance(cause, OSError) and cause.errno in (errno.ENOSPC, errno.EDQUOT):
        return ResourceError(
            f"the disk is full while fetching `{repo}`",
            hint="free some space, or set HF_HOME to a larger disk",
        )
    return CheckpointError(
        f"fetching `{repo}` failed: {describe(cause)}",
        hint="run the command again; finished files are kept",
    )


def describe(error: BaseException) -> str:
    """Class and first line of an error."""
    text = first_line(str(error))
    return f"{type(error).__name__}: {text}" if text else type(error).__name__


def first_line(text: str) -> str:
    """The first line of a message, without its full stop."""
    return text.strip().partition("\n")[0].rstrip(".")
