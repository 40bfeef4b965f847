"""A command reads lowbit.json once, and passes on what it has read."""

import io
from pathlib import Path

import pytest

from lowbit.convert.measure.build import build_report
from lowbit.convert.pipeline.existing import quality_of
from lowbit.convert.report.files import write_reports
from lowbit.formats.files import reading
from lowbit.formats.packed import open_packed
from tests.convert.conftest import Cli


def test_a_report_opens_the_manifest_once(
    short: Path, tmp_path: Path, cli: Cli, monkeypatch: pytest.MonkeyPatch
) -> None:
    packed = tmp_path / "packed"
    assert cli(short, packed).exit_code == 0
    opened: list[str] = []
    real = reading.reopen

    def counted(path: Path) -> io.BufferedReader:
        opened.append(path.name)
        return real(path)

    monkeypatch.setattr(reading, "reopen", counted)
    folder = open_packed(packed)
    assert quality_of(folder) is not None
    write_reports(folder, build_report(folder, [], None))
    assert opened.count("lowbit.json") == 1
