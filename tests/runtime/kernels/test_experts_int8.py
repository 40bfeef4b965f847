"""Experts with x in eight bits: the reference's bits, and a token's bits in steps and in prompts.

Without a GPU the Gluon kernels run in the emulator, the Triton ones in Triton's interpreter.
"""

from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from lowbit.formats.activations import (
    activation_group,
    dequantize_activations,
    grouped_product_ref,
    quantize_activations,
)
from lowbit.formats.layout.packing import pack
from lowbit.runtime.backends import cuda, cuda_experts
from lowbit.runtime.kernels.experts.int8.grouped import block_rows, experts_grouped_int8
from lowbit.runtime.kernels.experts.int8.lists import experts_lists
from lowbit.runtime.kernels.experts.int8.lone import down_int8, gate_up_int8
from lowbit.runtime.kernels.experts.route import experts_route
from lowbit.runtime.kernels.experts.tiled import stacked
from lowbit.runtime.kernels.linear.tiles import GpuLinear, TiledLinear, dequantized, tiled
from lowbit.runtime.thresholds import EXPERTS_APART, EXPERTS_CHUNK
from lowbit.runtime.weights.linear import ExpertWeights, PackedLinear
from tests.lanes import in_kernels
from tests.runtime.kernels.expert_layers import (
    EPS,
    REAL,
    SMALL,
    Size,
    acts,
    added,
    normed,
    random_experts,
    relative_error,
    scores_of,
    with_random_scales,
)

Randn = Callable[..., Tensor]

gpu = pytest.mark.gpu
kernels = pytest.mark.kernels  # make test-kernels runs them
pytestmark = pytest.mark.usefixtures("emulated_experts")

SIZES = [*SMALL, Size(8, 192, 320, 5, 2, False, 64), Size(8, 192, 192, 5, 2, True, 192)]
MANY = SMALL[4:6]  # experts, which take as long to make as all others
FEW = [size for size in SIZES if size not in MANY]
ON_GPU = pytest.mark.parametrize("size", [SMALL[0], SMALL[1], SMALL[5], *REAL], ids=str)


