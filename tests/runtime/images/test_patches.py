"""Patches of image files, against transformers' image processor."""

from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from torch import Tensor

from lowbit.formats.errors import RequestError
from lowbit.formats.image_settings import read_settings
from lowbit.runtime.images import patches
from lowbit.runtime.images.patches import image_patches
from lowbit.runtime.images.resize import resize
from tests.runtime.images.pictures import PROCESSOR, SETTINGS, odd_sizes, picture, saved


def processed(image: Any, content: dict[str, Any]) -> tuple[Tensor, list[int]]:
    """Patches and grid (frames, rows, columns) of transformers."""
    from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil

    made = Qwen2VLImageProcessorPil(**content)(images=[image], return_tensors="pt")
    return made["pixel_values"], made["image_grid_thw"][0].tolist()


def check_patches(size: tuple[int, int], content: dict[str, Any]) -> None:
    """Compare the grid, and the patches of the pixels that ours resized."""
    image, settings = picture(*size), read_settings(content, "file")
    found = image_patches(saved(image, compress_level=1), settings)
    assert [1, *found.grid] == processed(image, content)[1]
    pixels = Image.fromarray(np.ascontiguousarray(resize(image, settings).numpy()))
    wide = {"size": {"shortest_edge": 1, "longest_edge": 2**24}}
    values, grid = processed(pixels, content | wide)
    assert [1, *found.grid] == grid
    cut = found.values()
    assert cut.shape == values.shape
    assert cut.dtype == torch.float32
    assert (cut - values).abs().max() < 1e-5
    assert torch.equal(found.values(dtype=torch.bfloat16), cut.to(torch.bfloat16))
    assert (found.rows, found.columns) == (grid[1] // settings.merge, grid[2] // settings.merge)
    assert found.tokens == found.rows * found.columns == found.count // settings.merge**2
    assert found.count == len(values)


@pytest.mark.parametrize("size", odd_sizes(36))
def test_patches_and_grid_are_those_of_transformers(size: tuple[int, int]) -> None:
    check_patches(size, PROCESSOR)


@pytest.mark.parametrize(
    "changes",
    [
        {"patch_size": 14, "image_mean": [0.48, 0.46, 0.41], "image_std": [0.27, 0.26, 0.28]},
        {"merge_size": 1},
        {"merge_size": 3, "patch_size": 8, "temporal_patch_size": 1},
    ],
)
def test_other_settings(changes: dict[str, Any]) -> None:
    check_patches((301, 170), PROCESSOR | changes)


def test_pixels_that_cannot_be_page_locked_are_taken_as_they_are(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    pixels, locked = torch.zeros(2, 3, 3, dtype=torch.uint8), torch.ones(1)

    def refused(_: Tensor) -> Tensor:
        raise RuntimeError("CUDA error: out of memory")

    monkeypatch.setattr(Tensor, "pin_memory", refused)
    assert patches._locked(pixels) is pixels
    monkeypatch.setattr(Tensor, "pin_memory", lambda _: locked)
    assert patches._locked(pixels) is locked


def test_a_damaged_file_is_refused() -> None:
    with pytest.raises(RequestError, match="damaged"):
        image_patches(saved(picture(64, 64))[:-30], SETTINGS)
