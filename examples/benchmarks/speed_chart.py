"""Draw the README's bars of decode speed from the figures that were recorded in a JSON file.

    python examples/benchmarks/speed_chart.py examples/data/speed.json examples/data/speed.svg

The file names a title, engines, and for each model the tokens per second of every engine; null
where an engine was not measured. BENCHMARKS.md has the commands that measure them.
"""

import json
from pathlib import Path
from typing import Any
from xml.etree.ElementTree import Element, tostring

import click

from lowbit.formats.charts.shapes import box, svg_file, text

WIDTH = 720.0
LEFT, RIGHT = 96.0, 56.0  # room for names of models, and for figures behind the bars
TOP, BAR, GAP = 58.0, 13.0, 12.0  # title and legend, height of a bar, space between models
STYLE = """
text { font: 12px system-ui, -apple-system, 'Segoe UI', sans-serif; fill: #768390; }
.title { font-size: 14px; font-weight: 600; }
.engine0 { fill: #3b82f6; }
.engine1 { fill: #a0a8b0; }
.engine2 { fill: #c98a1b; }
.engine3 { fill: #8b6fc9; }
.first { font-weight: 600; fill: #3b82f6; }
"""


def draw(found: dict[str, Any]) -> str:
    """The SVG text of horizontal bars, grouped by model."""
    rows = found["rows"]
    bars = sum(speed is not None for row in rows for speed in row["tokens_per_s"])
    height = TOP + bars * BAR + len(rows) * GAP
    root = svg_file(found["title"], (WIDTH, height), STYLE)
    text(root, 0, 16, found["title"], "start", "title")
    draw_legend(root, found["engines"])
    most = max(speed or 0 for row in rows for speed in row["tokens_per_s"])
    top = TOP
    for row in rows:
        speeds = [(n, speed) for n, speed in enumerate(row["tokens_per_s"]) if speed is not None]
        text(root, LEFT - 8, top + len(speeds) * BAR / 2 + 4, row["model"], "end", "name")
        for engine, speed in speeds:
            width = speed / most * (WIDTH - LEFT - RIGHT)
            box(root, LEFT, top + 1, (width, BAR - 2), f"engine{engine}")
            style = "figure" if engine else "first"
            text(root, LEFT + width + 6, top + BAR - 2.5, f"{speed:,}", "start", style)
            top += BAR
        top += GAP
    return tostring(root, encoding="unicode") + "\n"


def draw_legend(root: Element, engines: list[str]) -> None:
    """A square and a name for every engine, side by side."""
    for number, name in enumerate(engines):
        left = LEFT + 140.0 * number
        box(root, left, 31, (10.0, 10.0), f"engine{number}")
        text(root, left + 16, 40, name, "start", "legend")


@click.command()
@click.argument("figures", type=click.Path(exists=True, path_type=Path))
@click.argument("out", type=click.Path(path_type=Path))
def main(figures: Path, out: Path) -> None:
    """Draw the speeds in FIGURES, a JSON file, as OUT, an SVG file."""
    out.write_text(draw(json.loads(figures.read_text(encoding="utf-8"))), encoding="utf-8")


if __name__ == "__main__":
    main()
