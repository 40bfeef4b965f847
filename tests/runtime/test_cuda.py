"""The GPU backend under a random two-layer Qwen3: decoding step by step against prefill."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from lowbit.formats.architectures.dense import DenseConfig
from lowbit.formats.errors import FormatError, UnsupportedModelError
from lowbit.formats.packing import pack
from lowbit.runtime import cuda
from lowbit.runtime.cache import KVCache, new_cache
from lowbit.runtime.linear import DenseLinear, Linear, PackedLinear
from lowbit.runtime.models.dense import Dense, Layer
from lowbit.runtime.ops import rope_tables

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"  # the kernels' interpreter
# BF16 activations: prefill rounds the normed x, decode does not; measured 6e-3 of the norm.
ERROR = 0.02

SMALL = DenseConfig(33, 64, 64, 1, 2, 1, 32, 1e-6, 1e6, 32, False)
LARGE = DenseConfig(5000, 2048, 6144, 2, 16, 8, 128, 1e-6, 1e6, 4096, False)


def packed(N: int, K: int, bits: int, G: int) -> PackedLinear:
    high = 1 << (bits - 1)
    codes = torch.randint(-high, high, (N, K), dtype=torch.int8)
    scales = torch.randn(N, K // G) / (high * K**0.5)
    return PackedLinear(pack(codes, bits).to(DEVICE), scales.bfloat16().to(DEVICE), bits, G)


def randn(*shape: int) -> Tensor:
    return torch.randn(shape).bfloat16().to(DEVICE)


def random_model(config: DenseConfig, linear: Callable[[int, int], Linear]) -> Dense[Linear]:
    torch.manual_seed(0)
    h, inner, D = config.hidden_size, config.intermediate_size, config.head_dim
    q, kv = config.num_attention_heads * D, config.num_key_value_heads * D
    layers = tuple(
        Layer(
            input_norm=1 + 0.1 * randn(h),
            qkv=linear(q + 2 * kv, h),
            q_norm=1 + 0.1 * randn(D),
            k_norm=1 + 0.1 * randn(D),
            o=linear(h, q),
            post_norm=1 + 0.1 * randn(h),
            gate_up=linear(2 * inner, h),
            down=linear(h, inner),
        )
        for _ in range(config.num_hidden_layers)
    )
    return Dense(
        config=config,
        embedding=randn(config.vocab_size, h),
        layers=layers,
        norm=1 + 0.1 * randn(h),
        head=linear(config.vocab_size, h),
        rope=rope_tables(config.max_position_embeddings, D, config.rope_theta, DEVICE),
        ops=cuda,
    )


def cache_for(config: DenseConfig) -> KVCache:
    return new_cache(
        config.num_hidden_layers,
        config.num_key_value_heads,
        config.head_dim,
        config.max_position_embeddings,
        torch.bfloat16,
        DEVICE,
    )


@pytest.mark.parametrize(
    ("config", "tokens", "kind"),
    [
        (SMALL, 3, "int4"),
        pytest.param(SMALL, 3, "int8", marks=pytest.mark.slow),
        (SMALL, 3, "dense"),
        *(pytest.param(LARGE, 40, k, marks=pytest.mark.gpu) for k in ("int4", "int8", "dense")),
    ],
)
def test_decode_follows_prefill(config: DenseConfig, tokens: int, kind: str) -> None:
    def linear(N: int, K: int) -> Linear:
        if kind == "dense":
            return DenseLinear(randn(N, K) * K**-0.5)
        return packed(N, K, 4 if kind == "int4" else 8, 32)

    model = random_model(config, linear)
    ids = torch.randint(config.vocab_size, (tokens,)).to(DEVICE)

    at_once = model.hidden(ids, cache_for(config))
    cache, steps = cache_for(config), []
    for m in range(tokens):
        steps.append(model.hidden(ids[m : m + 1], cache))
        cache.truncate(cache.length + 1)
    one_by_one = torch.cat(steps)
    a, b = model.logits(at_once), torch.cat([model.logits(step) for step in steps])

    for x, y in ((one_by_one, at_once), (b, a)):
        assert x.shape == y.shape
        assert float((x.double() - y.double()).norm() / y.double().norm()) < ERROR


def test_chunks_follow_each_other() -> None:
    """A prompt in two chunks leaves the cache and the result of one chunk."""
    model = random_model(SMALL, lambda N, K: packed(N, K, 4, 32))
    ids = torch.randint(SMALL.vocab_size, (9,)).to(DEVICE)
    whole, parts = cache_for(SMALL), cache_for(SMALL)
    expected = model.hidden(ids, whole)
    model.hidden(ids[:4], parts)
    parts.truncate(4)
    got = model.hidden(ids[4:], parts)
    assert float((got.double() - expected[4:].double()).norm() / expected.norm()) < ERROR
    torch.testing.assert_close(parts.k, whole.k, rtol=0.1, atol=0.1)


@pytest.mark.parametrize("M", [1, 3])
def test_logits_are_not_rounded(M: int) -> None:
    x, norm, w = randn(M, 64), randn(64), packed(33, 64, 8, 32)
    y = cuda.norm_logits(x, norm, 1e-6, w)
    assert y.dtype == torch.float32
    assert bool((y != y.bfloat16().float()).any())
    rounded = cuda.norm_linear(x, norm, 1e-6, w).float()
    assert bool(((y - rounded).abs() <= 2.0**-7 * y.abs()).all())
    dense = DenseLinear(w.dequantized().bfloat16())
    close = cuda.norm_logits(x, norm, 1e-6, dense)
    assert close.dtype == torch.float32
    assert float((y - close).norm() / y.norm()) < ERROR


def test_prepare_refuses_small_groups() -> None:
    w = packed(4, 64, 4, 16)
    with pytest.raises(FormatError, match="groups of 16 codes have no GPU kernel"):
        cuda.prepare(w)
    w = packed(4, 48, 8, 48)
    with pytest.raises(FormatError, match="rows of 48"):
        cuda.prepare(w)
    w = packed(4, 64, 8, 32)
    assert cuda.prepare(w) is w


@pytest.mark.parametrize("size", [0, 8, 48, 96])
def test_head_sizes_without_a_kernel_are_named(size: int) -> None:
    cuda.check_heads(head_dim=64, linear_key_head_dim=128)
    with pytest.raises(UnsupportedModelError, match=f"head_dim = {size} has no GPU kernel"):
        cuda.check_heads(head_dim=size)
