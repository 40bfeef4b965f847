"""Decode and prefill attention against float64."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from lowbit.runtime.cache import KVCache
from lowbit.runtime.kernels.attention_decode import attention_decode, attention_decode_ref
from lowbit.runtime.kernels.attention_prefill import attention_prefill, attention_prefill_ref
from lowbit.runtime.ops import Rope

Randn = Callable[..., Tensor]
MakeCache = Callable[..., KVCache]
MakeRope = Callable[[int, int], Rope]

EPS = 1e-6
# Softmax weights and the result are rounded to bfloat16, queries too (and the interpreter truncates
# them, the reference rounds): relative to the norm of the result, in units of one such rounding.
ROUNDINGS = 2

HEADS = [(4, 2, 64), (8, 1, 128), (3, 3, 64)]
POSITIONS = [0, 1, 31, 32, 33, 64, 99]
SMALL = [(*heads, 100, position) for heads in HEADS for position in POSITIONS]
REAL_HEADS = [(16, 8, 128), (32, 8, 128), (64, 8, 128), (4, 2, 64)]
REAL_POSITIONS = [0, 1, 255, 1024, 5000, 8191]
REAL = [(*heads, 8192, position) for heads in REAL_HEADS for position in REAL_POSITIONS]
CASES = SMALL + [pytest.param(*case, marks=pytest.mark.gpu) for case in REAL]


def relative_error(y: Tensor, ref: Tensor) -> float:
    return float((y.double() - ref).norm() / ref.norm())


def sharp(randn: Randn, M: int, Hq: int, Hkv: int, D: int) -> tuple[Tensor, Tensor, Tensor]:
    """qkv and gains that make some softmax weights dominate."""
    return randn(M, (Hq + 2 * Hkv) * D), 1.5 + 0.3 * randn(D), 1.5 + 0.3 * randn(D)


@pytest.mark.parametrize(("Hq", "Hkv", "D", "T", "position"), CASES)
def test_decode(
    randn: Randn,
    make_cache: MakeCache,
    make_rope: MakeRope,
    bf16_error: float,
    Hq: int,
    Hkv: int,
    D: int,
    T: int,
    position: int,
) -> None:
    qkv, q_norm, k_norm = sharp(randn, 1, Hq, Hkv, D)
    rope, cache = make_rope(T, D), make_cache(2, Hkv, D, T, position)
    before_k, before_v = cache.k.clone(), cache.v.clone()
    ref, k, v = attention_decode_ref(qkv, q_norm, k_norm, EPS, rope, cache, 1)
    out = attention_decode(qkv, q_norm, k_norm, EPS, rope, cache, 1)
    assert relative_error(out, ref) < ROUNDINGS * bf16_error

    new_k = cache.k[1, :, position].double()
    # FP32 sums of a rotation may cancel: allow their rounding beside the half ulp.
    assert bool(((new_k - k).abs() <= bf16_error * k.abs() + 1e-6 * k.abs().max()).all())
    assert torch.equal(cache.v[1, :, position].double(), v)
    cache.k[1, :, position] = before_k[1, :, position]
    cache.v[1, :, position] = before_v[1, :, position]
    assert torch.equal(cache.k.view(torch.int16), before_k.view(torch.int16))
    assert torch.equal(cache.v.view(torch.int16), before_v.view(torch.int16))


PREFILL = [(4, 2, 64, 100, 0, 7), (4, 2, 64, 100, 33, 67), (8, 1, 128, 100, 99, 1)]
PREFILL_REAL = [(16, 8, 128, 8192, 0, 777), (32, 8, 128, 8192, 1000, 129)]
PREFILL_CASES = PREFILL + [pytest.param(*case, marks=pytest.mark.gpu) for case in PREFILL_REAL]


@pytest.mark.parametrize(("Hq", "Hkv", "D", "T", "past", "M"), PREFILL_CASES)
def test_prefill(
    randn: Randn,
    make_cache: MakeCache,
    make_rope: MakeRope,
    bf16_error: float,
    Hq: int,
    Hkv: int,
    D: int,
    T: int,
    past: int,
    M: int,
) -> None:
    qkv, q_norm, k_norm = sharp(randn, M, Hq, Hkv, D)
    rope, cache = make_rope(T, D), make_cache(2, Hkv, D, T, past)
    before = cache.k.clone()
    ref = attention_prefill_ref(qkv, q_norm, k_norm, EPS, rope, cache, 1)
    out = attention_prefill(qkv, q_norm, k_norm, EPS, rope, cache, 1)
    assert relative_error(out, ref) < ROUNDINGS * bf16_error
    assert torch.equal(cache.v[1, :, past : past + M], qkv.view(M, -1, D)[:, -Hkv:].transpose(0, 1))
    cache.k[1, :, past : past + M] = before[1, :, past : past + M]
    assert torch.equal(cache.k.view(torch.int16), before.view(torch.int16))


@pytest.mark.parametrize("position", [0, 1, 40])
def test_decode_appends_what_prefill_appends(
    randn: Randn, make_cache: MakeCache, make_rope: MakeRope, bf16_error: float, position: int
) -> None:
    """One token through either path leaves the same cache and nearly the same result."""
    qkv, q_norm, k_norm = sharp(randn, 1, 4, 2, 64)
    rope, decode = make_rope(64, 64), make_cache(1, 2, 64, 64, position)
    prefill = KVCache(decode.k.clone(), decode.v.clone(), position, decode.position)
    a = attention_decode(qkv, q_norm, k_norm, EPS, rope, decode, 0)
    b = attention_prefill(qkv, q_norm, k_norm, EPS, rope, prefill, 0)
    assert relative_error(a, b.double()) < ROUNDINGS * bf16_error
    assert torch.equal(decode.k.view(torch.int16), prefill.k.view(torch.int16))
    assert torch.equal(decode.v.view(torch.int16), prefill.v.view(torch.int16))


@pytest.mark.gpu
def test_same_bytes_twice(randn: Randn, make_cache: MakeCache, make_rope: MakeRope) -> None:
    qkv, q_norm, k_norm = sharp(randn, 1, 32, 8, 128)
    rope, cache = make_rope(8192, 128), make_cache(1, 8, 128, 8192, 8000)
    runs = [attention_decode(qkv, q_norm, k_norm, EPS, rope, cache, 0) for _ in range(20)]
    assert all(torch.equal(runs[0], run) for run in runs)
