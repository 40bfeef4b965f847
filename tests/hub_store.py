"""What a loopback hub holds: repositories, their commits, and the objects that were uploaded."""

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path

REGULAR_LIMIT = 10_000_000  # bytes; what is longer is a large file whatever its name

Files = Mapping[str, Path]  # name in the repository -> where its bytes are


@dataclass(slots=True)
class Repository:
    """One repository: every commit whole, and what its branches point at."""

    private: bool = False
    commits: dict[str, Files] = field(default_factory=dict)
    branches: dict[str, str] = field(default_factory=dict)

    def commit(self, branch: str, files: Files, label: str) -> str:
        """Make `files` the content of a branch; the new commit's sha."""
        sha = hashlib.sha1(label.encode()).hexdigest()
        self.commits[sha] = dict(files)
        self.branches[branch] = sha
        return sha

    def find(self, revision: str) -> tuple[str, Files] | None:
        """Commit and content of a branch or a commit."""
        sha = self.branches.get(revision, revision)
        return None if sha not in self.commits else (sha, self.commits[sha])


def is_large(name: str, size: int) -> bool:
    """Whether the Hub keeps a file out of git."""
    return name.endswith(".safetensors") or size > REGULAR_LIMIT


def object_id(name: str, path: Path) -> str:
    """SHA-256 of a large file, the git blob id of any other."""
    status = path.stat()
    return _object_id(path, is_large(name, status.st_size), status.st_size, status.st_mtime_ns)


@cache
def _object_id(path: Path, large: bool, size: int, mtime_ns: int) -> str:
    with path.open("rb") as file:
        if large:
            return hashlib.file_digest(file, "sha256").hexdigest()
        return hashlib.sha1(b"blob %d\0" % size + file.read()).hexdigest()


def describe(name: str, path: Path) -> dict[str, object]:
    """Size and ids of a file, as the Hub gives them."""
    size, oid = path.stat().st_size, object_id(name, path)
    if not is_large(name, size):
        return {"size": size, "blobId": oid}
    lfs = {"sha256": oid, "size": size, "pointerSize": 130}
    pointer = hashlib.sha1(oid.encode()).hexdigest()
    return {"size": size, "blobId": pointer, "lfs": lfs}
