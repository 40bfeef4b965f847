"""GEMV against float64 on the exact stored codes; the order of the weight is `test_tiles`' matter.

Memory for results arrives full of NaN, so an element that no program stores is seen.
"""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn.functional import silu

from lowbit.runtime.kernels.launch import choose
from lowbit.runtime.kernels.launch.linear import GemvLaunch
from lowbit.runtime.kernels.linear.gemv import gemv, gemv_and_rows, gemv_ref
from lowbit.runtime.kernels.linear.norm import SQUARES
from lowbit.runtime.kernels.linear.tiles import TiledLinear, dequantized

pytestmark = pytest.mark.gpu

MakeTiled = Callable[..., TiledLinear]
Randn = Callable[..., Tensor]

EPS = 1e-6
# Products are exact and sums FP32, so this is their rounding: relative to the norm of the result,
# for one element 20 times as much of their mean size. Measured 1e-7, 2.5e-6 with outliers, since
# one token's x is a fixed-point number within each 256 elements.
SUMS = 3e-6
# silu(gate) * up carries the errors of both, and an exponential of 2^-21.
SWIGLU = 2e-5
HALF_ULP = 2.0**-8  # of bfloat16, relative
REF_TILES = 512  # of a large weight in float64 at a time

# Rows and columns that real models have, as (N, K).
NORMED = [(4096, 1024), (4096, 2048), (6144, 2560), (6144, 4096)]  # Qwen3 0.6B to 8B: q, k, v
NORMED += [(5120, 1024), (5120, 2048), (10240, 2560), (10240, 4096)]  # Qwen3.5 0.8B to 9B
NORMED += [(8192, 1024), (8192, 2048), (12288, 2560), (12288, 4096)]  # their linear attention
GATE_UP = [(6144, 1024), (12288, 2048), (19456, 2560), (24576, 4096)]
GATE_UP += [(7168, 1024), (18432, 2560)]
ADDED = [(1024, 2048), (2048, 2048), (2560, 4096), (4096, 4096)]  # of attention
ADDED += [(1024, 3072), (2048, 6144), (2560, 9728), (4096, 12288)]  # down
ADDED += [(1024, 3584), (2560, 9216)]
HEADS = [(vocabulary, K) for vocabulary in (151936, 248320) for K in (1024, 2048, 2560, 4096)]
DEPTHS = (1024, 2048, 2560, 3072, 3584, 4096, 6144, 9216, 9728, 12288)

# N, K, G, tokens, dtype of the scales
BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32
ODD = [
    (19, 96, 32, 1, BF16),
    (7, 96, 96, 3, FP32),
    (40, 192, 96, 1, BF16),
    (33, 768, 768, 1, FP16),
    (50, 960, 320, 2, BF16),
    (1001, 2560, 512, 1, FP32),
    (3, 2560, 64, 1, BF16),
    (130, 4096, 256, 8, FP16),
    (300, 9728, 32, 1, FP32),
    (2050, 17408, 128, 1, BF16),
    (24, 25600, 25600, 1, FP16),
    (16, 25600, 128, 5, BF16),
]


def linears(*shapes: list[tuple[int, int]]) -> pytest.MarkDecorator:
    rows = [shape for part in shapes for shape in part]
    return pytest.mark.parametrize(("N", "K"), rows, ids=[f"N{N}-K{K}" for N, K in rows])


def run(x: Tensor, w: TiledLinear, **fused: Any) -> Tensor:
    """`gemv` into NaN, which `torch.empty` is where torch is asked to be deterministic."""
    torch.use_deterministic_algorithms(True)
    try:
        return gemv(x, w, **fused)
    finally:
        torch.use_deterministic_algorithms(False)


def reference(x: Tensor, w: TiledLinear, **fused: Any) -> Tensor:
    """`gemv_ref`, a part of a large weight at a time."""
    if w.paired:
        gate, up = gemv_ref(x, w, **fused).chunk(2, -1)
        return silu(gate) * up
    added = fused.pop("added", None)
    parts = []
    for first in range(0, w.tiles, REF_TILES):
        tiles = slice(first, first + REF_TILES)
        N = min(16 * REF_TILES, w.N - 16 * first)
        parts.append(
            gemv_ref(x, replace(w, words=w.words[tiles], scales=w.scales[tiles], N=N), **fused)
        )
    y = torch.cat(parts, -1)
    return y if added is None else y + added.double()


