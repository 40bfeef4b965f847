"""The chart of KL against bytes, its tables and the recorded figures agree."""

import json
from pathlib import Path
from types import ModuleType

import pytest
from click.testing import CliRunner

from tests.load_script import ROOT, load_script

RECORDED = ROOT / "examples" / "data" / "kl.json"


@pytest.fixture
def script() -> ModuleType:
    return load_script("kl_chart")


def test_chart_is_drawn_from_the_recorded_figures(script: ModuleType) -> None:
    found = json.loads(RECORDED.read_text(encoding="utf-8"))
    [model] = found["models"]
    drawn = script.draw(found, model)
    assert RECORDED.with_suffix(".svg").read_text(encoding="utf-8") == drawn
    assert drawn.count("<circle") == len(found["models"][model])


def test_table_has_the_charts_figures() -> None:
    lines = (ROOT / "BENCHMARKS.md").read_text(encoding="utf-8").replace("*", "").splitlines()
    found = json.loads(RECORDED.read_text(encoding="utf-8"))
    for points in found["models"].values():
        for point in points:
            kl = f"{point['kl']:.3f}".removeprefix("0")
            figures = {f"{point['mb']:.1f} MB", kl}
            rows = [{cell.strip() for cell in line.split("|")} for line in lines]
            assert any(figures <= cells for cells in rows), point


def test_a_line_joins_the_best_points(script: ModuleType) -> None:
    points = [(2.0, 0.5), (1.0, 0.6), (3.0, 0.7), (2.0, 0.4)]
    assert script.best(points) == ((1.0, 0.6), (2.0, 0.4))


def test_a_model_that_was_not_recorded_is_named(script: ModuleType, tmp_path: Path) -> None:
    done = CliRunner().invoke(script.main, [str(RECORDED), "GPT-2", str(tmp_path / "x.svg")])
    assert done.exit_code == 1
    assert "not GPT-2" in done.output
    assert not (tmp_path / "x.svg").exists()
