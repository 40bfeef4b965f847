"""INT8 keys and values against FP64 arithmetic, number by number."""

import math
import struct

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from lowbit.formats.kv_cache import (
    BF16_CACHE,
    FP32_CACHE,
    INT8_CACHE,
    quantize_vectors,
    widen_vectors,
)

DTYPES = [torch.bfloat16, torch.float32]


def fp32(number: float) -> float:
    """A double rounded to FP32; of a quotient of two FP32 numbers that is the IEEE division."""
    return float(torch.tensor(number, dtype=torch.float64).float())


def bf16_from_above(number: float) -> float:
    """The least BF16 number that is not below an FP32 number, found by counting down."""
    high = struct.unpack("<I", struct.pack("<f", number))[0] >> 16
    candidates = [struct.unpack("<f", struct.pack("<I", (high + 1) << 16))[0], number]
    low = struct.unpack("<f", struct.pack("<I", high << 16))[0]
    return float(low if low == number else candidates[0])


def obvious(vector: list[float]) -> tuple[list[int], float]:
    """Codes and scale by the definition, one number at a time."""
    scale = bf16_from_above(fp32(max(abs(x) for x in vector) / 127))
    # Python rounds halves to even.
    return [round(fp32(x / scale)) if scale else 0 for x in vector], scale


def vectors(seed: int, shape: tuple[int, ...], spread: float) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    size = torch.randn(*shape[:-1], 1, generator=generator) * spread
    size = size.clamp(max=120)  # one draw in hundreds would be infinite, which other tests are of
    return torch.randn(*shape, generator=generator) * torch.exp2(size)


@given(
    seed=st.integers(0, 2**32),
    D=st.integers(1, 70),
    spread=st.sampled_from([0.0, 3.0, 40.0]),
    dtype=st.sampled_from(DTYPES),
)
def test_codes_and_scales_are_those_of_the_definition(
    seed: int, D: int, spread: float, dtype: torch.dtype
) -> None:
    x = vectors(seed, (3, 2, D), spread).to(dtype)
    codes, scales = quantize_vectors(x)
    assert (codes.dtype, codes.shape) == (torch.int8, x.shape)
    assert (scales.dtype, scales.shape) == (torch.bfloat16, (3, 2))
    expected = [obvious(vector) for vector in x.double().view(6, D).tolist()]
    assert codes.view(6, D).tolist() == [codes for codes, _ in expected]
    assert scales.flatten().tolist() == [scale for _, scale in expected]
    wide = widen_vectors(codes, scales)
    assert wide.dtype == torch.float32
    exact = codes.double() * scales.double()[..., None]
    assert torch.equal(wide, exact.float())


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_error_is_at_most_half_a_scale_and_codes_reach_127(dtype: torch.dtype) -> None:
    x = vectors(1, (4096, 64), 8.0).to(dtype)
    codes, scales = quantize_vectors(x)
    error = (codes.double() * scales.double()[:, None] - x.double()).abs()
    # The quotient is rounded to FP32 before it is rounded to a code.
    assert bool((error <= scales.double()[:, None] * (0.5 + 127 * 2**-24)).all())
    assert codes.min() == -127
    assert codes.max() == 127
    # A scale rounded up by at most a step of BF16 leaves its largest number a code near 127.
    assert bool((codes.int().abs().amax(-1) >= math.floor(127 / (1 + 2**-7))).all())


def test_golden_codes() -> None:
    x = torch.tensor([[127.0, -127.0, 0.5, 1.5, 2.5, -0.5], [1.0, 0.25, -1.0, 0.0, 0.5, 0.125]])
    codes, scales = quantize_vectors(x)
    assert scales.view(torch.int16).tolist() == [0x3F80, 0x3C02]  # 1, and 1/127 from above
    assert codes.tolist() == [[127, -127, 0, 2, 2, 0], [126, 32, -126, 0, 63, 16]]


def test_zeros_have_scale_zero() -> None:
    codes, scales = quantize_vectors(torch.tensor([[0.0, -0.0, 0.0], [0.0, 127.0, 0.0]]))
    assert scales.tolist()[0] == 0
    assert codes.tolist() == [[0, 0, 0], [0, 127, 0]]
    assert widen_vectors(codes, scales)[0].tolist() == [0, 0, 0]


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_what_is_not_finite_makes_its_vector_nan(bad: float, dtype: torch.dtype) -> None:
    x = torch.tensor([[1.0, bad, 3.0], [1.0, 2.0, 3.0]], dtype=dtype)
    codes, scales = quantize_vectors(x)
    assert codes[0].tolist() == [0, 0, 0]
    wide = widen_vectors(codes, scales)
    assert bool(wide[0].isnan().all())
    assert wide[1].tolist() == widen_vectors(*quantize_vectors(x[1])).tolist()
    assert bool(wide[1].isfinite().all())


def test_nan_with_all_bits_set_stays_nan() -> None:
    x = torch.tensor([0x7FFFFFFF, 0x3F800000], dtype=torch.int32).view(torch.float32)
    codes, scales = quantize_vectors(x[None])
    assert bool(scales.isnan().all())
    assert codes.tolist() == [[0, 0]]


@pytest.mark.parametrize("size", [1e-45, 1e-40, 3e-39, 1e-30, 1e30, 3.3e38])
def test_tiny_and_huge_numbers(size: float) -> None:
    x = torch.tensor([size, -size / 2, size / 4])
    codes, scales = quantize_vectors(x)
    assert (codes.tolist(), float(scales)) == obvious(x.double().tolist())
    error = (widen_vectors(codes, scales) - x).abs().max()
    # Below 127 times the least FP32 number nothing is left but zeros.
    assert float(error) <= max(float(scales) * 0.5001, 127 * 2**-149)


@pytest.mark.parametrize("D", [1, 8, 64, 128, 256])
def test_bytes_of_a_vector(D: int) -> None:
    x = torch.ones(1, D)
    codes, scales = quantize_vectors(x)
    assert INT8_CACHE.vector_bytes(D) == codes.nbytes + scales.nbytes == D + 2
    assert BF16_CACHE.vector_bytes(D) == x.bfloat16().nbytes
    assert FP32_CACHE.vector_bytes(D) == x.nbytes
