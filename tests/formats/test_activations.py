"""Eight-bit inputs of linears against exact fractions and FP64 arithmetic, number by number."""

import math
import struct
from fractions import Fraction

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from lowbit.formats.activations import (
    MOST_COLUMNS,
    activation_group,
    centres,
    dequantize_activations,
    fma,
    grouped_product_ref,
    integer_scales,
    quantize_activations,
    row_bounds,
    squared_norms,
    token_bounds,
    whole_product_ref,
)

DTYPES = [torch.bfloat16, torch.float32]
INVERSE_CODE = Fraction(0x010204 | 0x800000, 1 << 30)  # 1 / 127 in FP32, 0x3c010204


def fp32(number: Fraction) -> Fraction:
    """A number rounded once to 24 bits, halves to even; of the range that FP32 has."""
    if number == 0:
        return number
    exponent = math.frexp(float(abs(number)))[1] - 24
    if abs(number) >= Fraction(2) ** (exponent + 24):  # the float was rounded down
        exponent += 1
    unit = Fraction(2) ** max(exponent, -149)
    return round(number / unit) * unit


def obvious(numbers: list[float]) -> tuple[list[int], Fraction]:
    """Codes and scale of one group by the definition."""
    exact = [Fraction(number) for number in numbers]
    peak = max(*map(abs, exact), Fraction(1, 2**100))
    inverse = fp32(127 / peak)
    return [round(fp32(x * inverse)) for x in exact], odd(fp32(peak * INVERSE_CODE))


def odd(number: Fraction) -> Fraction:
    """An FP32 number with the last bit set."""
    bits = struct.unpack("<I", struct.pack("<f", float(number)))[0] | 1
    return Fraction(struct.unpack("<f", struct.pack("<I", bits))[0])


def centre_of(q: Tensor, s: Tensor, codes: Tensor, scales: Tensor, group: int) -> Tensor:
    """Starts of the sums of a product."""
    rows = row_bounds(squared_norms(codes, scales), s.shape[1])
    return centres(rows, token_bounds(q, s, group))


def inputs(seed: int, shape: tuple[int, ...], spread: float) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    size = torch.randn(*shape[:-1], 1, generator=generator) * spread
    return torch.randn(*shape, generator=generator) * torch.exp2(size)


@given(
    seed=st.integers(0, 2**32),
    K=st.integers(1, 150),
    group=st.sampled_from([32, 64, 128]),
    spread=st.sampled_from([0.0, 3.0, 40.0]),
    dtype=st.sampled_from(DTYPES),
)
def test_codes_and_scales_are_those_of_the_definition(
    seed: int, K: int, group: int, spread: float, dtype: torch.dtype
) -> None:
    x = inputs(seed, (2, K), spread).to(dtype)
    q, s = quantize_activations(x, group)
    assert (q.dtype, q.shape, s.dtype) == (torch.int8, x.shape, torch.float32)
    for row, codes, scales in zip(x.tolist(), q.tolist(), s.tolist(), strict=True):
        expected = [obvious(row[start : start + group]) for start in range(0, K, group)]
        assert codes == [code for group_codes, _ in expected for code in group_codes]
        assert [Fraction(scale) for scale in scales] == [scale for _, scale in expected]


@pytest.mark.parametrize(
    ("numbers", "codes"),
    [
        ([0.0, -0.0], [0, 0]),
        ([2.0**-133, -(2.0**-126)], [0, 0]),  # far below 2^-100 / 127
        ([2.0**-100, -(2.0**-101)], [127, -64]),
        ([127.0, 0.5, 1.5, -2.5, 126.5], [127, 0, 2, -2, 126]),  # halves to even
        ([3e38, -3e38], [127, -127]),
    ],
)
def test_codes_of_extremes(numbers: list[float], codes: list[int]) -> None:
    q, s = quantize_activations(torch.tensor([numbers]), 128)
    assert q.tolist() == [codes]
    assert Fraction(s.item()) == obvious(numbers)[1] > 0


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_numbers_that_are_not_finite_make_their_tokens_nan(bad: float) -> None:
    x = inputs(1, (3, 200), 1.0)
    x[1, 130] = bad
    q, s = quantize_activations(x, 128)
    assert q[1, 128:].tolist() == [0] * 72
    assert s.isnan().tolist() == [[False, False], [False, True], [False, False]]
    y = grouped_product_ref(q, s, torch.zeros(5, 200, dtype=torch.int8), torch.ones(5, 1))
    assert y.isnan().tolist() == [[False] * 5, [True] * 5, [False] * 5]


def test_groups_of_inputs_divide_those_of_weights() -> None:
    sizes = (32, 64, 128, 256, 512, 576)
    assert [activation_group(size, 576) for size in sizes] == [32, 64, 128, 128, 128, 128]


@given(seed=st.integers(0, 2**32), gap=st.integers(-60, 60))
def test_fma_rounds_once(seed: int, gap: int) -> None:
    a, b, c = inputs(seed, (3, 64), 3.0)
    c = c * 2.0**gap
    expected = [
        float(fp32(Fraction(x) * Fraction(y) + Fraction(z)))
        for x, y, z in zip(a.tolist(), b.tolist(), c.tolist(), strict=True)
    ]
    assert fma(a, b, c).tolist() == expected


