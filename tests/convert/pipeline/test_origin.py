"""Finding a local original again: where it may lie, and that no other model takes its place."""

import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from lowbit.convert import Recipe
from lowbit.convert.pipeline.origin import find_origin, recall, remember
from lowbit.formats.errors import CheckpointError, FormatError
from lowbit.formats.safetensors.checkpoint import Checkpoint, open_checkpoint
from tests.conversions import convert
from tests.convert.edits import flip, manifest_of, set_config
from tests.convert.fixture_types import Cli, MakeModel


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory, make_model: MakeModel) -> Path:
    """A folder with `source` and its conversion `out`; not to be written to."""
    place = tmp_path_factory.mktemp("origin")
    source = make_model(place / "source")
    model = {"type": "BPE", "vocab": {"a": 0}, "merges": []}
    (source / "tokenizer.json").write_text(json.dumps({"version": "1.0", "model": model}))
    convert(source, place / "out", Recipe())
    return place


@pytest.fixture
def packed(made: Path, tmp_path: Path) -> Path:
    """The conversion in a folder of its own, far from its source."""
    return Path(shutil.copytree(made / "out", tmp_path / "packed" / "out"))


@pytest.fixture
def source(made: Path, tmp_path: Path) -> Path:
    """A copy of the source, to be moved and changed at will."""
    return Path(shutil.copytree(made / "source", tmp_path / "source"))


def found(packed: Path, given: str | None = None, answer: str | None = None) -> Path:
    ask = None if answer is None else lambda _: answer
    return find_origin(packed, manifest_of(packed), given, ask).confirmed(lambda *_: None).folder


def remembered(packed: Path, folder: Path) -> None:
    remember(manifest_of(packed).source, folder)


def edit_config(folder: Path) -> None:
    set_config(folder, rope_theta=5.0)


def flip_weights(folder: Path) -> None:
    flip(folder / "model.safetensors")


def cut(folder: Path) -> None:
    content = (folder / "model.safetensors").read_bytes()
    (folder / "model.safetensors").write_bytes(content[:-1])


def garbage(folder: Path) -> None:
    (folder / "config.json").write_bytes(b"\xff")


def pipe(folder: Path) -> None:
    (folder / "config.json").unlink()
    os.mkfifo(folder / "config.json")


def link_out(folder: Path) -> None:
    config = folder / "config.json"
    config.rename(folder.parent / "config-elsewhere.json")
    config.symlink_to(folder.parent / "config-elsewhere.json")


def other_tokenizer(folder: Path) -> None:
    (folder / "tokenizer.json").write_text("[]")


def gone(folder: Path) -> None:
    shutil.rmtree(folder)


def a_file(folder: Path) -> None:
    shutil.rmtree(folder)
    folder.write_text("x")


HEADERS_DIFFER = (edit_config, cut, garbage, pipe, link_out, other_tokenizer, gone, a_file)
Change = Callable[[Path], Any]


def test_it_is_remembered(packed: Path, source: Path) -> None:
    remembered(packed, source)
    assert found(packed) == source


def test_the_latest_place_is_remembered(packed: Path, source: Path, tmp_path: Path) -> None:
    remembered(packed, source)
    second = Path(shutil.copytree(source, tmp_path / "second"))
    remembered(packed, second)
    assert found(packed) == second


@pytest.mark.parametrize("change", [shutil.rmtree, flip_weights, edit_config])
def test_a_copy_that_is_gone_hides_no_other_place(
    packed: Path, source: Path, tmp_path: Path, change: Change
) -> None:
    remembered(packed, source)
    second = Path(shutil.copytree(source, tmp_path / "second"))
    assert found(packed, given=str(second)) == second
    change(second)
    assert found(packed) == source
    assert recall(manifest_of(packed).source) == (source, second)


def test_the_last_eight_places_are_remembered(packed: Path, source: Path, tmp_path: Path) -> None:
    for number in (*range(12), 7):
        remembered(packed, tmp_path / str(number))
    kept = [place.name for place in recall(manifest_of(packed).source)]
    assert kept == ["7", "11", "10", "9", "8", "6", "5", "4"]


