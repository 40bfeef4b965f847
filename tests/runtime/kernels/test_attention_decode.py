"""Decode attention against float64: the heads of real models, over every reach of the cache."""

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor

from lowbit.runtime.kernels import attention_decode as module
from lowbit.runtime.kernels.attention_decode import attention_decode, attention_decode_ref
from lowbit.runtime.kernels.attention_join import join_splits
from lowbit.runtime.kernels.attention_prefill import attention_prefill
from lowbit.runtime.kernels.launch import AttentionLaunch, attention_launch
from lowbit.runtime.state.cache import KVCache
from lowbit.runtime.state.rope import Rope

pytestmark = pytest.mark.gpu

Randn = Callable[..., Tensor]
MakeCache = Callable[..., KVCache]
MakeRope = Callable[[int, int], Rope]

EPS = 1e-6
# Softmax weights and the result are rounded to bfloat16: relative to a head's norm, in units of one
# such rounding.
ROUNDINGS = 2
BF16, FP32 = torch.bfloat16, torch.float32


class Heads(NamedTuple):
    Hq: int
    Hkv: int
    D: int
    R: int
    gated: bool = False
    gain: torch.dtype | None = None


REAL = {
    "qwen3-0.6b": Heads(16, 8, 128, 128, gain=BF16),
    "qwen3-8b": Heads(32, 8, 128, 128, gain=BF16),
    "qwen3-32b": Heads(64, 8, 128, 128, gain=BF16),
    "qwen3.5-2b": Heads(8, 2, 256, 64, gated=True, gain=FP32),
    "qwen3.5-9b": Heads(16, 4, 256, 64, gated=True, gain=FP32),
    "qwen3.5-27b": Heads(24, 4, 256, 64, gated=True, gain=FP32),
    "qwen2.5-0.5b": Heads(14, 2, 64, 64),
    "qwen2.5-7b": Heads(28, 4, 128, 128),
    "llama-3.2-1b": Heads(32, 8, 64, 64),
}
ODD = {
    "tiny-qwen3": Heads(4, 2, 64, 64, gain=BF16),
    "tiny-qwen3.5": Heads(4, 2, 64, 16, gated=True, gain=FP32),
    "one-head": Heads(1, 1, 16, 16, gain=FP32),
    "none-shared": Heads(3, 3, 32, 32, gain=BF16),
    "rotated-48": Heads(5, 1, 128, 48, gain=FP32),
    "gated-only": Heads(8, 1, 64, 32, gated=True),
    "most": Heads(16, 2, 256, 64, gated=True, gain=FP32),
}
CONTEXT = 4096
POSITIONS = (0, 1, 15, 16, 17, 63, 64, 65, 127, 128, 129, 255, 1000, 4095)
LAYER = 1


@dataclass(frozen=True)
class Case:
    """A random token and a cache of two layers that holds what came before it."""

    heads: Heads
    qkv: Tensor
    q_norm: Tensor | None
    k_norm: Tensor | None
    rope: Rope
    cache: KVCache

    def run(self, layer: int = LAYER) -> Tensor:
        return attention_decode(*self._given(layer))

    def reference(self) -> tuple[Tensor, Tensor, Tensor]:
        return attention_decode_ref(*self._given(LAYER))

    def _given(self, layer: int) -> Any:
        norms = self.q_norm, self.k_norm
        return self.qkv, *norms, EPS, self.rope, self.cache, layer, self.heads.gated

    def check(self, bf16_error: float) -> None:
        """The result and the cache after it, and that all of it is ready for the next call."""
        cache, position = self.cache, int(self.cache.position)
        before = cache.k.clone(), cache.v.clone()
        ref, k, v = self.reference()
        out, again = self.run(), self.run()
        assert torch.equal(out, again), position
        error = (out.double() - ref).view(self.heads.Hq, -1).norm(dim=1)
        relative = error / ref.view(self.heads.Hq, -1).norm(dim=1)
        assert float(relative.max()) < ROUNDINGS * bf16_error, position
        # FP32 sums of a rotation may cancel: allow their rounding beside the half ulp.
        off = (cache.k[LAYER, :, position].double() - k).abs()
        assert bool((off <= bf16_error * k.abs() + 1e-6 * k.abs().max()).all()), position
        assert torch.equal(cache.v[LAYER, :, position].double(), v), position
        for rows, old in zip((cache.k, cache.v), before, strict=True):
            old[LAYER, :, position] = rows[LAYER, :, position]
            assert torch.equal(rows.view(torch.int16), old.view(torch.int16)), position


MakeCase = Callable[..., Case]


def gains(
    D: int, dtype: torch.dtype | None, device: str
) -> tuple[Tensor, Tensor] | tuple[None, None]:
    """Of queries and keys; some softmax weights dominate."""
    if dtype is None:
        return None, None
    q, k = (1.5 + 0.3 * torch.randn(2, D, device=device)).to(dtype)
    return q, k


