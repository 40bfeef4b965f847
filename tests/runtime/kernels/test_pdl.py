"""Programmatic launch: a kernel that starts early must not read what its producer still writes.

What earlier steps wrote (the position, the rows of the cache before it) may be read early.
"""

from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait, globaltimer

from lowbit.runtime.backends import cuda
from lowbit.runtime.kernels import gemv as gemv_module
from lowbit.runtime.kernels.choose import choose
from lowbit.runtime.kernels.draw import GROUP, draw
from lowbit.runtime.kernels.gemv import gemv
from lowbit.runtime.kernels.gemv_stage import SQUARES
from lowbit.runtime.kernels.launch import gemv_launch
from lowbit.runtime.kernels.tiles import TiledLinear
from lowbit.runtime.state.cache import KVCache
from lowbit.runtime.state.delta import DeltaState, DeltaWeights
from lowbit.runtime.state.rope import Rope
from lowbit.runtime.state.sampling import SamplingParams, new_sampler
from lowbit.runtime.weights.linear import DenseLinear

MakeTiled = Callable[..., TiledLinear]
Randn = Callable[..., Tensor]

DELAY_NS = 300_000
EPS = 1e-6
BITS = pytest.mark.parametrize("bits", [4, 8])


@pytest.fixture
def hopper() -> None:
    if torch.cuda.get_device_capability() < (9, 0):
        pytest.skip("programmatic launch needs compute capability 9.0")


pytestmark = [pytest.mark.gpu, pytest.mark.usefixtures("hopper")]