def test_a_relative_path_is_remembered_in_full(
    packed: Path, source: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.chdir(source.parent)
    remembered(packed, Path("source"))
    monkeypatch.chdir("/")
    assert found(packed) == source


@pytest.mark.parametrize(
    "name", ["a b", "naïve", "line\nbreak", os.fsdecode(b"\xff\xfe"), "x" * 200]
)
def test_any_name_is_remembered(packed: Path, source: Path, name: str) -> None:
    moved = source.rename(source.with_name(name))
    remembered(packed, moved)
    assert found(packed) == moved


@pytest.mark.parametrize("change", HEADERS_DIFFER)
def test_a_remembered_folder_that_changed_is_named(
    packed: Path, source: Path, change: Change
) -> None:
    remembered(packed, source)
    change(source)
    with pytest.raises(CheckpointError, match=r"it was `.*/source`, which is not there") as caught:
        found(packed)
    assert "--source" in str(caught.value.hint)


def test_a_remembered_folder_with_other_bytes_is_refused(packed: Path, source: Path) -> None:
    remembered(packed, source)
    flip_weights(source)
    with pytest.raises(FormatError, match="has other bytes than the original that was converted"):
        found(packed)


def test_a_moved_folder_is_found_beside(packed: Path, source: Path) -> None:
    remembered(packed, source)
    moved = source.rename(packed.parent / "renamed")
    assert found(packed) == moved
    assert recall(manifest_of(packed).source) == (moved, source)  # from now on


def test_it_is_found_beside_without_a_memory(made: Path) -> None:
    assert found(made / "out") == made / "source"


@pytest.mark.parametrize("change", [*HEADERS_DIFFER, flip_weights])
def test_the_right_one_of_several_is_found(packed: Path, source: Path, change: Change) -> None:
    right = Path(shutil.copytree(source, packed.parent / "right"))
    wrong = source.rename(packed.parent / "a-wrong-one")
    change(wrong)
    assert found(packed) == right


def test_two_that_are_equal_are_one(packed: Path, source: Path) -> None:
    shutil.copytree(source, packed.parent / "b")
    first = source.rename(packed.parent / "a")
    assert found(packed) == first


def test_two_that_are_both_wrong_are_refused(packed: Path, source: Path) -> None:
    flip_weights(source)
    shutil.copytree(source, packed.parent / "b")
    source.rename(packed.parent / "a")
    with pytest.raises(FormatError, match=r"`.*/packed/a` has other bytes .*\(and 1 more like it"):
        found(packed)


def test_a_loop_of_links_beside_is_passed_over(packed: Path, source: Path) -> None:
    (packed.parent / "a-loop").symlink_to("a-loop")
    (packed.parent / "a-pair").symlink_to("b-pair")
    (packed.parent / "b-pair").symlink_to("a-pair")
    right = source.rename(packed.parent / "right")
    assert found(packed) == right


def test_absent(packed: Path) -> None:
    with pytest.raises(CheckpointError, match=r"does not say where its original is$") as caught:
        found(packed)
    assert caught.value.hint == "name it with --source, a folder or a Hub id"


@pytest.mark.parametrize("change", [*HEADERS_DIFFER, flip_weights])
@pytest.mark.parametrize("how", ["given", "answered"])
def test_what_the_user_names_is_checked_too(
    packed: Path, source: Path, how: str, change: Change
) -> None:
    change(source)
    with pytest.raises((CheckpointError, FormatError)) as caught:
        found(packed, **{"given" if how == "given" else "answer": str(source)})
    assert "--source" not in (caught.value.hint or "")
    assert recall(manifest_of(packed).source) == ()


def test_it_is_asked_for_once(packed: Path, source: Path) -> None:
    assert found(packed, answer=f" {source} ") == source

    def twice(question: str) -> str:
        raise AssertionError(question)

    origin = find_origin(packed, manifest_of(packed), None, twice)
    assert origin.confirmed(lambda *_: None).folder == source


def test_every_candidate_is_opened_once(
    packed: Path, source: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    beside = Path(shutil.copytree(source, packed.parent / "another"))
    flip_weights(beside)
    remembered(packed, source)
    opened: list[Path] = []

    def counted(folder: Path) -> Checkpoint:
        opened.append(folder)
        return open_checkpoint(folder)

    monkeypatch.setattr("lowbit.convert.pipeline.origin.open_checkpoint", counted)
    assert found(packed) == source
    assert opened == [source, beside]


def test_a_given_folder_is_remembered(packed: Path, source: Path) -> None:
    assert found(packed, given=str(source)) == source
    assert found(packed) == source


@pytest.mark.parametrize(
    "content", [b"", b"relative\n", b"\n", b"/a\0b\n", b"\xff\n", b"/x" * 10_000]
)
def test_a_note_that_is_no_path_is_nothing(packed: Path, source: Path, content: bytes) -> None:
    remembered(packed, source)
    (note,) = Path(os.environ["XDG_STATE_HOME"]).rglob("originals/*")
    note.write_bytes(content)
    with pytest.raises(CheckpointError, match=r"does not say where its original is$"):
        found(packed)


def test_a_state_folder_that_cannot_be_written_stops_nothing(
    packed: Path, source: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "file" / "state"))
    remembered(packed, source)
    assert recall(manifest_of(packed).source) == ()
    assert found(packed, given=str(source)) == source


def test_a_candidate_that_vanishes_meanwhile_is_passed_over(packed: Path, source: Path) -> None:
    beside = Path(shutil.copytree(source, packed.parent / "another"))
    remembered(packed, source)
    origin = find_origin(packed, manifest_of(packed), None, None)
    shutil.rmtree(source)
    assert origin.confirmed(lambda *_: None).folder == beside


def test_a_conversion_remembers_and_publishes_nothing_of_it(
    cli: Cli, small: Path, tmp_path: Path
) -> None:
    assert cli(small, tmp_path / "far" / "out").exit_code == 0
    out = tmp_path / "far" / "out"
    assert recall(manifest_of(out).source) == (small,)
    for path in out.iterdir():
        assert os.fsencode(small) not in path.read_bytes(), path
    again = cli("report", out, "--eval-text", small / "config.json", "--json")
    assert "tokenizer.json" in again.stderr  # the small model has none; but it was found
