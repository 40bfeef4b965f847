"""Pixels of resized images, against torchvision's and Pillow's."""

import random

import numpy as np
import pytest
import torch
from PIL import Image

from lowbit.runtime.images import pixels
from lowbit.runtime.images.resize import resize
from lowbit.runtime.images.size import smart_size
from tests.runtime.images.pictures import SETTINGS, odd_sizes, picture

BICUBIC = Image.Resampling.BICUBIC


def steps(first: np.ndarray, second: np.ndarray) -> int:
    return int(np.abs(first.astype(int) - second.astype(int)).max())


@pytest.mark.parametrize("size", odd_sizes(36))
def test_pixels_are_those_of_pillow_rows_first(size: tuple[int, int]) -> None:
    """Each pass rounds, and the two round differently in some places."""
    image = picture(*size)
    width, height = smart_size(*size, SETTINGS)
    rows_first = image.resize((width, image.height), BICUBIC).resize((width, height), BICUBIC)
    found = resize(image, SETTINGS)
    assert found.shape == (height, width, 3)
    assert found.dtype == torch.uint8
    assert steps(found.numpy(), np.asarray(rows_first)) <= 2


def bicubic(values: np.ndarray, size: int) -> np.ndarray:
    """One pass along the first axis in FP64, from the definition of the kernel, then bytes."""
    scale = len(values) / size
    width = max(scale, 1.0)
    found = []
    for index in range(size):
        center = (index + 0.5) * scale
        first, last = max(int(center - 2 * width + 0.5), 0), int(center + 2 * width + 0.5)
        taps = np.arange(first, min(last, len(values)))
        x = np.abs((taps - center + 0.5) / width)
        weights = np.where(x < 1, (1.5 * x - 2.5) * x * x + 1, ((-0.5 * x + 2.5) * x - 4) * x + 2)
        weights = np.where(x < 2, weights, 0.0)
        summed = np.tensordot(weights / weights.sum(), values[taps].astype(float), 1)
        found.append(np.clip(np.floor(summed + 0.5), 0, 255))
    return np.stack(found)


@pytest.mark.parametrize("size", [(45, 97), (97, 45), (31, 33), (300, 90), (23, 583), (700, 500)])
def test_pixels_are_those_of_the_kernel_in_fp64(size: tuple[int, int]) -> None:
    image = picture(*size)
    width, height = smart_size(*size, SETTINGS)
    columns = bicubic(np.asarray(image).transpose(1, 0, 2), width)
    expected = bicubic(columns.transpose(1, 0, 2), height)
    # A value beside the middle of two bytes may go the other way in the first pass, and again in
    # the second.
    found = resize(image, SETTINGS).numpy()
    assert steps(found, expected) <= 2
    assert (np.abs(found - expected) > 1).mean() < 1e-4


def test_a_size_that_fits_is_left_alone() -> None:
    image = picture(96, 64)
    assert np.array_equal(resize(image, SETTINGS).numpy(), np.asarray(image))


def test_resizing_does_not_depend_on_threads() -> None:
    rng = random.Random(3)
    image = picture(rng.randrange(300, 900), rng.randrange(300, 900))
    alone = resize(image, SETTINGS)
    torch.set_num_threads(2)  # the fixture sets it back
    assert torch.equal(resize(image, SETTINGS), alone)


@pytest.mark.parametrize("strip", [1, 45 * 7, 10**9])
def test_strips_are_the_whole_image(strip: int, monkeypatch: pytest.MonkeyPatch) -> None:
    image = picture(45, 97)
    expected = resize(image, SETTINGS)
    monkeypatch.setattr(pixels, "STRIP_PIXELS", strip)
    assert torch.equal(resize(image, SETTINGS), expected)
    whole = picture(64, 96)
    assert np.array_equal(resize(whole, SETTINGS).numpy(), np.asarray(whole))