@pytest.fixture
def make_case(randn: Randn, make_cache: MakeCache, make_rope: MakeRope, device: str) -> MakeCase:
    """`make_case(heads, context, position, reach)`; rows from the position on are NaN."""

    def make(heads: Heads, context: int, position: int, reach: int = 0) -> Case:
        Hq, Hkv, D, R, gated, gain = heads
        cache = make_cache(2, Hkv, D, context, position)
        cache.reach = reach
        qkv = randn(1, ((2 if gated else 1) * Hq + 2 * Hkv) * D)
        q_norm, k_norm = gains(D, gain, device)
        return Case(heads, qkv, q_norm, k_norm, make_rope(context, R), cache)

    return make


@pytest.mark.parametrize("reach", [256, 1024, CONTEXT])
@pytest.mark.parametrize("heads", REAL.values(), ids=REAL)
def test_real_heads(make_case: MakeCase, bf16_error: float, heads: Heads, reach: int) -> None:
    for position in (position for position in POSITIONS if position < reach):
        make_case(heads, CONTEXT, position, reach).check(bf16_error)


@pytest.mark.parametrize("context", [100, 200, 601])
@pytest.mark.parametrize("heads", ODD.values(), ids=ODD)
def test_odd_heads(make_case: MakeCase, bf16_error: float, heads: Heads, context: int) -> None:
    """Without a reach the whole context is divided."""
    for position in (0, 1, 33, context // 2, context - 1):
        make_case(heads, context, position).check(bf16_error)


@pytest.mark.parametrize("splits", [1, 2, 8, 64])
@pytest.mark.parametrize("name", ["qwen3-8b", "qwen3.5-9b"])
def test_any_number_of_splits(
    make_case: MakeCase,
    bf16_error: float,
    monkeypatch: pytest.MonkeyPatch,
    name: str,
    splits: int,
) -> None:
    """The sum of few rows by many programs, and of many by one."""
    monkeypatch.setattr(
        module, "attention_launch", lambda *sizes: replace(attention_launch(*sizes), splits=splits)
    )
    for position in (0, 1, 127, 128, 700, 4095):
        make_case(REAL[name], CONTEXT, position).check(bf16_error)


@pytest.mark.parametrize("name", ["qwen3-8b", "qwen3.5-2b"])
@pytest.mark.parametrize(
    "launch",
    [
        AttentionLaunch(1, 4, 2, parts=2),
        AttentionLaunch(1, 8, 1, parts=2, ahead=False),
        AttentionLaunch(1, 8, 2, ahead=True, early=True),
        AttentionLaunch(8, 4, 1),
        AttentionLaunch(4, 8, 1, early=True),
    ],
    ids=repr,
)
def test_any_other_launch(
    make_case: MakeCase,
    bf16_error: float,
    monkeypatch: pytest.MonkeyPatch,
    name: str,
    launch: AttentionLaunch,
) -> None:
    """What the rule does not take is right too: `tune_attention.py` tries it."""
    monkeypatch.setattr(module, "attention_launch", lambda *sizes: launch)
    for position in (0, 1, 63, 64, 65, 128, 129, 255):
        make_case(REAL[name], CONTEXT, position, 256).check(bf16_error)


@pytest.mark.parametrize("splits", [2, 8, 128])
@pytest.mark.parametrize(("heads", "D", "gated"), [(3, 16, False), (2, 128, False), (4, 256, True)])
def test_splits_join(
    randn: Randn, bf16_error: float, device: str, heads: int, D: int, gated: bool, splits: int
) -> None:
    """In float64 they make the same; what splits without rows have left is not looked at."""
    turn, B = 32, 4
    position = torch.tensor([turn * splits, 16 * splits, 1, 0], dtype=torch.int32, device=device)
    sums = randn(B, heads, splits, D).float()
    tops, totals = 30 * randn(B, heads, splits).float(), randn(B, heads, splits).float().abs() + 1
    for sequence, running in enumerate((splits, splits // 2, 1, 1)):
        for each in (sums, tops, totals):
            each[sequence, :, running:] = float("nan")
    qkv, out = randn(B, 2 * heads * D + 2 * D), randn(B, heads * D)
    state = torch.stack((tops, totals), dim=-1).flatten(0, 1)
    join_splits(sums.flatten(0, 1), state, qkv, position, out, turn, False, gated, False)
    weights = torch.exp2((tops - tops[..., :1]).double()).nan_to_num(0)[..., None]
    whole = (weights * totals.nan_to_num(0)[..., None]).sum(2)
    ref = (weights * sums.nan_to_num(0)).sum(2) / whole
    if gated:
        ref *= qkv[:, : 2 * heads * D].double().view(B, heads, 2, D)[:, :, 1].sigmoid()
    error = (out.view(B, heads, D).double() - ref).abs()
    assert bool((error <= bf16_error * ref.abs() + 1e-6 * ref.abs().max()).all())


@pytest.mark.parametrize("name", ["qwen3-8b", "qwen3.5-9b", "qwen2.5-0.5b"])
def test_steps_follow_each_other(make_case: MakeCase, bf16_error: float, name: str) -> None:
    """A step reads what the steps before it have written, beginning with an empty cache."""
    case = make_case(REAL[name], 1024, 0, 256)
    for _ in range(70):
        replace(case, qkv=torch.randn_like(case.qkv)).check(bf16_error)
        case.cache.advance(1)


def test_layers_and_reaches_take_turns(make_case: MakeCase) -> None:
    """No call may leave something to the next, whatever its splits."""
    case = make_case(REAL["qwen3-8b"], CONTEXT, 250)
    expected = {}
    for reach in (256, 1024, CONTEXT):
        case.cache.reach = reach
        expected[reach] = [case.run(layer) for layer in (0, 1)]
        torch.cuda.synchronize()
    for reach in (CONTEXT, 256, 1024, 256, CONTEXT):
        case.cache.reach = reach
        assert all(torch.equal(case.run(layer), expected[reach][layer]) for layer in (0, 1, 0, 1))


@pytest.mark.parametrize("position", [200, 4000])
@pytest.mark.parametrize("heads", REAL.values(), ids=REAL)
def test_same_bits(make_case: MakeCase, heads: Heads, position: int) -> None:
    case = make_case(heads, CONTEXT, position, 256 if position < 256 else 0)
    runs = [case.run() for _ in range(20)]
    assert all(torch.equal(runs[0], run) for run in runs)


@pytest.mark.parametrize("reach", [256, 1024])
@pytest.mark.parametrize("name", ["qwen3-0.6b", "qwen3.5-9b"])
def test_several_sequences(make_case: MakeCase, bf16_error: float, name: str, reach: int) -> None:
    """Each has its own rows and its own result, whatever the others' lengths."""
    heads, positions = REAL[name], (0, 1, 128, 255)
    first, *others = [make_case(heads, reach, position, reach) for position in positions]
    cases = [first, *(replace(case, q_norm=first.q_norm, k_norm=first.k_norm) for case in others)]
    together = replace(
        first,
        qkv=torch.cat([case.qkv for case in cases]),
        cache=KVCache(
            k=torch.cat([case.cache.k for case in cases], 1),
            v=torch.cat([case.cache.v for case in cases], 1),
            length=max(positions),
            position=torch.cat([case.cache.position for case in cases]),
            reach=reach,
        ),
    )
    out = together.run()
    for index, (case, position) in enumerate(zip(cases, positions, strict=True)):
        ref, _, _ = case.reference()
        error = (out[index].double() - ref[0]).view(heads.Hq, -1).norm(dim=1)
        relative = error / ref.view(heads.Hq, -1).norm(dim=1)
        assert float(relative.max()) < ROUNDINGS * bf16_error, position
        case.run()
        rows = slice(index * heads.Hkv, (index + 1) * heads.Hkv)
        for own, all_rows in ((case.cache.k, together.cache.k), (case.cache.v, together.cache.v)):
            assert torch.equal(own.view(torch.int16), all_rows[:, rows].view(torch.int16)), position


@pytest.mark.parametrize("position", [0, 1, 40])
def test_appends_what_prefill_appends(
    make_case: MakeCase, bf16_error: float, position: int
) -> None:
    """One token through either path leaves the same cache and nearly the same result."""
    case = make_case(ODD["tiny-qwen3"], 64, position)
    cache = case.cache
    other = KVCache(cache.k.clone(), cache.v.clone(), position, cache.position)
    a = case.run()
    b = attention_prefill(case.qkv, case.q_norm, case.k_norm, EPS, case.rope, other, LAYER)
    assert float((a.double() - b.double()).norm() / b.double().norm()) < ROUNDINGS * bf16_error
    assert torch.equal(cache.v.view(torch.int16), other.v.view(torch.int16))
    torch.testing.assert_close(cache.k, other.k, rtol=2.0**-7, atol=1e-5, equal_nan=True)


def test_a_closed_gate_gives_nothing(make_case: MakeCase) -> None:
    """The gate of a head is what follows its query: closing one silences that head alone."""
    case = make_case(ODD["tiny-qwen3.5"], 64, 9)
    heads = case.qkv.view(-1, 64)
    heads[1:8:2] = 100.0  # open
    heads[2 * 2 + 1] = -float("inf")  # of head 2
    silent = (case.run().view(4, 64) == 0).all(dim=-1)
    assert silent.tolist() == [False, False, True, False]


def test_the_rest_of_a_head_is_not_rotated(make_case: MakeCase) -> None:
    case = make_case(Heads(2, 2, 64, 16), 64, 40)
    case.run()
    given, stored = case.qkv.view(-1, 64)[2:4], case.cache.k[LAYER, :, 40]
    assert torch.equal(stored[:, 16:], given[:, 16:])
    assert not torch.equal(stored[:, :16], given[:, :16])
