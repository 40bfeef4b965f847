"""Recorded runs of a vision tower on a GPU: the bits of launched ones."""

from pathlib import Path

import pytest
import torch

from lowbit.formats.packed import open_packed
from lowbit.runtime.engine.tower_graphs import TowerGraphs
from lowbit.runtime.models.vision import VisionTower, load_tower, open_tower
from tests.runtime.models.test_vision_gpu import SHAPES, random_patches
from tests.seeing_models import make_seeing

pytestmark = pytest.mark.gpu

GRIDS = [(2, 2), (6, 26), (64, 64), (30, 18)]  # in patches


def tower_of(folder: Path, shape: str) -> VisionTower:
    make_seeing(folder, **SHAPES[shape])
    return load_tower(open_tower(open_packed(folder).checkpoint), "cuda", torch.bfloat16)


@torch.inference_mode()
@pytest.mark.parametrize("shape", SHAPES)
def test_recorded_runs_have_the_bits_of_launched_ones(tmp_path: Path, shape: str) -> None:
    tower = tower_of(tmp_path, shape)
    graphs = TowerGraphs(tower, lambda _: True)
    images = [random_patches(grid) for grid in GRIDS]
    expected = [tower(image) for image in images]
    for turn in range(4):
        found = [list(graphs.pieces(image))[-1] for image in images]
        assert all(image.grid in graphs.graphs for image in images) == (turn > 0)
        for tokens, right in zip(found, expected, strict=True):
            assert tokens is not None
            assert torch.equal(tokens, right)
