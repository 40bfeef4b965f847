"""Kernels of a prompt's experts against float64, and the same bits by every launch.

Without a GPU the Gluon kernels run in the emulator, the Triton ones in Triton's interpreter.
"""

from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from lowbit.runtime.backends.cuda_experts import mixture
from lowbit.runtime.kernels.experts import order as experts_order
from lowbit.runtime.kernels.experts import products as experts_products
from lowbit.runtime.kernels.experts import route as experts_route
from lowbit.runtime.kernels.experts.gemm import experts_gemm
from lowbit.runtime.kernels.experts.tiled import stacked
from lowbit.runtime.kernels.launch.experts import EXPERTS_GEMM, GemmLaunch, GemmTiles
from lowbit.runtime.thresholds import EXPERTS_TOKENS
from tests.lanes import in_kernels
from tests.runtime.kernels.expert_layers import (
    EPS,
    FP32_ERROR,
    REAL,
    Size,
    acts,
    added,
    random_experts,
    relative_error,
    scores_of,
    with_random_scales,
)

Randn = Callable[..., Tensor]

gpu = pytest.mark.gpu
kernels = pytest.mark.kernels  # make test-kernels runs them
pytestmark = pytest.mark.usefixtures("emulated_experts")


@pytest.mark.parametrize(
    ("size", "M"),
    [
        (Size(4, 64, 64, 4, 2, True, 32), 18),
        (Size(8, 96, 96, 3, 3, False, 96), 7),
        (Size(4, 64, 64, 40, 2, True, 32, normed=False), 9),
        (Size(4, 128, 128, 9, 8, True), 2),
        *(pytest.param(s, M, marks=gpu) for s in REAL for M in (65, 300)),
    ],
    ids=str,
)
def test_gemm(size: Size, M: int, device: str, randn: Randn, bf16_error: float) -> None:
    """Act is rounded between the products, all else is exact or FP32."""
    w = random_experts(size, device)
    h, x, scores = (
        randn(M, size.h),
        torch.randn(M, size.h, device=device),
        scores_of(M, size, device),
    )
    scores[M // 2 :] = scores[M // 2]  # many tokens have the same experts
    found = experts_gemm(h, scores, w, x)
    expected = added(acts(h, scores, w), scores, w)
    assert relative_error(found.double() - x.double(), expected) < bf16_error
    assert bool(found.isfinite().all())


LAUNCHES = [  # without a GPU, each width takes two of them
    (64, GemmTiles(tiles=1, warps=2, passes=2)),
    (8, GemmTiles(tiles=4, warps=1, passes=3, stages=2, least=8)),
    (32, GemmTiles(tiles=2, warps=8, steps=2, stages=4)),
    (48, GemmTiles(warps=8)),
]


@in_kernels("torch.float16-8")
@pytest.mark.parametrize(  # both widths read scales by the same function
    ("dtype", "bits"),
    [
        pytest.param(torch.bfloat16, 2, marks=gpu),
        pytest.param(torch.bfloat16, 3, marks=kernels),
        (torch.float16, 8),
        (torch.float32, 4),
    ],
    ids=str,
)
def test_gemm_launches_have_the_same_bits(
    bits: int,
    dtype: torch.dtype,
    device: str,
    randn: Randn,
    bf16_error: float,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Also with scales of every type, and tiles that programs do not divide."""
    size, M = Size(bits, 256, 192, 5, 2, True, max(32, 8 * bits)), 21
    w = random_experts(size, device)
    gate_up, down = (
        replace(e, scales=e.scales.to(dtype)) for e in (stacked(w.gate_up), stacked(w.down))
    )
    h, x, scores = (
        randn(M, size.h),
        torch.randn(M, size.h, device=device),
        scores_of(M, size, device),
    )
    scores[1:] = scores[0]

    def found() -> Tensor:
        return experts_gemm(h, scores, replace(w, gate_up=gate_up, down=down), x)

    expected = found()
    wanted = added(acts(h, scores, w), scores, w)
    assert relative_error(expected.double() - x.double(), wanted) < bf16_error
    some = {3: LAUNCHES[1:3], 8: LAUNCHES[::2], 4: LAUNCHES[1::2]}  # the emulator takes long
    for rows, tiles in LAUNCHES if device == "cuda" else some[bits]:
        if bits < 4:  # whose rows of x are longer
            tiles = replace(tiles, warps=max(tiles.warps, 2))
        launch = GemmLaunch(rows, tiles, tiles)
        name = f"{experts_gemm.__module__}.EXPERTS_GEMM"
        monkeypatch.setattr(name, launch)
        assert torch.equal(found(), expected), launch


@in_kernels("torch.float16-4", "torch.float32-8")
@pytest.mark.parametrize(
    ("dtype", "bits"),
    [
        *((torch.bfloat16, bits) for bits in (2, 3, 4, 8)),
        *((dtype, bits) for dtype in (torch.float16, torch.float32) for bits in (4, 8)),
    ],
    ids=str,
)
def test_weights_are_rounded_once(dtype: torch.dtype, bits: int, device: str, randn: Randn) -> None:
    """Weights of any scales are rounded to BF16; all else is FP32, and act rounded at the end."""
    size, M = Size(bits, 256, 64, 3, 2, False, 32), 12
    made = random_experts(size, device)
    gate_up = with_random_scales(stacked(made.gate_up), dtype)
    down = with_random_scales(stacked(made.down), dtype)
    w = replace(made, gate_up=gate_up, down=down)
    h, scores = randn(M, size.h), scores_of(M, size, device)
    found = experts_route.experts_route(scores, w)
    order, ends = experts_order.by_expert(found.numbers, len(gate_up))
    blocks = experts_order.blocks_of(order, ends, EXPERTS_GEMM.rows)

    act = experts_products.gate_up_blocks(h, order, blocks, gate_up, size.chosen, EXPERTS_GEMM)
    wanted = acts(h, scores, w)
    other = act != wanted.flatten(0, 1)[order].to(act.dtype)
    assert float(other.double().mean()) < 0.02  # FP32 sums seldom lead to the next BF16

    out = experts_products.down_blocks(act, order, blocks, found.shares, down, EXPERTS_GEMM)
    slots = torch.empty_like(act)
    slots[order] = act
    wanted = added(slots.view(M, size.chosen, size.inner), scores, w)
    assert relative_error(out.view(M, size.chosen, size.h).sum(1), wanted) < FP32_ERROR


BLOCK_TOKENS = (1, 16, 17, 33, 48, 49, 64)  # of an expert: at and behind the ends of all loops


@pytest.mark.parametrize("bits", [4, pytest.param(8, marks=gpu)])
def test_shorter_loops_have_the_same_bits(
    bits: int, device: str, randn: Randn, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Blocks of few tokens take a shorter loop; without `least` all take the longest one."""
    size, M = Size(bits, 64, 32, len(BLOCK_TOKENS), 1, False, 32), sum(BLOCK_TOKENS)
    w, h, x = random_experts(size, device), randn(M, size.h), randn(M, size.h).float()
    numbers = torch.repeat_interleave(torch.arange(size.E), torch.tensor(BLOCK_TOKENS))
    scores = torch.nn.functional.one_hot(numbers[torch.randperm(M)], size.E).float().to(device)

    def found() -> Tensor:
        return experts_gemm(h, scores, w, x)

    def launch(least: int) -> None:
        tiles = GemmTiles(least=least)
        name = f"{experts_gemm.__module__}.EXPERTS_GEMM"
        monkeypatch.setattr(name, GemmLaunch(64, tiles, tiles))

    launch(64)
    expected = found()
    assert bool(expected.isfinite().all())
    launch(16)
    assert torch.equal(found(), expected)


def test_long_prompts_are_taken_in_parts(
    device: str, randn: Randn, monkeypatch: pytest.MonkeyPatch
) -> None:
    size, M = Size(4, 64, 32, 6, 2, True, 32), 18
    w, h, x = random_experts(size, device), randn(M, size.h), randn(M, size.h)
    scores = torch.randn(M, size.E + size.shared, device=device)

    def found() -> Tensor:
        return experts_gemm(h, scores, w, x)

    expected = found()
    monkeypatch.setattr(f"{experts_gemm.__module__}.EXPERTS_CHUNK", 8)
    assert torch.equal(found(), expected)


@pytest.mark.parametrize(
    ("size", "M"),
    [
        (Size(4, 64, 32, 6, 2, True, 32), EXPERTS_TOKENS + 20),
        *(pytest.param(size, 1024, marks=gpu) for size in REAL),
    ],
    ids=str,
)
def test_a_token_has_its_bits_in_prompts_of_all_lengths(
    size: Size, M: int, device: str, randn: Randn
) -> None:
    """From the router on: scores decide which experts a token meets."""
    w, x = random_experts(size, device), randn(M, size.h)
    norm = 1 + 0.1 * torch.randn(size.h, device=device)
    whole = mixture(x, norm, EPS, w)
    for first, stop in ((0, EXPERTS_TOKENS + 1), (7, M - 3)):
        assert torch.equal(mixture(x[first:stop], norm, EPS, w), whole[first:stop])


@in_kernels("nan1")
@pytest.mark.parametrize("bad", [torch.nan, -torch.nan, torch.inf])
def test_nan_stays_in_its_token_of_a_prompt(bad: float, device: str, randn: Randn) -> None:
    """Its scores are NaN too, or finite: then it shares blocks with other tokens."""
    size, M = Size(4, 64, 32, 6, 2, True, 32), 9
    w, h, x = random_experts(size, device), randn(M, size.h), randn(M, size.h)
    scores = torch.randn(M, size.E + size.shared, device=device)
    scores[:] = scores[0]
    others = torch.arange(M, device=device) != 4

    def found() -> Tensor:
        return experts_gemm(h, scores, w, x)

    clean = found()
    h[4] = bad
    for score in (scores[4].clone(), torch.nan):
        scores[4] = score
        y = found()
        assert not bool(y[4].isfinite().any())
        assert torch.equal(y[others], clean[others])
