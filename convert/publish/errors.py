"""Failures of publishing: which are tried again, and each as one sentence and a hint.

huggingface_hub itself repeats single requests only.
"""

import re
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TypeVar

from lowbit.formats.errors import PublishError
from lowbit.formats.hub.errors import describe, first_line

AGAIN = "`lowbit-convert push` continues: what has arrived is not sent twice"
TOKEN = "`hf auth login` stores a token with write access; HF_TOKEN wins over it"
# Storage is full: 402 (payment required), 413 (too large) and 507 (WebDAV). The Hub itself answers
# 403 and says so in words.
QUOTA_STATUS = (402, 413, 507)
QUOTA_WORDS = re.compile(r"storage|quota|limit reached", re.IGNORECASE)
CONFLICT = 412  # another commit came in between
PASSING = (408, 412, 429)  # worth another try, like every 5xx
WAITS_S = (2.0, 10.0)  # before the second and the third try

Result = TypeVar("Result")


@contextmanager
def explained(repo: str) -> Iterator[None]:
    """Turn every failure of huggingface_hub inside the block into a PublishError about `repo`."""
    from huggingface_hub.errors import HFValidationError, HTTPError, OfflineModeIsEnabled

    # The library raises RuntimeError for a failed upload, ValueError for a malformed answer and
    # OSError for a file or a socket.
    try:
        yield
    except HFValidationError as error:
        raise PublishError(
            f"`{repo}` is no name the Hub takes: {describe(error)}", hint="give OWNER/NAME"
        ) from None
    except OfflineModeIsEnabled:
        raise PublishError(
            "HF_HUB_OFFLINE is set, so nothing can be published", hint="unset it"
        ) from None
    except (HTTPError, OSError, RuntimeError, ValueError) as error:
        raise _explain(_cause(error), repo) from error


def patiently(step: Callable[[], Result]) -> Result:
    """Run a step, again after a pause if its failure may pass; its result.

    Raises:
        Exception: the last try's, from huggingface_hub.
    """
    from huggingface_hub.errors import HTTPError

    for wait in WAITS_S:
        try:
            return step()
        except (HTTPError, OSError, RuntimeError) as error:
            if not _is_passing(error):
                raise
        time.sleep(wait)
    return step()


def _is_passing(error: BaseException) -> bool:
    """Tell if another try may succeed: a server in trouble or a broken connection."""
    from huggingface_hub.errors import HfHubHTTPError, HTTPError, OfflineModeIsEnabled

    cause = _cause(error)
    if isinstance(cause, HfHubHTTPError):
        status = cause.response.status_code
        return status in PASSING or (status >= 500 and not _is_quota(cause))
    if isinstance(cause, OfflineModeIsEnabled):
        return False
    return isinstance(cause, HTTPError | ConnectionError | RuntimeError)


def _cause(error: BaseException) -> BaseException:
    while isinstance(error, RuntimeError) and error.__cause__ is not None:
        error = error.__cause__
    return error


def _explain(error: BaseException, repo: str) -> PublishError:
    from huggingface_hub.errors import HfHubHTTPError, HTTPError, RepositoryNotFoundError

    if isinstance(error, HfHubHTTPError):
        status = error.response.status_code
        said = first_line(error.server_message or "")
        answer = f"the Hub answers HTTP {status}" + (f": {said}" if said else "")
        if _is_quota(error):
            return PublishError(
                f"there is no room for `{repo}` on the Hub: {answer}",
                hint=f"make room, see https://huggingface.co/settings/billing, then {AGAIN}",
            )
        if status == CONFLICT:
            return PublishError(f"`{repo}` was changed by somebody else meanwhile", hint=AGAIN)
        if status in (401, 403) or isinstance(error, RepositoryNotFoundError):
            return PublishError(f"this token may not write to `{repo}`: {answer}", hint=TOKEN)
        if status in PASSING or status >= 500:
            return PublishError(f"publishing `{repo}` failed: {answer}", hint=AGAIN)
        return PublishError(f"the Hub refuses `{repo}`: {answer}")
    if isinstance(error, HTTPError | ConnectionError):
        return PublishError(
            f"the Hub cannot be reached: {describe(error)}", hint=f"check the network, then {AGAIN}"
        )
    message = f"publishing `{repo}` failed: {describe(error)}"
    return PublishError(message, hint=AGAIN if isinstance(error, RuntimeError) else None)


def _is_quota(error: BaseException) -> bool:
    from huggingface_hub.errors import HfHubHTTPError

    if not isinstance(error, HfHubHTTPError):
        return False
    status = error.response.status_code
    said = error.server_message or ""
    return status in QUOTA_STATUS or (status == 403 and QUOTA_WORDS.search(said) is not None)