def test_fma_rounds_once_where_fp64_rounds_to_a_half() -> None:
    a = torch.tensor([1 + 2.0**-23, -1 - 2.0**-23, 3e38, math.nan])
    b = torch.tensor([2.0**-24 - 2.0**-47, 2.0**-24 - 2.0**-47, 3e38, 1.0])
    c = torch.tensor([1 + 2.0**-23, -1 - 2.0**-23, 1.0, 1.0])  # odd, and a half less 2^-70 is added
    assert fma(a, b, c)[:3].tolist() == [1 + 2.0**-23, -1 - 2.0**-23, math.inf]
    assert fma(a, b, c)[3].isnan()


@pytest.mark.parametrize(
    ("K", "group_size"), [(64, 32), (192, 64), (256, 128), (512, 256), (512, 512), (200, 200)]
)
def test_product_adds_the_groups_in_any_order(K: int, group_size: int) -> None:
    generator = torch.Generator().manual_seed(K)
    codes = torch.randint(-128, 128, (3, K), generator=generator, dtype=torch.int8)
    scales = torch.randn(3, K // group_size, generator=generator).bfloat16()  # of both signs
    group = activation_group(group_size, K)
    q, s = quantize_activations(inputs(K, (2, K), 3.0), group)
    y = grouped_product_ref(q, s, codes, scales)
    centre = centre_of(q, s, codes, scales, group)
    for m, n in ((m, n) for m in range(2) for n in range(3)):
        terms = []
        for number, start in enumerate(range(0, K, group)):
            part = slice(start, start + group)
            products = zip(q[m, part].tolist(), codes[n, part].tolist(), strict=True)
            weight_scale = Fraction(scales[n, start // group_size].item())
            t = fp32(sum(x * code for x, code in products) * weight_scale)
            terms.append(t * Fraction(s[m, number].item()))
        begin = Fraction(centre[m, n].item())
        for order in (terms, terms[::-1], sorted(terms)):
            total = begin
            for term in order:
                total = fp32(total + term)
            assert Fraction(y[m, n].item()) == total - begin
        parts = [fp32(begin + term) - begin for term in terms]  # each by itself
        assert sum(parts) == Fraction(y[m, n].item())
    weight = codes.double() * scales.double().repeat_interleave(group_size, 1)
    exact = dequantize_activations(q, s, group).double() @ weight.T
    size = dequantize_activations(q, s, group).double().abs() @ weight.abs().T
    # Half of a multiple, and half of a unit of each term.
    assert ((y - exact).abs() <= -(-K // group) * centre / 6 * 2.0**-22 + size * 2.0**-24).all()


@pytest.mark.parametrize("bits", [2, 3, 4, 8])
@pytest.mark.parametrize(("K", "group_size"), [(192, 64), (512, 128), (512, 512), (200, 200)])
def test_product_of_tokens_with_one_scale(K: int, group_size: int, bits: int) -> None:
    """An integer for each row and token, which is rounded, and scaled twice."""
    generator = torch.Generator().manual_seed(K)
    top = 2 ** (bits - 1)
    codes = torch.randint(-top, top, (4, K), generator=generator).to(torch.int8)
    scales = torch.randn(4, K // group_size, generator=generator).bfloat16()
    scales[0, 0], scales[1] = 0, 0
    x = inputs(K, (2, K), 3.0)
    q, s = quantize_activations(x, K)
    assert s.shape == (2, 1)
    y = whole_product_ref(q, s, codes, scales, bits)
    multiples, units = integer_scales(codes, scales, bits)
    factors = multiples.repeat_interleave(group_size, 1)
    for m, n in ((m, n) for m in range(2) for n in range(4)):
        terms = zip(q[m].tolist(), codes[n].tolist(), factors[n].tolist(), strict=True)
        total = fp32(Fraction(sum(x * code * multiple for x, code, multiple in terms)))
        scaled = fp32(total * Fraction(units[n].item()))
        assert Fraction(y[m, n].item()) == fp32(scaled * Fraction(s[m, 0].item()))
    weight = codes.double() * scales.double().repeat_interleave(group_size, 1)
    x = dequantize_activations(q, s, K).double()
    # Half a unit for each code, and the roundings of a unit, a sum and two products.
    error = x.abs() @ codes.double().abs().T * (units / 2) + x.abs() @ weight.abs().T * 2.0**-21
    assert ((y - x @ weight.T).abs() <= error).all()


@given(
    seed=st.integers(0, 2**32),
    bits=st.sampled_from([2, 3, 4, 8]),
    K=st.sampled_from([64, 1024, MOST_COLUMNS]),
)
def test_sums_with_integer_scales_fit_32_bits(seed: int, bits: int, K: int) -> None:
    """Of any token, while codes lie in the upper bits of a byte."""
    generator = torch.Generator().manual_seed(seed)
    least, most = -(2 ** (bits - 1)), 2 ** (bits - 1)
    codes = torch.randint(least, most, (4, K), generator=generator).to(torch.int8)
    codes[0] = least
    codes[1, 1:] = 0
    scales = torch.randn(4, K // 64, generator=generator) * torch.logspace(-30, 30, 4)[:, None]
    scales[2] = scales[2, 0]
    multiples, units = integer_scales(codes, scales, bits)
    assert (scales.double() / units[:, None] - multiples).abs().max() < 0.51
    sizes = codes.long().abs() * multiples.long().abs().repeat_interleave(64, 1)
    largest = sizes.sum(1) * 127 << 8 - bits
    assert (largest < 2**31).all()
    assert (multiples.abs().amax(1) >= 1).all()
    assert (largest[[0, 2, 3]] > (2**30 if K < MOST_COLUMNS else 2**28)).all()  # nor much too small


def test_sums_fit_32_bits_for_any_ratio_of_scales() -> None:
    """The largest scale is that of zeros, so the bound leaves the other its rounding alone."""
    codes = torch.full((2000, 128), -128, dtype=torch.int8)
    codes[:, :64] = 0
    ratios = torch.arange(1, 2001) / 2000
    multiples, _ = integer_scales(codes, torch.stack((torch.ones(2000), ratios), 1), 8)
    assert (multiples[:, 1].long() * (64 * 128 * 127) < 2**31).all()


@pytest.mark.parametrize(
    ("bits", "K", "most"), [(4, 4096, 0.004), (4, 1024, 0.001), (8, 4096, 0.004)]
)
def test_integer_scales_are_near(bits: int, K: int, most: float) -> None:
    """Of weights that are rounded to nearest."""
    weight = torch.randn(64, K // 128, 128, generator=torch.Generator().manual_seed(bits))
    scales = weight.abs().amax(-1) / (2 ** (bits - 1) - 1)
    codes = (weight / scales[..., None]).round().to(torch.int8).view(64, K)
    multiples, units = integer_scales(codes, scales.bfloat16(), bits)
    found = multiples * units[:, None]
    error = (found / scales.bfloat16() - 1).square().mean().sqrt()
    assert 0 < error < most
    largest = scales.bfloat16().float().argmax(1)[:, None]
    assert torch.allclose(found.gather(1, largest), scales.bfloat16().float().gather(1, largest))


def test_a_weight_of_too_many_columns_has_no_integer_scales() -> None:
    codes = torch.zeros(1, 2 * MOST_COLUMNS, dtype=torch.int8)
    with pytest.raises(ValueError, match="131072 columns, at most 65536"):
        integer_scales(codes, torch.ones(1, 1), 4)


@given(seed=st.integers(0, 2**32), K=st.sampled_from([128, 1024]), bits=st.sampled_from([2, 4, 8]))
def test_no_sum_of_terms_leaves_its_power_of_two(seed: int, K: int, bits: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    least, most = -(2 ** (bits - 1)), 2 ** (bits - 1)
    codes = torch.randint(least, most, (4, K), generator=generator).to(torch.int8)
    codes[0] = least
    scales = torch.randn(4, K // 128, generator=generator).abs()
    q, s = quantize_activations(inputs(seed, (3, K), 2.0), 128)
    q[0] = -127  # all of one sign, as are the codes of the first row
    s[0] = s[0, 0]
    size = (
        dequantize_activations(q, s, 128).double().abs()
        @ (codes.double().abs() * scales.double().repeat_interleave(128, 1)).T
    )
    centre = centre_of(q, s, codes, scales, 128).double()
    assert (size < centre / 3).all()
    below = 2 * centre / 3
    assert (centre - size > below).all()
    assert (centre + size < 2 * below).all()


@pytest.mark.parametrize("token", [2.0**-107, 1.0, 3e36, math.nan])
@pytest.mark.parametrize("square", [0.0, 1e-60, 1.0, 1e60, math.inf])
def test_centres_of_extremes_are_numbers(square: float, token: float) -> None:
    q = torch.full((1, 128), 127, dtype=torch.int8)
    rows = row_bounds(torch.tensor([square], dtype=torch.float64), 1)
    centre = centres(rows, token_bounds(q, torch.tensor([[token]]), 128)).item()
    assert 0 <= centre < math.inf
    assert math.frexp(centre)[0] == (0 if math.isnan(token) else 0.75)


@pytest.mark.gpu
def test_a_gpu_gives_the_same_bits() -> None:
    x = inputs(5, (64, 200), 40.0)
    x[0], x[1, 3], x[2, 190] = 0, math.nan, math.inf
    generator = torch.Generator().manual_seed(6)
    codes = torch.randint(-128, 128, (48, 200), generator=generator, dtype=torch.int8)
    scales = torch.randn(48, 1, generator=generator)
    q, s = quantize_activations(x, 128)
    y = grouped_product_ref(q, s, codes, scales)
    there = quantize_activations(x.cuda(), 128)
    product = grouped_product_ref(*there, codes.cuda(), scales.cuda())
    for found, expected in zip((*there, product), (q, s, y), strict=True):
        assert torch.equal(found.cpu().nan_to_num(), expected.nan_to_num())
        assert torch.equal(found.cpu().isnan(), expected.isnan())
