"""Kernels of mixtures of experts against float64, and a token's bits in any company.

Without a GPU the Gluon kernels run in the emulator, the Triton ones in Triton's interpreter.
"""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from lowbit.formats.architectures.config import Experts
from lowbit.formats.errors import UnsupportedModelError
from lowbit.runtime.backends import cuda, cuda_experts
from lowbit.runtime.kernels.experts import down as experts_down
from lowbit.runtime.kernels.experts import gate_up as experts_gate_up
from lowbit.runtime.kernels.experts import order as experts_order
from lowbit.runtime.kernels.experts import route as experts_route
from lowbit.runtime.kernels.experts.groups import groups_of
from lowbit.runtime.kernels.experts.program import padded_width
from lowbit.runtime.kernels.launch.experts import GROUP
from lowbit.runtime.kernels.linear.tiles import GpuLinear
from lowbit.runtime.thresholds import EXPERTS_CHUNK, EXPERTS_TOKENS
from lowbit.runtime.weights.linear import ExpertWeights
from tests.lanes import in_kernels
from tests.runtime.kernels.expert_layers import (
    EPS,
    FP32_ERROR,
    REAL,
    SMALL,
    WIDE,
    Size,
    acts,
    added,
    normed,
    random_experts,
    relative_error,
    routes,
    scores_of,
)

Randn = Callable[..., Tensor]

gpu = pytest.mark.gpu
pytestmark = pytest.mark.usefixtures("emulated_experts")

GIVEN = pytest.mark.parametrize("given", [False, True], ids=["chosen by warps", "given"])
ON_GPU = pytest.mark.parametrize("size", [SMALL[0], SMALL[1], SMALL[5], *REAL], ids=str)


def made_routes(
    scores: Tensor, w: ExpertWeights[GpuLinear], given: bool
) -> experts_route.Routes | None:
    return experts_route.experts_route(scores, w) if given else None


@pytest.mark.parametrize(
    ("size", "given"),
    [
        *((size, n % 2 == 0) for n, size in enumerate(SMALL)),
        *(
            pytest.param(size, n % 2 == 1, marks=pytest.mark.kernels)
            for n, size in enumerate(SMALL)
        ),
        *(pytest.param(size, given, marks=gpu) for size in REAL for given in (False, True)),
    ],
    ids=str,
)
def test_gate_up(size: Size, given: bool, device: str, randn: Randn) -> None:
    w, M = random_experts(size, device), 3
    x, norm = 3 * randn(M, size.h), 1 + 0.2 * randn(size.h)
    norm = norm.float() if size.bits == 4 else norm
    scores = scores_of(M, size, device)
    routes = made_routes(scores, w, given)
    found = experts_gate_up.experts_gate_up(x, norm, EPS, scores, routes, w)
    expected = acts(normed(x, norm), scores, w)
    assert relative_error(found[..., : size.inner], expected) < 2**-8
    assert not found[..., size.inner :].any()


@in_kernels(
    "INT4-h512-*-given",
    "INT3-*-chosen*",
    "INT8-h64-*-given",
    "INT4-h160-I64-*-chosen*",
    "INT2-*-given",
    "INT8-h96-*-chosen*",
    "INT8-h128-*-given",
)
@GIVEN
@pytest.mark.parametrize(
    "size", [*SMALL, WIDE, *(pytest.param(s, marks=gpu) for s in REAL)], ids=str
)
def test_down(size: Size, given: bool, device: str, randn: Randn) -> None:
    """Sums are rounded once, here not at all: the residual is FP32."""
    w, M, slots = random_experts(size, device), 3, size.chosen + size.shared
    x, scores = torch.randn(M, size.h, device=device), scores_of(M, size, device)
    act = torch.zeros(M, slots, padded_width(size.inner), device=device)
    act = act.bfloat16()
    act[..., : size.inner] = randn(M, slots, size.inner)
    found = experts_down.experts_down(act, scores, made_routes(scores, w, given), w, x)
    expected = added(act[..., : size.inner], scores, w) + x.double()
    assert relative_error(found, expected) < FP32_ERROR