def codes_and_scales(w: TiledLinear) -> tuple[Tensor, Tensor]:
    """Codes [N, K] int8 and scales [N, K / G] float32."""
    codes = dequantized(replace(w, scales=torch.ones_like(w.scales))).to(torch.int8)
    ones, none = pack(torch.ones_like(codes), w.bits), w.scales.new_zeros(w.N, w.K // w.group_size)
    words = tiled(PackedLinear(ones, none, w.bits, w.group_size), w.paired, w.activations).words
    return codes, dequantized(replace(w, words=words))[:, :: w.group_size]


def product_ref(x: Tensor, w: TiledLinear) -> Tensor:
    """The FP32 product of rounded inputs, [M, N]."""
    q, s = quantize_activations(x, activation_group(w.group_size, w.K))
    return grouped_product_ref(q, s, *codes_and_scales(w))


def scaled(w: ExpertWeights[GpuLinear], dtype: torch.dtype) -> ExpertWeights[GpuLinear]:
    """Experts whose scales are no powers of two, so that every term is rounded."""
    gate_up, down = (with_random_scales(stacked(e), dtype) for e in (w.gate_up, w.down))
    return replace(w, gate_up=gate_up, down=down)


def one_expert(M: int, size: Size, device: str) -> Tensor:
    """Scores by which the first expert alone has a share, which is 1, and a shared one has 0."""
    scores = torch.full((M, size.E + size.shared), -torch.inf, device=device)
    scores[:, 0] = 0
    return scores


PRODUCTS = [
    *((size, torch.bfloat16, n % 2 == 0) for n, size in enumerate(FEW)),
    *(pytest.param(size, torch.bfloat16, n == 0, marks=kernels) for n, size in enumerate(MANY)),
    *((size, torch.float16, False) for size in SIZES[:2]),
    *((size, torch.float32, True) for size in (*SIZES[:2], *SIZES[-1:])),
    *(pytest.param(size, torch.bfloat16, False, marks=gpu) for size in REAL),
    *(pytest.param(size, torch.float32, True, marks=gpu) for size in REAL[:2]),
]


@pytest.mark.parametrize(("size", "dtype", "given"), PRODUCTS, ids=str)
def test_down_is_the_reference(
    size: Size, dtype: torch.dtype, given: bool, device: str, randn: Randn
) -> None:
    """To the last bit: the residual is zero, in FP32, and one expert has the whole share."""
    size, M = replace(size, chosen=1, shared=False), 2
    w = scaled(random_experts(size, device, "int8"), dtype)
    scores = one_expert(M, size, device)
    act, x = randn(M, 1, size.inner), torch.zeros(M, size.h, device=device)
    routes = experts_route(scores, w) if given else None
    found = down_int8(act, scores, routes, w, x)
    assert torch.equal(found, product_ref(act[:, 0], stacked(w.down)[0]))


@pytest.mark.parametrize(
    "size",
    [
        *FEW,
        MANY[1],
        pytest.param(MANY[0], marks=kernels),
        *(pytest.param(size, marks=gpu) for size in REAL),
    ],
    ids=str,
)
def test_gate_up(size: Size, device: str, randn: Randn) -> None:
    """Elements of 1 and -1 have a norm of 1, and the gain decides about codes."""
    w, M = scaled(random_experts(size, device, "int8"), torch.bfloat16), 2
    x, norm = randn(M, size.h).sign(), 1 + 0.5 * randn(size.h)
    scores = scores_of(M, size, device)
    numbers = experts_route(scores, w)
    found = gate_up_int8(x, norm, 0.0, scores, numbers, w)
    for token, experts in enumerate(numbers.numbers.tolist()):
        for slot, e in enumerate(experts):
            y = product_ref(x[token, None] * norm, stacked(w.gate_up)[e])[0]
            gate, up = y.double().chunk(2)
            expected = torch.nn.functional.silu(gate) * up
            error = (found[token, slot].double() - expected).abs()
            assert bool((error <= expected.abs() * 1.01 * 2**-8 + 1e-30).all())


BLOCKS = [
    *((size, 8) for size in (*FEW, MANY[1])),
    (SIZES[0], 48),
    *((SIZES[1], rows) for rows in (16, 32)),
    *(pytest.param(SIZES[0], rows, marks=kernels) for rows in (16, 32)),
    pytest.param(SIZES[1], 48, marks=kernels),
    pytest.param(MANY[0], 8, marks=kernels),
    *(pytest.param(size, rows, marks=gpu) for size in REAL for rows in (8, 16, 32, 48)),
]


@in_kernels("INT4-h160-I64-*", "INT8-h192-I192-*", "INT8-h96-I96-*-32", "INT4-h256-I128-*-8")
@pytest.mark.parametrize(("size", "rows"), BLOCKS, ids=str)
def test_blocks_give_a_token_the_bits_that_it_has_alone(
    size: Size, rows: int, device: str, randn: Randn
) -> None:
    """Blocks that are full and that are not, for tokens of which many have the same experts.

    Tokens are of many sizes, so that one does not have the bounds of another.
    """
    M = 11 if device == "cpu" else 200
    w = scaled(random_experts(size, device, "int8"), torch.bfloat16)
    x, norm = randn(M, size.h), 1 + 0.2 * randn(size.h)
    x *= torch.exp2(torch.arange(M, device=device) % 9 - 4.0)[:, None].bfloat16()
    scores = scores_of(M, size, device)
    scores[M // 2 :] = scores[M // 2]
    routes = experts_route(scores, w)
    apart = down_int8(gate_up_int8(x, norm, EPS, scores, routes, w), scores, routes, w, x)
    assert torch.equal(experts_grouped_int8(x, norm, EPS, routes, w, rows, x), apart)
    some = scores[:1].contiguous()
    lone = down_int8(gate_up_int8(x[:1], norm, EPS, some, None, w), some, None, w, x[:1])
    assert torch.equal(lone, apart[:1])


@pytest.mark.parametrize("size", [SMALL[0], *(pytest.param(s, marks=gpu) for s in REAL)], ids=str)
def test_rounding_alone_is_far_from_exact(size: Size, device: str, randn: Randn) -> None:
    """The error to rounded inputs is that of BF16; to exact inputs it is 0.2 % or more."""
    w, M = random_experts(size, device, "int8"), 3
    x, norm, scores = randn(M, size.h), 1 + 0.2 * randn(size.h), scores_of(M, size, device)
    act = gate_up_int8(x, norm, EPS, scores, experts_route(scores, w), w)
    gained = (x.float() * norm.float()).bfloat16()
    group = activation_group(size.G, size.h)
    seen = dequantize_activations(*quantize_activations(gained, group), group).double()
    seen *= torch.rsqrt(x.double().square().mean(-1, keepdim=True) + EPS)
    assert relative_error(act, acts(seen, scores, w)) < 2**-8
    assert 2e-3 < relative_error(act, acts(normed(x, norm), scores, w)) < 3e-2


@pytest.mark.parametrize(
    ("experts", "rows", "M"), [(3, 8, 50), (3, 48, 70), (40, 8, 1), (40, 8, 50)]
)
def test_lists(
    experts: int, rows: int, M: int, device: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Every pair is in one block, with pairs of its expert; all blocks but its last are full."""
    monkeypatch.setattr(f"{experts_lists.__module__}.MOST_PAIRS", 64)
    numbers = torch.stack([torch.randperm(experts)[:3] for _ in range(M)]).int()
    words = torch.zeros(experts, 4096, dtype=torch.int32, device=device)
    order, blocks = (made.tolist() for made in experts_lists(numbers.to(device), words, rows))
    flat = numbers.flatten()
    assert order == flat.sort(stable=True).indices.tolist()
    expected, place = [], 0
    for expert in range(experts):
        end = place + int((flat == expert).sum())
        while place < end:
            expected.append([expert, place, min(place + rows, end)])
            place = min(place + rows, end)
    assert [block for block in blocks if block[1] < block[2]] == expected
    assert all(0 <= block[0] < experts for block in blocks)


def test_nan_stays_in_its_token(device: str, randn: Randn) -> None:
    size, M = Size(4, 64, 32, 6, 2, True, 32), 4
    w, x, norm = random_experts(size, device, "int8"), randn(M, 64), randn(64)
    scores = scores_of(M, size, device)
    scores[:] = scores[0]  # all tokens in the same blocks
    routes = experts_route(scores, w)
    clean = experts_grouped_int8(x, norm, EPS, routes, w, 8, x)
    for bad in (torch.nan, -torch.nan, torch.inf):
        x[1, 5] = bad
        apart = down_int8(gate_up_int8(x, norm, EPS, scores, routes, w), scores, routes, w, x)
        for y in (experts_grouped_int8(x, norm, EPS, routes, w, 8, x), apart):
            assert not bool(y[1].isfinite().any())
            assert torch.equal(y[[0, 2, 3]], clean[[0, 2, 3]])


def test_blocks_have_room() -> None:
    wide = random_experts(Size(8, 12800, 32, 2, 2, True, 32), "cpu", "int8")
    narrow = random_experts(Size(4, 64, 32, 40, 2, True, 32), "cpu", "int8")
    assert [block_rows(pairs, narrow, 99 << 10) for pairs in (64, 300, 9216)] == [8, 16, 48]
    assert [block_rows(9216, wide, kilobytes << 10) for kilobytes in (99, 163, 227)] == [0, 8, 8]


def test_the_mode_decides(device: str, randn: Randn, monkeypatch: pytest.MonkeyPatch) -> None:
    """A step of few tokens, of more and a prompt in two parts: all have the bits of lone tokens."""
    size, M = Size(4, 64, 32, 6, 2, True, 32), 7
    w, x, norm = random_experts(size, device, "int8"), randn(M, 64), 1 + 0.2 * randn(64)
    alone = torch.cat([cuda.moe(one, norm, EPS, w) for one in torch.split(x, 1)])
    monkeypatch.setattr(cuda_experts, "EXPERTS_APART", 3)
    assert torch.equal(cuda.moe(x[:3], norm, EPS, w), alone[:3])
    assert torch.equal(cuda.moe(x, norm, EPS, w), alone)
    monkeypatch.setattr(cuda_experts, "EXPERTS_CHUNK", 4)
    assert torch.equal(cuda.moe(x, norm, EPS, w), alone)
    exact = replace(w, gate_up=replace(stacked(w.gate_up), activations="exact"))
    assert not torch.equal(cuda.moe(x[:1], norm, EPS, exact), alone[:1])


@pytest.mark.parametrize("M", [1, 3, 7])
def test_sums_of_a_part_are_those_that_a_residual_is_added_to(
    M: int, device: str, randn: Randn, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A rank adds them to zeros, in FP32: tokens alone, few, and a prompt in parts."""
    monkeypatch.setattr(cuda_experts, "EXPERTS_APART", 3)
    monkeypatch.setattr(cuda_experts, "EXPERTS_CHUNK", 5)
    size = Size(4, 64, 32, 6, 2, True, 32)
    w = scaled(random_experts(size, device, "int8"), torch.bfloat16)
    x, norm = randn(M, 64), 1 + 0.2 * randn(64)
    sums = cuda_experts.mixture(x, norm, EPS, w, torch.zeros(M, 64, device=device))
    assert sums.dtype == torch.float32
    assert not torch.equal(sums, sums.bfloat16().float())
    assert torch.equal((sums + x.float()).bfloat16(), cuda.moe(x, norm, EPS, w))


@gpu
@ON_GPU
def test_a_token_has_the_same_bits_in_any_step_and_prompt(
    size: Size, device: str, randn: Randn
) -> None:
    w = scaled(random_experts(size, device, "int8"), torch.bfloat16)
    x, norm = randn(EXPERTS_CHUNK + 300, size.h), 1 + 0.2 * randn(size.h)
    prompt = cuda.moe(x, norm, EPS, w)
    for count in (1, 2, 3, 8, EXPERTS_APART, EXPERTS_APART + 1, 16, 24, 33, 64, 65, 128, 200, 256):
        for some in (torch.arange(count), torch.randperm(len(x))[:count]):
            assert torch.equal(cuda.moe(x[some.to(device)], norm, EPS, w), prompt[some.to(device)])


@gpu
@ON_GPU
@pytest.mark.parametrize("M", [1, 8, 64, 300])
def test_the_op(size: Size, M: int, device: str, randn: Randn) -> None:
    """All of it, but for tokens whose last expert is hardly more likely than the next."""
    w, x, norm = random_experts(size, device, "int8"), randn(M, size.h), 1 + 0.2 * randn(size.h)
    found = cuda.moe(x, norm, EPS, w)
    some = torch.randperm(M, device=device)[:24]
    h = normed(x[some], norm)
    scores = h @ w.router.double().T
    order = scores[:, : size.E].sort(-1, descending=True).values
    clear = torch.ones(len(some), dtype=torch.bool, device=device)
    if size.chosen < size.E:
        clear = order[:, size.chosen - 1] - order[:, size.chosen] > 0.02
    assert bool(clear.any())
    expected = x[some].double() + added(acts(h, scores, w), scores, w)
    assert relative_error(found[some][clear], expected[clear]) < 2**-8
    replayed = torch.cuda.CUDAGraph()
    with torch.cuda.graph(replayed):
        out = cuda.moe(x, norm, EPS, w)
    for _ in range(3):
        x.copy_(randn(M, size.h))
        replayed.replay()
        again = out.clone()
        assert torch.equal(again, cuda.moe(x, norm, EPS, w))
