"""Charts of lines, bars and named dots as SVG; a style sheet gives them colours and type."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from xml.etree.ElementTree import Element, SubElement, tostring

from lowbit.formats.charts import shapes
from lowbit.formats.charts.axes import Axis
from lowbit.formats.charts.names import LINED, Box, Point, place_names
from lowbit.formats.charts.shapes import Size
from lowbit.formats.printable import printable

SIZE = (460.0, 240.0)
LEFT, RIGHT, TOP, BOTTOM = 52.0, 14.0, 26.0, 42.0
TITLE_HEIGHT = 46.0  # height of title and legend above the chart of a file
POINT = 3.6  # radius


@dataclass(frozen=True, slots=True)
class Line:
    """Points joined by a line."""

    points: tuple[Point, ...]  # x and y of each
    style: str  # class of the style sheet
    marked: bool = True  # draw a dot at every point, where they are few


@dataclass(frozen=True, slots=True)
class Bars:
    """Bars from the x axis up: (from, to, height) of each."""

    bars: tuple[tuple[float, float, float], ...]
    style: str


@dataclass(frozen=True, slots=True)
class Rule:
    """A line across the whole chart at one value of x, or of y where it is not vertical."""

    value: float
    style: str
    vertical: bool = True


@dataclass(frozen=True, slots=True)
class Dot:
    """A point with its name, if it has one, beside it where no line or other name is."""

    x: float
    y: float
    name: str
    style: str

    @property
    def is_drawn(self) -> bool:
        """True if both values are finite."""
        return math.isfinite(self.x) and math.isfinite(self.y)


Mark = Line | Bars | Rule | Dot


def chart(description: str, x: Axis, y: Axis, marks: Sequence[Mark], size: Size = SIZE) -> str:
    """A chart as an `svg` element for a page, whose style sheet applies to it.

    Args:
        description: alternative text, for those who do not see the chart.
        marks: drawn in this order, then the names of dots.
        size: width and height of the view box.
    """
    root = Element("svg", {"class": "chart", "viewBox": f"0 0 {size[0]:g} {size[1]:g}"})
    root.set("role", "img")
    root.set("aria-label", printable(description))
    _draw_chart(root, _Plane(x, y, size), marks)
    return tostring(root, encoding="unicode")  # ElementTree escapes


def chart_file(
    title: str,
    x: Axis,
    y: Axis,
    marks: Sequence[Mark],
    legend: Sequence[tuple[str, str]],
    style: str,
    size: Size,
) -> str:
    """A chart as the text of an SVG file, with its title and a legend above it.

    Args:
        style: the style sheet; beside those of the marks it gives `title`, `tick`, `label`, `name`,
            `grid`, `axis` and `leader`.
        size: width and height of the chart without title and legend.
    """
    root = shapes.svg_file(title, (size[0], size[1] + TITLE_HEIGHT), style)
    shapes.text(root, LEFT, 18, title, "start", "title")
    u = LEFT
    for name, line_style in legend:
        shapes.line(root, u, 34, u + 22, 34, line_style)
        shapes.text(root, u + 28, 38, name, "start", "tick")
        u += 52 + 6.6 * len(name)
    below = SubElement(root, "g", {"transform": f"translate(0 {TITLE_HEIGHT:g})"})
    _draw_chart(below, _Plane(x, y, size), marks)
    return tostring(root, encoding="unicode") + "\n"


@dataclass(frozen=True, slots=True)
class _Plane:
    """Two axes, and the size of the chart that they lie in."""

    x: Axis
    y: Axis
    size: Size

    @property
    def right(self) -> float:
        """Right end of the x axis."""
        return self.size[0] - RIGHT

    @property
    def bottom(self) -> float:
        """Height of the x axis in the chart."""
        return self.size[1] - BOTTOM

    def across(self, value: float) -> float:
        """Horizontal place of a value of x."""
        return LEFT + (self.right - LEFT) * self.x.share(value)

    def down(self, value: float) -> float:
        """Vertical place of a value of y."""
        return self.bottom - (self.bottom - TOP) * self.y.share(value)

    def place(self, point: Point) -> Point:
        """Place of a pair of values."""
        return self.across(point[0]), self.down(point[1])


def _draw_chart(root: Element, plane: _Plane, marks: Sequence[Mark]) -> None:
    _draw_axes(root, plane)
    for mark in marks:
        _draw(root, plane, mark)
    _draw_names(root, plane, marks)


def _draw_axes(root: Element, plane: _Plane) -> None:
    right, bottom = plane.right, plane.bottom
    for value, name in plane.y.ticks:
        v = plane.down(value)
        shapes.line(root, LEFT, v, right, v, "grid")
        shapes.text(root, LEFT - 6, v + 4, name, "end", "tick")
    for value, name in plane.x.ticks:
        u = plane.across(value)
        shapes.line(root, u, bottom, u, bottom + 4, "axis")
        shapes.text(root, u, bottom + 17, name, "middle", "tick")
    shapes.line(root, LEFT, bottom, right, bottom, "axis")
    middle = (LEFT + right) / 2
    shapes.text(root, middle, bottom + BOTTOM - 6, plane.x.label, "middle", "label")
    shapes.text(root, 0, 12, plane.y.label, "start", "label")


def _draw(root: Element, plane: _Plane, mark: Mark) -> None:
    if isinstance(mark, Line):
        _draw_line(root, plane, mark)
    elif isinstance(mark, Bars):
        for start, stop, value in mark.bars:
            u, v = plane.place((start, value))
            size = plane.across(stop) - u, plane.down(plane.y.low) - v
            shapes.box(root, u, v, size, mark.style)
    elif isinstance(mark, Rule) and mark.vertical:
        u = plane.across(mark.value)
        shapes.line(root, u, TOP, u, plane.bottom, mark.style)
    elif isinstance(mark, Rule):
        v = plane.down(mark.value)
        shapes.line(root, LEFT, v, plane.right, v, mark.style)
    elif mark.is_drawn:
        shapes.circle(root, *plane.place((mark.x, mark.y)), mark.style, POINT)


def _places(plane: _Plane, line: Line) -> list[Point]:
    """Places of a line's finite points."""
    finite = [(u, v) for u, v in line.points if math.isfinite(u) and math.isfinite(v)]
    return [plane.place(point) for point in finite]


