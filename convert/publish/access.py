"""Checks of a repository's name and of the token, before anything is read or sent."""

from typing import TYPE_CHECKING

from lowbit.convert.publish.errors import TOKEN, explained, patiently
from lowbit.formats.errors import PublishError
from lowbit.formats.hub.ids import HUB_ID

if TYPE_CHECKING:
    from huggingface_hub import HfApi


def check_name(repo: str) -> None:
    """Refuse a repository name that the Hub does not take, without asking the Hub.

    Args:
        repo: `owner/name`; it need not exist.

    Raises:
        PublishError: a name the Hub does not take.
    """
    from huggingface_hub.utils import validate_repo_id

    if not HUB_ID.fullmatch(repo):
        raise PublishError(f"`{repo}` is not of the form OWNER/NAME")
    with explained(repo):
        validate_repo_id(repo)


def open_hub(repo: str) -> "HfApi":
    """A client of the Hub with a checked token that may write.

    Args:
        repo: `owner/name`; it need not exist.

    Raises:
        PublishError: a name the Hub does not take, no token, one that it does not know or that
            may only read, or no connection.
    """
    from huggingface_hub import HfApi, get_token

    check_name(repo)
    token = get_token()
    if token is None:
        raise PublishError("there is no token for the Hub", hint=TOKEN)
    api = HfApi(token=token, library_name="lowbit")
    with explained(repo):
        account = patiently(api.whoami)
    access = (account.get("auth") or {}).get("accessToken") or {}
    if access.get("role") == "read":
        raise PublishError(f"the token of `{account.get('name')}` may only read", hint=TOKEN)
    return api
