"""The GPU backend under a random two-layer Qwen3: decoding step by step against prefill.

Without a GPU, prompts of dense linears run in the interpreter of the kernels.
"""

from collections.abc import Iterator
from dataclasses import replace

import pytest
import torch
from torch import Tensor
from torch.nn.functional import silu

from lowbit.formats.architectures.dense import DenseConfig
from lowbit.formats.errors import FormatError, UnsupportedModelError
from lowbit.formats.layout.packing import pack
from lowbit.formats.page_counts import pages_for
from lowbit.runtime.backends import cuda
from lowbit.runtime.kernels.linear.tiles import GpuLinear, TiledLinear, dequantized
from lowbit.runtime.kernels.rows import rms_norm_ref
from lowbit.runtime.models.dense import Dense, Layer
from lowbit.runtime.state.device_state import DeviceState, new_state
from lowbit.runtime.state.rope import rope_tables
from lowbit.runtime.state.step_buffers import lone_step
from lowbit.runtime.thresholds import DENSE_TOKENS, PACKED_TOKENS
from lowbit.runtime.weights.layers import AttentionLayer
from lowbit.runtime.weights.linear import DenseLinear, MlpWeights, PackedLinear
from tests.lanes import in_commands
from tests.runtime.kernels.interpreter import quick_interpreter

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
GPU = pytest.mark.gpu
# Activations are BF16 everywhere; the weights of a long prompt are rounded to it as well.
ERROR = 0.02
EPS = 1e-6

SMALL = DenseConfig(33, 64, 64, 1, 2, 1, 32, 1e-6, 1e6, 64, False)
LARGE = DenseConfig(5000, 2048, 6144, 2, 16, 8, 128, 1e-6, 1e6, 4096, False)
PACKED = [pytest.param(kind, marks=GPU) for kind in ("int2", "int3", "int4", "int8")]


@pytest.fixture(scope="module", autouse=True)
def _quick_interpreter() -> Iterator[None]:
    if DEVICE == "cuda":  # where its parts of Triton are the compiler's
        yield
        return
    with quick_interpreter():
        yield


