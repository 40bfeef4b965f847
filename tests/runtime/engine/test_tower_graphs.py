"""Recorded runs of a vision tower: which are recorded, and that sizes do not mix."""

from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from lowbit.formats.packed import open_packed
from lowbit.runtime.engine import tower_graphs as module
from lowbit.runtime.engine.tower_graphs import Grid, TowerGraphs
from lowbit.runtime.images.patches import ImagePatches
from lowbit.runtime.models.vision import VisionTower, load_tower, open_tower
from tests.runtime.images.pictures import SETTINGS
from tests.seeing_models import make_seeing


class Recorder:
    """Runs a step in place of a recording of it, and forgets the first of more than two."""

    def __init__(self) -> None:
        self.recorded: dict[Grid, int] = {}  # replays

    def __contains__(self, key: Grid) -> bool:
        return key in self.recorded

    def replay(self, key: Grid, step: Callable[[], None]) -> None:
        step()
        self.recorded[key] = 1 + self.recorded.get(key, 0)
        if len(self.recorded) > 2:
            del self.recorded[next(iter(self.recorded))]


@pytest.fixture(scope="module")
def tower(tmp_path_factory: pytest.TempPathFactory) -> VisionTower:
    folder: Path = tmp_path_factory.mktemp("seeing")
    make_seeing(folder)
    return load_tower(open_tower(open_packed(folder).checkpoint), "cpu", torch.float32)


def image(rows: int, columns: int, seed: int = 0) -> ImagePatches:
    generator = torch.Generator().manual_seed(seed)
    size = (32 * rows, 32 * columns, 3)
    pixels = torch.randint(256, size, generator=generator, dtype=torch.uint8)
    return ImagePatches(pixels, SETTINGS)


def made(graphs: TowerGraphs, one: ImagePatches) -> torch.Tensor:
    *_, last = graphs.pieces(one)
    assert last is not None
    return last


def test_a_size_is_recorded_when_it_comes_again(tower: VisionTower) -> None:
    recorder = Recorder()
    graphs = TowerGraphs(tower, lambda _: True, recorder)
    sizes = [(3, 4), (4, 3), (3, 4), (2, 2), (3, 4)]
    expected = [{}, {}, {(6, 8): 1}, {(6, 8): 1}, {(6, 8): 2}]
    for seed, (size, right) in enumerate(zip(sizes, expected, strict=True)):
        one = image(*size, seed=seed)
        assert torch.equal(made(graphs, one), tower(one))
        assert recorder.recorded == right


def test_results_outlive_the_next_run(tower: VisionTower) -> None:
    graphs = TowerGraphs(tower, lambda _: True, Recorder())
    images = [image(*size, seed=seed) for seed in range(2) for size in ((5, 4), (2, 3), (4, 5))]
    for _ in range(2):
        found = [made(graphs, one) for one in images]
        for one, tokens in zip(images, found, strict=True):
            assert torch.equal(tokens, tower(one))


def test_a_dropped_size_is_recorded_again(tower: VisionTower) -> None:
    recorder = Recorder()
    graphs = TowerGraphs(tower, lambda _: True, recorder)
    for size in ((2, 2), (2, 3), (2, 4)):
        for _ in range(2):
            made(graphs, image(*size))
    assert list(recorder.recorded) == [(4, 6), (4, 8)]
    assert torch.equal(made(graphs, image(2, 2)), tower(image(2, 2)))
    assert list(recorder.recorded) == [(4, 8), (4, 4)]
    assert set(graphs._angles) <= {(4, 4), (4, 6), (4, 8)}
    made(graphs, image(2, 3))
    assert len(graphs._angles) <= 3  # those of dropped ones go with the next recording


def test_more_sizes_in_turn_than_are_kept_are_launched(
    tower: VisionTower, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "MOST_SIZES", 2)
    recorder = Recorder()
    graphs = TowerGraphs(tower, lambda _: True, recorder)
    for size in ((2, 2), (2, 3), (2, 4)) * 3:
        made(graphs, image(*size))
    assert recorder.recorded == {}
    made(graphs, image(2, 4))
    made(graphs, image(2, 3))
    assert recorder.recorded == {(4, 8): 1, (4, 6): 1}


def test_large_images_and_full_gpus_are_not_recorded(
    tower: VisionTower, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "MOST_RECORDED", 4 * 12)
    recorder, asked = Recorder(), []

    def has_room(patches: int) -> bool:
        asked.append(patches)
        return patches < 40

    graphs = TowerGraphs(tower, has_room, recorder)
    for size in ((3, 4), (3, 5), (3, 3)):
        for _ in range(2):
            assert torch.equal(made(graphs, image(*size)), tower(image(*size)))
    assert asked == [4 * 12, 4 * 9]
    assert list(recorder.recorded) == [(6, 6)]
