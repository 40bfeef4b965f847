"""Programmatic launch: a kernel that starts early must not read what its producer still writes.

What earlier steps wrote (positions, block tables, the pages' rows) may be read early.
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
from lowbit.runtime.kernels.experts import down as experts_down
from lowbit.runtime.kernels.launch import choose as choose_module
from lowbit.runtime.kernels.launch.experts import experts_down_launch
from lowbit.runtime.kernels.launch.linear import gemv_launch
from lowbit.runtime.kernels.linear.gemv import gemv
from lowbit.runtime.kernels.linear.norm import SQUARES
from lowbit.runtime.kernels.linear.tiles import TiledLinear
from lowbit.runtime.state.delta import DeltaSlots
from lowbit.runtime.state.rope import Rope
from lowbit.runtime.state.sampler import new_sampler_rows
from lowbit.runtime.state.sampling_params import SamplingParams
from lowbit.runtime.state.step import Span, Step
from lowbit.runtime.weights.layers import AttentionLayer, DeltaLayer
from lowbit.runtime.weights.linear import DenseLinear, PackedLinear
from tests.runtime.kernels.expert_layers import Size, random_experts
from tests.runtime.kernels.paged import random_pages, rows_of, step_of

MakePacked = Callable[[int, int, int, int], PackedLinear]
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
    cached = choose_module.packed_variant
    monkeypatch.setattr(choose_module, "packed_variant", getattr(cached, "__wrapped__", cached))
    monkeypatch.setattr(
        choose_module, "gemv_launch", lambda *sizes: replace(gemv_launch(*sizes), early=chosen)
    )
    return chosen


@pytest.fixture(params=[True, False], ids=["staged", "given"])
def staged(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whether programs turn x into digits, or a kernel before does."""
    cached, launch = choose_module.packed_variant, choose_module.gemv_launch  # type: ignore[attr-defined]
    monkeypatch.setattr(choose_module, "packed_variant", getattr(cached, "__wrapped__", cached))
    monkeypatch.setattr(
        choose_module,
        "gemv_launch",
        lambda *sizes: replace(launch(*sizes), staged=bool(request.param)),
    )


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
    assert waits(lambda x: cuda.product(x, w, norm=norm, eps=EPS), x)
    assert waits(lambda x: cuda.product(x, w, norm=norm, eps=EPS, added=bias), x)
    assert waits(lambda x: cuda.product(x, w, added=residual), x)
    assert waits(lambda residual: cuda.product(x, w, added=residual), residual)
    assert waits(lambda x: cuda.product(x, w, norm=norm, eps=EPS, logits=True), x)
    gate_up = make_tiled(bits, 4096, 2048, 128, True)
    assert waits(lambda x: cuda.product(x, gate_up, norm=norm, eps=EPS, swiglu=True), x)
    squares = torch.rand(1, 16, SQUARES, device="cuda")
    assert waits(lambda squares: gemv(x, w, squares=squares, eps=EPS), squares)


@BITS
@pytest.mark.usefixtures("early", "staged")
@pytest.mark.parametrize("tokens", [2, 8, 16, 20])
def test_gemvs_of_several_tokens_wait(
    make_tiled: MakeTiled, randn: Randn, bits: int, tokens: int
) -> None:
    w, x, residual = make_tiled(bits, 2048, 2048, 128), randn(tokens, 2048), randn(tokens, 2048)
    norm = randn(2048)
    assert waits(lambda x: cuda.product(x, w, added=residual), x, stale=True)
    assert waits(lambda residual: cuda.product(x, w, added=residual), residual)
    assert waits(lambda x: cuda.product(x, w, norm=norm, eps=EPS), x, stale=True)
    gate_up = make_tiled(bits, 4096, 2048, 128, True)
    assert waits(lambda x: gemv(x, gate_up), x, stale=True)
    squares = torch.rand(tokens, 16, SQUARES, device="cuda")
    assert waits(lambda squares: gemv(x, w, squares=squares, eps=EPS), squares, stale=True)


@pytest.mark.parametrize(("N", "K"), [(4096, 12288), (24576, 4096), (1024, 2048), (151936, 1024)])
def test_gemvs_as_they_are_launched_wait(
    make_tiled: MakeTiled, randn: Randn, N: int, K: int
) -> None:
    """Of weights of every size class."""
    w, residual = make_tiled(4, N, K, 128), randn(1, N)
    assert waits(lambda x: cuda.product(x, w, added=residual), randn(1, K))


