"""Round-to-nearest: exact error bounds, a slow oracle in FP64, and the same codes everywhere."""

import hashlib
import math

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from lowbit.formats.layout import rtn
from lowbit.formats.layout.packing import dequantize
from lowbit.formats.layout.rtn import (
    RATIOS,
    TINY,
    ScaleRule,
    nearest_codes,
    pairwise_sum,
    quantize,
)
from lowbit.formats.layout.scheme import GROUP_SIZES, Scheme
from tests.lanes import in_commands

pytestmark = pytest.mark.usefixtures("scales_anew")

RULES: tuple[ScaleRule, ...] = ("signed", "positive", "absmax")
BF16_MAX = torch.finfo(torch.bfloat16).max


def gaussian(N: int, K: int, seed: int = 0) -> Tensor:
    return torch.randn(N, K, generator=torch.Generator().manual_seed(seed))


def student_t5(N: int, K: int) -> Tensor:
    generator = torch.Generator().manual_seed(5)
    chi_squared = torch.randn(5, N, K, generator=generator).square_().sum(0)
    return gaussian(N, K) / (chi_squared / 5).sqrt()


def nasty(N: int, K: int) -> Tensor:
    """BF16 rows over the whole exponent range, with outliers, ties, zeros and constants."""
    generator = torch.Generator().manual_seed(7)
    w = gaussian(N, K, seed=8) * 2.0 ** torch.randint(-130, 120, (N, 1), generator=generator)
    w[0::9] = 0
    w[1::9] = 0.0123
    w[2::9] = -w[2::9].abs()
    w[3::9] = (w[3::9] * 0).add_(torch.arange(K) % 16 - 7.5)  # halfway between codes
    w[4::9, ::100] *= 1000
    w[5::9] = BF16_MAX
    w[6::9, ::2] = -BF16_MAX
    w[7::9] *= 2.0**-110
    return w.bfloat16()


def relative_error(w: Tensor, scheme: Scheme, rule: ScaleRule) -> float:
    codes, scale = quantize(w, scheme, rule)
    error = dequantize(codes, scale).double() - w.double()
    return float(error.norm() / w.double().norm())


def group_errors(w: Tensor, codes: Tensor, scale: Tensor) -> Tensor:
    """Squared error of each group in FP64: [N, K/G]."""
    error = dequantize(codes, scale).double() - w.double()
    return error.view(*scale.shape, -1).square().sum(-1)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("bits", range(2, 9))
def test_nearest_code_to_the_stored_scale(bits: int, rule: ScaleRule, dtype: torch.dtype) -> None:
    scheme = Scheme(bits, 64)
    w = gaussian(16, 192, seed=bits).to(dtype)
    codes, scale = quantize(w, scheme, rule)
    assert codes.dtype == torch.int8
    assert codes.shape == (16, 192)
    assert scale.dtype == torch.bfloat16
    assert scale.shape == (16, 3)
    assert codes.min() >= scheme.code_min
    assert codes.max() <= scheme.code_max
    s = scale.double().repeat_interleave(64, 1)
    q = codes.double()
    clipped = (w.double() / s > scheme.code_max + 0.5) | (w.double() / s < scheme.code_min - 0.5)
    slack = 1 + 2.0**-22  # of the FP32 division
    assert ((w.double() - q * s).abs()[~clipped] <= (s.abs() / 2)[~clipped] * slack).all()
    at_the_end = (q == scheme.code_min) | (q == scheme.code_max)
    assert at_the_end[clipped].all()
    assert rule == "signed" or (scale > 0).all()


@pytest.mark.parametrize(
    ("rule", "normal", "heavy"),
    [("signed", 0.0968, 0.140), ("positive", 0.1011, 0.147), ("absmax", 0.1109, 0.162)],
)
def test_measured_error_at_int4_g128(rule: ScaleRule, normal: float, heavy: float) -> None:
    assert relative_error(gaussian(64, 2048), Scheme(4), rule) == pytest.approx(normal, rel=0.005)
    assert relative_error(student_t5(64, 2048), Scheme(4), rule) == pytest.approx(heavy, rel=0.02)


