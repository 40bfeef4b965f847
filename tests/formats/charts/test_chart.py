"""Charts: marks at the places of their values, round axes, escaped text."""

import math
from xml.etree import ElementTree

import pytest

from lowbit.formats.charts.axes import around, linear_axis, log_axis
from lowbit.formats.charts.chart import BOTTOM, LEFT, RIGHT, SIZE, TOP, Bars, Dot, Line, Rule, chart

WIDTH, HEIGHT = SIZE

X, Y = linear_axis("x", [0.0, 10.0]), linear_axis("y", [0.0, 100.0])


def drawn(*marks: Bars | Dot | Line | Rule) -> ElementTree.Element:
    return ElementTree.fromstring(chart("what it shows", X, Y, marks))


def test_marks_lie_where_their_numbers_say() -> None:
    root = drawn(
        Bars(((0.0, 5.0, 50.0),), "bar"),
        Line(((0.0, 0.0), (10.0, 100.0)), "line"),
        Rule(5.0, "rule"),
    )
    width, height = WIDTH - LEFT - RIGHT, HEIGHT - TOP - BOTTOM
    (bar,) = root.findall(".//rect[@class='bar']")
    assert float(bar.get("x", "")) == pytest.approx(LEFT)
    assert float(bar.get("width", "")) == pytest.approx(width / 2, abs=0.01)
    assert float(bar.get("height", "")) == pytest.approx(height / 2, abs=0.01)
    (line,) = root.findall(".//polyline")
    assert line.get("points") == f"{LEFT:.2f},{HEIGHT - BOTTOM:.2f} {WIDTH - RIGHT:.2f},{TOP:.2f}"
    (rule,) = root.findall(".//line[@class='rule']")
    assert float(rule.get("x1", "")) == pytest.approx(LEFT + width / 2, abs=0.01)


@pytest.mark.parametrize(
    ("values", "ticks"),
    [
        ([0.0, 0.025], ["0", "0.005", "0.01", "0.015", "0.02", "0.025"]),
        ([3.0, 17.0], ["2.5", "5", "7.5", "10", "12.5", "15", "17.5"]),
        ([0.5, 0.5], ["0.2", "0.3", "0.4", "0.5", "0.6", "0.7", "0.8"]),
        ([0.0, 0.0], ["-1", "-0.5", "0", "0.5", "1"]),
        ([math.inf, 1.0, 2.0], ["1", "1.2", "1.4", "1.6", "1.8", "2"]),
        ([0.0, 5000.0], ["0", "1,000", "2,000", "3,000", "4,000", "5,000"]),
        ([], ["-1", "-0.5", "0", "0.5", "1"]),
    ],
)
def test_round_ticks(values: list[float], ticks: list[str]) -> None:
    axis = linear_axis("y", values)
    assert [name for _, name in axis.ticks] == ticks
    assert axis.low < axis.high


def test_an_axis_from_zero() -> None:
    axis = linear_axis("y", [0.5, 0.5], from_zero=True)
    assert (axis.low, axis.high) == (0.0, 0.5)


def test_decades() -> None:
    axis = log_axis("x", 2e-6, 3.0)
    assert [name for _, name in axis.ticks] == ["10⁻⁵", "10⁻⁴", "0.001", "0.01", "0.1", "1"]
    assert axis.share(math.sqrt(2e-6 * 3.0)) == pytest.approx(0.5)
    assert axis.share(0.0) == 0.0
    assert axis.share(1e9) == 1.0


@pytest.mark.parametrize(
    ("low", "high", "ticks"),
    [
        (0.006, 0.03, ["0.01", "0.02"]),
        (0.004, 0.06, ["0.005", "0.01", "0.02", "0.05"]),
        (0.0001, 0.5, ["10⁻⁴", "0.001", "0.01", "0.1"]),
        (3e-6, 3e-5, ["5·10⁻⁶", "10⁻⁵", "2·10⁻⁵"]),
    ],
)
def test_log_axes_have_ticks_enough(low: float, high: float, ticks: list[str]) -> None:
    axis = log_axis("y", low, high)
    assert [name for _, name in axis.ticks] == ticks
    assert (axis.low, axis.high) == (low, high)


@pytest.mark.parametrize("values", [[], [0.0], [math.inf], [5e-324, 1e308], [0.01, 0.01]])
def test_a_log_axis_around_anything(values: list[float]) -> None:
    axis = log_axis("y", *around(values))
    assert 0 < axis.low < axis.high < math.inf
    assert all(0 <= axis.share(value) <= 1 for value in (0.0, 1e-9, 1.0, 1e300))


def test_names_of_dots_are_drawn_once_each_off_the_dots() -> None:
    dots = [Dot(1.0, 1.0, "first", "dot"), Dot(1.0, 1.0, "second", "dot")]
    root = drawn(*dots, Line(((0.0, 0.0), (1.0, 1.0)), "line"))
    names = [text for text in root.findall("text") if text.get("class") == "name"]
    assert sorted(text.text or "" for text in names) == ["first", "second"]
    assert len({(text.get("x"), text.get("y")) for text in names}) == 2


def test_non_finite_values_are_not_drawn() -> None:
    root = drawn(
        Dot(math.inf, 1.0, "far", "dot"),
        Dot(math.nan, 1.0, "nowhere", "dot"),
        Line(((0.0, math.nan), (1.0, 1.0)), "line"),
    )
    assert len(root.findall(".//circle")) == 1
    assert "nan" not in ElementTree.tostring(root, encoding="unicode")


def test_words_are_escaped() -> None:
    text = chart('a "quoted" <name>', X, Y, [Dot(1.0, 1.0, "</svg><script>", "dot")])
    root = ElementTree.fromstring(text)
    assert root.get("aria-label") == 'a "quoted" <name>'
    assert "<script>" not in text
