"""Charts as inline SVG: the page's style gives them colours and type, so they follow its theme."""

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from xml.etree.ElementTree import Element, SubElement, tostring

from markupsafe import Markup

from lowbit.convert.report.labels import LINED, Box, Point, place_names
from lowbit.formats.printable import printable

WIDTH, HEIGHT = 460.0, 240.0
LEFT, RIGHT, TOP, BOTTOM = 52.0, 14.0, 26.0, 42.0
TICKS = 6
POINT = 3.6  # radius
LARGEST = 1e200  # value of an axis, whose steps are computed with
FEW_DECADES = 3
_SUPERSCRIPT = str.maketrans("-0123456789", "⁻⁰¹²³⁴⁵⁶⁷⁸⁹")


@dataclass(frozen=True, slots=True)
class Axis:
    """The scale along one side of a chart.

    Attributes:
        label: with the unit.
        low: value at the left or lower end.
        high: value at the other end, above `low`.
        ticks: value and name of each.
        log: steps are factors.
    """

    label: str
    low: float
    high: float
    ticks: tuple[tuple[float, str], ...]
    log: bool = False

    def share(self, value: float) -> float:
        """A value's place from 0 at the low end to 1 at the high end; beyond them, the end."""
        if self.log:
            low, high = math.log(self.low), math.log(self.high)
            value = math.log(max(value, self.low))
        else:
            low, high = self.low, self.high
        return min(1.0, max(0.0, (value - low) / (high - low)))


@dataclass(frozen=True, slots=True)
class Line:
    """Points joined by a line; `style` is a class of the page's style sheet."""

    points: tuple[Point, ...]
    style: str


@dataclass(frozen=True, slots=True)
class Bars:
    """Bars from the axis up: (from, to, height) of each."""

    bars: tuple[tuple[float, float, float], ...]
    style: str


@dataclass(frozen=True, slots=True)
class Rule:
    """A line across the whole chart at one value of the x axis, or of the y axis."""

    value: float
    style: str
    vertical: bool = True


@dataclass(frozen=True, slots=True)
class Dot:
    """A point with its name beside it, where no line or other name is."""

    x: float
    y: float
    name: str
    style: str

    @property
    def is_drawn(self) -> bool:
        """True if it has a place."""
        return math.isfinite(self.x) and math.isfinite(self.y)


Mark = Line | Bars | Rule | Dot


def linear_axis(label: str, values: Iterable[float], from_zero: bool = False) -> Axis:
    """An axis over the finite ones of some values, with round ticks."""
    finite = [_computable(value) for value in values if math.isfinite(value)] or [0.0]
    low, high = min(finite), max(finite)
    if from_zero:
        low = min(0.0, low)
    if high - low <= 1e-9 * max(abs(low), abs(high)):
        spread = abs(high) / 2 or 1.0
        low, high = (low if from_zero else low - spread), high + spread
    step = _round_step((high - low) / TICKS)
    first, last = math.floor(low / step + 1e-9), math.ceil(high / step - 1e-9)
    ticks = tuple((number * step, f"{number * step:.6g}") for number in range(first, last + 1))
    return Axis(label, first * step, last * step, ticks)


def log_axis(label: str, low: float, high: float) -> Axis:
    """An axis between two positive values; ticks at decades, at 1, 2 and 5 where those are few."""
    low, high = (max(1 / LARGEST, min(LARGEST, value)) for value in (low, high))
    decades = range(math.floor(math.log10(low)), math.ceil(math.log10(high)) + 1)
    inside = [n for n in decades if low * 0.999 <= 10.0**n <= high * 1.001]
    if len(inside) >= FEW_DECADES:
        every = math.ceil(len(inside) / TICKS)
        ticks = tuple((10.0**n, _power(n)) for n in inside if n % every == 0)
    else:
        places = ((n, digit) for n in decades for digit in (1, 2, 5))
        found = ((digit * 10.0**n, _digit(digit, n)) for n, digit in places)
        ticks = tuple((value, name) for value, name in found if low <= value <= high)
    return Axis(label, low, max(high, low * 1.001), ticks, log=True)


def around(values: Iterable[float], room: float = 1.6, least: float = 1e-7) -> tuple[float, float]:
    """Ends of a log axis that leaves room around the finite ones of some values."""
    finite = [max(least, value) for value in values if math.isfinite(value)] or [1.0]
    return min(finite) / room, max(finite) * room


def _computable(value: float) -> float:
    """The value, unless its steps would be too small or too large for a float."""
    return max(-LARGEST, min(LARGEST, value)) if abs(value) > 1 / LARGEST else 0.0


def _round_step(step: float) -> float:
    scale = 10.0 ** math.floor(math.log10(step))
    return next((n * scale for n in (1, 2, 2.5, 5) if n * scale >= step * 0.999), 10 * scale)


def _power(exponent: int) -> str:
    """`0.01`, `100`, and powers where they would be long."""
    if -3 <= exponent <= 3:
        return f"{10.0**exponent:g}"
    return "10" + str(exponent).translate(_SUPERSCRIPT)


def _digit(digit: int, exponent: int) -> str:
    """`0.05`; `5·10⁻⁵` where that would be long."""
    if -4 <= exponent <= 3:
        return f"{digit * 10.0**exponent:.6g}"
    return _power(exponent) if digit == 1 else f"{digit}·{_power(exponent)}"


