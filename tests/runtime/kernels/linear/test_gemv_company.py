"""A token's result is the same bits in any company: alone, and among others of a step.

Whatever of a launch may depend on how many tokens there are is tried in every way.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch
from torch import Tensor

from lowbit.runtime.backends import cuda
from lowbit.runtime.kernels.codec import CODECS
from lowbit.runtime.kernels.launch import choose
from lowbit.runtime.kernels.launch.device import card_of
from lowbit.runtime.kernels.launch.linear import GemvLaunch, gemv_launch
from lowbit.runtime.kernels.linear.dense import dense_gemv
from lowbit.runtime.kernels.linear.gemv import gemv, gemv_ref
from lowbit.runtime.kernels.linear.norm import SQUARES
from lowbit.runtime.kernels.linear.tiles import TiledLinear
from lowbit.runtime.thresholds import EXACT_TOKENS
from lowbit.runtime.weights.linear import DenseLinear

pytestmark = pytest.mark.gpu

MakeTiled = Callable[..., TiledLinear]
Randn = Callable[..., Tensor]
Compute = Callable[[Tensor], Tensor]

EPS = 1e-6
COUNTS = (1, 2, 3, 4, 5, 8, 11, 16, 17, 24, 32, 33, 48, 50, 64)
MOST = EXACT_TOKENS
BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32


@dataclass(frozen=True, slots=True)
class Case:
    """A linear and what is fused with it.

    Attributes:
        added: rows of the residual (MOST) or bias (1); 0 for none.
        heads: of x that are normed by given squares.
    """

    bits: int
    N: int
    K: int
    G: int = 128
    paired: bool = False
    norm: torch.dtype | None = None
    added: int = 0
    heads: int = 0
    scales: torch.dtype = BF16
    dtype: torch.dtype = BF16
    positive: bool = False  # scales

    def __str__(self) -> str:
        sign = "-positive" if self.positive else ""
        return f"INT{self.bits}-N{self.N}-K{self.K}-G{self.G}{sign}"


CASES = [
    Case(4, 6144, 4096, norm=BF16),
    Case(4, 2560, 2560, norm=BF16, added=1),
    Case(4, 2048, 2048, added=MOST),
    Case(4, 4096, 12288, added=MOST),
    Case(4, 12288, 2048, paired=True, norm=BF16),
    Case(4, 7168, 1024, paired=True, norm=FP32),
    Case(8, 15000, 2048, norm=BF16, dtype=FP32),
    Case(8, 4096, 2560, norm=FP32),
    Case(8, 2048, 2048, added=MOST, heads=16),
    Case(4, 2560, 4096, added=MOST, heads=32),
    Case(4, 1000, 1120, 32, norm=BF16, added=MOST),
    Case(4, 1040, 2048, 64, norm=BF16, scales=FP16),
    Case(8, 1040, 2048, 32, added=1, dtype=FP32),
    Case(8, 130, 4096, 256, added=1, scales=FP16),
    Case(4, 33, 768, 768, scales=FP32),
    Case(8, 40, 192, 96),
    Case(4, 19, 96, 32, norm=BF16),
    Case(8, 104, 2208, 32, norm=FP32),
    Case(4, 50, 1056, 32, paired=True, norm=BF16),
    Case(4, 2050, 17408, added=MOST),
    Case(4, 5120, 17408, added=MOST),
    Case(4, 5120, 8192, added=MOST),
    Case(4, 24, 25600, 25600),
    Case(4, 5120, 25600, added=MOST),
    Case(8, 5120, 17408, added=MOST),
    Case(8, 520, 25600, added=MOST),
    Case(4, 640, 9728, added=MOST),
    Case(8, 1000, 4096, 64, norm=BF16),
    Case(8, 520, 12288, 256, scales=FP16, added=1),
    Case(3, 6144, 4096, norm=BF16),
    Case(3, 4096, 12288, added=MOST),
    Case(3, 24576, 4096, paired=True, norm=BF16),
    Case(3, 1040, 2048, 64, norm=BF16, scales=FP16),
    Case(3, 50, 1056, 32, paired=True, norm=BF16),
    Case(2, 6144, 4096, norm=FP32),
    Case(2, 4096, 12288, added=MOST),
    Case(2, 24576, 4096, paired=True, norm=BF16),
    Case(2, 2560, 4096, 256, added=MOST, heads=32),
    Case(2, 33, 768, 768, scales=FP32),
]


# On Hopper `wgmma` takes 17 tokens of them and more.
WITHIN_STEPS = [
    *(
        Case(bits, N, K, G, paired, norm, added, positive=positive)
        for bits, G in ((4, 64), (4, 32), (8, 32))
        for N, K, paired, norm, added in (
            (6144, 4096, False, BF16, 0),
            (4096, 4096, False, None, MOST),
            (24576, 4096, True, BF16, 0),
            (4096, 12288, False, None, MOST),
        )
        for positive in (False, True)
    ),
    Case(4, 4099, 4096, 64, added=1, scales=FP16),
    Case(4, 2050, 4192, 32, norm=FP32, dtype=FP32),
    Case(4, 1048, 4032, 192, added=MOST),
    Case(4, 1000, 4128, 96, norm=BF16),
    Case(8, 1000, 4192, 32, norm=BF16, added=MOST),
    Case(8, 33, 2208, 32, paired=False, scales=FP16),
]


def changed(launch: GemvLaunch, way: str) -> GemvLaunch:
    """The launch with as many parts of a tile's steps."""
    if way in ("staged", "given"):
        return replace(launch, staged=way == "staged")
    if way == "split":
        return replace(launch, tiles=1, rounds=3, warp_groups=4, warps=4, split=launch.parts)
    warp_groups = max(1, 8 // launch.parts)
    return replace(
        launch,
        tiles=2 if way == "pairs" else 1,
        steps=min(launch.steps, 2),
        rounds=3,
        warp_groups=warp_groups,
        warps=warp_groups * launch.parts,
        split=1,
    )


def shared(launch: GemvLaunch, bits: int) -> GemvLaunch:
    """The launch of a lone token with as many parts, where programs share tiles if they can."""
    split = 2 if launch.parts // 2 * CODECS[bits].STEP_K % 256 == 0 else 1
    each = launch.parts // split
    return GemvLaunch(1, 2, 2 * each, warp_groups=2, rounds=3, split=split)


# Shapes of which each way of dividing the work is tried.
DIVIDED = [
    Case(4, 1000, 4096, norm=BF16),
    Case(8, 1040, 2560, norm=FP32, added=MOST),
    Case(4, 1000, 1120, 32, paired=True, norm=BF16),
    Case(8, 520, 2048, added=1, heads=16, dtype=FP32),
    Case(3, 1000, 4096, norm=BF16),
    Case(2, 1040, 2560, norm=FP32, added=MOST),
]


def divide(monkeypatch: pytest.MonkeyPatch, way: str) -> None:
    """Have programs divide the work for several tokens in another way than was measured best."""

    def launch(bits: int, tiles: int, steps: int, tokens: int, *others: Any) -> GemvLaunch:
        found = gemv_launch(bits, tiles, steps, tokens, *others)
        least = 8 if way == "split" else 2
        if way == "shared":
            return shared(found, bits) if tokens == 1 else found
        return found if tokens < least else changed(found, way)

    monkeypatch.setattr(choose, "packed_variant", choose.packed_variant.__wrapped__)
    monkeypatch.setattr(choose, "gemv_launch", launch)
    monkeypatch.setattr(choose, "wgmma_launch", lambda *sizes: None)


def companies(most: int, device: torch.device) -> Iterator[Tensor]:
    """Numbers of the tokens of a step, in two orders."""
    for count in (n for n in COUNTS if n <= most):
        yield torch.arange(count, device=device)
        yield torch.randperm(most, device=device)[:count]


def check(compute: Compute, most: int, device: torch.device) -> None:
    """Every one of so many tokens has the bits that it has alone."""
    alone = torch.cat([compute(torch.tensor([i], device=device)) for i in range(most)])
    assert bool(alone.isfinite().all())
    for tokens in companies(most, device):
        assert torch.equal(compute(tokens), alone[tokens]), tokens


def weight_of(case: Case, make_tiled: MakeTiled) -> TiledLinear:
    w = make_tiled(case.bits, case.N, case.K, case.G, case.paired, case.scales)
    return replace(w, scales=w.scales.abs()) if case.positive else w


def computation(case: Case, make_tiled: MakeTiled, randn: Randn, x: Tensor) -> Compute:
    w = weight_of(case, make_tiled)
    norm = None if case.norm is None else (1 + 0.3 * randn(case.K)).to(case.norm)
    added = randn(case.added, case.N) if case.added else None
    squares = None
    if case.heads:
        squares = x.float().square().view(MOST, case.heads, SQUARES, -1).sum(-1)

    def compute(tokens: Tensor) -> Tensor:
        return gemv(
            x[tokens],
            w,
            norm=norm,
            squares=None if squares is None else squares[tokens],
            eps=EPS,
            added=added[tokens] if added is not None and case.added > 1 else added,
            dtype=case.dtype,
        )

    return compute


@pytest.mark.parametrize("case", CASES, ids=str)
def test_packed(case: Case, make_tiled: MakeTiled, randn: Randn) -> None:
    check_packed(case, make_tiled, randn)


@pytest.mark.parametrize("case", WITHIN_STEPS, ids=str)
def test_scales_that_change_within_a_step(case: Case, make_tiled: MakeTiled, randn: Randn) -> None:
    check_packed(case, make_tiled, randn)
    w, x = weight_of(case, make_tiled), randn(MOST, case.K)
    card = card_of(x)
    for tokens in (17, 32, 33, MOST) if card.is_hopper else ():
        assert choose.choose(w, tokens, card).way == "wgmma"
    plain = replace(w, paired=False) if case.paired else w  # whose rows are gate and up in turn
    found = gemv(x, plain, dtype=FP32).double()
    expected = gemv_ref(x, plain)
    assert float((found - expected).norm() / expected.norm()) < 2.0**-21  # measured: 2^-24


@pytest.mark.parametrize("way", ["staged", "given", "rounds", "pairs", "split", "shared"])
@pytest.mark.parametrize("case", DIVIDED, ids=str)
def test_every_division(
    case: Case,
    way: str,
    make_tiled: MakeTiled,
    randn: Randn,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    divide(monkeypatch, way)
    check_packed(case, make_tiled, randn)


def check_packed(case: Case, make_tiled: MakeTiled, randn: Randn) -> None:
    """Same bits in any company, and NaN stays in its token."""
    sizes = torch.logspace(-2, 2, MOST, device="cuda")[:, None]
    x = (randn(MOST, case.K) * sizes).bfloat16()
    compute = computation(case, make_tiled, randn, x)
    check(compute, MOST, x.device)
    steps = [torch.arange(count, device=x.device) for count in (8, MOST)]
    clean = [compute(step) for step in steps]
    x[3, 5], x[3, 7] = torch.nan, torch.inf
    for step, before in zip(steps, clean, strict=True):
        y = compute(step)
        assert not bool(y[3].isfinite().any()) or case.heads
        assert torch.equal(y[step != 3], before[step != 3])


@pytest.mark.parametrize(("N", "K", "n"), [(8192, 1024, 32), (8192, 2048, 32), (12288, 4096, 64)])
def test_rows_beside(make_tiled: MakeTiled, randn: Randn, N: int, K: int, n: int) -> None:
    w, rows, x = make_tiled(4, N, K, 128), DenseLinear(randn(n, K)), randn(MOST, K)
    norm = (1 + 0.3 * randn(K)).float()

    def compute(tokens: Tensor) -> Tensor:
        return torch.cat(cuda.two_products(x[tokens], w, rows, norm, EPS), 1)

    check(compute, MOST, x.device)


@pytest.mark.parametrize(("N", "K"), [(5000, 1024), (64, 2560), (96, 256), (40, 2104), (300, 4096)])
@pytest.mark.parametrize("norm", [None, BF16, FP32], ids=str)
def test_dense(randn: Randn, N: int, K: int, norm: torch.dtype | None) -> None:
    w, x, residual = randn(N, K), randn(MOST, K), randn(MOST, N)
    gain = None if norm is None else (1 + 0.3 * randn(K)).to(norm)
    compute = lambda i: dense_gemv(x[i], w, norm=gain, eps=EPS, added=residual[i])  # noqa: E731
    check(compute, MOST, x.device)


@pytest.mark.parametrize(("N", "K"), [(32, 1024), (64, 4096), (96, 5120), (257, 2048)])
@pytest.mark.parametrize("dtype", [BF16, FP32], ids=str)
def test_few_rows_of_a_prompt(randn: Randn, N: int, K: int, dtype: torch.dtype) -> None:
    """Gates of linear attention and routers, of hundreds of tokens too."""
    w, x, gain = randn(N, K), randn(2048, K), (1 + 0.3 * randn(K)).float()
    whole = dense_gemv(x, w, norm=gain, eps=EPS, dtype=dtype)
    for first, count in ((0, 1), (7, 16), (1, 64), (5, 65), (64, 256), (1, 1023), (0, 1024)):
        part = slice(first, first + count)
        assert torch.equal(dense_gemv(x[part], w, norm=gain, eps=EPS, dtype=dtype), whole[part])


def test_dense_swiglu(randn: Randn) -> None:
    w, x, norm = DenseLinear(randn(6144, 1024)), randn(MOST, 1024), randn(1024)
    check(lambda i: cuda.product(x[i], w, norm=norm, eps=EPS, swiglu=True), MOST, x.device)


def test_embedding(randn: Randn) -> None:
    table = randn(300, 1500)
    ids = torch.randint(300, (MOST,), device=table.device)
    check(lambda i: cuda.embed(ids[i], table), MOST, table.device)