def _draw_line(root: Element, plane: _Plane, line: Line) -> None:
    """Join the finite points, and mark each where they are few."""
    places = _places(plane, line)
    path = " ".join(f"{u:.2f},{v:.2f}" for u, v in places)
    SubElement(root, "polyline", {"class": line.style, "points": path})
    for u, v in places if line.marked and len(places) <= 48 else ():
        shapes.circle(root, u, v, line.style, 2.2)


def _draw_names(root: Element, plane: _Plane, marks: Sequence[Mark]) -> None:
    dots = [mark for mark in marks if isinstance(mark, Dot) and mark.is_drawn and mark.name]
    points = [plane.place((dot.x, dot.y)) for dot in dots]
    lines = [_places(plane, mark) for mark in marks if isinstance(mark, Line)]
    frame = Box(LEFT + 2, TOP - 8, plane.size[0], plane.bottom - 2)
    boxes = place_names(points, [dot.name for dot in dots], lines, frame)
    for dot, point, box in zip(dots, points, boxes, strict=True):
        end = box.nearest(point)
        if math.dist(end, point) > LINED:
            shapes.line(root, *point, *end, "leader")
        middle = (box.left + box.right) / 2
        anchor, u = "middle", middle
        if abs(middle - point[0]) > (box.right - box.left) / 4:
            anchor, u = ("start", box.left) if middle > point[0] else ("end", box.right)
        shapes.text(root, u, box.bottom - 4, dot.name, anchor, "name")
