"""Charts as inline SVG: the page's style gives them colours and type, so they follow its theme."""

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from xml.etree.ElementTree import Element, SubElement, tostring

from markupsafe import Markup

from lowbit.convert.report.words import plain

WIDTH, HEIGHT = 460.0, 240.0
LEFT, RIGHT, TOP, BOTTOM = 52.0, 14.0, 26.0, 42.0
TICKS = 6
POINT = 3.6  # radius
_SUPERSCRIPT = str.maketrans("-0123456789", "⁻⁰¹²³⁴⁵⁶⁷⁸⁹")

Point = tuple[float, float]


@dataclass(frozen=True, slots=True)
class Axis:
    """What a position along one side of a chart means.

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
        """Where a value lies, 0 at the low end and 1 at the high end; beyond them, the end."""
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
    """A point with its name beside it."""

    x: float
    y: float
    name: str
    style: str


Mark = Line | Bars | Rule | Dot


def linear_axis(label: str, values: Iterable[float], from_zero: bool = False) -> Axis:
    """An axis over the finite ones of some values, with round ticks."""
    finite = [value for value in values if math.isfinite(value)] or [0.0]
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
    """An axis between two positive values, with a tick a decade."""
    decades = range(math.ceil(math.log10(low) - 1e-9), math.floor(math.log10(high) + 1e-9) + 1)
    every = max(1, math.ceil(len(decades) / TICKS))
    ticks = tuple((10.0**n, _power(n)) for n in decades if n % every == 0)
    return Axis(label, low, high, ticks, log=True)


def _round_step(step: float) -> float:
    scale = 10.0 ** math.floor(math.log10(step))
    return next((n * scale for n in (1, 2, 2.5, 5) if n * scale >= step * 0.999), 10 * scale)


def _power(exponent: int) -> str:
    """`0.01`, `100`, and powers where they would be long."""
    if -3 <= exponent <= 3:
        return f"{10.0**exponent:g}"
    return "10" + str(exponent).translate(_SUPERSCRIPT)


def chart(description: str, x: Axis, y: Axis, marks: Sequence[Mark]) -> Markup:
    """A chart as an `svg` element.

    Args:
        description: what it shows, for those who do not see it.
        x: from left to right.
        y: upwards.
        marks: drawn in this order.
    """
    root = Element(
        "svg",
        {
            "class": "chart",
            "viewBox": f"0 0 {WIDTH:g} {HEIGHT:g}",
            "role": "img",
            "aria-label": plain(description),
        },
    )
    _draw_axes(root, x, y)
    for mark in marks:
        _draw(root, x, y, mark)
    return Markup(tostring(root, encoding="unicode"))  # ElementTree escapes


def _draw_axes(root: Element, x: Axis, y: Axis) -> None:
    bottom = HEIGHT - BOTTOM
    for value, name in y.ticks:
        v = _down(y, value)
        _line(root, LEFT, v, WIDTH - RIGHT, v, "grid")
        _text(root, LEFT - 6, v + 4, name, "end")
    for value, name in x.ticks:
        u = _across(x, value)
        _line(root, u, bottom, u, bottom + 4, "axis")
        _text(root, u, bottom + 17, name, "middle")
    _line(root, LEFT, bottom, WIDTH - RIGHT, bottom, "axis")
    _text(root, (LEFT + WIDTH - RIGHT) / 2, HEIGHT - 6, x.label, "middle", "label")
    _text(root, 0, 12, y.label, "start", "label")


def _draw(root: Element, x: Axis, y: Axis, mark: Mark) -> None:
    if isinstance(mark, Line):
        _draw_line(root, x, y, mark)
    elif isinstance(mark, Bars):
        for start, stop, height in mark.bars:
            u, v = _across(x, start), _down(y, height)
            size = {"x": u, "y": v, "width": _across(x, stop) - u, "height": _down(y, y.low) - v}
            attributes = {name: f"{value:.2f}" for name, value in size.items()}
            SubElement(root, "rect", {"class": mark.style, **attributes})
    elif isinstance(mark, Rule) and mark.vertical:
        u = _across(x, mark.value)
        _line(root, u, TOP, u, HEIGHT - BOTTOM, mark.style)
    elif isinstance(mark, Rule):
        v = _down(y, mark.value)
        _line(root, LEFT, v, WIDTH - RIGHT, v, mark.style)
    elif math.isfinite(mark.x) and math.isfinite(mark.y):
        _draw_dot(root, x, y, mark)


def _draw_line(root: Element, x: Axis, y: Axis, line: Line) -> None:
    """The finite points; with few of them, each is marked."""
    finite = [(u, v) for u, v in line.points if math.isfinite(u) and math.isfinite(v)]
    places = [(_across(x, u), _down(y, v)) for u, v in finite]
    path = " ".join(f"{u:.2f},{v:.2f}" for u, v in places)
    SubElement(root, "polyline", {"class": line.style, "points": path})
    for u, v in places if len(places) <= 48 else ():
        _circle(root, u, v, line.style, 2.2)


def _draw_dot(root: Element, x: Axis, y: Axis, dot: Dot) -> None:
    u, v = _across(x, dot.x), _down(y, dot.y)
    _circle(root, u, v, dot.style, POINT)
    right = u < WIDTH * 0.62
    _text(root, u + 7 if right else u - 7, v - 6, dot.name, "start" if right else "end", "name")


def _across(x: Axis, value: float) -> float:
    return LEFT + (WIDTH - LEFT - RIGHT) * x.share(value)


def _down(y: Axis, value: float) -> float:
    return HEIGHT - BOTTOM - (HEIGHT - BOTTOM - TOP) * y.share(value)


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
    element.text = plain(words)
