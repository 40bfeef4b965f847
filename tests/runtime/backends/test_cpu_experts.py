"""The experts' op on a CPU: its formula in FP64, ties, and a token's bits in company."""

import pytest
import torch
from torch import Tensor
from torch.nn.functional import silu

from lowbit.formats.activation_modes import Activations
from lowbit.formats.activations import (
    activation_group,
    dequantize_activations,
    quantize_activations,
)
from lowbit.formats.layout.packing import pack
from lowbit.runtime.backends import cpu
from lowbit.runtime.backends.cpu_experts import routes
from lowbit.runtime.backends.cpu_linear import CpuLinear, prepare
from lowbit.runtime.thresholds import EXACT_TOKENS
from lowbit.runtime.weights.linear import DenseLinear, ExpertWeights, Linear, PackedLinear
from tests.lanes import in_commands

EPS = 1e-6
H, INNER, SHARED = 64, 32, 96


def linear(kind: str, N: int, K: int) -> Linear:
    if kind == "dense":
        return DenseLinear(torch.randn(N, K).bfloat16() * 0.1)
    bits = int(kind[3])
    codes = torch.randint(-(1 << bits - 1), 1 << bits - 1, (N, K)).to(torch.int8)
    group = K if kind.endswith("row") else 32
    scales = (torch.rand(N, K // group) * 0.4 / (1 << bits)).bfloat16()
    return PackedLinear(pack(codes, bits), scales, bits, group)


def experts(
    kind: str, E: int, chosen: int, shared: bool, normed: bool = True
) -> ExpertWeights[Linear]:
    one = [(linear(kind, 2 * INNER, H), linear(kind, H, INNER)) for _ in range(E)]
    if shared:
        one.append((linear("int8", 2 * SHARED, H), linear("int8", H, SHARED)))
    return ExpertWeights(
        router=torch.randn(E + shared, H).bfloat16() * 0.3,
        gate_up=[gate_up for gate_up, _ in one],
        down=[down for _, down in one],
        chosen=chosen,
        shared=shared,
        normed=normed,
    )


def prepared(
    w: ExpertWeights[Linear], dtype: torch.dtype, activations: Activations = "exact"
) -> ExpertWeights[CpuLinear]:
    return ExpertWeights(
        router=w.router.to(dtype),
        gate_up=[prepare(each, dtype, activations) for each in w.gate_up],
        down=[prepare(each, dtype, activations) for each in w.down],
        chosen=w.chosen,
        shared=w.shared,
        normed=w.normed,
    )


def rounded(x: Tensor, w: Linear, activations: Activations) -> Tensor:
    """A token's input in FP64, as the linear takes it."""
    if activations == "exact" or isinstance(w, DenseLinear):
        return x
    group = activation_group(w.group_size, w.K)
    return dequantize_activations(*quantize_activations(x[None], group), group)[0].double()


def gated(x: Tensor, gate_up: Linear, down: Linear, activations: Activations) -> Tensor:
    x = rounded(x, gate_up, activations)
    gate, up = (x @ gate_up.dequantized().double().T).chunk(2)
    return rounded(silu(gate) * up, down, activations) @ down.dequantized().double().T


def in_fp64(
    x: Tensor, norm: Tensor, w: ExpertWeights[Linear], activations: Activations = "exact"
) -> Tensor:
    """The formula of `Ops.moe`, token by token."""
    out = x.double().clone()
    for token in out:
        h = token * torch.rsqrt(token.square().mean() + EPS) * norm.double()
        scores = w.router.double() @ h
        p = scores[: len(w.gate_up) - w.shared].softmax(0)
        best = sorted(range(len(p)), key=lambda e: -float(p[e]))[: w.chosen]
        for e in best:
            share = p[e] / p[best].sum() if w.normed else p[e]
            token += share * gated(h, w.gate_up[e], w.down[e], activations)
        if w.shared:
            token += torch.sigmoid(scores[-1]) * gated(h, w.gate_up[-1], w.down[-1], activations)
    return out


@in_commands("40-8-*-int8", "40-8-*-dense", "40-8-*-int8-row")
@pytest.mark.parametrize("kind", ["dense", "int4", "int8", "int8-row"])
@pytest.mark.parametrize(
    ("E", "chosen", "shared", "normed"),
    [(40, 8, False, True), (5, 1, True, False), (3, 3, True, True), (3, 2, False, False)],
)
def test_the_op_is_its_formula(kind: str, E: int, chosen: int, shared: bool, normed: bool) -> None:
    torch.manual_seed(1)
    w, norm, x = (
        experts(kind, E, chosen, shared, normed),
        1 + 0.1 * torch.randn(H),
        torch.randn(33, H),
    )
    found = cpu.moe(x, norm, EPS, prepared(w, torch.float32))
    expected = in_fp64(x, norm, w)
    assert (found - expected).abs().max() < 1e-5 * expected.abs().max()
    rounded = cpu.moe(x.bfloat16(), norm, EPS, prepared(w, torch.bfloat16))
    expected = in_fp64(x.bfloat16(), norm, w)
    assert (rounded - expected).norm() < 2e-2 * expected.norm()


@pytest.mark.parametrize("kind", ["int4", "int8-row"])
def test_experts_with_rounded_inputs_are_the_formula(kind: str) -> None:
    torch.manual_seed(1)
    w, norm = experts(kind, 5, 2, shared=True), 1 + 0.1 * torch.randn(H)
    x = torch.randn(33, H)
    found = cpu.moe(x, norm, EPS, prepared(w, torch.float32, "int8"))
    exact, expected = in_fp64(x, norm, w), in_fp64(x, norm, w, "int8")
    rounding = (expected - exact).norm()
    assert rounding > 5e-4 * exact.norm()
    # The norm's factor comes behind the rounding, so that a few codes beside a half differ by one.
    assert (found - expected).norm() < 0.1 * rounding + 1e-5 * exact.norm()


@in_commands("int4-int8-dtype1", "int8-exact-dtype0", "dense-exact-dtype1", "int8-row-exact-dtype0")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(
    ("kind", "activations"),
    [*((kind, "exact") for kind in ("dense", "int4", "int8", "int8-row")), ("int4", "int8")],
)
def test_a_token_has_the_same_bits_in_any_company(
    kind: str, dtype: torch.dtype, activations: Activations
) -> None:
    torch.manual_seed(2)
    w = prepared(experts(kind, 20, 5, shared=True), dtype, activations)
    norm, x = torch.ones(H, dtype=dtype), torch.randn(EXACT_TOKENS, H).to(dtype)
    alone = torch.cat([cpu.moe(one, norm, EPS, w) for one in torch.split(x, 1)])
    for count in (2, 3, 7, 16, 17, 33, EXACT_TOKENS):
        some = torch.randperm(EXACT_TOKENS)[:count]
        assert torch.equal(cpu.moe(x[some], norm, EPS, w), alone[some])


def test_of_equal_experts_the_first_are_chosen() -> None:
    scores = torch.tensor([[0.0, 2, 1, 2, 1, 1, 2], [0.0] * 7])
    shares, numbers = routes(scores, 4, normed=True)
    assert numbers.tolist() == [[1, 3, 6, 2], [0, 1, 2, 3]]
    whole = torch.tensor([2.0, 2, 2, 1]).exp()
    assert torch.allclose(shares, torch.stack((whole / whole.sum(), torch.full((4,), 0.25))))