@pytest.mark.parametrize("size", [SMALL[0], *(pytest.param(s, marks=gpu) for s in REAL)], ids=str)
def test_launches_have_the_same_bits(
    size: Size, device: str, randn: Randn, monkeypatch: pytest.MonkeyPatch
) -> None:
    """But for warps that share a tile of gate and up."""
    w = random_experts(size, device)
    x, norm = randn(2, size.h), 1 + 0.2 * randn(size.h)
    expected = cuda.moe(x, norm, EPS, w)

    def check(module: Any, name: str, launch: dict[str, Any]) -> None:
        chosen = getattr(module, name)
        monkeypatch.setattr(module, name, lambda *sizes: replace(chosen(*sizes), **launch))
        assert torch.equal(cuda.moe(x, norm, EPS, w), expected), launch
        monkeypatch.setattr(module, name, chosen)

    check(experts_down, "experts_down_launch", {"tiles": 2, "warps": 4, "ahead": False})
    check(experts_down, "experts_down_launch", {"tiles": 4, "early": True, "registers": None})
    check(experts_down, "experts_down_launch", {"warps": 16, "shared": 32})
    check(experts_down, "experts_down_launch", {"rounds": 4})
    check(experts_down, "experts_down_launch", {"tiles": 2, "rounds": 5, "warps": 4})
    check(experts_gate_up, "experts_gate_up_launch", {"tiles": 1, "steps": 1})
    check(experts_gate_up, "experts_gate_up_launch", {"warps": 8, "warp_groups": 2})
    check(experts_gate_up, "experts_gate_up_launch", {"steps": 3, "shared": 32})
    check(experts_gate_up, "experts_gate_up_launch", {"rounds": 3, "tiles": 1})
    check(experts_gate_up, "experts_gate_up_launch", {"rounds": 2, "warps": 8, "warp_groups": 2})


@pytest.mark.parametrize(
    ("chosen", "inner", "hidden", "words"),
    [
        (32, 64, 2048, "33 experts of a token, at most 32"),
        (8, 4096, 2048, "9 experts of a token as wide as 40"),
        (28, 512, 2048, "29 experts of a token as wide as 512"),  # in rounds
        (8, 512, 16384, "tokens of 16384"),
    ],
)
def test_sizes_without_kernels_are_named(chosen: int, inner: int, hidden: int, words: str) -> None:
    cuda.check_experts(Experts(256, 8, 512, 512), 2048)
    cuda.check_experts(Experts(128, 8, 1536, None), 4096)
    with pytest.raises(UnsupportedModelError, match=words):
        cuda.check_experts(Experts(64, chosen, inner, inner), hidden)


def test_nan_stays_in_its_token(device: str, randn: Randn) -> None:
    """Its experts are some that exist."""
    size = Size(4, 64, 32, 6, 2, True, 32)
    w, x, norm = random_experts(size, device), randn(3, 64), randn(64)
    clean = cuda.moe(x, norm, EPS, w)
    for bad in (torch.nan, -torch.nan, torch.inf):
        x[1, 5] = bad
        y = cuda.moe(x, norm, EPS, w)
        assert not bool(y[1].isfinite().any())
        assert torch.equal(y[::2], clean[::2])


@pytest.mark.parametrize("normed", [False, True])
@pytest.mark.parametrize("shared", [False, True])
def test_routes(shared: bool, normed: bool, device: str) -> None:
    size = Size(4, 32, 32, 40, 8, shared, 32)
    scores = scores_of(12, size, device)
    scores[7], scores[8] = 1.5, torch.nan
    found = experts_route.experts_route(
        scores, replace(random_experts(size, device), normed=normed)
    )
    numbers, shares = found.numbers, found.shares
    assert bool(((numbers >= 0) & (numbers < 40 + shared)).all())
    wanted = [pairs for i, pairs in enumerate(routes(scores, 8, shared, normed)) if i != 8]
    rows = torch.arange(12, device=device) != 8
    assert numbers[rows].tolist() == [[e for e, _ in pairs] for pairs in wanted]
    right = torch.tensor([[share for _, share in pairs] for pairs in wanted])
    assert float((shares[rows].cpu() - right).abs().max()) < 1e-6
    assert len(set(numbers[8].tolist())) == numbers.shape[1]  # also where all scores are NaN
    order, ends = experts_order.by_expert(numbers, 40 + shared)
    flat = numbers.flatten()
    assert flat[order].tolist() == sorted(flat.tolist())
    assert ends.tolist() == [int((flat <= e).sum()) for e in range(40 + shared)]


@gpu
@ON_GPU
@pytest.mark.parametrize("M", [1, 5, 16, EXPERTS_TOKENS, EXPERTS_TOKENS + 1, EXPERTS_CHUNK + 300])
def test_the_op(size: Size, M: int, device: str, randn: Randn) -> None:
    """All of it, but for tokens whose last expert is hardly more likely than the next."""
    w, x, norm = random_experts(size, device), randn(M, size.h), 1 + 0.2 * randn(size.h)
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
    assert relative_error(found[some][clear], expected[clear]) < 0.01


