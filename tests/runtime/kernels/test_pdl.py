"""Programmatic launch: a kernel that starts early must not read what its producer still writes."""

from collections.abc import Callable

import pytest
import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait, globaltimer

from lowbit.runtime import cuda
from lowbit.runtime.cache import KVCache
from lowbit.runtime.delta import DeltaState, DeltaWeights
from lowbit.runtime.linear import DenseLinear, PackedLinear
from lowbit.runtime.ops import Rope

MakePacked = Callable[[int, int, int, int], PackedLinear]
Randn = Callable[..., Tensor]

pytestmark = pytest.mark.gpu

DELAY_NS = 300_000
EPS = 1e-6


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


def late_copy(source: Tensor, target: Tensor) -> None:
    """Fill target from source, late."""
    n = source.numel()
    _late_copy_kernel[(triton.cdiv(n, 1024),)](
        source, target, n, DELAY_NS, BLOCK=1024, launch_pdl=True, enable_fp_fusion=True
    )


@pytest.fixture
def hopper() -> None:
    if torch.cuda.get_device_capability() < (9, 0):
        pytest.skip("programmatic launch needs compute capability 9.0")


def check_waits(op: Callable[[Tensor], Tensor], x: Tensor) -> None:
    """`op(x)` is the same when x is written late by the kernel just before it."""
    expected = op(x)
    for _ in range(3):
        target = torch.full_like(x, 1)
        torch.cuda.synchronize()
        late_copy(x, target)
        assert torch.equal(op(target), expected)


@pytest.mark.usefixtures("hopper")
@pytest.mark.parametrize("bits", [4, 8])
def test_gemvs_wait(make_packed: MakePacked, randn: Randn, bits: int) -> None:
    w, norm, residual = make_packed(bits, 2048, 2048, 128), randn(2048), randn(1, 2048)
    x = randn(1, 2048)
    check_waits(lambda x: cuda.norm_linear(x, norm, EPS, w), x)
    check_waits(lambda x: cuda.norm_swiglu(x, norm, EPS, w), x)
    check_waits(lambda x: cuda.linear_add(x, w, residual), x)
    check_waits(lambda residual: cuda.linear_add(x, w, residual), residual)


@pytest.mark.usefixtures("hopper")
def test_embed_waits(randn: Randn) -> None:
    table = randn(100, 2048)
    check_waits(lambda ids: cuda.embed(ids, table), torch.tensor([77], device="cuda"))


@pytest.mark.usefixtures("hopper")
def test_attention_waits(
    randn: Randn, make_cache: Callable[..., KVCache], make_rope: Callable[[int, int], Rope]
) -> None:
    q_norm, k_norm, rope = randn(128), randn(128), make_rope(4096, 128)
    cache = make_cache(1, 8, 128, 4096, 3000)
    check_waits(
        lambda qkv: cuda.attention(qkv, q_norm, k_norm, EPS, rope, cache, 0), randn(1, 32 * 128)
    )


@pytest.mark.usefixtures("hopper")
def test_dense_gemv_waits(randn: Randn) -> None:
    w, norm, bias = DenseLinear(randn(64, 2048)), randn(2048).float(), randn(64)
    x = randn(1, 2048)
    check_waits(lambda x: cuda.norm_linear(x, norm, EPS, w, bias), x)
    check_waits(lambda residual: cuda.linear_add(x, w, residual), randn(1, 64))


@pytest.mark.usefixtures("hopper")
def test_delta_net_waits(randn: Randn) -> None:
    """Neither the inputs nor the state is read before the kernel ahead has written them."""
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

    def step(qkvz: Tensor, ba: Tensor, memory: Tensor, window: Tensor) -> Tensor:
        return cuda.delta_net(qkvz, ba, weights, EPS, DeltaState(window, memory), 0)

    expected = step(*(x.clone() for x in inputs))
    for late in (0, 1, 2, 3) * 3:
        given = [x.clone() for x in inputs]
        given[late].fill_(1)
        torch.cuda.synchronize()
        late_copy(inputs[late], given[late])
        assert torch.equal(step(*given), expected)


@pytest.mark.usefixtures("hopper")
def test_a_wait_covers_earlier_kernels(make_packed: MakePacked, randn: Randn) -> None:
    """Three kernels on, what the first of them writes late is complete, in a graph too."""
    w, norm, x = make_packed(4, 2048, 2048, 128), randn(2048), randn(1, 2048)
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
