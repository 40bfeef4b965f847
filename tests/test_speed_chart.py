"""The README's chart, its tables and the recorded figures agree."""

import json
from pathlib import Path
from types import ModuleType

import pytest

from tests.load_script import load_script

ROOT = Path(__file__).parents[1]
RECORDED = ROOT / "examples" / "data" / "speed.json"


@pytest.fixture
def script() -> ModuleType:
    return load_script("speed_chart")


def test_chart_is_drawn_from_the_recorded_figures(script: ModuleType) -> None:
    drawn = script.draw(json.loads(RECORDED.read_text(encoding="utf-8")))
    assert RECORDED.with_suffix(".svg").read_text(encoding="utf-8") == drawn


def cells_of(lines: list[str], engine: str) -> set[str]:
    """Cells of tables in the rows and columns that name an engine."""
    cells: set[str] = set()
    header: list[str] = []
    for line in lines:
        row = [cell.strip(" *") for cell in line.strip("|").split("|")] if line[:1] == "|" else []
        header = row and (header or row)
        named = zip(header, row, strict=False)
        cells |= {cell for name, cell in named if engine in row[0] or engine in name}
    return cells


@pytest.mark.parametrize("page", ["README.md", "BENCHMARKS.md"])
def test_tables_have_the_charts_figures(page: str) -> None:
    lines = (ROOT / page).read_text(encoding="utf-8").splitlines()
    found = json.loads(RECORDED.read_text(encoding="utf-8"))
    for number, engine in enumerate(found["engines"]):
        speeds = [row["tokens_per_s"][number] for row in found["rows"]]
        assert {f"{speed:,}" for speed in speeds if speed is not None} <= cells_of(lines, engine)


def test_missing_figures_have_no_bar(script: ModuleType) -> None:
    one = {"model": "a", "tokens_per_s": [10, None]}
    assert script.draw({"title": "t", "engines": ["x", "y"], "rows": [one]}).count("<rect") == 3
