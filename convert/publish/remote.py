"""Content of a repository at a commit, and its comparison with the files that were sent."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

from lowbit.convert.publish.upload import Item
from lowbit.formats.errors import PublishError

if TYPE_CHECKING:
    from huggingface_hub import HfApi


@dataclass(frozen=True, slots=True)
class RemoteFile:
    """A file of a repository."""

    size: int  # in bytes
    sha256: str | None  # of a large file; None for a file that git stores itself
    git_id: str | None  # blob id of what git stores

    def equals(self, item: Item) -> bool:
        """Tell by the hash whether the file has the item's bytes."""
        if self.size != item.size:
            return False
        return self.sha256 == item.sha256 if self.sha256 else self.git_id == item.git_id()


@dataclass(frozen=True, slots=True)
class Remote:
    """Files of a repository at a commit."""

    commit: str
    private: bool
    files: Mapping[str, RemoteFile]

    def missing(self, items: Iterable[Item]) -> list[Item]:
        """Items that the repository lacks or holds with other bytes."""
        return [
            item
            for item in items
            if item.name not in self.files or not self.files[item.name].equals(item)
        ]


def read_remote(api: "HfApi", repo: str, revision: str | None) -> Remote:
    """Read the content of a revision; None is the default branch."""
    info = api.model_info(repo, revision=revision, files_metadata=True)
    if info.sha is None:
        raise PublishError(f"the Hub names no commit of `{repo}`")
    files = {}
    for file in info.siblings or ():
        sha256 = None if file.lfs is None else file.lfs.sha256
        files[file.rfilename] = RemoteFile(file.size or 0, sha256, file.blob_id)
    return Remote(commit=info.sha, private=bool(info.private), files=files)


def require_equal(remote: Remote, items: Iterable[Item], repo: str) -> None:
    """Refuse a repository that does not hold the items' bytes.

    Raises:
        PublishError: naming the first that differs.
    """
    wrong = remote.missing(items)
    if not wrong:
        return
    item = wrong[0]
    found = remote.files.get(item.name)
    more = f" (and {len(wrong) - 1} more)" if len(wrong) > 1 else ""
    if found is None:
        got = "it is not there"
    else:
        expected = item.sha256 if found.sha256 else item.git_id()
        got = f"expected {expected[:12]}…, got {(found.sha256 or found.git_id or 'none')[:12]}…"
    raise PublishError(
        f"`{item.name}`{more} in `{repo}` is not what was sent: {got}",
        hint="`lowbit-convert push` sends it anew",
    )
