"""A line plot as one SVG file, in colours that read on light and on dark pages."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from xml.etree.ElementTree import Element, SubElement, tostring

from lowbit.formats.files.atomic import replace_file

WIDTH, HEIGHT = 640.0, 360.0
LEFT, RIGHT, TOP, BOTTOM = 70.0, 24.0, 60.0, 52.0
TICKS = 5  # of the y axis, about
LEAST_GAP = 36.0  # between texts side by side
GREY, BLUE = "#808890", "#3b82f6"
FONT = "system-ui, -apple-system, 'Segoe UI', sans-serif"


@dataclass(frozen=True, slots=True)
class Line:
    """A named line.

    Attributes:
        name: in the legend.
        points: x, above 0, and y, at least 0, of each.
        marked: drawn with a dot at every point and its value above it; else dashed, in grey.
    """

    name: str
    points: tuple[tuple[float, float], ...]
    marked: bool


def line_plot(title: str, x_label: str, y_label: str, lines: Sequence[Line]) -> str:
    """The SVG text of lines over one logarithmic x axis, y from 0 up.

    Args:
        title: above the plot.
        x_label: with the unit.
        y_label: with the unit.
        lines: at least one with a point; the x axis names the points of the first.
    """
    xs = [x for line in lines for x, _ in line.points]
    step = _round_step(max(y for line in lines for _, y in line.points) / TICKS)
    top = step * max(1, math.ceil(max(y for line in lines for _, y in line.points) / step - 1e-9))
    frame = _Frame(min(xs), max(xs), top)
    size = {"width": f"{WIDTH:g}", "height": f"{HEIGHT:g}"}
    svg = Element("svg", {"xmlns": "http://www.w3.org/2000/svg", "role": "img", **size})
    svg.set("viewBox", f"0 0 {WIDTH:g} {HEIGHT:g}")
    svg.set("font-family", FONT)
    svg.set("font-size", "12")
    SubElement(svg, "title").text = title
    _text(svg, LEFT, 20, title, size="14", weight="600")
    _legend(svg, lines)
    _y_axis(svg, frame, y_label, step)
    _x_axis(svg, frame, x_label, [x for x, _ in lines[0].points])
    for line in lines:
        _draw(svg, frame, line)
    return tostring(svg, encoding="unicode") + "\n"


def write_plot(path: Path, svg: str) -> None:
    """Give a file its new content at once; a reader sees the old one or all of the new.

    Raises:
        ResourceError: the place cannot be written to.
    """
    replace_file(path, svg.encode())


@dataclass(frozen=True, slots=True)
class _Frame:
    """Where values lie in the picture."""

    low: float
    high: float
    top: float

    def x(self, value: float) -> float:
        if self.high == self.low:
            return (LEFT + WIDTH - RIGHT) / 2
        share = math.log(value / self.low) / math.log(self.high / self.low)
        return LEFT + 12 + share * (WIDTH - LEFT - RIGHT - 24)

    def y(self, value: float) -> float:
        return HEIGHT - BOTTOM - value / self.top * (HEIGHT - TOP - BOTTOM)


def _draw(svg: Element, frame: _Frame, line: Line) -> None:
    places = [(frame.x(x), frame.y(y)) for x, y in line.points]
    drawn = SubElement(svg, "polyline", {"fill": "none", **_stroke(line)})
    drawn.set("points", " ".join(f"{x:.1f},{y:.1f}" for x, y in places))
    if not line.marked:
        return
    last = -math.inf
    for (x, y), (_, value) in zip(places, line.points, strict=True):
        dot = SubElement(svg, "circle", {"cx": f"{x:.1f}", "cy": f"{y:.1f}", "r": "3.5"})
        dot.set("fill", BLUE)
        if x - last >= LEAST_GAP:
            _text(svg, x, y - 9, number(value), anchor="middle", fill=BLUE)
            last = x


def _stroke(line: Line) -> dict[str, str]:
    if line.marked:
        return {"stroke": BLUE, "stroke-width": "2"}
    return {"stroke": GREY, "stroke-width": "1.5", "stroke-dasharray": "5 4"}


def _legend(svg: Element, lines: Sequence[Line]) -> None:
    x = LEFT
    for line in lines:
        ends = {"x1": f"{x:g}", "x2": f"{x + 22:g}", "y1": "38", "y2": "38"}
        SubElement(svg, "line", {**ends, **_stroke(line)})
        _text(svg, x + 28, 42, line.name)
        x += 52 + 6.6 * len(line.name)


def _y_axis(svg: Element, frame: _Frame, label: str, step: float) -> None:
    for index in range(round(frame.top / step) + 1):
        y = frame.y(index * step)
        ends = {"x1": f"{LEFT:g}", "x2": f"{WIDTH - RIGHT:g}", "y1": f"{y:.1f}", "y2": f"{y:.1f}"}
        opacity = "0.9" if index == 0 else "0.25"
        SubElement(svg, "line", {**ends, "stroke": GREY, "stroke-opacity": opacity})
        _text(svg, LEFT - 8, y + 4, number(index * step), anchor="end")
    middle = (TOP + HEIGHT - BOTTOM) / 2
    turned = _text(svg, 16, middle, label, anchor="middle")
    turned.set("transform", f"rotate(-90 16 {middle:g})")


def _x_axis(svg: Element, frame: _Frame, label: str, values: Sequence[float]) -> None:
    bottom, last = HEIGHT - BOTTOM, -math.inf
    for value in sorted(values):
        x = frame.x(value)
        ends = {"x1": f"{x:.1f}", "x2": f"{x:.1f}", "y1": f"{bottom:g}", "y2": f"{bottom + 5:g}"}
        SubElement(svg, "line", {**ends, "stroke": GREY})
        if x - last >= LEAST_GAP:
            _text(svg, x, bottom + 19, number(value), anchor="middle")
            last = x
    _text(svg, (LEFT + WIDTH - RIGHT) / 2, HEIGHT - 10, label, anchor="middle")


def _text(
    svg: Element,
    x: float,
    y: float,
    text: str,
    *,
    anchor: str = "start",
    fill: str = GREY,
    size: str = "12",
    weight: str = "400",
) -> Element:
    at = {"x": f"{x:.1f}", "y": f"{y:.1f}", "text-anchor": anchor, "fill": fill}
    element = SubElement(svg, "text", {**at, "font-size": size, "font-weight": weight})
    element.text = text
    return element


def number(value: float) -> str:
    """Three digits, or all that a larger number has before the point: `0.25`, `84.1`, `2,310`."""
    return f"{value:,.0f}" if value >= 100 else f"{value:.3g}"


def _round_step(step: float) -> float:
    """The next of 1, 2, 2.5 and 5 times a power of ten."""
    if step <= 0:
        return 1.0
    scale = 10.0 ** math.floor(math.log10(step))
    return next((n * scale for n in (1, 2, 2.5, 5) if n * scale >= step * 0.999), 10 * scale)
