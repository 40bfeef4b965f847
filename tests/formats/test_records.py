"""Dataclasses from JSON: all that is within them is made too, and what does not fit is refused."""

import json
import math
from dataclasses import dataclass
from typing import Any, Literal

import pytest

from lowbit.formats.errors import FormatError
from lowbit.formats.layout.records import record


@dataclass(frozen=True)
class Point:
    x: float
    y: float


@dataclass(frozen=True)
class Figure:
    kind: Literal["line", "area"]
    points: tuple[Point, ...]
    center: Point | None
    counts: tuple[int, ...]
    label: str | None = None


CONTENT: dict[str, Any] = {
    "kind": "line",
    "points": [{"x": 1, "y": 2.5}, {"x": None, "y": 0}],
    "center": {"x": 0.0, "y": 0.0},
    "counts": [1, 2],
    "label": None,
}


def test_what_is_within_is_made_too() -> None:
    found = record(Figure, json.loads(json.dumps(CONTENT)), "file")
    points = (Point(1, 2.5), Point(math.inf, 0))
    assert found == Figure("line", points, Point(0.0, 0.0), (1, 2))
    assert record(Figure, {**CONTENT, "center": None, "points": []}, "file").center is None


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"points": None}, r"^`file: points` is not a list$"),
        ({"points": {"x": 1, "y": 2}}, r"^`file: points` is not a list$"),
        ({"points": [3]}, r"^`file: points` is not an object$"),
        ({"points": [{"x": 1}]}, r"^`file: points`: missing keys \['y'\], unknown keys \[\]$"),
        ({"points": [{"x": 1, "y": "2"}]}, r"^`file: points`: `y` cannot be \"2\"$"),
        ({"points": [{"x": 1, "y": math.nan}]}, r"`y` cannot be NaN"),
        ({"center": []}, r"^`file: center` is not an object$"),
        ({"center": {"x": 1, "y": 2, "z": 3}}, r"^`file: center`: .* unknown keys \['z'\]$"),
        ({"counts": [1, True]}, r"^`file`: `counts` cannot be \[1, true\]$"),
        ({"counts": [10**19]}, r"^`file`: `counts` cannot be "),
        ({"counts": "12"}, r"^`file`: `counts` cannot be \"12\"$"),
        ({"kind": "dot"}, r"^`file`: `kind` cannot be \"dot\"$"),
        ({"label": 3}, r"^`file`: `label` cannot be 3$"),
        ({"more": 1}, r"^`file`: missing keys \[\], unknown keys \['more'\]$"),
    ],
)
def test_what_does_not_fit_is_named(change: dict[str, Any], message: str) -> None:
    with pytest.raises(FormatError, match=message):
        record(Figure, {**CONTENT, **change}, "file")


@pytest.mark.parametrize("key", CONTENT)
def test_every_key_is_required_even_with_a_default(key: str) -> None:
    content = {name: value for name, value in CONTENT.items() if name != key}
    with pytest.raises(FormatError, match=rf"missing keys \['{key}'\]"):
        record(Figure, content, "file")


@pytest.mark.parametrize("content", [None, [], 3, "x"])
def test_no_object(content: object) -> None:
    with pytest.raises(FormatError, match=r"^`file` is not an object$"):
        record(Figure, content, "file")
