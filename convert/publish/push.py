"""Send a verified folder to the Hub: weights first, everything else in one last commit.

A repository without config.json loads nowhere, so while it is being filled each weight file gets a
commit of its own: an interrupted push continues after the last one. A repository that is complete
stays as it is until the last commit, which also names the new weights; their content is on the Hub
by then. Each try begins by comparing hashes, so it may be repeated at any point. The upload itself
is huggingface_hub's, which chooses with the server between Xet and LFS over HTTP. Its
`upload_folder` is not used: it commits in batches of its own, config.json among them.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from fnmatch import fnmatch
from typing import TYPE_CHECKING

from lowbit.convert.publish.errors import TOKEN, explained, patiently
from lowbit.convert.publish.remote import Remote, read_remote, require_equal
from lowbit.convert.publish.upload import WEIGHTS, Item, UploadPlan
from lowbit.formats.errors import PublishError
from lowbit.formats.file_names import HTML_FILE, QUALITY_FILE
from lowbit.formats.hub.ids import HUB_ID
from lowbit.formats.layout.manifest import MANIFEST_FILE
from lowbit.formats.safetensors.checkpoint import CONFIG_FILE
from lowbit.formats.tasks import TASKS_FILE

if TYPE_CHECKING:
    from huggingface_hub import HfApi

# Removed if an earlier push left them: they would describe other weights.
REPLACED = (WEIGHTS, "*.safetensors.index.json", QUALITY_FILE, HTML_FILE, TASKS_FILE)


@dataclass(frozen=True, slots=True)
class Published:
    """Content of the Hub after a push; every hash was compared."""

    repo: str  # `owner/name`
    url: str  # for people
    commit: str  # sha of the commit that holds the files
    private: bool  # True where only its owner sees it
    sent: tuple[str, ...]  # names of the files that this call sent, in order
    present: tuple[str, ...]  # names of the files that were there already
    size_bytes: int  # of all files
    left_out: tuple[str, ...]  # files of the folder that were not published
    notes: tuple[str, ...]  # sentences of the upload


def publish(
    api: "HfApi",
    upload: UploadPlan,
    private: bool | None = None,
    revision: str | None = None,
    bars: bool = False,
) -> Published:
    """Make a revision of a repository hold exactly the upload's bytes, and check that it does.

    Args:
        private: visibility of a new repository, the account's default when None; one that exists
            must agree.
        revision: branch to push to, created where it does not exist; the default one when None.
        bars: let huggingface_hub draw its progress bars.

    Raises:
        PublishError: the push failed; another call does not send again what has arrived.
    """
    repo = upload.repo
    sent: list[str] = []
    with explained(repo), _library_bars(bars):
        before = patiently(lambda: _open_repository(api, repo, private, revision))
        commit = patiently(lambda: _send(api, upload, revision, sent))
        after = patiently(lambda: read_remote(api, repo, commit))
        require_equal(after, upload.items, repo)
    url = f"{api.endpoint}/{repo}" + (f"/tree/{revision}" if revision else "")
    names = dict.fromkeys(sent)
    return Published(
        repo=repo,
        url=url,
        commit=commit,
        private=before.private,
        sent=tuple(names),
        present=tuple(item.name for item in upload.items if item.name not in names),
        size_bytes=upload.size_bytes,
        left_out=upload.left_out,
        notes=upload.notes,
    )


def _open_repository(api: "HfApi", repo: str, private: bool | None, revision: str | None) -> Remote:
    """Create repository and branch where they do not exist; the content they have."""
    api.create_repo(repo, private=private, exist_ok=True)
    if revision is not None and not revision.startswith("refs/"):
        api.create_branch(repo, branch=revision, exist_ok=True)
    found = read_remote(api, repo, revision)
    if private is not None and found.private != private:
        words = ("public", "private")
        raise PublishError(
            f"`{repo}` exists and is {words[found.private]}, not {words[private]}",
            hint="change that on its settings page, or leave the option out",
        )
    if CONFIG_FILE in found.files and MANIFEST_FILE not in found.files:
        raise PublishError(
            f"`{repo}` holds a model that lowbit-convert did not make",
            hint="choose another name; only packed checkpoints are replaced",
        )
    return found


def _send(api: "HfApi", upload: UploadPlan, revision: str | None, sent: list[str]) -> str:
    """Send what the revision lacks; the sha of the commit that holds everything.

    Every commit is made on top of the one before; one that is not the newest any more fails.
    """
    from huggingface_hub import CommitOperationAdd, CommitOperationDelete

    repo = upload.repo
    remote = read_remote(api, repo, revision)
    head = remote.commit
    todo = remote.missing(upload.items)
    weights = [item for item in todo if item.is_weight]

    def commit(message: str, items: Sequence[Item], removed: Sequence[str] = ()) -> str:
        operations = [CommitOperationAdd(item.name, item.content) for item in items]
        found = api.create_commit(
            repo,
            [*operations, *map(CommitOperationDelete, removed)],
            commit_message=message,
            revision=revision,
            parent_commit=head,
        )
        sent.extend(item.name for item in items)
        return found.oid

    if CONFIG_FILE not in remote.files and weights:
        for item in weights:
            head = commit(f"Add {item.name}", [item])
        require_equal(read_remote(api, repo, head), weights, repo)
        todo = [item for item in todo if not item.is_weight]
    published = {item.name for item in upload.items}
    stale = [
        name
        for name in remote.files
        if name not in published
        and "/" not in name
        and any(fnmatch(name, pattern) for pattern in REPLACED)
    ]
    if todo or stale:
        head = commit(f"Publish {upload.folder.resolve().name}", todo, stale)
    return head


@contextmanager
def _library_bars(shown: bool) -> Iterator[None]:
    from huggingface_hub.utils import (
        are_progress_bars_disabled,
        disable_progress_bars,
        enable_progress_bars,
    )

    if shown or are_progress_bars_disabled():
        yield
        return
    disable_progress_bars()
    try:
        yield
    finally:
        enable_progress_bars()


def check_name(repo: str) -> None:
    """Refuse a repository name that the Hub does not take, without asking the Hub.

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
