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


@pytest.mark.parametrize("page", ["README.md", "BENCHMARKS.md"])
def test_tables_have_the_charts_figures(page: str) -> None:
    lines = (ROOT / page).read_text(encoding="utf-8").splitlines()
    found = json.loads(RECORDED.read_text(encoding="utf-8"))
    for number, engine in enumerate(found["engines"]):
        rows = [line.replace("*", "") for line in lines if line.startswith(f"| {engine}")]
        cells = {cell.strip() for row in rows for cell in row.split("|")}
        speeds = [row["tokens_per_s"][number] for row in found["rows"]]
        assert {f"{speed:,}" for speed in speeds if speed is not None} <= cells, engine


def test_missing_figures_have_no_bar(script: ModuleType) -> None:
    one = {"model": "a", "tokens_per_s": [10, None]}
    assert script.draw({"title": "t", "engines": ["x", "y"], "rows": [one]}).count("<rect") == 3
