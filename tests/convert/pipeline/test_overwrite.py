"""--overwrite, and going on in a working folder, remove only what lowbit-convert wrote."""

import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from lowbit.convert import Recipe
from lowbit.convert.pipeline.owned import foreign_entries, remove_owned
from lowbit.convert.report.reporting import write_report
from lowbit.formats.errors import ResourceError
from lowbit.formats.packed import open_packed
from lowbit.formats.tasks import TaskReport, write_tasks
from tests.conversions import convert
from tests.convert.edits import flip, stop_at
from tests.convert.fixture_types import Hashes, MakeModel

Put = Callable[[Path], object]
MINE = "weeks of work"


def file(name: str) -> Put:
    def put(folder: Path) -> None:
        (folder / name).write_text(MINE)

    return put


def edit(name: str) -> Put:
    def put(folder: Path) -> None:
        with (folder / name).open("a") as opened:
            opened.write(MINE)

    return put


def subfolder(folder: Path) -> None:
    (folder / "thesis").mkdir()
    (folder / "thesis" / "chapter.txt").write_text(MINE)


def empty_subfolder(folder: Path) -> None:
    (folder / "empty").mkdir()


def link(folder: Path) -> None:
    (folder.parent / "elsewhere").mkdir()
    (folder / "link").symlink_to(folder.parent / "elsewhere")


def linked_weights(folder: Path) -> None:
    """Weights that were moved to another disk."""
    shutil.move(folder / "model.safetensors", folder.parent / "moved")
    (folder / "model.safetensors").symlink_to(folder.parent / "moved")


FOREIGN: dict[str, tuple[Put, str]] = {  # and the name that is refused
    "text": (file("notes.txt"), "notes.txt"),
    "hidden": (file(".notes"), ".notes"),
    "weights": (file("adapter.safetensors"), "adapter.safetensors"),
    "newline": (file("a\nb"), "a"),
    "not-utf8": (file("caf\udce9"), "caf"),
    "like-a-report": (file("quality.csv"), "quality.csv"),
    "pipe": (lambda folder: os.mkfifo(folder / "pipe"), "pipe"),
    "folder": (subfolder, "thesis"),
    "empty-folder": (empty_subfolder, "empty"),
    "link": (link, "link"),
    "other-weights": (edit("model.safetensors"), "model.safetensors"),
    "linked-weights": (linked_weights, "model.safetensors"),
    "config": (edit("config.json"), "config.json"),
    "settings": (edit("generation_config.json"), "generation_config.json"),
    "license": (edit("LICENSE"), "LICENSE"),
    "card": (edit("README.md"), "README.md"),
    "new-card": (file("README.md"), "README.md"),
    "draft": (file("MODEL_CARD.md"), "MODEL_CARD.md"),
    "no-manifest": (lambda folder: (folder / "lowbit.json").unlink(), "lowbit.json"),
    "manifest": (lambda folder: (folder / "lowbit.json").write_text("{}"), "lowbit.json"),
    "other-release": (
        lambda folder: (folder / "lowbit.json").write_text('{"format_version": 99}'),
        "format version 99",
    ),
}
OURS: dict[str, Put] = {
    "report": lambda folder: None,
    "tasks": lambda folder: write_tasks(folder, TaskReport("0.1.0", "h", None, ())),
    "killed-report": file(".quality.json.partial"),
    "killed-rename": file(".journal.jsonl"),
    "missing-file": lambda folder: (folder / "LICENSE").unlink(),
    "missing-report": lambda folder: (folder / "quality.html").unlink(),
    "damaged-weights": lambda folder: flip(folder / "model.safetensors"),
    "damaged-report": file("quality.json"),
}


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory, make_model: MakeModel) -> Path:
    """A folder with `source` and its conversion `out`, report and card included."""
    folder = tmp_path_factory.mktemp("made")
    source = make_model(folder / "source", num_hidden_layers=1)
    (source / "LICENSE").write_text("do what you like")
    done = convert(source, folder / "out", Recipe())
    write_report(done, open_packed(done.folder), None)
    return folder


@pytest.fixture
def out(made: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(made / "out", tmp_path / "out"))


def everything(folder: Path) -> dict[str, bytes | None]:
    """Content of all files below a folder; None for what is none."""
    return {
        str(path.relative_to(folder)): path.read_bytes() if path.is_file() else None
        for path in sorted(folder.rglob("*"))
    }


