"""The long report: by the command, in the file, in a terminal and on the page."""

import io
import json
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from rich.console import Console

from lowbit.convert import Recipe
from lowbit.convert.measure.record import LongQuality, QualityReport, read_quality
from lowbit.convert.report.html import render_html
from lowbit.convert.report.terminal import render_terminal
from lowbit.convert.texts import long as long_text
from lowbit.formats.errors import FormatError
from tests.conversions import convert
from tests.convert.report.pages import Page
from tests.convert.report.samples import make_report

if TYPE_CHECKING:
    from tests.convert.conftest import Cli


@pytest.fixture
def report(long: LongQuality) -> QualityReport:
    return replace(make_report(), long=long)


def save(folder: Path, content: Any) -> None:
    (folder / "quality.json").write_text(json.dumps(content))


def test_the_file_holds_it(report: QualityReport, tmp_path: Path) -> None:
    content = report.to_json()
    save(tmp_path, content)
    assert read_quality(tmp_path) == report


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda long: long.update(length=0), "`length` is 0, expected 1 to inf"),
        (lambda long: long.update(cache_kl_mean=-1.0), "`cache_kl_mean` is -1"),
        (lambda long: long.pop("needles"), "long`: missing keys ['needles']"),
        (lambda long: long["needles"][0].update(found_int8=-1), "`found_int8` is -1"),
        (lambda long: long["needles"][0].update(distance="far"), "`distance` cannot be"),
        (lambda long: long["cache"][0].update(stop=0), "`stop` is 0"),
        (lambda long: long.update(more=1), "unknown keys"),
    ],
)
def test_figures_that_cannot_be_are_refused(
    report: QualityReport, tmp_path: Path, change: Callable[[Any], object], words: str
) -> None:
    content = report.to_json()
    change(content["long"])
    save(tmp_path, content)
    with pytest.raises(FormatError) as caught:
        read_quality(tmp_path)
    assert words in str(caught.value)


def test_no_object_is_refused(report: QualityReport, tmp_path: Path) -> None:
    save(tmp_path, report.to_json() | {"long": []})
    with pytest.raises(FormatError, match="long` is not an object"):
        read_quality(tmp_path)


def test_tables_in_a_terminal(report: QualityReport) -> None:
    out = io.StringIO()
    render_terminal(Console(file=out, width=120), report)
    lines = [" ".join(line.split()) for line in out.getvalue().splitlines()]
    assert "long texts mean KL 0.0310 nats; an INT8 cache adds 6.00e-05" in lines
    assert "a passage and its repetition, 2 x 2,048 tokens" in lines
    assert "128 to 2,048 3.004 → 3.034 0.0160 ± 0.0005 0.0007 ± 0.0002" in lines
    assert "lines found again in 2,048 tokens" in lines
    assert "1,900 4 4 3 3 2" in lines
    out = io.StringIO()
    render_terminal(Console(file=out, width=120), replace(report, long=None))
    assert "found again" not in out.getvalue()


def test_tables_on_the_page(report: QualityReport) -> None:
    page = Page(render_html(report, None, "m"))
    assert ["1,900", "4", "4", "3", "3", "2"] in page.rows["long"]
    row = next(row for row in page.rows["long"] if row[0] == "128 to 2,048")
    assert row[1:] == ["0.0160 ± 0.0005", "0.0007 ± 0.0002", "3.004", "3.034"]
    assert "it adds a KL of 6.00e-05 to the 0.0310 of packing" in page.text
    assert "Long texts" not in Page(render_html(replace(report, long=None), None, "m")).text


@pytest.mark.commands
def test_by_the_command(
    cli: "Cli", short: Path, tmp_path: Path, stories: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("MOST_REPEATED", "MOST_SEARCHED"):
        monkeypatch.setattr(long_text, name, 1)
    source, text = tmp_path / "source", tmp_path / "stories.txt"
    shutil.copytree(short, source)
    config = json.loads((source / "config.json").read_text())
    (source / "config.json").write_text(json.dumps(config | {"max_position_embeddings": 1024}))
    packed = convert(source, tmp_path / "packed", Recipe()).folder
    text.write_text(stories[:8000])
    arguments = ("report", packed, "--source", source, "--eval-text", text, "--device", "cpu")
    result = cli(*arguments, "--long", "--json")
    assert result.exit_code == 0, result.output
    content = json.loads(result.stdout)["quality"]["long"]
    assert (content["length"], len(content["needles"])) == (1024, 8)
    found = read_quality(packed)
    assert found is not None
    assert found.long is not None
    assert found.long.cache_kl_mean == content["cache_kl_mean"]
    assert "Lines found again" in (packed / "quality.html").read_text()
    assert cli(*arguments, "--json").exit_code == 0
    found = read_quality(packed)
    assert found is not None
    assert found.long is None