@BITS
@pytest.mark.parametrize("tokens", [1, 8, 16, 40])
@pytest.mark.parametrize("fused", ["added", "norm", "heads"])
def test_products_of_rounded_inputs_wait(
    make_packed: MakePacked, randn: Randn, bits: int, tokens: int, fused: str
) -> None:
    """Products wait for tokens that their programs round, and that a kernel before rounds."""
    w = cuda.prepare(make_packed(bits, 2048, 4352, 128), inputs="int8")
    x, residual, squares = randn(tokens, 4352), randn(tokens, 2048), torch.rand(tokens, 34, SQUARES)
    given = {"norm": randn(4352)} if fused == "norm" else {}
    given |= {"squares": squares.cuda()} if fused == "heads" else {}

    def compute(x: Tensor, added: Tensor) -> Tensor:
        return cuda.product(x, w, added=added, eps=EPS, **given)  # type: ignore[arg-type]

    assert waits(lambda x: compute(x, residual), x, stale=True)
    assert waits(lambda residual: compute(x, residual), residual, stale=True)


def test_convolutions_wait(randn: Randn) -> None:
    own, base = randn(8, 4 * 16), randn(2, 2, 256)
    x = randn(8, 256)
    assert waits(lambda x: cuda.convolve(x, own, base, 0, 8), x)
    assert waits(lambda own: cuda.convolve(x, own, base, 1, 8, added=x), own)


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
@pytest.mark.parametrize(("reach", "tokens"), [(256, 1), (4096, 1), (256, 4), (4096, 4)])
def test_attention_waits(
    randn: Randn,
    make_tiled: MakeTiled,
    make_rope: Callable[[int, int], Rope],
    reach: int,
    tokens: int,
    heads: tuple[int, int, int, int, bool],
) -> None:
    """Whatever is read of the pages before, new tokens are complete: queries, key, value, gate.

    The rows of the new tokens are written by the call and must not be what a call reads early.
    """
    Hq, Hkv, D, R, gated = heads
    layer = AttentionLayer(0, make_rope(4096, R), EPS, randn(D), randn(D), gated)
    position = min(3000, reach - 6)
    pages, tables = random_pages(1, Hkv, D, [position], 4096, "cuda")
    step = step_of(tables, [Span(0, position, tokens)], reach)

    def attend(qkv: Tensor) -> Tensor:
        out = cuda.attention(qkv, layer, pages, step)
        new = [rows_of(each, tables, 0, position, tokens) for each in (pages.k, pages.v)]
        return torch.cat([part.flatten() for part in (out, *new)])

    qkv = randn(tokens, ((2 if gated else 1) * Hq + 2 * Hkv) * D)
    assert waits(attend, qkv, stale=True)
    w, residual = make_tiled(4, 1024, Hq * D, 128), randn(tokens, 1024)

    def attend_and_project(qkv: Tensor) -> Tensor:
        """The linear may start while splits are read."""
        out = cuda.attention(qkv, layer, pages, step)
        return cuda.product(out, w, added=residual)

    assert waits(attend_and_project, qkv, stale=True)


@pytest.mark.usefixtures("early")
def test_gemv_with_rows_beside_waits(make_tiled: MakeTiled, randn: Randn) -> None:
    w, small = make_tiled(4, 4096, 2048, 128), DenseLinear(randn(64, 2048))
    norm = randn(2048).float()
    for tokens in (1, 5, 16):
        x = randn(tokens, 2048)
        assert waits(lambda x: torch.cat(cuda.two_products(x, w, small, norm, EPS), -1), x)


@pytest.mark.parametrize("ahead", [True, False], ids=["ahead", "behind"])
@pytest.mark.parametrize("successor", [True, False], ids=["early", "late"])
@pytest.mark.parametrize(
    "size", [Size(4, 2048, 512, 256, 8, True), Size(8, 256, 128, 6, 2, False)], ids=str
)
def test_experts_wait(
    randn: Randn, monkeypatch: pytest.MonkeyPatch, size: Size, successor: bool, ahead: bool
) -> None:
    """The scores too, which `experts_down` may read before it waits, are those of this input."""
    monkeypatch.setattr(
        experts_down,
        "experts_down_launch",
        lambda *sizes: replace(experts_down_launch(*sizes), early=successor, ahead=ahead),
    )
    w, norm = random_experts(size, "cuda"), 1 + 0.2 * randn(size.h)
    for tokens in (1, 4, 20):
        x = randn(tokens, size.h)
        assert waits(lambda x: cuda.moe(x, norm, EPS, w), x, stale=True)
        assert waits(lambda x: cuda.moe(cuda.moe(x, norm, EPS, w), norm, EPS, w), x, stale=True)


@pytest.mark.parametrize(
    "size", [Size(4, 2048, 512, 256, 8, True), Size(8, 256, 128, 40, 3, False)], ids=str
)
def test_experts_with_rounded_inputs_wait(randn: Randn, size: Size) -> None:
    """Routes and blocks, which kernels read before they wait, are those of this input."""
    w, norm = random_experts(size, "cuda", "int8"), 1 + 0.2 * randn(size.h)
    for tokens in (1, 4, 20, 300):
        x = randn(tokens, size.h)
        assert waits(lambda x: cuda.moe(x, norm, EPS, w), x, stale=True)
        assert waits(lambda x: cuda.moe(cuda.moe(x, norm, EPS, w), norm, EPS, w), x, stale=True)


