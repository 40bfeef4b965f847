"""Which files are written, and that nobody's model card is lost."""

import errno
import os
from collections.abc import Callable
from pathlib import Path

import pytest

from lowbit.convert.quality.record import QualityReport, read_quality
from lowbit.convert.report.files import write_reports
from lowbit.formats.errors import FormatError, ResourceError

MakeReport = Callable[..., QualityReport]


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def test_writes_three_files(make_report: MakeReport, tmp_path: Path) -> None:
    report = make_report()
    written = write_reports(tmp_path, report)
    assert [path.name for path in written] == ["quality.json", "quality.html", "README.md"]
    assert names(tmp_path) == ["README.md", "quality.html", "quality.json"]
    assert read_quality(tmp_path) == report


def test_own_draft_is_renewed(make_report: MakeReport, tmp_path: Path) -> None:
    write_reports(tmp_path, make_report(measured=False))
    before = (tmp_path / "README.md").read_text()
    write_reports(tmp_path, make_report())
    assert names(tmp_path) == ["README.md", "quality.html", "quality.json"]
    assert (tmp_path / "README.md").read_text() != before


def test_edited_draft_is_kept(make_report: MakeReport, tmp_path: Path) -> None:
    write_reports(tmp_path, make_report())
    readme = tmp_path / "README.md"
    edited = readme.read_text().replace("TODO", "done")
    readme.write_text(edited)
    write_reports(tmp_path, make_report())
    assert readme.read_text() == edited
    assert (tmp_path / "MODEL_CARD.md").exists()


def test_card_of_the_source_is_kept_and_gives_the_license(
    make_report: MakeReport, tmp_path: Path
) -> None:
    readme = tmp_path / "README.md"
    readme.write_text("---\nlicense: apache-2.0\n---\n# Original\n")
    write_reports(tmp_path, make_report())
    assert readme.read_text().endswith("# Original\n")
    assert 'license: "apache-2.0"' in (tmp_path / "MODEL_CARD.md").read_text()


def test_a_full_disk_keeps_the_old_report(
    make_report: MakeReport, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_reports(tmp_path, make_report())
    before = {path.name: path.read_bytes() for path in tmp_path.iterdir()}

    def full(descriptor: int) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(ResourceError, match="disk is full"):
        write_reports(tmp_path, make_report(measured=False))
    assert {path.name: path.read_bytes() for path in tmp_path.iterdir()} == before


def test_foreign_manifest(make_report: MakeReport, tmp_path: Path) -> None:
    (tmp_path / "lowbit.json").write_text('{"format_version": 99}')
    with pytest.raises(FormatError, match="format version 99"):
        write_reports(tmp_path, make_report())
    assert names(tmp_path) == ["lowbit.json"]
