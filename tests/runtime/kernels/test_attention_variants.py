"""Attention as other models than Qwen3 have it: gated, partly rotated, without norms."""

from collections.abc import Callable
from dataclasses import dataclass

import pytest
import torch
from torch import Tensor

from lowbit.runtime import cuda
from lowbit.runtime.cache import KVCache
from lowbit.runtime.kernels.attention_decode import attention_decode, attention_decode_ref
from lowbit.runtime.kernels.attention_prefill import attention_prefill, attention_prefill_ref
from lowbit.runtime.ops import Rope

Randn = Callable[..., Tensor]
MakeCache = Callable[..., KVCache]
MakeRope = Callable[[int, int], Rope]

EPS = 1e-6
ROUNDINGS = 2  # of weights, queries and the result to bfloat16, as for the plain case
GATE_ROUNDINGS = 3  # in prefill the result is rounded before the gate as well


@dataclass(frozen=True)
class Heads:
    Hq: int
    Hkv: int
    D: int
    rotated: int
    gated: bool
    normed: bool

    @property
    def width(self) -> int:
        return ((2 if self.gated else 1) * self.Hq + 2 * self.Hkv) * self.D


SMALL = [
    Heads(4, 2, 64, 16, gated=True, normed=True),
    Heads(3, 3, 32, 24, gated=False, normed=True),  # rotated dimensions not a power of two
    Heads(7, 1, 32, 32, gated=False, normed=False),
    Heads(8, 1, 64, 32, gated=True, normed=False),
]
REAL = [
    Heads(8, 2, 256, 64, gated=True, normed=True),  # Qwen3.5-2B
    Heads(16, 4, 256, 64, gated=True, normed=True),  # 9B
    Heads(24, 4, 256, 64, gated=True, normed=True),  # 27B
    Heads(32, 8, 64, 64, gated=False, normed=False),  # Llama-3.2-1B
    Heads(28, 4, 128, 128, gated=False, normed=False),  # Qwen2.5-7B
]
GPU = pytest.mark.gpu


def relative_error(y: Tensor, ref: Tensor) -> float:
    return float((y.double() - ref).norm() / ref.norm())


def gains(heads: Heads, device: str) -> tuple[Tensor | None, Tensor | None]:
    """FP32 gains that bfloat16 would round."""
    if not heads.normed:
        return None, None
    q_norm, k_norm = (1.5 + 0.3 * torch.randn(heads.D, device=device) for _ in range(2))
    assert not torch.equal(q_norm, q_norm.bfloat16().float())
    return q_norm, k_norm


def name(value: object) -> str:
    if not isinstance(value, Heads):
        return str(value)
    flags = "-gated" * value.gated + "-normed" * value.normed
    return f"{value.Hq}x{value.Hkv}x{value.D}-r{value.rotated}{flags}"


DECODE = [(heads, 100, position) for heads in SMALL for position in (0, 1, 33, 99)]
DECODE_REAL = [(heads, 8192, position) for heads in REAL for position in (0, 255, 5000, 8191)]


@pytest.mark.parametrize(
    ("heads", "T", "position"),
    DECODE + [pytest.param(*case, marks=GPU) for case in DECODE_REAL],
    ids=name,
)
def test_decode(
    randn: Randn,
    make_cache: MakeCache,
    make_rope: MakeRope,
    bf16_error: float,
    device: str,
    heads: Heads,
    T: int,
    position: int,
) -> None:
    q_norm, k_norm = gains(heads, device)
    qkv, rope = randn(1, heads.width), make_rope(T, heads.rotated)
    cache = make_cache(2, heads.Hkv, heads.D, T, position)
    ref, k, v = attention_decode_ref(qkv, q_norm, k_norm, EPS, rope, cache, 1, heads.gated)
    out = attention_decode(qkv, q_norm, k_norm, EPS, rope, cache, 1, heads.gated)
    assert relative_error(out, ref) < ROUNDINGS * bf16_error
    new_k = cache.k[1, :, position].double()
    assert bool(((new_k - k).abs() <= bf16_error * k.abs() + 1e-6 * k.abs().max()).all())
    assert torch.equal(cache.v[1, :, position].double(), v)


PREFILL = [(heads, 100, past, M) for heads in SMALL for past, M in ((0, 7), (33, 20))]
PREFILL_REAL = [(heads, 8192, past, M) for heads in REAL for past, M in ((0, 777), (1000, 129))]


@pytest.mark.parametrize(
    ("heads", "T", "past", "M"),
    PREFILL + [pytest.param(*case, marks=GPU) for case in PREFILL_REAL],
    ids=name,
)
def test_prefill(
    randn: Randn,
    make_cache: MakeCache,
    make_rope: MakeRope,
    bf16_error: float,
    device: str,
    heads: Heads,
    T: int,
    past: int,
    M: int,
) -> None:
    q_norm, k_norm = gains(heads, device)
    qkv, rope = randn(M, heads.width), make_rope(T, heads.rotated)
    cache = make_cache(2, heads.Hkv, heads.D, T, past)
    ref = attention_prefill_ref(qkv, q_norm, k_norm, EPS, rope, cache, 1, heads.gated)
    out = attention_prefill(qkv, q_norm, k_norm, EPS, rope, cache, 1, heads.gated)
    assert relative_error(out, ref) < GATE_ROUNDINGS * bf16_error
    v = qkv[:, -heads.Hkv * heads.D :].view(M, heads.Hkv, heads.D).transpose(0, 1)
    assert torch.equal(cache.v[1, :, past : past + M], v)


def test_a_closed_gate_gives_nothing(
    randn: Randn, make_cache: MakeCache, make_rope: MakeRope
) -> None:
    """The gate of a head is what follows its query: closing one silences that head alone."""
    Hq, Hkv, D = 4, 2, 32
    for M in (1, 5):
        qkv, rope = randn(M, (2 * Hq + 2 * Hkv) * D), make_rope(64, 16)
        heads = qkv.view(M, -1, D)
        heads[:, 1 : 2 * Hq : 2] = 100.0  # open
        heads[:, 2 * 2 + 1] = -float("inf")  # of head 2
        out = cuda.attention(
            qkv, None, None, EPS, rope, make_cache(1, Hkv, D, 64, 9), 0, gated=True
        )
        silent = (out.view(M, Hq, D) == 0).all(dim=-1)
        assert silent.tolist() == [[False, False, True, False]] * M


def test_the_rest_of_a_head_is_not_rotated(
    randn: Randn, make_cache: MakeCache, make_rope: MakeRope
) -> None:
    Hkv, D, R, position = 2, 32, 8, 40
    qkv, cache = randn(1, 4 * Hkv * D), make_cache(1, Hkv, D, 64, position)
    attention_decode(qkv, None, None, EPS, make_rope(64, R), cache, 0)
    given, stored = qkv.view(-1, D)[2 * Hkv : 3 * Hkv], cache.k[0, :, position]
    assert torch.equal(stored[:, R:], given[:, R:])
    assert not torch.equal(stored[:, :R], given[:, :R])