def packed(N: int, K: int, bits: int, G: int) -> PackedLinear:
    high = 1 << (bits - 1)
    codes = torch.randint(-high, high, (N, K), dtype=torch.int8)
    scales = torch.randn(N, K // G) / (high * K**0.5)
    return PackedLinear(pack(codes, bits).to(DEVICE), scales.bfloat16().to(DEVICE), bits, G)


def randn(*shape: int) -> Tensor:
    return torch.randn(shape).bfloat16().to(DEVICE)


def linear(kind: str, N: int, K: int, paired: bool = False) -> GpuLinear:
    """A random linear: int2, int3, int4, int8 or dense."""
    if kind == "dense":
        return DenseLinear(randn(N, K) * K**-0.5)
    return cuda.prepare(packed(N, K, int(kind.removeprefix("int")), 32), paired)


def weight_of(w: GpuLinear) -> Tensor:
    """Its exact weight in float64, in the order of the checkpoint's rows."""
    return (dequantized(w) if isinstance(w, TiledLinear) else w.weight).double()


def random_model(config: DenseConfig, kind: str) -> Dense[GpuLinear]:
    torch.manual_seed(0)
    h, inner, D = config.hidden_size, config.intermediate_size, config.head_dim
    q, kv = config.num_attention_heads * D, config.num_key_value_heads * D
    rope = rope_tables(config.max_position_embeddings, D, config.rope_theta, DEVICE)
    layers = tuple(
        Layer(
            input_norm=1 + 0.1 * randn(h),
            qkv=linear(kind, q + 2 * kv, h),
            attention=AttentionLayer(
                index, rope, config.rms_norm_eps, 1 + 0.1 * randn(D), 1 + 0.1 * randn(D)
            ),
            o=linear(kind, h, q),
            post_norm=1 + 0.1 * randn(h),
            mlp=MlpWeights(linear(kind, 2 * inner, h, paired=True), linear(kind, h, inner)),
        )
        for index in range(config.num_hidden_layers)
    )
    return Dense(
        config=config,
        embedding=randn(config.vocab_size, h),
        layers=layers,
        norm=1 + 0.1 * randn(h),
        head=linear(kind, config.vocab_size, h),
        ops=cuda,
    )


def state_for(config: DenseConfig) -> DeviceState:
    pages = 1 + pages_for(config.max_position_embeddings)
    return new_state(config, pages, 0, torch.bfloat16, DEVICE)


def relative_error(y: Tensor, ref: Tensor) -> float:
    return float((y.double() - ref.double()).norm() / ref.double().norm())


@GPU
@pytest.mark.parametrize("kind", ["int2", "int3", "int4", "int8", "dense"])
@pytest.mark.parametrize(
    ("config", "tokens"),
    [(SMALL, 3), (LARGE, 8), (LARGE, 20), (LARGE, 40)],
    ids=["small-3", "large-8", "large-20", "large-40"],
)
def test_decode_follows_prefill(config: DenseConfig, tokens: int, kind: str) -> None:
    model = random_model(config, kind)
    ids = torch.randint(config.vocab_size, (tokens,)).to(DEVICE)

    at_once = model.hidden(ids, state_for(config), lone_step(tokens, DEVICE))
    state, steps = state_for(config), []
    for m in range(tokens):
        step = lone_step(1, DEVICE, first=m, prompt=False)
        steps.append(model.hidden(ids[m : m + 1], state, step))
    one_by_one = torch.cat(steps)
    a, b = model.logits(at_once), torch.cat([model.logits(step) for step in steps])

    for x, y in ((one_by_one, at_once), (b, a)):
        assert x.shape == y.shape
        assert relative_error(x, y) < ERROR


@pytest.mark.parametrize("kind", ["dense", *PACKED])
def test_chunks_follow_each_other(kind: str) -> None:
    """A prompt in two chunks leaves the cache and the result of one chunk."""
    config = replace(SMALL, max_position_embeddings=160)
    model = random_model(config, kind)
    few, many = DENSE_TOKENS + 2, DENSE_TOKENS + 6  # rows in BF16 are the interpreter's from there
    ids = torch.randint(config.vocab_size, (few + many,)).to(DEVICE)
    whole, parts = state_for(config), state_for(config)
    expected = model.hidden(ids, whole, lone_step(few + many, DEVICE))
    model.hidden(ids[:few], parts, lone_step(few, DEVICE))
    got = model.hidden(ids[few:], parts, lone_step(many, DEVICE, first=few))
    assert float((got.double() - expected[few:].double()).norm() / expected.norm()) < ERROR
    torch.testing.assert_close(parts.pages.k, whole.pages.k, rtol=0.1, atol=0.1)


MANY = PACKED_TOKENS


@in_commands("dense-65_1")
@pytest.mark.parametrize(
    ("kind", "M"),
    [
        pytest.param(kind, M, marks=() if kind == "dense" and M > DENSE_TOKENS else GPU)
        for kind in ("dense", "int4", "int8")
        for M in (1, 3, DENSE_TOKENS, DENSE_TOKENS + 1, 32, 33, MANY, MANY + 1)
    ],
)
def test_linears_of_any_number_of_tokens(kind: str, M: int) -> None:
    """Whatever kernel so many tokens take, each op is the same product."""
    torch.manual_seed(1)
    x, norm, bias, residual = randn(M, 96), 1 + 0.1 * randn(96), 5 * randn(50), randn(M, 50)
    w, gate_up = linear(kind, 50, 96), linear(kind, 100, 96, paired=True)
    normed = rms_norm_ref(x, norm, EPS)
    biased = normed @ weight_of(w).T + bias.double()
    assert relative_error(cuda.product(x, w, norm=norm, eps=EPS, added=bias), biased) < ERROR
    assert relative_error(cuda.product(x, w, norm=norm, eps=EPS), biased - bias.double()) < ERROR
    added = x.double() @ weight_of(w).T + residual.double()
    assert relative_error(cuda.product(x, w, added=residual), added) < ERROR
    gate, up = (normed @ weight_of(gate_up).T).chunk(2, dim=1)
    act = cuda.product(x, gate_up, norm=norm, eps=EPS, swiglu=True)
    assert relative_error(act, silu(gate) * up) < ERROR
    logits = cuda.product(x, w, norm=norm, eps=EPS, logits=True)
    assert logits.dtype == torch.float32
    assert relative_error(logits, normed @ weight_of(w).T) < ERROR


@GPU
@pytest.mark.parametrize("M", [1, 3, MANY + 1])
def test_logits_are_not_rounded(M: int) -> None:
    x, norm, w = randn(M, 64), randn(64), cuda.prepare(packed(33, 64, 8, 32))
    y = cuda.product(x, w, norm=norm, eps=EPS, logits=True)
    assert bool((y != y.bfloat16().float()).any())
    rounded = cuda.product(x, w, norm=norm, eps=EPS).float()
    assert bool(((y - rounded).abs() <= 2.0**-7 * y.abs()).all())


def test_prepare_gives_tiles() -> None:
    w = packed(40, 64, 8, 32)
    for paired in (False, True):
        tiled = cuda.prepare(w, paired)
        assert isinstance(tiled, TiledLinear)
        assert tiled.paired == paired
        assert torch.equal(dequantized(tiled), w.dequantized())
    dense = DenseLinear(randn(4, 64))
    assert cuda.prepare(dense, True) is dense


def test_prepare_refuses_small_groups() -> None:
    with pytest.raises(FormatError, match="groups of 16 codes have no GPU kernel"):
        cuda.prepare(packed(4, 64, 4, 16))
    with pytest.raises(FormatError, match="rows of 48"):
        cuda.prepare(packed(4, 48, 8, 48))


@pytest.mark.parametrize("size", [0, 8, 48, 96])
def test_head_sizes_without_a_kernel_are_named(size: int) -> None:
    cuda.check_attention(256, 64)
    with pytest.raises(UnsupportedModelError, match=f"head_dim = {size} has no GPU kernel"):
        cuda.check_attention(size, 16)
    cuda.check_delta(128, 16)
    with pytest.raises(UnsupportedModelError, match=f"linear_key_head_dim = {size}"):
        cuda.check_delta(size, 128)
    with pytest.raises(UnsupportedModelError, match="linear_value_head_dim = 256"):
        cuda.check_delta(128, 256)


@pytest.mark.parametrize(
    ("sizes", "named"),
    [
        ((32, 24), "24 rotated dimensions"),
        ((32, 8), "8 rotated dimensions"),
        ((512, 512), "head_dim = 512"),
        ((96, 96), "head_dim = 96"),
    ],
)
def test_attention_without_a_kernel_is_refused(sizes: tuple[int, ...], named: str) -> None:
    with pytest.raises(UnsupportedModelError, match=named):
        cuda.check_attention(*sizes)


def test_attention_of_real_models_has_a_kernel() -> None:
    for sizes in ((128, 128), (256, 64), (64, 64)):
        cuda.check_attention(*sizes)
