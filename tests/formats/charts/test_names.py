"""Names of points do not overlap each other, the points or the lines."""

from itertools import pairwise

import numpy as np
import pytest

from lowbit.formats.charts.names import Box, place_names

FRAME = Box(54.0, 18.0, 460.0, 276.0)


def frontier(seed: int, count: int) -> list[tuple[float, float]]:
    """Points as a comparison has them: the larger the file, the smaller the loss, by and large."""
    generator = np.random.default_rng(seed)
    places = (np.arange(count) + 0.5) / count
    u = 80 + 350 * (places + generator.uniform(-0.3, 0.3, count) / count)
    v = 40 + 220 * (places + generator.uniform(-0.3, 0.3, count) / count)
    return list(zip(u.tolist(), v.tolist(), strict=True))


def on_line(box: Box, line: list[tuple[float, float]]) -> bool:
    for (a, b), (c, d) in pairwise(line):
        for share in np.linspace(0, 1, 200):
            if box.holds((a + share * (c - a), b + share * (d - b))):
                return True
    return False


@pytest.mark.parametrize("count", [1, 2, 3, 5])
@pytest.mark.parametrize("seed", range(12))
def test_names_are_free(seed: int, count: int) -> None:
    points = frontier(seed, count)
    boxes = place_names(
        points, ["qwen3-int4-gptq"[: 6 + 2 * n] for n in range(count)], [points], FRAME
    )
    for n, box in enumerate(boxes):
        assert not any(box.holds(point) for point in points)
        assert not any(box.overlap(other) > 0 for other in boxes[n + 1 :])
        assert not on_line(box, points)
        assert box.overlap(FRAME) == pytest.approx((box.right - box.left) * (box.bottom - box.top))


def test_names_of_one_place_do_not_cover_each_other() -> None:
    boxes = place_names([(200.0, 100.0)] * 4, ["a" * 10] * 4, [], FRAME)
    assert all(a.overlap(b) == 0 for n, a in enumerate(boxes) for b in boxes[n + 1 :])


def test_a_crowd_still_has_all_its_names() -> None:
    points = [(100.0 + n, 100.0 + n) for n in range(30)]
    boxes = place_names(points, ["x" * 24] * 30, [points], FRAME)
    assert len(boxes) == 30
    assert place_names([], [], [], FRAME) == []