@pytest.mark.parametrize("name", FOREIGN)
def test_nothing_of_others_is_overwritten(made: Path, out: Path, name: str) -> None:
    put, refused = FOREIGN[name]
    put(out)
    before = everything(out.parent)
    with pytest.raises(ResourceError) as caught:
        convert(made / "source", out, Recipe("int8"), overwrite=True)
    assert refused in str(caught.value)
    assert caught.value.hint is not None
    assert everything(out.parent) == before


@pytest.mark.parametrize("name", [name for name in FOREIGN if name != "no-manifest"])
def test_nothing_of_others_is_lost_with_an_old_result(made: Path, out: Path, name: str) -> None:
    """As a kill between two renames leaves it."""
    put, refused = FOREIGN[name]
    old = out.rename(out.with_name("new.replaced"))
    put(old)
    before = everything(out.parent)
    with pytest.raises(ResourceError) as caught:
        convert(made / "source", out.with_name("new"), Recipe("int8"))
    assert refused in str(caught.value)
    assert everything(out.parent) == before


@pytest.mark.parametrize("name", OURS)
def test_what_lowbit_wrote_is_replaced(made: Path, out: Path, hashes: Hashes, name: str) -> None:
    OURS[name](out)
    convert(made / "source", out, Recipe("int8"), overwrite=True)
    assert json.loads((out / "lowbit.json").read_text())["recipe"]["recipe"] == "int8"
    assert not (out / "quality.html").exists()
    assert [path.name for path in out.parent.iterdir()] == ["out"]


def test_a_card_with_other_line_ends_is_no_edit(made: Path, out: Path) -> None:
    card = (out / "README.md").read_bytes()
    (out / "README.md").write_bytes(card.replace(b"\n", b"\r\n"))
    assert foreign_entries(out) == []


def test_removing_is_refused_for_what_came_meanwhile(out: Path) -> None:
    remove_owned(Path(shutil.copytree(out, out.with_name("copy"))))
    assert not out.with_name("copy").exists()
    subfolder(out)
    with pytest.raises(OSError, match="directory"):
        remove_owned(out)
    assert (out / "thesis" / "chapter.txt").read_text() == MINE


WORKING: dict[str, Put] = {
    "text": file("notes.txt"),
    "weights": file("adapter.safetensors"),
    "folder": subfolder,
    "link": link,
}


@pytest.mark.parametrize("overwrite", [False, True])
@pytest.mark.parametrize("name", WORKING)
def test_nothing_of_others_is_lost_in_a_working_folder(
    made: Path, tmp_path: Path, name: str, overwrite: bool
) -> None:
    out, partial = tmp_path / "out", tmp_path / "out.partial"
    with pytest.raises(KeyboardInterrupt):
        convert(made / "source", out, Recipe(), progress=stop_at("verify"))
    WORKING[name](partial)
    before = everything(tmp_path)
    with pytest.raises(ResourceError, match="was not written by lowbit-convert"):
        convert(made / "source", out, Recipe(), overwrite=overwrite)
    assert everything(tmp_path) == before


def test_a_working_folder_of_another_source_is_known(
    made: Path, tmp_path: Path, make_model: MakeModel
) -> None:
    """What was passed through from the other source is told from files of others."""

    other = make_model(tmp_path / "other", num_hidden_layers=1, seed=1)
    (other / "vocab.txt").write_text("of the other source")
    with pytest.raises(KeyboardInterrupt):
        convert(other, tmp_path / "out", Recipe(), progress=stop_at("verify"))
    assert (tmp_path / "out.partial" / "vocab.txt").exists()
    with pytest.raises(ResourceError, match="another recipe or source"):
        convert(made / "source", tmp_path / "out", Recipe("int8"))
    convert(made / "source", tmp_path / "out", Recipe("int8"), overwrite=True)
    assert not (tmp_path / "out" / "vocab.txt").exists()


def test_a_file_that_joins_the_source_meanwhile(tmp_path: Path, make_model: MakeModel) -> None:
    source = make_model(tmp_path / "source", num_hidden_layers=1)
    for number in range(3):
        with pytest.raises(KeyboardInterrupt):
            convert(source, tmp_path / "out", Recipe(), progress=stop_at("verify"))
        (source / f"late-{number}.txt").write_text("late")
    done = convert(source, tmp_path / "out", Recipe())
    assert done.resumed == len(done.plan.steps)
    assert (done.folder / "late-2.txt").exists()