@pytest.mark.parametrize("rule", RULES)
def test_measured_error_at_int8(rule: ScaleRule) -> None:
    assert relative_error(gaussian(64, 2048), Scheme(8), rule) == pytest.approx(0.0065, rel=0.02)


def round_to_bf16(x: np.ndarray) -> np.ndarray:
    """FP32 to the nearest BF16, ties to even, by its bits."""
    bits = x.astype(np.float32).view(np.uint32)
    rounded = bits + np.uint32(0x7FFF) + ((bits >> np.uint32(16)) & np.uint32(1))
    return (rounded & np.uint32(0xFFFF0000)).view(np.float32)


def slow_candidates(w: np.ndarray, bits: int, rule: ScaleRule) -> dict[float, np.ndarray]:
    """Every candidate scale of one group and the codes it gives."""
    half = 2 ** (bits - 1)
    extreme = w.min() if -w.min() >= w.max() else w.max()
    if rule == "signed":
        extreme = np.float32(-extreme)
    found = {}
    for ratio in RATIOS:
        factor = np.float32(1 / (half * ratio))
        s = round_to_bf16(np.array([abs(extreme) if rule == "positive" else extreme]) * factor)[0]
        found[float(s)] = np.clip(np.rint(w / s), -half, half - 1)
    return found


@pytest.mark.parametrize("rule", ["signed", "positive"])
@pytest.mark.parametrize("bits", [2, 3, 4, 6])
def test_equals_a_slow_search_in_fp64(bits: int, rule: ScaleRule) -> None:
    w = student_t5(12, 128)
    codes, scale = quantize(w, Scheme(bits, 64), rule)
    for group, q, s in zip(
        w.reshape(-1, 64).numpy(),
        codes.reshape(-1, 64).numpy(),
        scale.flatten().tolist(),
        strict=True,
    ):
        found = slow_candidates(group, bits, rule)
        errors = {
            candidate: np.square(group.astype(np.float64) - candidate * codes_).sum()
            for candidate, codes_ in found.items()
        }
        assert errors[s] <= min(errors.values()) * (1 + 1e-6)
        assert np.array_equal(found[s], q)


@given(
    bits=st.integers(2, 7),
    values=st.lists(st.floats(-1000, 1000, width=32), min_size=32, max_size=32),
)
def test_search_never_loses_to_the_plain_full_range(bits: int, values: list[float]) -> None:
    w = torch.tensor([values]).bfloat16().float()
    extreme = w.min() if -w.min() >= w.max() else w.max()
    if extreme.abs() < TINY:
        return
    half = 1 << (bits - 1)
    plain = (-extreme / half).bfloat16().view(1, 1)
    plain_codes = (w / plain.float()).round().clamp(-half, half - 1).to(torch.int8)
    best = group_errors(w, *quantize(w, Scheme(bits, 32)))
    # Rounding in FP32 may rank candidates that differ in the seventh digit either way.
    assert best <= group_errors(w, plain_codes, plain) * (1 + 1e-5) + 1e-9 * extreme.double() ** 2


@pytest.mark.parametrize("bits", [2, 3, 4, 8])
def test_signed_reproduces_a_lone_outlier(bits: int) -> None:
    w = torch.zeros(2, 64)
    w[0, 17], w[1, 3] = 3.0, -3.0
    codes, scale = quantize(w, Scheme(bits, 64))
    assert torch.equal(dequantize(codes, scale), w)
    assert scale[0] < 0 < scale[1]


@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("bits", [3, 4, 8])
@pytest.mark.parametrize("value", [0.0, -0.0, TINY / 2, -TINY / 2, 2.0**-149])
def test_groups_without_weights_become_zeros(bits: int, rule: ScaleRule, value: float) -> None:
    codes, scale = quantize(torch.full((3, 64), value), Scheme(bits, 32), rule)
    assert not codes.any()
    assert torch.isfinite(scale).all()
    assert scale.all()


@pytest.mark.parametrize("value", [1.0, -1.0, 0.3, TINY, -TINY, 1e-25, 1e18, -1e37])
def test_constant_groups_are_within_a_bf16_rounding(value: float) -> None:
    w = torch.full((1, 64), value)
    weight = dequantize(*quantize(w, Scheme(4, 64)))
    assert torch.allclose(weight, w, rtol=2.0**-8, atol=0)