def test_dense_gemv_waits(randn: Randn) -> None:
    w, norm, bias = DenseLinear(randn(64, 2048)), randn(2048).float(), randn(64)
    for tokens in (1, 12):
        x, residual = randn(tokens, 2048), randn(tokens, 64)
        assert waits(lambda x: cuda.product(x, w, norm=norm, eps=EPS, added=bias), x)
        assert waits(lambda x, r=residual: cuda.product(x, w, added=r), x)  # type: ignore[misc]
        assert waits(lambda r, x=x: cuda.product(x, w, added=r), residual)  # type: ignore[misc]


@pytest.mark.parametrize(
    ("starts", "write"), [((0, 1), (0,)), ((0, 2, 4, 6), (1, 0, 3, 2, 5, 4))], ids=["one", "three"]
)
def test_delta_net_waits(
    make_tiled: MakeTiled, randn: Randn, starts: tuple[int, ...], write: tuple[int, ...]
) -> None:
    """Inputs are not read before the kernel ahead has written them; slots are older.

    One token in place, then two of each of three sequences, the second in place.
    """
    Hk, Hv, D, M = 16, 32, 128, len(write)
    C = 2 * Hk * D + Hv * D
    w = make_tiled(8, 1024, Hv * D, 128) if M == 1 else DenseLinear(randn(1024, Hv * D))
    residual = randn(M, 1024)
    layer = DeltaLayer(
        index=0,
        conv=randn(C, 4).float(),
        decay=-randn(Hv).float().abs(),
        dt_bias=randn(Hv).float(),
        norm=randn(D).float(),
        key_heads=Hk,
        key_dim=D,
        eps=EPS,
    )
    inputs = [randn(M, C + Hv * D), randn(M, 2 * Hv)]
    conv, memory = randn(1, M, 3, C), randn(1, M, Hv, D, D).float()
    numbers = [torch.tensor(x, dtype=torch.int32, device="cuda") for x in (starts, write)]
    step = Step(
        positions=numbers[1],
        rows=numbers[1],
        starts=numbers[0],
        tables=numbers[1],
        read=numbers[0][:-1].contiguous(),
        write=numbers[1],
        max_kv_len=M,
        longest=2,
        spans=(),
    )

    def advance(late: int | None) -> list[Tensor]:
        """The result, and the slots after it."""
        qkvz, ba = given = [x.clone() for x in inputs]
        arrived = torch.zeros(M, Hk, dtype=torch.int32, device="cuda")
        slots = DeltaSlots(conv.clone(), memory.clone(), arrived)
        if late is not None:
            given[late].fill_(1)
        torch.cuda.synchronize()
        if late is not None:
            late_copy(inputs[late], given[late])
        out = cuda.delta_linear(qkvz, ba, layer, slots.layer(0), step, w, residual)
        return [out, slots.conv, slots.memory, arrived]

    expected = advance(None)
    assert not expected[-1].any()
    for late in (0, 1) * 3:
        assert all(torch.equal(*pair) for pair in zip(advance(late), expected, strict=True))


@pytest.mark.parametrize("bias", [(), ((7, 1.0),)], ids=["as they are", "adjusted"])
@pytest.mark.parametrize("top_k", [1, 20, 0], ids=["greedy", "top 20", "all"])
def test_choosing_waits(randn: Randn, top_k: int, bias: tuple[tuple[int, float], ...]) -> None:
    V, M = 151936, 3
    sampler = new_sampler_rows(M + 1, V, "cuda")
    for row in range(1, M + 1):
        sampler.configure_row(row, SamplingParams(0.8, top_k, seed=row, logit_bias=bias), [])
    rows = torch.arange(1, M + 1, dtype=torch.int32, device="cuda")
    positions = torch.zeros(M, dtype=torch.int32, device="cuda")
    token = torch.zeros(M, dtype=torch.int64, device="cuda")
    slots = torch.zeros(2, M + 1, dtype=torch.int64, pin_memory=True)

    def chosen(logits: Tensor) -> Tensor:
        cuda.choose(logits, sampler, rows, positions, token, slots)
        positions.zero_()  # the same random numbers for every call
        return token.clone()

    assert waits(chosen, 5 * randn(M, V).float(), stale=True)


@pytest.mark.usefixtures("early")
def test_a_wait_covers_earlier_kernels(make_tiled: MakeTiled, randn: Randn) -> None:
    """Three kernels on, what the first of them writes late is complete, in a graph too."""
    w, norm, x = make_tiled(4, 2048, 2048, 128), randn(2048), randn(1, 2048)
    residual, late = randn(1, 2048), torch.zeros(1, 2048, device="cuda", dtype=torch.bfloat16)

    def chain(residual: Tensor) -> Tensor:
        y = cuda.product(x, w, norm=norm, eps=EPS)
        y = cuda.product(y, w, norm=norm, eps=EPS)
        return cuda.product(y, w, added=residual)

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
