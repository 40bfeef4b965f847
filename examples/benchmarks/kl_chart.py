"""Draw mean KL against bytes for one model from the figures that were recorded in a JSON file.

    python examples/benchmarks/kl_chart.py examples/data/kl.json SmolLM2-135M examples/data/kl.svg

The file names a title and tools, and for each model the points: the number of the tool, a name,
megabytes of the weights and the mean KL. BENCHMARKS.md has the commands that measure them.
"""

import json
from collections import defaultdict
from pathlib import Path
from typing import Any

import click

from lowbit.formats.charts.axes import around, linear_axis, log_axis
from lowbit.formats.charts.chart import Dot, Line, Mark, chart_file

SIZE = (720.0, 300.0)
STYLE = """
text { font: 12px system-ui, -apple-system, 'Segoe UI', sans-serif; fill: #768390; }
.title { font-size: 14px; font-weight: 600; }
.grid { stroke: #768390; stroke-opacity: 0.25; }
.axis, .leader { stroke: #768390; }
line, polyline { fill: none; stroke-width: 2; }
.axis, .grid, .leader { stroke-width: 1; }
.tool0 { stroke: #3b82f6; fill: #3b82f6; }
.tool1 { stroke: #c98a1b; fill: #c98a1b; }
.tool2 { stroke: #a0a8b0; fill: #a0a8b0; }
polyline.tool0, polyline.tool1, polyline.tool2 { fill: none; stroke-opacity: 0.5; }
"""


def draw(found: dict[str, Any], model: str) -> str:
    """The SVG text of a model's points; a line joins the best of each tool."""
    points = found["models"][model]
    x = linear_axis("MB of weights", [point["mb"] for point in points])
    y = log_axis("KL, nats a token", *around([point["kl"] for point in points], 1.3))
    by_tool: defaultdict[int, list[tuple[float, float]]] = defaultdict(list)
    for point in points:
        by_tool[point["tool"]].append((point["mb"], point["kl"]))
    marks: list[Mark] = [
        Line(best(by_tool[tool]), f"tool{tool}", marked=False) for tool in sorted(by_tool)
    ]
    marks += [Dot(p["mb"], p["kl"], p["name"], f"tool{p['tool']}") for p in points]
    legend = [(name, f"tool{number}") for number, name in enumerate(found["tools"])]
    return chart_file(f"{model}: {found['title']}", x, y, marks, legend, STYLE, SIZE)


def best(points: list[tuple[float, float]]) -> tuple[tuple[float, float], ...]:
    """Points that none of fewer or as many bytes is below, by bytes.

    >>> best([(2.0, 0.5), (1.0, 0.6), (3.0, 0.7), (2.0, 0.4)])
    ((1.0, 0.6), (2.0, 0.4))
    """
    kept: list[tuple[float, float]] = []
    for point in sorted(points):
        if not kept or point[1] < kept[-1][1]:
            kept.append(point)
    return tuple(kept)


@click.command()
@click.argument("figures", type=click.Path(exists=True, path_type=Path))
@click.argument("model")
@click.argument("out", type=click.Path(path_type=Path))
def main(figures: Path, model: str, out: Path) -> None:
    """Draw the points of MODEL in FIGURES, a JSON file, as OUT, an SVG file."""
    found = json.loads(figures.read_text(encoding="utf-8"))
    if model not in found["models"]:
        raise click.ClickException(f"{figures} has {', '.join(found['models'])}, not {model}")
    out.write_text(draw(found, model), encoding="utf-8")


if __name__ == "__main__":
    main()
