"""Files appear whole or not at all, whichever operation the disk refuses."""

import errno
import os
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lowbit.formats.errors import ResourceError
from lowbit.formats.files import atomic

OLD, NEW = b"old", b"new content"


@given(
    count=st.integers(1, 5),
    fails=st.integers(0, 5),
    partly=st.booleans(),
    code=st.sampled_from([errno.ENOSPC, errno.EROFS, errno.EACCES, errno.EIO, errno.EDQUOT]),
)
def test_all_files_change_or_none(
    tmp_path_factory: pytest.TempPathFactory, count: int, fails: int, partly: bool, code: int
) -> None:
    folder = tmp_path_factory.mktemp("disk")
    paths = [folder / f"file{n}" for n in range(count)]
    for path in paths:
        path.write_bytes(OLD)
    with pytest.MonkeyPatch.context() as patch:
        _refuse(patch, fails, partly, code)
        if fails < count:
            with pytest.raises(
                ResourceError, match=f"`{paths[fails]}` cannot be written: "
            ) as caught:
                atomic.replace_files(dict.fromkeys(paths, NEW))
            full = code in (errno.ENOSPC, errno.EDQUOT)
            assert ("the disk is full" in str(caught.value)) == full
            assert (caught.value.hint is not None) == full
        else:
            atomic.replace_files(dict.fromkeys(paths, NEW))
    assert {path.read_bytes() for path in paths} == {OLD if fails < count else NEW}
    assert sorted(folder.iterdir()) == paths  # nothing is left behind


def _refuse(patch: pytest.MonkeyPatch, fails: int, partly: bool, code: int) -> None:
    write, calls = atomic.write_synced, [0]

    def refused(path: Path, content: bytes, mode: int = 0o666) -> None:
        calls[0] += 1
        if calls[0] == fails + 1:
            if partly:
                path.write_bytes(content[:2])
            raise OSError(code, os.strerror(code))
        write(path, content)

    patch.setattr(atomic, "write_synced", refused)


def test_check_place_leaves_no_file(tmp_path: Path) -> None:
    atomic.check_place(tmp_path / "file", 1000)
    assert list(tmp_path.iterdir()) == []
    (tmp_path / "file").write_bytes(OLD)
    atomic.check_place(tmp_path / "file", 1000)
    assert [path.read_bytes() for path in tmp_path.iterdir()] == [OLD]


def test_check_place_finds_an_obstacle(tmp_path: Path) -> None:
    (tmp_path / "folder").mkdir()
    (tmp_path / "file").write_bytes(OLD)
    for place in ("folder", "none/file", "file/below"):
        with pytest.raises(ResourceError, match=f"`{tmp_path / place}` cannot be written: "):
            atomic.check_place(tmp_path / place, 1000)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["file", "folder"]


def test_attempt_returns_the_failure(tmp_path: Path) -> None:
    assert atomic.attempt(lambda: atomic.replace_files({tmp_path / "file": NEW})) is None
    failure = atomic.attempt(lambda: (tmp_path / "none" / "file").write_bytes(NEW))
    assert isinstance(failure, ResourceError)
    assert "No such file" in str(failure)


@pytest.mark.parametrize("error", [BrokenPipeError(errno.EPIPE, "x"), ValueError("x")])
def test_other_errors_pass(error: Exception) -> None:
    with pytest.raises(type(error)), atomic.disk_errors():
        raise error


def test_a_planted_link_is_replaced_not_followed(tmp_path: Path) -> None:
    victim, path = tmp_path / "victim", tmp_path / "file"
    victim.write_bytes(OLD)
    for pid in ("", f".{os.getpid()}"):
        (tmp_path / f".file{pid}.partial").symlink_to(victim)
    atomic.check_place(path)
    atomic.replace_file(path, NEW, 0o600)
    assert (victim.read_bytes(), path.read_bytes()) == (OLD, NEW)
    assert path.stat().st_mode & 0o777 == 0o600
    path.unlink()
    path.symlink_to(victim)
    atomic.replace_file(path, NEW)
    assert not path.is_symlink()
    assert victim.read_bytes() == OLD
