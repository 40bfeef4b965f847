"""Placement of the names of points: off the lines, the points and each other."""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise

CHARACTER = 8.2  # width of a character on a phone, where type is largest against the chart
HEIGHT = 15.0
NEAR = 8.0  # distance of a name from its point
FAR = (24.0, 42.0, 62.0)  # further distances, with a line back to the point
STEP = 6.0  # distance between the samples of a line that names avoid
LINED = 9.0  # least distance at which a name has a line back

Point = tuple[float, float]


@dataclass(frozen=True, slots=True)
class Box:
    """A rectangle, in the units of the chart."""

    left: float
    top: float
    right: float
    bottom: float

    def overlap(self, other: "Box") -> float:
        """Area shared with another box."""
        width = min(self.right, other.right) - max(self.left, other.left)
        height = min(self.bottom, other.bottom) - max(self.top, other.top)
        return max(0.0, width) * max(0.0, height)

    def holds(self, point: Point, margin: float = 0.0) -> bool:
        """True if a point lies inside the box, or at most `margin` outside."""
        u, v = point
        inside = self.left - margin <= u <= self.right + margin
        return inside and self.top - margin <= v <= self.bottom + margin

    def nearest(self, point: Point) -> Point:
        """The point of the box that is nearest to a point."""
        u, v = point
        return min(max(u, self.left), self.right), min(max(v, self.top), self.bottom)


def place_names(
    points: Sequence[Point], names: Sequence[str], lines: Sequence[Sequence[Point]], frame: Box
) -> list[Box]:
    """Place a box for every name, those of the most crowded points first.

    Args:
        points: places in the chart, v downwards.
        names: one for each point.
        lines: corners of the lines that are drawn.
        frame: area that names should stay within.
    """
    avoided = [*points, *(spot for line in lines for spot in _along(line))]
    crowded = sorted(range(len(points)), key=lambda n: -_neighbours(points, n))
    placed: dict[int, Box] = {}
    for number in crowded:
        boxes = _candidates(points[number], CHARACTER * len(names[number]))
        others = list(placed.values())
        placed[number] = min(
            boxes, key=lambda box: _cost(box, points[number], avoided, others, frame)
        )
    return [placed[number] for number in range(len(points))]


def _neighbours(points: Sequence[Point], number: int) -> int:
    return sum(math.dist(points[number], other) < FAR[-1] for other in points)


def _along(line: Sequence[Point]) -> Iterator[Point]:
    for a, b in pairwise(line):
        count = max(1, math.ceil(math.dist(a, b) / STEP))
        for n in range(count + 1):
            share = n / count
            yield a[0] + share * (b[0] - a[0]), a[1] + share * (b[1] - a[1])


def _candidates(point: Point, width: float) -> Iterator[Box]:
    """Boxes beside, above and below a point, near ones first."""
    u, v = point
    for distance in (NEAR, *FAR):
        for across in (1, -1, 0):
            for down in (-1, 0, 1):
                if across == 0 and down == 0:
                    continue
                left = u + across * distance - (width if across < 0 else 0 if across else width / 2)
                middle = v + down * (distance if across == 0 or distance > NEAR else 9.0)
                top = middle - HEIGHT / 2 + (down * HEIGHT / 2 if across == 0 else 0)
                yield Box(left, top, left + width, top + HEIGHT)


def _cost(
    box: Box, point: Point, avoided: Sequence[Point], others: Sequence[Box], frame: Box
) -> float:
    """Cost of a place: outside the frame, over names, points or lines, far from the point."""
    area = (box.right - box.left) * (box.bottom - box.top)
    outside = 1 - box.overlap(frame) / area
    names = sum(box.overlap(other) for other in others) / area
    marks = sum(box.holds(spot, 2.0) for spot in avoided)
    return 100 * outside + 60 * names + 8 * marks + math.dist(box.nearest(point), point) / 10
