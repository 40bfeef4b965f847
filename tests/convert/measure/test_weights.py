"""Weight metrics against FP64 numpy on whole tensors."""

import math

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from lowbit.convert.measure.weights import WeightQuality, WeightSums
from lowbit.formats.layout.packing import dequantize
from lowbit.formats.layout.rtn import ScaleRule, quantize
from lowbit.formats.layout.scheme import Scheme


def packed(w: Tensor, scheme: Scheme, rule: ScaleRule) -> tuple[Tensor, Tensor]:
    codes, scale = quantize(w, scheme, rule)
    return dequantize(codes, scale), scale


def measure(w: Tensor, scheme: Scheme, rule: ScaleRule, rows: int) -> WeightQuality:
    """As the converter does: block by block, each with sums of its own."""
    p, scale = packed(w, scheme, rule)
    total = WeightSums()
    for start in range(0, len(w), rows):
        block = slice(start, start + rows)
        sums = WeightSums()
        sums.add(w[block], p[block], scale[block], scheme)
        total.merge(sums)
    return total.finish("x", scheme)


def weights(N: int, K: int, seed: int, dtype: torch.dtype = torch.float32) -> Tensor:
    """Heavy tails, rows of very different size."""
    generator = torch.Generator().manual_seed(seed)
    w = torch.randn(N, K, generator=generator) ** 3
    return (w * torch.rand(N, 1, generator=generator)).to(dtype)


@given(
    bits=st.integers(2, 8),
    group=st.sampled_from([32, 64, None]),
    rule=st.sampled_from(["signed", "positive", "absmax"]),
    dtype=st.sampled_from([torch.float32, torch.bfloat16]),
    seed=st.integers(0, 1000),
)
def test_against_fp64(
    bits: int, group: int | None, rule: ScaleRule, dtype: torch.dtype, seed: int
) -> None:
    w, scheme = weights(13, 192, seed, dtype), Scheme(bits, group)
    found = measure(w, scheme, rule, 5)
    p, scale = packed(w, scheme, rule)
    a, b = w.double().numpy(), p.double().numpy()
    relative = np.linalg.norm(b - a) / np.linalg.norm(a)
    cosine = (a * b).sum() / np.linalg.norm(a) / np.linalg.norm(b)
    assert found.relative_l2 == pytest.approx(relative, rel=1e-5)
    assert found.sqnr_db == pytest.approx(-20 * math.log10(relative), abs=1e-4)
    assert found.cosine == pytest.approx(cosine, abs=1e-6)
    # In units of the scale the codes reach from -2^(b-1) - 1/2 to 2^(b-1) - 1/2.
    steps = a.reshape(13, scale.shape[1], -1) / scale.double().numpy()[:, :, None]
    beyond = (steps < -(2 ** (bits - 1)) - 0.5) | (steps > 2 ** (bits - 1) - 0.5)
    assert found.clipped_share == pytest.approx(beyond.mean(), abs=1.5 / beyond.size)
    assert (found.name, found.bits, found.group_size, found.weights) == ("x", bits, group, 13 * 192)


def test_clipping_is_seen_by_brute_force() -> None:
    w = torch.tensor([[8.0, 7.51, 7.49, -8.51, -8.49, 0.5, -3.2, 100.0]])
    scale = torch.tensor([[1.0]])
    p = w.round().clamp(-8, 7)
    sums = WeightSums()
    sums.add(w, p, scale, Scheme(4))
    assert sums.clipped == 4  # 8.0, 7.51, -8.51 and 100
    negative = WeightSums()
    negative.add(-w, p, -scale, Scheme(4))
    assert negative.clipped == 4
    moved = WeightSums()  # codes chosen to make up for others clip nothing
    inside = torch.tensor([[3.0, -2.0]])
    moved.add(inside, torch.tensor([[5.0, -4.0]]), scale, Scheme(4))
    assert moved.clipped == 0


def test_rounding_half_a_step_is_no_clipping() -> None:
    """The weights halfway between two codes and their neighbours, for every 8-bit mantissa."""
    scale = (torch.arange(128, 256) / 128).to(torch.bfloat16)[:, None]
    halves = torch.arange(-120, 121, dtype=torch.float64) + 0.5
    middle = (halves * scale.double()).to(torch.float32)
    w = torch.cat([middle, middle.nextafter(middle * 2), middle.nextafter(middle * 0)], dim=1)
    q = (w / scale.float()).round()
    sums = WeightSums()
    sums.add(w, q * scale.float(), scale, Scheme(8))
    assert sums.clipped == 0


def test_how_rows_are_blocked_changes_nothing_visible() -> None:
    w, scheme = weights(64, 256, 3), Scheme(4, 64)
    whole = measure(w, scheme, "signed", 64)
    for rows in (1, 7, 32):
        parts = measure(w, scheme, "signed", rows)
        assert parts.clipped_share == whole.clipped_share
        assert parts.relative_l2 == pytest.approx(whole.relative_l2, rel=1e-7)
        assert parts.cosine == pytest.approx(whole.cosine, abs=1e-7)


def test_zeros_are_perfect() -> None:
    found = measure(torch.zeros(4, 64), Scheme(4, 32), "signed", 4)
    assert found == WeightQuality("x", 4, 32, 256, 1.0, 0.0, math.inf, 0.0)


def test_exact_weights_are_perfect() -> None:
    w = torch.arange(-8, 8, dtype=torch.float32).repeat(4, 2)
    found = measure(w, Scheme(4, 32), "signed", 4)
    assert (found.relative_l2, found.sqnr_db, found.clipped_share) == (0.0, math.inf, 0.0)
    assert found.cosine == 1.0


def test_nothing_measured() -> None:
    assert WeightSums().finish("x", Scheme(8)).clipped_share == 0.0
