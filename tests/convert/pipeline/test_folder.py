"""The output folder: what it may replace, and what it must leave alone."""

import shutil
from pathlib import Path

import pytest

from lowbit.convert import Recipe
from lowbit.convert.pipeline.folder import passed_through
from lowbit.formats.errors import ResourceError
from tests.conversions import convert
from tests.convert.fixture_types import Hashes


def refused(source: Path, out: Path, message: str, overwrite: bool = False) -> None:
    with pytest.raises(ResourceError, match=message):
        convert(source, out, Recipe(), overwrite=overwrite)


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def test_empty_folder_is_used(tmp_path: Path, small: Path) -> None:
    (tmp_path / "out").mkdir()
    convert(small, tmp_path / "out", Recipe())
    assert (tmp_path / "out" / "lowbit.json").exists()


def test_parents_are_made(tmp_path: Path, small: Path) -> None:
    convert(small, tmp_path / "a" / "b" / "out", Recipe())
    assert names(tmp_path / "a" / "b") == ["out"]


@pytest.mark.parametrize("overwrite", [False, True])
def test_file_in_the_way(tmp_path: Path, small: Path, overwrite: bool) -> None:
    (tmp_path / "out").write_text("mine")
    refused(small, tmp_path / "out", "is a file, expected a folder", overwrite)
    assert (tmp_path / "out").read_text() == "mine"
    assert names(tmp_path) == ["out", "small"]


def test_folder_that_is_not_empty(tmp_path: Path, small: Path) -> None:
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "notes.txt").write_text("mine")
    refused(small, tmp_path / "out", "is not empty")
    refused(small, tmp_path / "out", r"not written by lowbit-convert \(it has no", overwrite=True)
    assert names(tmp_path / "out") == ["notes.txt"]
    assert names(tmp_path) == ["out", "small"]


def test_overwrite_replaces_a_packed_checkpoint(
    tmp_path: Path, small: Path, hashes: Hashes
) -> None:
    out = tmp_path / "out"
    convert(small, out, Recipe("int8"), max_shard_bytes=100_000)
    refused(small, out, "is not empty")
    convert(small, out, Recipe(), overwrite=True)
    convert(small, tmp_path / "fresh", Recipe())
    assert hashes(out) == hashes(tmp_path / "fresh")
    assert names(tmp_path) == ["fresh", "out", "small"]


def test_failed_overwrite_keeps_the_old_one(
    tmp_path: Path, small: Path, hashes: Hashes, monkeypatch: pytest.MonkeyPatch
) -> None:
    out = tmp_path / "out"
    convert(small, out, Recipe())
    before = hashes(out)

    def stop(*_: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("lowbit.convert.pipeline.conversion.put_in_place", stop)
    with pytest.raises(KeyboardInterrupt):
        convert(small, out, Recipe("int8"), overwrite=True)
    assert hashes(out) == before


@pytest.mark.parametrize("overwrite", [False, True])
@pytest.mark.parametrize("where", [".", "..", "packed", "a/b", "../small/../small"])
def test_overlap_with_the_source(small: Path, hashes: Hashes, where: str, overwrite: bool) -> None:
    before = hashes(small)
    with pytest.raises(ResourceError, match=r"overlap|is not empty|was not written by"):
        convert(small, small / where, Recipe(), overwrite=overwrite)
    assert hashes(small) == before
    assert names(small.parent) == ["small"]


def test_link_into_the_source(tmp_path: Path, small: Path, hashes: Hashes) -> None:
    before = hashes(small)
    (tmp_path / "link").symlink_to(small)
    refused(small, tmp_path / "link" / "out", "overlap")
    refused(tmp_path / "link", small / "out", "overlap")
    assert hashes(small) == before


@pytest.mark.parametrize("name", ["out.partial", "out.replaced"])
def test_source_named_like_a_working_folder(
    tmp_path: Path, small: Path, hashes: Hashes, name: str
) -> None:
    source = small.rename(tmp_path / name)
    before = hashes(source)
    refused(source, tmp_path / "out", "in the way|overlap")
    assert hashes(source) == before


@pytest.mark.parametrize("name", ["out.partial", "out.replaced"])
def test_folders_of_others_beside_out(tmp_path: Path, small: Path, name: str) -> None:
    (tmp_path / name).mkdir()
    (tmp_path / name / "thesis.safetensors").write_text("mine")
    refused(small, tmp_path / "out", f"{name}` is in the way")
    assert (tmp_path / name / "thesis.safetensors").read_text() == "mine"
    shutil.rmtree(tmp_path / name)
    (tmp_path / name).write_text("mine")
    refused(small, tmp_path / "out", f"{name}` is in the way")
    assert (tmp_path / name).read_text() == "mine"


def test_out_through_a_link(tmp_path: Path, small: Path) -> None:
    (tmp_path / "disk" / "out").mkdir(parents=True)
    (tmp_path / "link").symlink_to(tmp_path / "disk" / "out")
    convert(small, tmp_path / "link", Recipe())
    assert (tmp_path / "link").is_symlink()
    assert "lowbit.json" in names(tmp_path / "disk" / "out")
    assert names(tmp_path / "disk") == ["out"]


def test_relative_and_dotted_paths(
    tmp_path: Path, small: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "work").mkdir()
    monkeypatch.chdir(tmp_path / "work")
    done = convert("../small", Path("../work/../out"), Recipe())
    assert names(done.folder) == names(tmp_path / "out")
    assert names(tmp_path) == ["out", "small", "work"]
    refused(Path("../small"), Path(), "is a mount point or the current folder")
    assert names(tmp_path / "work") == []


def test_mount_point(tmp_path: Path, small: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "out").mkdir()
    monkeypatch.setattr(Path, "is_mount", lambda path: path.name == "out")
    refused(small, tmp_path / "out", "is a mount point")
    assert names(tmp_path) == ["out", "small"]


def test_what_passes_through() -> None:
    kept = ["LICENSE", "README.md", "chat_template.jinja", "generation_config.json", "merges.txt"]
    kept += ["tokenizer.json", "tokenizer.model", "config.yaml"]
    left = ["config.json", "lowbit.json", "quality.html", "quality.json", "model.safetensors"]
    left += ["x.safetensors.index.json", "pytorch_model.bin", "a.pt", "a.pth", "a.gguf", ".hidden"]
    left += ["SOURCE_README.md"]
    assert passed_through([*left, *kept]) == sorted(kept)