@pytest.mark.parametrize("bits", [2, 3, 4, 5, 8])
def test_largest_bf16_values_stay_finite(bits: int) -> None:
    w = torch.full((3, 64), BF16_MAX, dtype=torch.bfloat16)
    w[1] *= -1
    w[2, ::2] *= -1
    codes, scale = quantize(w, Scheme(bits, 64))
    weight = dequantize(codes, scale)
    assert torch.isfinite(weight).all()
    assert torch.equal(weight[:2], w[:2].float())


def test_extremes_of_both_signs_give_a_positive_scale() -> None:
    w = torch.zeros(2, 32)
    w[:, 3], w[0, 5], w[1, 2] = 4, -4, -4
    for bits in (4, 8):
        codes, scale = quantize(w, Scheme(bits, 32))
        assert (scale > 0).all()
        assert (codes[:, 3] == 2 ** (bits - 1) - 1).all()


def made_by_integers() -> Tensor:
    """Bell-shaped weights in FP32 that no random generator has a part in: [32, 256]."""
    k = torch.arange(32 * 256 * 4)
    uniform = ((k * k * 40503 + k * 2654435761) % 65521).view(-1, 4) - 32760
    w = uniform.sum(1).view(32, 256).float() / 65536
    w[3] *= 2.0**-95
    w[4] *= 2.0**-105
    w[5] *= 2.0**90
    w[6, 128] = -w[6].abs().max() * 9
    return w


# A change here means that rerunning a conversion gives other bytes than it used to.
GOLDEN = {
    (4, "signed"): "bc224b503557353a",
    (4, "positive"): "ce1f5809cbd0645f",
    (4, "absmax"): "5a7e4e2f3205f790",
    (8, "signed"): "fdf1f0c02fcfb6a8",
    (8, "absmax"): "0fc35ca719bea480",
    (3, "signed"): "7ba86259c4ac804b",
}


@pytest.mark.parametrize(("bits", "rule"), GOLDEN)
def test_golden_codes(bits: int, rule: ScaleRule) -> None:
    codes, scale = quantize(made_by_integers(), Scheme(bits, 128), rule)
    content = codes.numpy().tobytes() + scale.view(torch.int16).numpy().tobytes()
    assert hashlib.sha256(content).hexdigest()[:16] == GOLDEN[bits, rule]


@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("bits", [3, 4, 8])
def test_nasty_values_give_legal_codes_and_scales(bits: int, rule: ScaleRule) -> None:
    scheme = Scheme(bits, 128)
    codes, scale = quantize(nasty(90, 256), scheme, rule)
    assert codes.min() >= scheme.code_min
    assert codes.max() <= scheme.code_max
    assert torch.isfinite(scale).all()
    assert scale.all()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
def test_leaves_its_input_alone(dtype: torch.dtype) -> None:
    w = gaussian(4, 128).to(dtype)
    before = w.clone()
    for bits in (4, 8):
        quantize(w, Scheme(bits, 32))
        assert torch.equal(w, before)


@pytest.mark.parametrize("bits", [4, 8])
def test_dtype_of_the_input_does_not_matter(bits: int) -> None:
    w = gaussian(8, 128).bfloat16()
    codes, scale = quantize(w, Scheme(bits, 32))
    wide_codes, wide_scale = quantize(w.float(), Scheme(bits, 32))
    assert torch.equal(codes, wide_codes)
    assert torch.equal(scale, wide_scale)


@in_commands("signed-3", "positive-4")
@pytest.mark.parametrize("bits", [3, 4, 8])
@pytest.mark.parametrize("rule", RULES)
def test_blocks_threads_and_neighbours_change_nothing(
    bits: int, rule: ScaleRule, monkeypatch: pytest.MonkeyPatch
) -> None:
    w, scheme = nasty(15, 256), Scheme(bits, 128)
    codes, scale = quantize(w, scheme, rule)
    torch.set_num_threads(3)  # conftest.py sets one, and restores
    threaded_codes, threaded_scale = quantize(w, scheme, rule)
    assert torch.equal(codes, threaded_codes)
    assert torch.equal(scale, threaded_scale)
    rows = [quantize(row[None], scheme, rule) for row in w]
    assert torch.equal(codes, torch.cat([row[0] for row in rows]))
    assert torch.equal(scale, torch.cat([row[1] for row in rows]))
    for elements in (1, 128 * 7, 128 * 30):
        monkeypatch.setattr(rtn, "CACHE_ELEMENTS", elements)
        block_codes, block_scale = quantize(w, scheme, rule)
        assert torch.equal(codes, block_codes)
        assert torch.equal(scale, block_scale)