def chart(
    description: str, x: Axis, y: Axis, marks: Sequence[Mark], height: float = HEIGHT
) -> Markup:
    """A chart as an `svg` element.

    Args:
        description: what it shows, for those who do not see it.
        x: from left to right.
        y: upwards.
        marks: drawn in this order, then the names of dots.
        height: of the chart, whose width is 460.
    """
    root = Element(
        "svg",
        {
            "class": "chart",
            "viewBox": f"0 0 {WIDTH:g} {height:g}",
            "role": "img",
            "aria-label": printable(description),
        },
    )
    plane = _Plane(x, y, height - BOTTOM)
    _draw_axes(root, plane)
    for mark in marks:
        _draw(root, plane, mark)
    _draw_names(root, plane, marks)
    return Markup(tostring(root, encoding="unicode"))  # ElementTree escapes


@dataclass(frozen=True, slots=True)
class _Plane:
    """Two axes, and the place of the lower one."""

    x: Axis
    y: Axis
    bottom: float

    def across(self, value: float) -> float:
        """Place of a value of x."""
        return LEFT + (WIDTH - LEFT - RIGHT) * self.x.share(value)

    def down(self, value: float) -> float:
        """Place of a value of y."""
        return self.bottom - (self.bottom - TOP) * self.y.share(value)

    def place(self, point: Point) -> Point:
        """Place of a pair of values."""
        return self.across(point[0]), self.down(point[1])


def _draw_axes(root: Element, plane: _Plane) -> None:
    bottom = plane.bottom
    for value, name in plane.y.ticks:
        v = plane.down(value)
        _line(root, LEFT, v, WIDTH - RIGHT, v, "grid")
        _text(root, LEFT - 6, v + 4, name, "end")
    for value, name in plane.x.ticks:
        u = plane.across(value)
        _line(root, u, bottom, u, bottom + 4, "axis")
        _text(root, u, bottom + 17, name, "middle")
    _line(root, LEFT, bottom, WIDTH - RIGHT, bottom, "axis")
    middle = (LEFT + WIDTH - RIGHT) / 2
    _text(root, middle, bottom + BOTTOM - 6, plane.x.label, "middle", "label")
    _text(root, 0, 12, plane.y.label, "start", "label")


def _draw(root: Element, plane: _Plane, mark: Mark) -> None:
    if isinstance(mark, Line):
        _draw_line(root, plane, mark)
    elif isinstance(mark, Bars):
        for start, stop, value in mark.bars:
            u, v = plane.place((start, value))
            height = plane.down(plane.y.low) - v
            size = {"x": u, "y": v, "width": plane.across(stop) - u, "height": height}
            attributes = {name: f"{value:.2f}" for name, value in size.items()}
            SubElement(root, "rect", {"class": mark.style, **attributes})
    elif isinstance(mark, Rule) and mark.vertical:
        u = plane.across(mark.value)
        _line(root, u, TOP, u, plane.bottom, mark.style)
    elif isinstance(mark, Rule):
        v = plane.down(mark.value)
        _line(root, LEFT, v, WIDTH - RIGHT, v, mark.style)
    elif mark.is_drawn:
        _circle(root, *plane.place((mark.x, mark.y)), mark.style, POINT)


def _places(plane: _Plane, line: Line) -> list[Point]:
    """Places of a line's finite points."""
    finite = [(u, v) for u, v in line.points if math.isfinite(u) and math.isfinite(v)]
    return [plane.place(point) for point in finite]


def _draw_line(root: Element, plane: _Plane, line: Line) -> None:
    """The finite points; with few of them, each is marked."""
    places = _places(plane, line)
    path = " ".join(f"{u:.2f},{v:.2f}" for u, v in places)
    SubElement(root, "polyline", {"class": line.style, "points": path})
    for u, v in places if len(places) <= 48 else ():
        _circle(root, u, v, line.style, 2.2)


def _draw_names(root: Element, plane: _Plane, marks: Sequence[Mark]) -> None:
    dots = [mark for mark in marks if isinstance(mark, Dot) and mark.is_drawn]
    points = [plane.place((dot.x, dot.y)) for dot in dots]
    lines = [_places(plane, mark) for mark in marks if isinstance(mark, Line)]
    frame = Box(LEFT + 2, TOP - 8, WIDTH, plane.bottom - 2)
    boxes = place_names(points, [dot.name for dot in dots], lines, frame)
    for dot, point, box in zip(dots, points, boxes, strict=True):
        end = box.nearest(point)
        if math.dist(end, point) > LINED:
            _line(root, *point, *end, "leader")
        middle = (box.left + box.right) / 2
        anchor, u = "middle", middle
        if abs(middle - point[0]) > (box.right - box.left) / 4:
            anchor, u = ("start", box.left) if middle > point[0] else ("end", box.right)
        _text(root, u, box.bottom - 4, dot.name, anchor, "name")


def _line(root: Element, u: float, v: float, to_u: float, to_v: float, style: str) -> None:
    ends = {"x1": u, "y1": v, "x2": to_u, "y2": to_v}
    attributes = {name: f"{value:.2f}" for name, value in ends.items()}
    SubElement(root, "line", {"class": style, **attributes})


def _circle(root: Element, u: float, v: float, style: str, radius: float) -> None:
    place = {"cx": f"{u:.2f}", "cy": f"{v:.2f}", "r": f"{radius:g}"}
    SubElement(root, "circle", {"class": style, **place})


def _text(root: Element, u: float, v: float, words: str, anchor: str, style: str = "tick") -> None:
    attributes = {"x": f"{u:.2f}", "y": f"{v:.2f}", "text-anchor": anchor, "class": style}
    element = SubElement(root, "text", attributes)
    element.text = printable(words)
