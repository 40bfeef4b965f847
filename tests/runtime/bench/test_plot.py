"""The SVG of a sweep: well-formed for any name, points at the places of their values."""

from pathlib import Path
from xml.etree import ElementTree

import pytest

from lowbit.formats.errors import ResourceError
from lowbit.runtime.bench.plot import NamedLine, line_plot, number, write_plot

SVG = "{http://www.w3.org/2000/svg}"


def drawn(*points: tuple[float, float], title: str = "speed") -> ElementTree.Element:
    lines = [
        NamedLine("measured", points, marked=True),
        NamedLine("allowed", points, marked=False),
    ]
    return ElementTree.fromstring(line_plot(title, "tokens", "tokens / s", lines))


def dots(root: ElementTree.Element) -> list[tuple[float, float]]:
    return [(float(d.attrib["cx"]), float(d.attrib["cy"])) for d in root.iter(f"{SVG}circle")]


def test_x_is_logarithmic_and_y_begins_at_zero() -> None:
    root = drawn((128, 100), (1024, 50), (8192, 0))
    (ax, ay), (bx, by), (cx, cy) = dots(root)
    assert bx - ax == pytest.approx(cx - bx, abs=0.2)  # factors of 8
    assert by - ay == pytest.approx(cy - by, abs=0.2)
    zero = next(each for each in root.iter(f"{SVG}text") if each.text == "0")
    assert float(zero.attrib["y"]) == pytest.approx(cy + 4, abs=0.2)


def test_a_name_with_markup_stays_text() -> None:
    name = "<script>\"&'</script>"
    root = drawn((1, 1), title=name)
    assert root.find(f"{SVG}title") is not None
    assert root.findtext(f"{SVG}title") == name
    assert not list(root.iter(f"{SVG}script"))


@pytest.mark.parametrize("points", [((64.0, 5.0),), ((1.0, 0.0), (2.0, 0.0))], ids=["one", "zero"])
def test_degenerate_lines_lie_inside(points: tuple[tuple[float, float], ...]) -> None:
    for x, y in dots(drawn(*points)):
        assert 0 < x < 640
        assert 0 < y < 360


def test_no_outside_resources() -> None:
    text = line_plot("speed", "x", "y", [NamedLine("a", ((1.0, 2.0),), marked=True)])
    assert text.count("http") == 1  # the namespace
    assert "href" not in text


def test_close_points_are_all_drawn_but_not_all_named() -> None:
    root = drawn(*((1000.0 + n, 700.0 + n) for n in range(50)))
    assert len(dots(root)) == 50
    assert sum(text.text == "1,000" for text in root.iter(f"{SVG}text")) == 1
    named = [text.text for text in root.iter(f"{SVG}text") if (text.text or "").startswith("7")]
    assert 1 < len(named) < 20


@pytest.mark.parametrize(
    ("value", "text"), [(0, "0"), (0.25, "0.25"), (84.13, "84.1"), (2310.4, "2,310")]
)
def test_numbers_are_short(value: float, text: str) -> None:
    assert number(value) == text


def test_a_file_is_replaced_whole(tmp_path: Path) -> None:
    path = tmp_path / "speed.svg"
    path.write_text("old")
    write_plot(path, "<svg/>")
    assert path.read_text() == "<svg/>"
    (tmp_path / "taken.svg").mkdir()
    with pytest.raises(ResourceError, match=r"taken\.svg` cannot be written"):
        write_plot(tmp_path / "taken.svg", "<svg/>")
    assert sorted(each.name for each in tmp_path.iterdir()) == ["speed.svg", "taken.svg"]
