"""Files of a model folder: all but regular files inside the folder are refused by name."""

import hashlib
import os
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch

from lowbit.formats.errors import CheckpointError
from lowbit.formats.files.reading import check_regular, open_file, read_bytes, read_text
from lowbit.formats.layout.records import load_object
from lowbit.formats.safetensors.checkpoint import read_at, read_json
from lowbit.formats.safetensors.hashing import hash_file
from lowbit.formats.safetensors.header import read_header
from tests.hostile_files import PLANTS, SECRET, Plant, impatient, link_out

READERS: dict[str, Callable[[Path], object]] = {
    "open_file": open_file,
    "read_bytes": read_bytes,
    "read_text": read_text,
    "check_regular": check_regular,
    "hash_file": hash_file,
    "read_header": read_header,
    "read_json": read_json,
    "load_object": lambda path: load_object(path, "schema", 1, "hint"),
}


@pytest.fixture(autouse=True)
def _impatient() -> Iterator[None]:
    with impatient():
        yield


@pytest.fixture
def model(tmp_path: Path) -> Path:
    folder = tmp_path / "model"
    folder.mkdir()
    return folder


@pytest.mark.parametrize(
    ("reader", "plant"),
    [*(("open_file", plant) for plant in PLANTS), *((reader, link_out) for reader in READERS)],
    ids=lambda value: getattr(value, "__name__", value),
)
def test_non_regular_files_are_refused(model: Path, reader: str, plant: Plant) -> None:
    path = model / "file.json"
    plant(path)
    with pytest.raises(CheckpointError) as caught:
        READERS[reader](path)
    message = str(caught.value)
    assert f"`{path}` " in message
    assert SECRET not in message
    assert "secret.txt" not in message
    assert caught.value.__cause__ is None


def test_a_file_that_became_another_since_its_header_was_read(model: Path) -> None:
    os.mkfifo(model / "pipe")
    (model / "folder").mkdir()
    for name, kind in (("pipe", "a pipe, expected a regular"), ("folder", "a folder"), ("x", "No")):
        with pytest.raises(CheckpointError, match=kind):
            read_at(model / name, 0, torch.empty(4))


@pytest.mark.parametrize("name", ["a\0b", "half\ud800", "x" * 300, "a/" * 3000 + "b"])
def test_impossible_names_are_refused(model: Path, name: str) -> None:
    with pytest.raises(CheckpointError, match="cannot be"):
        read_bytes(model / name)


def test_a_device_is_refused(model: Path) -> None:
    with pytest.raises(CheckpointError, match=r"`/dev/zero` is a device, expected a regular file"):
        read_bytes(Path("/dev/zero"))


def test_a_missing_file(model: Path) -> None:
    with pytest.raises(FileNotFoundError):
        read_bytes(model / "none")


@pytest.mark.skipif(os.geteuid() == 0, reason="root may read everything")
def test_a_file_that_may_not_be_read(model: Path) -> None:
    (model / "file").touch(0o000)
    with pytest.raises(CheckpointError, match=r"`.*file` cannot be read: Permission denied"):
        read_bytes(model / "file")


@pytest.mark.parametrize(("size", "most"), [(5, 4), (100, 0), (1 << 20, 1000)])
def test_a_file_that_is_too_long_is_refused(model: Path, size: int, most: int) -> None:
    (model / "file").write_bytes(bytes(size))
    with pytest.raises(CheckpointError, match=f"has {size} bytes, expected at most {most}"):
        read_bytes(model / "file", most)
    assert read_bytes(model / "file", size) == bytes(size)


def test_text_that_is_not_utf8_is_refused(model: Path) -> None:
    (model / "file").write_bytes(b"\xff")
    with pytest.raises(CheckpointError, match="is not UTF-8 text"):
        read_text(model / "file")


class TestLinksThatAreRight:
    """Links to `content`, which a Hub cache names by its hash."""

    content = b'{"schema": 1}'

    def assert_read(self, path: Path) -> None:
        assert read_bytes(path) == self.content
        assert hash_file(path) == hashlib.sha256(self.content).hexdigest()
        check_regular(path, path.parent)

    def snapshot(self, cache: Path) -> Path:
        """A file of a snapshot, as huggingface_hub lays a cache out."""
        repository = cache / "models--org--name"
        name = hashlib.sha256(self.content).hexdigest()
        (repository / "blobs").mkdir(parents=True)
        (repository / "blobs" / name).write_bytes(self.content)
        folder = repository / "snapshots" / ("c" * 40)
        folder.mkdir(parents=True)
        (folder / "file.json").symlink_to(f"../../blobs/{name}")
        return folder / "file.json"

    def test_inside_the_folder(self, model: Path) -> None:
        (model / "real").write_bytes(self.content)
        (model / "one").symlink_to("real")
        (model / "two").symlink_to(model / "one")
        self.assert_read(model / "two")

    def test_a_folder_that_is_a_link(self, model: Path) -> None:
        (model / "file").write_bytes(self.content)
        link = model.with_name("link")
        link.symlink_to(model)
        (model / "inner").symlink_to(link / "file")
        self.assert_read(link / "file")
        self.assert_read(link / "inner")

    def test_a_snapshot_of_the_hub_cache(self, tmp_path: Path) -> None:
        self.assert_read(self.snapshot(tmp_path / "cache"))

    def test_a_cache_on_another_disk(self, tmp_path: Path) -> None:
        path = self.snapshot(tmp_path / "disk")
        (tmp_path / "cache").symlink_to(tmp_path / "disk")
        self.assert_read(tmp_path / "cache" / path.relative_to(tmp_path / "disk"))

    def test_a_local_folder_linked_into_the_cache(self, model: Path, tmp_path: Path) -> None:
        (model / "file.json").symlink_to(self.snapshot(tmp_path / "cache"))
        self.assert_read(model / "file.json")

    def test_a_blob_that_is_a_link_itself_is_refused(self, tmp_path: Path) -> None:
        path = self.snapshot(tmp_path / "cache")
        blob = path.resolve()
        blob.unlink()
        link_out(blob)
        with pytest.raises(CheckpointError, match="symbolic link out of its folder"):
            read_bytes(path)

    def test_blobs_that_are_a_link_are_refused(self, tmp_path: Path) -> None:
        path = self.snapshot(tmp_path / "cache")
        blobs = path.resolve().parent
        blobs.rename(tmp_path / "elsewhere")
        blobs.symlink_to(tmp_path / "elsewhere")
        with pytest.raises(CheckpointError, match="symbolic link out of its folder"):
            read_bytes(path)


def test_a_file_below_a_linked_folder(model: Path, tmp_path: Path) -> None:
    (tmp_path / "outside").mkdir()
    (tmp_path / "outside" / "file").write_text(SECRET)
    (model / "sub").symlink_to(tmp_path / "outside")
    with pytest.raises(CheckpointError, match="symbolic link out of its folder"):
        check_regular(model / "sub" / "file", model)
