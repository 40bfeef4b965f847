"""Files of a report; an edited model card is never overwritten."""

import errno
import os
import shutil
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from lowbit.convert import Recipe
from lowbit.convert.measure.record import read_quality
from lowbit.convert.report.files import (
    check_reports,
    known_tasks,
    left_out,
    save_tasks,
    write_reports,
)
from lowbit.convert.report.reporting import save_report
from lowbit.convert.report.verdict import judge
from lowbit.formats.errors import FormatError, LowbitError, ResourceError
from lowbit.formats.files import atomic
from lowbit.formats.files.atomic import replace_files
from lowbit.formats.judgement import read_judgement
from lowbit.formats.packed import open_packed
from lowbit.formats.tasks import (
    TaskReport,
    TaskResult,
    manifest_sha256,
    read_tasks,
    write_tasks,
)
from tests.conversions import convert
from tests.convert.report.samples import make_report

if TYPE_CHECKING:
    from tests.convert.conftest import MakeModel

REPORTS = ["quality.json", "quality.html", "README.md"]


@pytest.fixture(scope="module")
def converted(tmp_path_factory: pytest.TempPathFactory, make_model: "MakeModel") -> Path:
    place = tmp_path_factory.mktemp("files")
    return convert(make_model(place / "model"), place / "packed", Recipe()).folder


@pytest.fixture
def packed(converted: Path, tmp_path: Path) -> Path:
    """A packed folder without reports."""
    return Path(shutil.copytree(converted, tmp_path / "packed"))


def added(folder: Path, converted: Path) -> list[str]:
    before = {path.name for path in converted.iterdir()}
    return sorted(path.name for path in folder.iterdir() if path.name not in before)


def test_writes_three_files(packed: Path, converted: Path) -> None:
    report = make_report()
    written = write_reports(open_packed(packed), report)
    assert [path.name for path in written] == REPORTS
    assert added(packed, converted) == sorted(REPORTS)
    assert read_quality(packed) == report


def test_the_judgement_can_be_read_alone(packed: Path) -> None:
    assert read_judgement(packed) is None
    report = replace(make_report(), manifest_sha256=manifest_sha256(packed))
    write_reports(open_packed(packed), report)
    found, right = read_judgement(packed), judge(report)
    assert found is not None
    assert report.logits is not None
    assert (found.grade, found.title, found.current) == (right.grade, right.title, True)
    assert found.kl_mean == report.logits.kl_mean
    assert found.bits_per_weight == report.sizes.bits_per_weight
    (packed / "lowbit.json").write_bytes((packed / "lowbit.json").read_bytes() + b" ")
    again = read_judgement(packed)
    assert again is not None
    assert not again.current


def test_the_page_has_the_folder_s_bytes_and_tasks(packed: Path) -> None:
    result = TaskResult(
        "arc_easy", "acc", 0.8123, 0.1, 9, True, 0, None, False, 512, "cpu", "bf16", "1"
    )
    tasks = TaskReport("0.1.0", "lm-eval 1", manifest_sha256(packed), (result,))
    write_tasks(packed, tasks)
    saved = save_report(open_packed(packed), make_report(), None, overwrite=False)
    saved.raise_failure()
    assert saved.quality.tasks == tasks
    assert read_quality(packed) == saved.quality
    page = (packed / "quality.html").read_text()
    assert "Where the bytes went" in page
    assert "arc_easy" in page


def test_results_of_an_earlier_conversion_are_left_out(packed: Path) -> None:
    result = TaskResult(
        "arc_easy", "acc", 0.8123, 0.1, 9, True, 0, None, False, 512, "cpu", "bf16", "1"
    )
    write_tasks(packed, TaskReport("0.1.0", "lm-eval 1", "ab" * 32, (result,)))
    saved = save_report(open_packed(packed), make_report(), None, overwrite=False)
    assert saved.quality.tasks is None
    assert "arc_easy" not in (packed / "quality.html").read_text()


def test_results_written_elsewhere_come_before_the_folder_s(packed: Path, tmp_path: Path) -> None:
    digest, out = manifest_sha256(packed), tmp_path / "new" / "out"
    rows = [
        TaskResult(name, "acc", 0.5, 0.1, 9, True, 0, None, False, 512, "cpu", "bf16", "1")
        for name in ("old", "new", "newer")
    ]
    old, new, newer = (TaskReport("0.1.0", "lm-eval 1", digest, (row,)) for row in rows)
    write_tasks(packed, old)
    opened = open_packed(packed)
    assert known_tasks(opened, out) == old
    save_tasks(packed, new, out)
    save_tasks(packed, newer, out)
    assert known_tasks(opened, out) == replace(new, tasks=(rows[1], rows[2]))
    assert known_tasks(opened) == read_tasks(packed) == old


def test_own_draft_is_renewed(packed: Path, converted: Path) -> None:
    write_reports(open_packed(packed), make_report(measured=False))
    before = (packed / "README.md").read_text()
    write_reports(open_packed(packed), make_report())
    assert added(packed, converted) == sorted(REPORTS)
    assert (packed / "README.md").read_text() != before


def test_edited_draft_is_kept(packed: Path) -> None:
    write_reports(open_packed(packed), make_report())
    readme = packed / "README.md"
    edited = readme.read_text().replace("## Use", "## Usage")
    readme.write_text(edited)
    write_reports(open_packed(packed), make_report())
    assert readme.read_text() == edited
    assert (packed / "MODEL_CARD.md").exists()


