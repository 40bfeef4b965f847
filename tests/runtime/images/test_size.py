"""Sizes of resized images, against transformers' image processor."""

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lowbit.runtime.images.size import smart_size
from tests.runtime.images.pictures import SETTINGS

SIDES = [1, 2, 15, 16, 17, 31, 32, 33, 47, 48, 49, 80, 99, 160, 237, 240, 451, 640, 1023, 3001]


@given(st.sampled_from(SIDES) | st.integers(1, 20_000), st.floats(1, 200), st.booleans())
def test_sizes_are_those_of_transformers(side: int, aspect: float, tall: bool) -> None:
    from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import smart_resize

    other = min(int(side * aspect), side * 200)
    width, height = (side, other) if tall else (other, side)
    for least, most in ((4096, 200_000), (65_536, 16_777_216)):
        settings = replace(SETTINGS, least_pixels=least, most_pixels=most)
        expected = smart_resize(height, width, 32, least, most)
        assert smart_size(width, height, settings) == expected[::-1]


@pytest.mark.parametrize("size", [(1, 1), (200, 1), (1, 200), (20_000, 100), (100, 20_000)])
def test_extreme_sizes_become_whole_tokens(size: tuple[int, int]) -> None:
    width, height = smart_size(*size, SETTINGS)
    assert width % 32 == height % 32 == 0
    assert min(width, height) >= 32