def rounded(x: Tensor, norm: Tensor) -> tuple[Tensor, Tensor]:
    """What the fused norm multiplies: x * gain in bfloat16, and the factor of the result."""
    factor = torch.rsqrt(x.double().square().mean(-1, keepdim=True) + EPS)
    return (x.float() * norm.float()).bfloat16(), factor


def normed_reference(x: Tensor, norm: Tensor, w: TiledLinear) -> Tensor:
    """With the one rounding of the fused norm; all else is exact."""
    scaled, factor = rounded(x, norm)
    if not w.paired:
        return factor * reference(scaled, w)
    gate, up = (factor * gemv_ref(scaled, w)).chunk(2, -1)
    return silu(gate) * up


def check(y: Tensor, ref: Tensor, bound: float = SUMS) -> None:
    """Every element is there and close, and all of them together are closer."""
    assert y.shape == ref.shape
    assert bool(y.isfinite().all())
    error = y.double() - ref
    assert float(error.norm() / ref.norm()) < bound
    assert float(error.abs().max()) < 20 * bound * float(ref.square().mean().sqrt())


@pytest.mark.parametrize("bits", [2, 3, 4, 8])
@linears(NORMED)
def test_normed(make_tiled: MakeTiled, randn: Randn, bits: int, N: int, K: int) -> None:
    w, x, norm = make_tiled(bits, N, K, 128), randn(1, K), 1 + 0.3 * randn(K)
    y = run(x, w, norm=norm, eps=EPS, dtype=FP32)
    check(y, normed_reference(x, norm, w))