@pytest.fixture(params=[False, True], ids=["late", "early"])
def early(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> bool:
    """Whether every GEMV lets its successor start before it has waited itself."""
    chosen = bool(request.param)
    monkeypatch.setattr(
        gemv_module, "gemv_launch", lambda *sizes: replace(gemv_launch(*sizes), early=chosen)
    )
    return chosen


@triton.jit  # type: ignore[untyped-decorator]
def _late_copy_kernel(source_ptr, target_ptr, n, delay_ns, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]
    """Let the next kernel start at once, and write target much later."""
    gdc_wait()
    gdc_launch_dependents()
    start = globaltimer()
    now = start
    while now - start < delay_ns:
        now = globaltimer()
    offs = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    tl.store(target_ptr + offs, tl.load(source_ptr + offs, mask=offs < n), mask=offs < n)


@triton.jit  # type: ignore[untyped-decorator]
def _hasty_copy_kernel(source_ptr, target_ptr, n, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]
    """What no kernel may be: it reads, and then waits."""
    offs = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    values = tl.load(source_ptr + offs, mask=offs < n)
    gdc_wait()
    tl.store(target_ptr + offs, values, mask=offs < n)


def late_copy(source: Tensor, target: Tensor) -> None:
    """Fill target from source, late."""
    n = source.numel()
    _late_copy_kernel[(triton.cdiv(n, 1024),)](
        source, target, n, DELAY_NS, BLOCK=1024, launch_pdl=True, enable_fp_fusion=True
    )


def waits(op: Callable[[Tensor], Tensor], x: Tensor, stale: bool = False) -> bool:
    """Whether `op(x)` is the same each time x is written late by the kernel just before it.

    stale: leave between its kernels what another input makes, since a second kernel of op that
    reads early would find what the first has made of x the time before.
    """
    expected = op(x)
    same = []
    for _ in range(3):
        target = torch.full_like(x, 1)
        if stale:
            op(target)
        torch.cuda.synchronize()
        late_copy(x, target)
        same.append(torch.equal(op(target), expected))
    return all(same)


def test_a_kernel_that_reads_early_is_noticed(randn: Randn) -> None:
    def hasty_copy(x: Tensor) -> Tensor:
        out = torch.empty_like(x)
        _hasty_copy_kernel[(2,)](x, out, 2048, BLOCK=1024, launch_pdl=True, enable_fp_fusion=True)
        return out

    assert not waits(hasty_copy, randn(2048))


@BITS
@pytest.mark.usefixtures("early")
def test_gemvs_wait(make_tiled: MakeTiled, randn: Randn, bits: int) -> None:
    w, norm, bias = make_tiled(bits, 2048, 2048, 128), randn(2048), randn(2048)
    x, residual = randn(1, 2048), randn(1, 2048)
    assert waits(lambda x: gemv(x, w), x)
    assert waits(lambda x: cuda.norm_linear(x, norm, EPS, w), x)
    assert waits(lambda x: cuda.norm_linear(x, norm, EPS, w, bias), x)
    assert waits(lambda x: cuda.linear_add(x, w, residual), x)
    assert waits(lambda residual: cuda.linear_add(x, w, residual), residual)
    assert waits(lambda x: cuda.norm_logits(x, norm, EPS, w), x)
    gate_up = make_tiled(bits, 4096, 2048, 128, True)
    assert waits(lambda x: cuda.norm_swiglu(x, norm, EPS, gate_up), x)
    squares = torch.rand(16, SQUARES, device="cuda")
    assert waits(lambda squares: gemv(x, w, squares=squares, eps=EPS), squares)


@BITS
@pytest.mark.usefixtures("early")
@pytest.mark.parametrize("tokens", [2, 8, 20])
def test_gemvs_of_several_tokens_wait(
    make_tiled: MakeTiled, randn: Randn, bits: int, tokens: int
) -> None:
    w, x, residual = make_tiled(bits, 2048, 2048, 128), randn(tokens, 2048), randn(tokens, 2048)
    assert waits(lambda x: cuda.linear_add(x, w, residual), x)
    assert waits(lambda residual: cuda.linear_add(x, w, residual), residual)
    gate_up = make_tiled(bits, 4096, 2048, 128, True)
    assert waits(lambda x: gemv(x, gate_up), x)


@pytest.mark.parametrize(("N", "K"), [(4096, 12288), (24576, 4096), (1024, 2048), (151936, 1024)])
def test_gemvs_as_they_are_launched_wait(
    make_tiled: MakeTiled, randn: Randn, N: int, K: int
) -> None:
    """Of weights of every size class."""
    w, residual = make_tiled(4, N, K, 128), randn(1, N)
    assert waits(lambda x: cuda.linear_add(x, w, residual), randn(1, K))


def test_embed_waits(randn: Randn) -> None:
    table = randn(100, 2048)
    assert waits(lambda ids: cuda.embed(ids, table), torch.tensor([77], device="cuda"))


@pytest.mark.parametrize(
    "heads",
    [
        (16, 8, 128, 128, False),
        (32, 8, 128, 128, False),
        (8, 2, 256, 64, True),
        (16, 4, 256, 64, True),
    ],
    ids=str,
)
@pytest.mark.parametrize("reach", [256, 4096])
def test_attention_waits(
    randn: Randn,
    make_tiled: MakeTiled,
    make_cache: Callable[..., KVCache],
    make_rope: Callable[[int, int], Rope],
    reach: int,
    heads: tuple[int, int, int, int, bool],
) -> None:
    """Whatever it reads of the cache before, the new token is complete: queries, key, value, gate.

    The row of the new token is written by the call and must not be what a call reads early.
    """
    Hq, Hkv, D, R, gated = heads
    q_norm, k_norm, rope = randn(D), randn(D), make_rope(4096, R)
    cache = make_cache(1, Hkv, D, 4096, min(3000, reach - 6))
    cache.reach = reach
    row = int(cache.position)

    def attend(qkv: Tensor) -> Tensor:
        out = cuda.attention(qkv, q_norm, k_norm, EPS, rope, cache, 0, gated)
        return torch.cat([part.flatten() for part in (out, cache.k[0, :, row], cache.v[0, :, row])])

    qkv = randn(1, ((2 if gated else 1) * Hq + 2 * Hkv) * D)
    assert waits(attend, qkv, stale=True)
    w, residual = make_tiled(4, 1024, Hq * D, 128), randn(1, 1024)

    def attend_and_project(qkv: Tensor) -> Tensor:
        """The linear may start while splits are read."""
        out = cuda.attention(qkv, q_norm, k_norm, EPS, rope, cache, 0, gated)
        return cuda.linear_add(out, w, residual)

    assert waits(attend_and_project, qkv, stale=True)


@pytest.mark.usefixtures("early")
def test_gemv_with_rows_beside_waits(make_tiled: MakeTiled, randn: Randn) -> None:
    w, small = make_tiled(4, 4096, 2048, 128), DenseLinear(randn(64, 2048))
    norm, x = randn(2048).float(), randn(1, 2048)
    assert waits(lambda x: torch.cat(cuda.norm_linears(x, norm, EPS, w, small), -1), x)


def test_dense_gemv_waits(randn: Randn) -> None:
    w, norm, bias = DenseLinear(randn(64, 2048)), randn(2048).float(), randn(64)
    x, residual = randn(1, 2048), randn(1, 64)
    assert waits(lambda x: cuda.norm_linear(x, norm, EPS, w, bias), x)
    assert waits(lambda x: cuda.linear_add(x, w, residual), x)
    assert waits(lambda residual: cuda.linear_add(x, w, residual), residual)


def test_delta_net_waits(make_tiled: MakeTiled, randn: Randn) -> None:
    """Inputs are not read before the kernel ahead has written them; the state is older."""
    w, residual = make_tiled(8, 1024, 4096, 128), randn(1, 1024)
    Hk, Hv, D = 16, 32, 128
    C = 2 * Hk * D + Hv * D
    weights = DeltaWeights(
        conv=randn(C, 4).float(),
        decay=-randn(Hv).float().abs(),
        dt_bias=randn(Hv).float(),
        norm=randn(D).float(),
        key_heads=Hk,
        key_dim=D,
    )
    inputs = [randn(1, C + Hv * D), randn(1, 2 * Hv), randn(1, Hv, D, D).float(), randn(1, 3, C)]

    def step(qkvz: Tensor, ba: Tensor, memory: Tensor, window: Tensor) -> list[Tensor]:
        """The result and the state after it."""
        state = DeltaState(window, memory)
        out = cuda.delta_linear(qkvz, ba, weights, EPS, state, 0, w, residual)
        return [out, memory, window]

    expected = step(*(x.clone() for x in inputs))
    for late in (0, 1) * 3:
        given = [x.clone() for x in inputs]
        given[late].fill_(1)
        torch.cuda.synchronize()
        late_copy(inputs[late], given[late])
        assert all(torch.equal(*pair) for pair in zip(step(*given), expected, strict=True))


@pytest.mark.parametrize(
    "params", [SamplingParams(), SamplingParams(temperature=0.8, top_k=20)], ids=["greedy", "hot"]
)
def test_choosing_waits(randn: Randn, params: SamplingParams) -> None:
    sampler = new_sampler(151936, 16, "cuda")
    sampler.start(params, [1], 16)
    sampler.uniforms.fill_(0.7)  # the same for every call
    token = torch.zeros(1, dtype=torch.int64, device="cuda")
    position = torch.zeros(1, dtype=torch.int32, device="cuda")
    slots = torch.zeros(2, dtype=torch.int64, pin_memory=True)

    def chosen(logits: Tensor) -> Tensor:
        choose(logits, sampler, token, position, slots)
        return token.clone()

    assert waits(chosen, 5 * randn(1, 151936).float())
    assert int(position) == int(sampler.drawn) == 4


def test_drawing_waits(randn: Randn) -> None:
    """The kernels after the first one, by themselves."""
    V = 151552  # whole blocks
    logits = 5 * randn(1, V).float()
    bits = logits[0].view(torch.int32)
    ordered = torch.where(bits < 0, bits ^ 0x7FFFFFFF, bits).long()
    keys = (ordered << 32) | (0x7FFFFFFF - torch.arange(V, device="cuda"))
    sampler = new_sampler(V, 16, "cuda")
    sampler.start(SamplingParams(temperature=0.8, top_k=20), [1], 16)
    sampler.uniforms.fill_(0.7)
    token = torch.zeros(1, dtype=torch.int64, device="cuda")
    position = torch.zeros(1, dtype=torch.int32, device="cuda")
    slots = torch.zeros(2, dtype=torch.int64, pin_memory=True)

    def drawn(keys: Tensor) -> Tensor:
        draw(logits, keys, sampler, token, position, slots)
        return token.clone()

    assert waits(drawn, keys.view(-1, GROUP).amax(1))


@pytest.mark.usefixtures("early")
def test_a_wait_covers_earlier_kernels(make_tiled: MakeTiled, randn: Randn) -> None:
    """Three kernels on, what the first of them writes late is complete, in a graph too."""
    w, norm, x = make_tiled(4, 2048, 2048, 128), randn(2048), randn(1, 2048)
    residual, late = randn(1, 2048), torch.zeros(1, 2048, device="cuda", dtype=torch.bfloat16)

    def chain(residual: Tensor) -> Tensor:
        y = cuda.norm_linear(x, norm, EPS, w)
        y = cuda.norm_linear(y, norm, EPS, w)
        return cuda.linear_add(y, w, residual)

    expected = chain(residual)
    graph = torch.cuda.CUDAGraph()
    late_copy(residual, late)
    with torch.cuda.graph(graph):
        late_copy(residual, late)
        out = chain(late)
    for _ in range(3):
        late.zero_()
        graph.replay()
        assert torch.equal(out, expected)