@pytest.mark.parametrize("K", [1, 2, 33, 127, 1001])
@pytest.mark.parametrize("bits", [4, 8])
def test_whole_rows_of_any_length(bits: int, K: int) -> None:
    w = gaussian(5, K)
    codes, scale = quantize(w, Scheme(bits, None))
    assert scale.shape == (5, 1)
    error = group_errors(w, codes, scale).sum().sqrt() / w.double().norm()
    assert error < {4: 0.2, 8: 0.02}[bits]


@pytest.mark.parametrize("group_size", GROUP_SIZES)
def test_groups_are_independent_rows(group_size: int) -> None:
    w = gaussian(3, 1024)
    codes, scale = quantize(w, Scheme(4, group_size))
    row_codes, row_scale = quantize(w.view(-1, group_size), Scheme(4, None))
    assert torch.equal(codes, row_codes.view(3, 1024))
    assert torch.equal(scale, row_scale.view(3, -1))


def test_reads_strided_rows() -> None:
    w = gaussian(64, 64)
    codes, scale = quantize(w.T, Scheme(4, 32))
    packed_codes, packed_scale = quantize(w.T.contiguous(), Scheme(4, 32))
    assert torch.equal(codes, packed_codes)
    assert torch.equal(scale, packed_scale)


@pytest.mark.parametrize("n", [1, 2, 3, 5, 7, 32, 100, 127, 1024, 1001])
def test_pairwise_sum(n: int) -> None:
    x = gaussian(4, n, seed=n)
    exact = x.double().sum(-1, keepdim=True)
    bound = (math.ceil(math.log2(n)) + 2) * 2.0**-24 * x.double().abs().sum(-1, keepdim=True)
    result = pairwise_sum(x.clone())
    assert result.shape == (4, 1)
    assert ((result.double() - exact).abs() <= bound).all()


def test_pairwise_sum_order_is_fixed() -> None:
    def add(values: list[float]) -> float:
        while len(values) > 1:
            half = len(values) // 2
            folded = [
                float(np.float32(a) + np.float32(b))
                for a, b in zip(values[:half], values[half : 2 * half], strict=True)
            ]
            if len(values) % 2:
                folded[0] = float(np.float32(folded[0]) + np.float32(values[-1]))
            values = folded
        return values[0]

    for n in (1, 6, 7, 31, 128, 129):
        x = gaussian(3, n, seed=n) * 1e3
        assert pairwise_sum(x.clone()).flatten().tolist() == [add(row) for row in x.tolist()]


@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("group_size", [32, None], ids=["g32", "row"])
def test_nearest_codes_are_those_of_the_same_scales(
    rule: ScaleRule, group_size: int | None
) -> None:
    w, scheme = gaussian(9, 96), Scheme(4, group_size)
    codes, scale = quantize(w, scheme, rule)
    assert torch.equal(nearest_codes(w, scale, scheme), codes)


@pytest.mark.gpu
@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("bits", [3, 4, 8])
@pytest.mark.parametrize("group_size", [32, 128, None], ids=["g32", "g128", "row"])
def test_cpu_and_gpu_agree_bit_for_bit(bits: int, rule: ScaleRule, group_size: int | None) -> None:
    scheme = Scheme(bits, group_size)
    for w in (student_t5(512, 2048).bfloat16(), gaussian(256, 2048), nasty(450, 1024)):
        codes, scale = quantize(w, scheme, rule)
        gpu_codes, gpu_scale = quantize(w.cuda(), scheme, rule)
        assert torch.equal(codes, gpu_codes.cpu())
        assert torch.equal(scale, gpu_scale.cpu())