@pytest.mark.parametrize("bits", [2, 3, 4, 8])
@pytest.mark.parametrize(("K", "heads"), [(4096, 32), (2048, 16), (6144, 48), (128, 8)])
def test_normed_heads(
    make_tiled: MakeTiled, randn: Randn, device: str, bits: int, K: int, heads: int
) -> None:
    """Heads of sizes far apart, as large as each other once normed; some of zeros."""
    w, residual = make_tiled(bits, 1000, K, 128), randn(1, 1000)
    sizes = torch.logspace(-2, 2, heads, device=device)[torch.randperm(heads, device=device)]
    x = (randn(heads, K // heads).float() * sizes[:, None]).bfloat16()
    squares = x.float().square().view(1, heads, SQUARES, -1).sum(-1)
    zeros = max(1, 256 * heads // K) if K > 256 else 1  # a whole block where there are several
    x[:zeros], squares[:, :zeros] = 0.0, 0.0
    ref = reference(x.view(1, K), w, squares=squares, eps=EPS, added=residual)
    check(run(x.view(1, K), w, squares=squares, eps=EPS, added=residual, dtype=FP32), ref)


@pytest.mark.parametrize("bits", [2, 3, 4, 8])
def test_heads_of_zeros(make_tiled: MakeTiled, device: str, bits: int) -> None:
    x = torch.zeros(1, 4096, dtype=BF16, device=device)
    squares = torch.zeros(1, 32, SQUARES, device=device)
    assert not run(x, make_tiled(bits, 64, 4096, 128), squares=squares, eps=EPS, dtype=FP32).any()


def test_squares_refused(make_tiled: MakeTiled, randn: Randn, device: str) -> None:
    """Heads are not normed twice."""
    squares = torch.ones(1, 16, SQUARES, device=device)
    with pytest.raises(ValueError, match="squares of heads and the gain"):
        gemv(randn(1, 2048), make_tiled(4, 32, 2048, 128), norm=randn(2048), squares=squares)


@pytest.mark.parametrize("bits", [2, 3, 4, 8])
@linears(GATE_UP)
def test_swiglu(make_tiled: MakeTiled, randn: Randn, bits: int, N: int, K: int) -> None:
    w, x, norm = make_tiled(bits, N, K, 128, paired=True), randn(1, K), 1 + 0.3 * randn(K)
    y = run(x, w, norm=norm, eps=EPS, dtype=FP32)
    check(y, normed_reference(x, norm, w), SWIGLU)


@pytest.mark.parametrize("bits", [2, 3, 4, 8])
@linears(ADDED)
def test_added(make_tiled: MakeTiled, randn: Randn, bits: int, N: int, K: int) -> None:
    w, x, residual = make_tiled(bits, N, K, 128), randn(1, K), randn(1, N)
    y = run(x, w, added=residual, dtype=FP32)
    check(y, reference(x, w, added=residual))


@linears(HEADS)
def test_heads(make_tiled: MakeTiled, randn: Randn, N: int, K: int) -> None:
    w, x, norm = make_tiled(8, N, K, 128), randn(1, K), 1 + 0.3 * randn(K)
    check(run(x, w, norm=norm, eps=EPS, dtype=FP32), normed_reference(x, norm, w))


@pytest.mark.parametrize("bits", [2, 3, 4, 8])
@pytest.mark.parametrize(
    ("N", "K", "n"), [(8192, 1024, 32), (12288, 2560, 64), (12288, 4096, 64), (48, 96, 5)]
)
def test_rows_beside(
    make_tiled: MakeTiled, randn: Randn, bits: int, N: int, K: int, n: int
) -> None:
    """A packed weight and a few dense rows of one x."""
    w, rows, x, norm = make_tiled(bits, N, K, 32), randn(n, K), randn(1, K), 1 + 0.3 * randn(K)
    y, small = gemv_and_rows(x, w, rows, norm=norm.float(), eps=EPS)
    scaled, factor = rounded(x, norm)
    check(y, normed_reference(x, norm, w), HALF_ULP)
    check(small, factor * (scaled.double() @ rows.double().T), HALF_ULP)


@pytest.mark.parametrize(
    ("bits", "K"),
    [(4, K) for K in DEPTHS] + [(bits, K) for bits in (2, 3, 8) for K in (1024, 2560, 4096, 12288)],
)
def test_eight_tokens(make_tiled: MakeTiled, randn: Randn, bits: int, K: int) -> None:
    w, x, residual = make_tiled(bits, 272, K, 128), randn(8, K), randn(8, 272)
    check(run(x, w, added=residual, dtype=FP32), reference(x, w, added=residual))


@pytest.mark.parametrize(
    ("bits", "B"), [(4, B) for B in (2, 3, 4, 7, 9, 16, 32, 64, 100)] + [(8, 3), (8, 16)]
)
def test_several_tokens(make_tiled: MakeTiled, randn: Randn, bits: int, B: int) -> None:
    """Each has its own residual, or all the same bias; a broken one spoils no other."""
    w, x = make_tiled(bits, 2560, 2560, 128), randn(B, 2560)
    for added in (randn(B, 2560), randn(1, 2560)):
        check(run(x, w, added=added, dtype=FP32), reference(x, w, added=added))
    clean = run(x, w, added=added, dtype=FP32)
    x[B // 2] = float("nan")
    y = run(x, w, added=added, dtype=FP32)
    assert bool(y[B // 2].isnan().all())
    others = torch.arange(B, device=x.device) != B // 2
    assert torch.equal(y[others], clean[others])


@pytest.mark.parametrize("bits", [2, 3, 4, 8])
@pytest.mark.parametrize(
    ("N", "K", "G", "B", "dtype"), ODD, ids=[f"N{N}-K{K}-G{G}-B{B}" for N, K, G, B, _ in ODD]
)
def test_odd_shapes(
    make_tiled: MakeTiled,
    randn: Randn,
    bits: int,
    N: int,
    K: int,
    G: int,
    B: int,
    dtype: torch.dtype,
) -> None:
    w, x = make_tiled(bits, N, K, G, dtype=dtype), randn(B, K)
    check(run(x, w, dtype=FP32), reference(x, w))


@pytest.mark.parametrize("bits", [2, 3, 4, 8])
@pytest.mark.parametrize(("half", "B"), [(25, 1), (1500, 3)])
def test_odd_pairs(make_tiled: MakeTiled, randn: Randn, bits: int, half: int, B: int) -> None:
    w, x = make_tiled(bits, 2 * half, 1056, 32, paired=True), randn(B, 1056)
    check(run(x, w, dtype=FP32), reference(x, w), SWIGLU)


@pytest.mark.parametrize("bits", [2, 3, 4, 8])
def test_outliers(make_tiled: MakeTiled, randn: Randn, bits: int) -> None:
    """Elements up to 2^12 times as large as most others, and blocks 2^60 times as small."""
    w, x = make_tiled(bits, 100, 2560, 128), randn(1, 2560)
    x[:, ::97] *= 4096
    check(run(x, w, dtype=FP32), reference(x, w), 2 * SUMS)
    x[:, 512:] *= 2.0**-60
    check(run(x, w, dtype=FP32), reference(x, w), 2 * SUMS)
    assert not bool(run(torch.zeros_like(x), w).any())
    for value in (torch.inf, -torch.inf, torch.nan):
        x[0, 1234] = value
        assert not bool(run(x, w).isfinite().any())


@pytest.mark.parametrize("bits", [2, 3, 4, 8])
def test_small_numbers(make_tiled: MakeTiled, randn: Randn, bits: int) -> None:
    """Far below what a model has, with units that are still normal numbers."""
    w, x = make_tiled(bits, 100, 512, 128), randn(1, 512)
    for power in (-90, -100, -104):
        small = x * 2.0**power
        check(run(small, w, dtype=FP32), reference(small, w))


LAUNCHES = [
    GemvLaunch(tiles=1, steps=1, warps=8),
    GemvLaunch(tiles=1, steps=3, warps=8, early=True),
    GemvLaunch(tiles=1, steps=4, warps=4, early=True),
    GemvLaunch(tiles=2, steps=1, warps=16),
    GemvLaunch(tiles=2, steps=2, warps=8),
    GemvLaunch(tiles=3, steps=4, warps=1),
    GemvLaunch(tiles=4, steps=8, warps=2),
    GemvLaunch(tiles=1, steps=3, warps=8, warp_groups=4),
    GemvLaunch(tiles=2, steps=2, warps=8, warp_groups=2),
    GemvLaunch(tiles=1, steps=5, warps=4, early=True, warp_groups=4),
]


@pytest.mark.parametrize("staged", [True, False], ids=["staged", "given"])
@pytest.mark.parametrize(("bits", "B"), [(4, 1), (8, 1), (4, 3), (4, 7), (2, 1), (3, 1), (3, 7)])
@pytest.mark.parametrize(
    "launch", LAUNCHES, ids=[f"R{x.tiles}-C{x.steps}-W{x.warps}-A{x.warp_groups}" for x in LAUNCHES]
)
def test_every_launch(
    make_tiled: MakeTiled,
    randn: Randn,
    monkeypatch: pytest.MonkeyPatch,
    launch: GemvLaunch,
    bits: int,
    B: int,
    staged: bool,
) -> None:
    """Neither its tiles nor its steps nor its warps divide what there is."""
    launch = replace(launch, staged=staged)
    monkeypatch.setattr(choose, "packed_variant", choose.packed_variant.__wrapped__)
    monkeypatch.setattr(choose, "gemv_launch", lambda *sizes: launch)
    w, x = make_tiled(bits, 104, 2208, 32), randn(B, 2208)
    check(run(x, w, dtype=FP32), reference(x, w))


@pytest.mark.parametrize("bits", [2, 3, 4, 8])
@pytest.mark.parametrize(("N", "K"), [(104, 2208), (5120, 25600), (2560, 9728)])
@pytest.mark.parametrize(
    "launch",
    [
        GemvLaunch(1, 4, 4, split=4),
        GemvLaunch(1, 2, 8, early=True, warp_groups=2, split=2),
        GemvLaunch(1, 5, 8, early=True, registers=255, rounds=5, split=2),
        GemvLaunch(2, 3, 4, rounds=2),
    ],
    ids=["split", "warp_groups", "rounds", "alone"],
)
def test_programs_that_share_a_tile(
    make_tiled: MakeTiled, randn: Randn, launch: GemvLaunch, bits: int, N: int, K: int
) -> None:
    """Whichever comes last: the same bits twenty times, one GEMV after the other."""
    w = replace(make_tiled(bits, N, K, 32), tuned=((1, launch),))
    x, residual = randn(1, K), randn(1, N)
    y = run(x, w, added=residual, dtype=FP32)
    check(y, reference(x, w, added=residual))
    for _ in range(20):
        assert torch.equal(run(x, w, added=residual, dtype=FP32), y)
    assert w.arrived is not None
    assert not bool(w.arrived.any())


@pytest.mark.parametrize("bits", [2, 3, 4, 8])
@pytest.mark.parametrize("dtype", [BF16, FP32], ids=str)
def test_gain_rounds_once(
    make_tiled: MakeTiled, randn: Randn, bits: int, dtype: torch.dtype
) -> None:
    """Against the norm without any rounding: each x * gain is off by half an ulp at most.

    A term of a sum is then off by that share of its size, whatever its sign.
    """
    w, x = make_tiled(bits, 100, 768, 128), randn(1, 768)
    norm = (1 + 0.1 * randn(768).float() ** 2).to(dtype)
    y = run(x, w, norm=norm, eps=EPS, dtype=FP32)
    check(y, normed_reference(x, norm, w))
    scaled, factor = rounded(x, norm)
    sizes = factor * (x.double() * norm.double()).abs() @ dequantized(w).double().abs().T
    error = (y.double() - gemv_ref(x, w, norm=norm, eps=EPS)).abs()
    assert bool((error <= HALF_ULP * sizes + SUMS * sizes).all())
    # An FP32 gain is not rounded before it multiplies.
    twice = (x.float() * norm.bfloat16().float()).bfloat16()
    assert torch.equal(scaled, twice) == (dtype == BF16)


@pytest.mark.parametrize("bits", [2, 3, 4, 8])
def test_results_in_bf16_are_rounded_once(make_tiled: MakeTiled, randn: Randn, bits: int) -> None:
    w, x, residual = make_tiled(bits, 2560, 4096, 128), randn(1, 4096), randn(1, 2560)
    exact = run(x, w, added=residual, dtype=FP32)
    assert torch.equal(run(x, w, added=residual), exact.bfloat16())
    pair, norm = make_tiled(bits, 7168, 1024, 128, paired=True), 1 + 0.3 * randn(1024)
    exact = run(x[:, :1024].contiguous(), pair, norm=norm, eps=EPS, dtype=FP32)
    y = run(x[:, :1024].contiguous(), pair, norm=norm, eps=EPS)
    assert torch.equal(y, exact.bfloat16())


@pytest.mark.parametrize("bits", [2, 3, 4, 8])
@pytest.mark.parametrize("B", [1, 2, 4, 8, 16])
def test_every_code_is_exact(make_tiled: MakeTiled, device: str, bits: int, B: int) -> None:
    """With one-hot x the sum is one weight: its value comes back, for every code and place."""
    w = make_tiled(bits, 24, 256, 32)
    weight = dequantized(w)
    codes = dequantized(replace(w, scales=torch.ones_like(w.scales)))
    assert len(set(codes.flatten().tolist())) == 1 << bits
    eye = torch.eye(256, device=device, dtype=BF16)
    for k in range(0, 256, B):
        y = run(eye[k : k + B], w, dtype=FP32)
        assert torch.equal(y, weight.T[k : k + B])


def test_tiny_and_zero_inputs(make_tiled: MakeTiled, device: str) -> None:
    """Zeros stay zero, and eps carries a vector too small for its own mean square."""
    w, norm = make_tiled(4, 8, 256, 32), torch.ones(256, device=device, dtype=BF16)
    zero = torch.zeros(1, 256, device=device, dtype=BF16)
    assert bool((run(zero, w, norm=norm, eps=EPS, dtype=FP32) == 0).all())
    tiny = torch.full((1, 256), 1e-30, device=device, dtype=BF16)
    y = run(tiny, w, norm=norm, eps=EPS, dtype=FP32)
    check(y, normed_reference(tiny, norm, w))


@pytest.mark.parametrize("bits", [2, 3, 4, 8])
def test_same_bits_every_time(make_tiled: MakeTiled, randn: Randn, bits: int) -> None:
    w, x, norm = make_tiled(bits, 6144, 4096, 128), randn(1, 4096), 1 + 0.3 * randn(4096)
    runs = [run(x, w, norm=norm, eps=EPS, dtype=FP32) for _ in range(20)]
    assert all(torch.equal(runs[0], run) for run in runs)
    several = randn(8, 4096)
    batches = [run(several, w, dtype=FP32) for _ in range(20)]
    assert all(torch.equal(batches[0], batch) for batch in batches)