def test_card_of_the_source_is_kept_and_gives_the_license(packed: Path) -> None:
    readme = packed / "README.md"
    readme.write_text("---\nlicense: apache-2.0\n---\n# Original\n")
    write_reports(open_packed(packed), make_report())
    assert readme.read_text().endswith("# Original\n")
    assert "license: apache-2.0" in (packed / "MODEL_CARD.md").read_text().replace('"', "")


@pytest.mark.parametrize("passed", [False, True], ids=["edited", "of-the-source"])
def test_edited_cards_are_never_replaced(packed: Path, passed: bool) -> None:
    write_reports(open_packed(packed), make_report())
    (packed / "README.md").write_text("# Mine\n")
    write_reports(open_packed(packed), make_report())
    draft = packed / "MODEL_CARD.md"
    mine = b"# Of the source\n" if passed else draft.read_bytes().replace(b"packed", b"mine")
    draft.write_bytes(mine)
    assert left_out(packed) == [
        "no card was written: README.md and MODEL_CARD.md are both somebody's own"
    ]
    check_reports(packed)
    written = write_reports(open_packed(packed), make_report(measured=False))
    assert [path.name for path in written] == ["quality.json", "quality.html"]
    assert draft.read_bytes() == mine
    assert (packed / "README.md").read_text() == "# Mine\n"


@pytest.mark.parametrize("text", ["", "{", "[]", '{"schema": 1}', '{"schema": 9}', "\0"])
def test_a_bad_bench_result_is_noted_and_left_out(packed: Path, text: str) -> None:
    assert left_out(packed) == []
    (packed / "bench.json").write_text(text)
    check_reports(packed)
    assert [path.name for path in write_reports(open_packed(packed), make_report())] == REPORTS
    (note,) = left_out(packed)
    assert note.startswith("the report names no speed: `")
    assert "run `lowbit-run bench" in note


def test_a_full_disk_keeps_the_old_report(packed: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_reports(open_packed(packed), make_report())
    before = {path.name: path.read_bytes() for path in packed.iterdir()}

    def full(descriptor: int) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(ResourceError, match="disk is full"):
        write_reports(open_packed(packed), make_report(measured=False))
    assert {path.name: path.read_bytes() for path in packed.iterdir()} == before


@pytest.mark.parametrize("name", REPORTS)
@pytest.mark.parametrize("code", [errno.ENOSPC, errno.EROFS, errno.EDQUOT, errno.EACCES])
def test_one_file_that_cannot_be_written_leaves_all_as_they_were(
    packed: Path, monkeypatch: pytest.MonkeyPatch, name: str, code: int
) -> None:
    write_reports(open_packed(packed), make_report())
    before = {path.name: path.read_bytes() for path in packed.iterdir()}
    write = atomic.write_synced

    def refused(path: Path, content: bytes, mode: int = 0o666) -> None:
        if name in path.name:
            raise OSError(code, os.strerror(code), str(path))
        write(path, content)

    monkeypatch.setattr(atomic, "write_synced", refused)
    for work in (
        lambda: check_reports(packed),
        lambda: write_reports(open_packed(packed), make_report(measured=False)),
    ):
        with pytest.raises(ResourceError, match=f"`{packed / name}` cannot be written: "):
            work()
        assert {path.name: path.read_bytes() for path in packed.iterdir()} == before


def test_a_report_can_be_written_elsewhere(packed: Path, converted: Path, tmp_path: Path) -> None:
    place = tmp_path / "new" / "place"
    check_reports(packed, place)
    assert not place.parent.exists()  # a report that fails leaves no empty folder behind
    written = write_reports(open_packed(packed), make_report(), place)
    assert written == [place / name for name in REPORTS]
    assert sorted(path.name for path in place.iterdir()) == sorted(REPORTS)
    assert added(packed, converted) == []
    page = (place / "quality.html").read_text()
    assert "packed" in page
    assert "# packed\n" in (place / "README.md").read_text()


def test_a_report_is_not_written_into_another_checkpoint(
    packed: Path, converted: Path, tmp_path: Path
) -> None:
    other = Path(shutil.copytree(converted, tmp_path / "other"))
    for work in (
        lambda: check_reports(packed, other),
        lambda: write_reports(open_packed(packed), make_report(), other),
    ):
        with pytest.raises(ResourceError, match="is another packed checkpoint"):
            work()
    assert added(other, converted) == []


def test_a_folder_in_the_place_of_a_file_is_found_first(packed: Path) -> None:
    (packed / "quality.html").mkdir()
    with pytest.raises(ResourceError, match=r"quality.html` cannot be written: Is a directory"):
        check_reports(packed)


def test_task_results_that_cannot_be_read_are_found_first(packed: Path) -> None:
    (packed / "tasks.json").write_text("{")
    with pytest.raises(FormatError, match=r"tasks.json"):
        check_reports(packed)


def test_unwritable_places_are_refused(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("x")
    (tmp_path / "folder").mkdir()
    for place in (tmp_path / "none" / "a", tmp_path / "file" / "a", tmp_path / "folder"):
        with pytest.raises(ResourceError):
            replace_files({place: b"content"})
    assert sorted(path.name for path in tmp_path.iterdir()) == ["file", "folder"]


def test_foreign_manifest(packed: Path, converted: Path) -> None:
    (packed / "lowbit.json").write_text('{"format_version": 99}')
    with pytest.raises(FormatError, match="format version 99"):
        write_reports(open_packed(packed), make_report())
    assert added(packed, converted) == []


def test_a_folder_without_checkpoint_is_refused(tmp_path: Path) -> None:
    with pytest.raises(LowbitError):
        write_reports(open_packed(tmp_path), make_report())
    assert list(tmp_path.iterdir()) == []