@pytest.mark.parametrize(
    "size", [SMALL[0], pytest.param(SMALL[5], marks=pytest.mark.kernels), SMALL[-2]], ids=str
)
def test_a_lone_token_has_the_same_bits_as_in_company(
    size: Size, device: str, randn: Randn
) -> None:
    """Few tokens of a small size, so that the emulator shows it too."""
    w, norm, x = random_experts(size, device), 1 + 0.2 * randn(size.h), randn(3, size.h)
    alone = torch.cat([cuda.moe(one, norm, EPS, w) for one in torch.split(x, 1)])
    for count in (2, 3):
        assert torch.equal(cuda.moe(x[:count], norm, EPS, w), alone[:count])


@pytest.mark.parametrize("M", [1, 13, EXPERTS_TOKENS])
@pytest.mark.parametrize("experts", [3, 40])
def test_groups(experts: int, M: int, device: str) -> None:
    """Every pair is in one group, with pairs of its expert; all groups but its last are full."""
    numbers = torch.stack([torch.randperm(experts)[:3] for _ in range(M)]).int()
    groups = groups_of(numbers.to(device)).tolist()
    flat = numbers.flatten().tolist()
    expected = [[-1] * GROUP for _ in flat]
    for expert in set(flat):
        pairs = [pair for pair, number in enumerate(flat) if number == expert]
        for first in range(0, len(pairs), GROUP):
            members = pairs[first : first + GROUP]
            expected[members[0]] = members + [-1] * (GROUP - len(members))
    assert groups == expected


@in_kernels("INT8-h96-*", "INT2-*")
@pytest.mark.parametrize("size", [SMALL[0], SMALL[1], SMALL[-1]], ids=str)
def test_experts_read_once_give_a_token_the_same_bits(
    size: Size, device: str, randn: Randn, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two groups of tokens have the same experts, the last of them not full, and some have one."""
    w, norm, x = random_experts(size, device), 1 + 0.2 * randn(size.h), randn(6, size.h)
    alone = torch.cat([cuda.moe(one, norm, EPS, w) for one in torch.split(x, 1)])
    monkeypatch.setattr(cuda_experts, "experts_way", lambda M: "lone" if M == 1 else "together")
    assert torch.equal(cuda.moe(x, norm, EPS, w), alone)


@gpu
@ON_GPU
def test_a_token_has_the_same_bits_in_any_company(size: Size, device: str, randn: Randn) -> None:
    w, norm = random_experts(size, device), 1 + 0.2 * randn(size.h)
    x = randn(EXPERTS_TOKENS, size.h)
    alone = torch.cat([cuda.moe(one, norm, EPS, w) for one in torch.split(x, 1)])
    for count in (2, 3, 4, 7, 8, 9, 16, 17, 24, 33, 48, EXPERTS_TOKENS):
        for some in (torch.arange(count), torch.randperm(EXPERTS_TOKENS)[:count]):
            assert torch.equal(cuda.moe(x[some.to(device)], norm, EPS, w), alone[some.to(device)])


@gpu
@ON_GPU
@pytest.mark.parametrize("M", [1, 8, 64])
def test_graphs(size: Size, M: int, device: str, randn: Randn) -> None:
    """Replays follow what is in the input, layer after layer."""
    w, norm = random_experts(size, device), 1 + 0.2 * randn(size.h)
    x = randn(M, size.h)

    def layers(x: Tensor) -> Tensor:
        for _ in range(4):
            x = cuda.moe(x, norm, EPS, w)
        return x

    layers(x)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = layers(x)
    for _ in range(5):
        x.copy_(randn(M, size.h))
        expected = layers(x)
        for _ in range(3):
            graph.replay()
            assert torch.equal(out, expected)


@gpu
@ON_GPU
@pytest.mark.parametrize("M", [16, 200])
def test_all_tokens_on_the_same_experts(size: Size, M: int, device: str, randn: Randn) -> None:
    """Equal rows of the router: the first experts are chosen, for every token."""
    w = random_experts(size, device)
    w = replace(w, router=w.router[:1].expand(len(w.router), -1).contiguous())
    x, norm = randn(M, size.h), 1 + 0.2 * randn(size.h)
    found = cuda.moe(x, norm, EPS, w)
    h = normed(x[:8], norm)
    scores = (h @ w.router[:1].double().T).expand(-1, len(w.router))
    expected = x[:8].double() + added(acts(h, scores, w), scores, w)
    assert relative_error(found[:8], expected) < 0.01
