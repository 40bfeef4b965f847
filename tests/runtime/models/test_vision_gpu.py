"""The vision tower on a GPU: beside transformers in FP32 on a CPU, and its memory."""

from collections.abc import Iterator
from dataclasses import fields, is_dataclass
from pathlib import Path
from typing import Any

import pytest
import torch

from lowbit.formats.packed import open_packed
from lowbit.runtime.images.patches import ImagePatches
from lowbit.runtime.models.vision import load_tower, open_tower
from tests.runtime.hub_logits import in_bf16
from tests.runtime.images.pictures import SETTINGS
from tests.seeing_models import make_seeing

pytestmark = pytest.mark.gpu

GRIDS = [(2, 2), (6, 26), (30, 18), (2, 130), (64, 64)]  # in patches
SHAPES: dict[str, dict[str, Any]] = {
    "head of 64, as 4B's": {"hidden_size": 256, "num_heads": 4, "intermediate_size": 512},
    "head of 72, as 9B's": {"hidden_size": 288, "num_heads": 4, "intermediate_size": 1076},
}


def random_patches(grid: tuple[int, int]) -> ImagePatches:
    generator = torch.Generator().manual_seed(sum(grid))
    size = (16 * grid[0], 16 * grid[1], 3)
    pixels = torch.randint(256, size, generator=generator, dtype=torch.uint8)
    return ImagePatches(pixels, SETTINGS)


def tensors_of(part: object) -> Iterator[torch.Tensor]:
    """Weights of a tower, or of a part of one."""
    if isinstance(part, torch.Tensor):
        yield part
    elif isinstance(part, tuple):
        for each in part:
            yield from tensors_of(each)
    elif is_dataclass(part):
        for each in fields(part):
            yield from tensors_of(getattr(part, each.name))


@torch.no_grad()
@pytest.mark.parametrize("shape", SHAPES)
def test_tokens_are_those_of_transformers(tmp_path: Path, shape: str) -> None:
    theirs = make_seeing(tmp_path, **SHAPES[shape]).model.visual
    half = make_seeing(tmp_path, **SHAPES[shape]).model.visual
    half = in_bf16(half).cuda()
    opened = open_tower(open_packed(tmp_path).checkpoint)
    exact = load_tower(opened, "cuda", torch.float32)
    rounded = load_tower(opened, "cuda", torch.bfloat16)
    for grid in GRIDS:
        image, places = random_patches(grid), torch.tensor([[1, *grid]])
        expected = theirs(image.values(), grid_thw=places).pooler_output
        largest = expected.abs().max()
        assert (exact(image).cpu() - expected).abs().max() < 1e-4 * largest
        found = rounded(image)
        assert torch.equal(rounded(image), found)
        values = image.values("cuda", torch.bfloat16)
        assert torch.equal(values.cpu(), image.values(dtype=torch.bfloat16))
        others = half(values, grid_thw=places.cuda()).pooler_output.cpu().float()
        off = (found.cpu().float() - expected).norm()
        assert off < 1.25 * (others - expected).norm()


@torch.no_grad()
@pytest.mark.parametrize("shape", SHAPES)
def test_working_memory_is_as_stated(tmp_path: Path, shape: str) -> None:
    make_seeing(tmp_path, **SHAPES[shape])
    opened = open_tower(open_packed(tmp_path).checkpoint)
    tower = load_tower(opened, "cuda", torch.bfloat16)
    # PyTorch counts blocks of memory, which may be larger by up to a megabyte each.
    assert sum(each.nbytes for each in tensors_of(tower)) == opened.weight_bytes(torch.bfloat16)
    tower(random_patches((2, 2)))  # libraries take their workspace
    image = random_patches((128, 96))
    torch.cuda.reset_peak_memory_stats()
    start = torch.cuda.memory_allocated()
    tower(image)
    peak = torch.cuda.max_memory_allocated() - start
    stated = opened.working_bytes(image.count, torch.bfloat16)
    assert 0.8 * stated < peak < 1.35 * stated  # 1.14 and 1.29 were measured on an H200


@torch.no_grad()
def test_a_streamed_tower_has_two_blocks_on_the_gpu_and_the_same_bits(tmp_path: Path) -> None:
    make_seeing(tmp_path, depth=8, **SHAPES["head of 72, as 9B's"])
    opened = open_tower(open_packed(tmp_path).checkpoint)
    whole = load_tower(opened, "cuda", torch.bfloat16)
    images = [random_patches(grid) for grid in GRIDS]
    expected = [whole(image).cpu() for image in images]
    del whole
    before = torch.cuda.memory_allocated()
    tower = load_tower(opened, "cuda", torch.bfloat16, streamed=True)
    for image, right in zip(images, expected, strict=True):
        assert torch.equal(tower(image).cpu(), right)
    assert all(block.up.weight.is_pinned() for block in tower.blocks)
    torch.cuda.reset_peak_memory_stats()
    image = random_patches((128, 96))
    tower(image)
    peak = torch.cuda.max_memory_allocated() - before
    stated = opened.weight_bytes(torch.bfloat16) - opened.streamed_bytes(torch.bfloat16)
    stated += opened.working_bytes(image.count, torch.bfloat16)
    assert 0.8 * stated < peak < 1.3 * stated
