"""Text files that a user names: pipes that end are read, and every wait is bounded."""

import os
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from lowbit.formats.errors import RequestError
from lowbit.formats.files import user_file
from lowbit.formats.files.user_file import read_text_file, read_user_file
from tests.hostile_files import folder, impatient, link_in_a_circle, link_to_nothing, sock

WHAT = "evaluation text"


@pytest.fixture(autouse=True)
def _impatient() -> Iterator[None]:
    with impatient():
        yield


@pytest.mark.parametrize("size", [0, 1, 65_536, 3_000_000])
def test_a_process_substitution(size: int) -> None:
    """A pipe as a shell passes it for `<(command)`."""
    reading, writing = os.pipe()
    content = os.urandom(size)

    def write() -> None:
        with os.fdopen(writing, "wb") as file:
            file.write(content)

    writer = threading.Thread(target=write)
    writer.start()
    try:
        assert read_user_file(Path(f"/dev/fd/{reading}"), WHAT) == content
    finally:
        os.close(reading)
        writer.join()


def test_links_and_folders_elsewhere(tmp_path: Path) -> None:
    (tmp_path / "text").write_text("a\r\nb\rc\n")
    (tmp_path / "sub").mkdir()
    (tmp_path / "sub" / "link").symlink_to(tmp_path / "text")
    assert read_text_file(tmp_path / "sub" / "link", WHAT) == "a\nb\nc\n"


def test_a_named_pipe_that_nobody_writes_to(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(user_file, "WRITER_S", 0.01)
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(RequestError, match="pipe` is a pipe that nobody writes to"):
        read_user_file(tmp_path / "pipe", WHAT)


def test_a_named_pipe_whose_writer_comes_late(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    os.mkfifo(tmp_path / "pipe")
    writer = threading.Thread(target=(tmp_path / "pipe").write_text, args=("late",))
    wait = user_file._wait

    def begin(*arguments: Any) -> None:
        if not writer.ident:
            writer.start()
        wait(*arguments)

    monkeypatch.setattr(user_file, "_wait", begin)
    assert read_user_file(tmp_path / "pipe", WHAT) == b"late"
    writer.join()


def test_a_pipe_that_stays_silent(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(user_file, "SILENCE_S", 0.01)
    reading, writing = os.pipe()
    with pytest.raises(RequestError, match=r"is a pipe that sent nothing for 0\.01 seconds"):
        read_user_file(Path(f"/dev/fd/{reading}"), WHAT, 1000)
    os.close(reading)
    os.close(writing)


def test_a_pipe_without_end() -> None:
    reading, writing = os.pipe()
    os.write(writing, bytes(2000))
    with pytest.raises(RequestError, match="is longer than 1000 bytes"):
        read_user_file(Path(f"/dev/fd/{reading}"), WHAT, 1000)
    os.close(reading)
    os.close(writing)


@pytest.mark.parametrize(
    ("plant", "message"),
    [
        (folder, "is a folder, expected a file"),
        (sock, "is a socket, expected a file"),
        (lambda path: path.symlink_to("/dev/zero"), "is a device, expected a file"),
        (link_to_nothing, "cannot be read: No such file"),
        (link_in_a_circle, "cannot be read: Too many levels"),
        (lambda path: None, "cannot be read: No such file"),
    ],
)
def test_folders_devices_and_sockets_are_refused(
    tmp_path: Path, plant: object, message: str
) -> None:
    plant(tmp_path / "text")  # type: ignore[operator]
    with pytest.raises(RequestError, match=f"{WHAT} `{tmp_path}/text` {message}"):
        read_user_file(tmp_path / "text", WHAT)


@pytest.mark.parametrize("name", ["a\0b", "\ud800", "x" * 300])
def test_impossible_names_are_refused(tmp_path: Path, name: str) -> None:
    with pytest.raises(RequestError, match="cannot be"):
        read_user_file(tmp_path / name, WHAT)
