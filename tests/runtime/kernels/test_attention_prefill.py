"""Prefill attention against float64: plain, gated, partly rotated, without norms."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from lowbit.formats.page_counts import PAGE, pages_for
from lowbit.runtime.kernels.attention.prefill import attention_prefill
from lowbit.runtime.kernels.attention.reference import attention_ref
from lowbit.runtime.state.pages import KVPages
from lowbit.runtime.state.rope import Rope
from lowbit.runtime.state.step import Span
from lowbit.runtime.thresholds import PROMPT_TOKENS
from lowbit.runtime.weights.layers import AttentionLayer
from tests.lanes import in_kernels
from tests.runtime.kernels.attention_layers import BF16, EPS, FP32, REAL, Heads, hopper, layer_of
from tests.runtime.kernels.paged import clone, random_pages, rows_of, step_of, with_axes

Randn = Callable[..., Tensor]
MakeRope = Callable[[int, int], Rope]

# Softmax weights and the result are rounded to bfloat16, queries too (and the interpreter truncates
# them, the reference rounds); the result of a gated head is rounded before the gate as well.
# Relative to the norm of the result, in units of one such rounding.
ROUNDINGS = {False: 2, True: 3}


QWEN3 = [Heads(4, 2, 64, 64, gain=BF16), Heads(8, 1, 128, 128, gain=BF16)]
SMALL = [
    Heads(4, 2, 64, 16, gated=True, gain=FP32),
    Heads(3, 3, 32, 24, gain=FP32),  # rotated dimensions not a power of two
    Heads(7, 1, 32, 32),
    Heads(8, 1, 64, 32, gated=True),
    Heads(2, 1, 256, 64, gated=True, gain=FP32),
]
ON_HOPPER = [REAL[name] for name in ("qwen3-0.6b", "qwen3-8b", "qwen3.5-2b")]
CASES = [(QWEN3[0], 100, 0, 7), (QWEN3[0], 100, 33, 67), (QWEN3[1], 100, 99, 1)]
CASES += [(heads, 100, 0, 7) for heads in SMALL]
CASES += [(heads, 100, 33, 20) for heads in (SMALL[0], SMALL[-1])]
# Beyond PROMPT_TOKENS: large programs on Hopper, PyTorch elsewhere.
MANY = Heads(2, 1, 32, 32, gain=BF16)
WITH_KERNELS = [(MANY, 180, 33, 130)]  # `test_attention_prefill_codes` has gated heads always
WITH_KERNELS += [(heads, 100, 33, 20) for heads in SMALL[1:-1]]
LENGTHS = ((0, 777), (1000, 129), (0, 128), (3000, 33), (4001, 200))
ON_GPU = [(heads, 8192, past, M) for heads in REAL.values() for past, M in LENGTHS]


@in_kernels("4x2x64-r64-bfloat16-100-33-67")
@pytest.mark.parametrize(
    ("heads", "T", "past", "M"),
    [
        *CASES,
        *(pytest.param(*case, marks=pytest.mark.kernels) for case in WITH_KERNELS),
        *(pytest.param(*case, marks=pytest.mark.gpu) for case in ON_GPU),
    ],
    ids=str,
)
def test_prefill(
    randn: Randn,
    make_rope: MakeRope,
    bf16_error: float,
    device: str,
    heads: Heads,
    T: int,
    past: int,
    M: int,
) -> None:
    Hkv, D, qkv = heads.Hkv, heads.D, randn(M, heads.width)
    layer = layer_of(heads, make_rope(T, heads.R), device)
    pages, tables = random_pages(2, Hkv, D, [5, past], T, device, room=M)
    step, before = step_of(tables, [Span(1, past, M)], prompt=True), clone(pages)
    ref, _, _ = attention_ref(qkv, layer, pages, step)
    out = attention_prefill(qkv, layer, pages, step)
    error = float((out.double() - ref).norm() / ref.norm())
    assert error < ROUNDINGS[heads.gated] * bf16_error
    new = tables, 1, past, M
    assert torch.equal(rows_of(pages.v, *new)[1], qkv.view(M, -1, D)[:, -Hkv:])
    positions = torch.arange(past, past + M, device=device)
    places = tables[1].long()[positions // PAGE], positions % PAGE
    for rows, old in ((pages.k, before.k), (pages.v, before.v)):
        old[1][places] = rows[1][places]
        assert torch.equal(rows.view(torch.int16), old.view(torch.int16))


@pytest.mark.parametrize("M", [20, pytest.param(200, marks=pytest.mark.gpu)])
def test_a_chunk_may_have_rotary_tables_of_its_own(
    randn: Randn, make_rope: MakeRope, bf16_error: float, device: str, M: int
) -> None:
    heads, past = SMALL[0], 33
    qkv, layer = randn(M, heads.width), layer_of(heads, make_rope(300, heads.R), device)
    pages, tables = random_pages(2, heads.Hkv, heads.D, [5, past], 300, device, room=M)
    plain = step_of(tables, [Span(1, past, M)], prompt=True)
    step = with_axes(plain, layer.rope)
    ref, k, _ = attention_ref(qkv, layer, pages, step)
    out = attention_prefill(qkv, layer, pages, step)
    assert float((out.double() - ref).norm() / ref.norm()) < ROUNDINGS[True] * bf16_error
    stored = rows_of(pages.k, tables, 1, past, M)[1].double()
    assert float((stored - k).norm() / k.norm()) < 2 * bf16_error
    other = attention_prefill(qkv, layer, pages, plain)
    assert float((other.double() - ref).norm() / ref.norm()) > 0.05


@pytest.mark.parametrize("M", [20, pytest.param(130, marks=pytest.mark.gpu)])
def test_where_pages_lie_changes_nothing(
    randn: Randn, make_rope: MakeRope, device: str, M: int
) -> None:
    Hq, Hkv, D, past = 4, 2, 32, 70
    qkv, layer = randn(M, (Hq + 2 * Hkv) * D), AttentionLayer(0, make_rope(256, D), EPS)
    pages, tables = random_pages(1, Hkv, D, [past + M], 256, device)
    step = step_of(tables, [Span(0, past, M)], prompt=True)
    out = attention_prefill(qkv, layer, pages, step)
    # The same sequence in pages 2, 3, 4... of other pages; the host may know that, or not.
    own = tables[0, : pages_for(past + M)].long()
    other = KVPages(k=torch.zeros_like(pages.k), v=torch.zeros_like(pages.v))
    other.k[:, 2 : 2 + len(own)], other.v[:, 2 : 2 + len(own)] = pages.k[:, own], pages.v[:, own]
    moved = torch.arange(2, 2 + tables.shape[1], device=device, dtype=torch.int32)[None]
    for known in ((), tuple(moved[0].tolist())):
        step = step_of(moved, [Span(0, past, M, known)], prompt=True)
        assert torch.equal(attention_prefill(qkv, layer, other, step), out)


# Heads, tokens before, tokens, with padding: in small programs, and in those of Hopper alone.
PADDED = [
    (QWEN3[0], 33, 20, 32),
    (SMALL[0], 0, 33, 64),
    (SMALL[1], 60, 1, 32),
    *(
        pytest.param(heads, past, M, width, marks=pytest.mark.gpu)
        for heads in ON_HOPPER
        for past, M, width in ((0, 65, 128), (70, 130, 192), (3000, 257, 384))
    ),
]


@in_kernels("4x2x64-r16-gated-float32-0-33-64")
@in_kernels("4x2x64-r64-*")
@pytest.mark.parametrize(("heads", "past", "M", "width"), PADDED, ids=str)
def test_padding_changes_no_bit(
    randn: Randn, make_rope: MakeRope, device: str, heads: Heads, past: int, M: int, width: int
) -> None:
    """Padding changes neither result nor pages, whatever it holds."""
    if width > PROMPT_TOKENS and not hopper():
        pytest.skip("PyTorch attends to so many tokens, without padding")
    qkv = randn(width, heads.width)
    qkv[M:] = float("inf")  # pages hold NaN there
    layer = layer_of(heads, make_rope(4096, heads.R), device)
    pages, tables = random_pages(2, heads.Hkv, heads.D, [5, past], 4096, device, room=M)
    padded = clone(pages)
    found = []
    for stored, rows in ((pages, M), (padded, width)):
        step = step_of(tables, [Span(1, past, M)], prompt=True, padding=rows - M)
        found.append(attention_prefill(qkv[:rows], layer, stored, step)[:M])
    assert bool(found[0].isfinite().all())
    assert torch.equal(*found)
    for one, other in ((pages.k, padded.k), (pages.v, padded.v)):
        assert torch.equal(one.view(torch.int16), other.view(torch.int16))


def test_a_closed_gate_gives_nothing(randn: Randn, make_rope: MakeRope, device: str) -> None:
    """The gate of a head is what follows its query: closing one silences that head alone."""
    Hq, Hkv, D, M = 4, 2, 32, 5
    qkv = randn(M, (2 * Hq + 2 * Hkv) * D)
    pages, tables = random_pages(1, Hkv, D, [9], 64, device)
    heads = qkv.view(M, -1, D)
    heads[:, 1 : 2 * Hq : 2] = 100.0  # open
    heads[:, 2 * 2 + 1] = -float("inf")  # of head 2
    step = step_of(tables, [Span(0, 9, M)], prompt=True)
    out = attention_prefill(qkv, AttentionLayer(0, make_rope(64, 16), EPS, gated=True), pages, step)
    silent = (out.view(M, Hq, D) == 0).all(dim=-1)
    assert silent.tolist() == [[False, False, True, False]] * M


def test_the_rest_of_a_head_is_not_rotated(randn: Randn, make_rope: MakeRope, device: str) -> None:
    Hkv, D, R, M = 2, 32, 8, 3
    qkv = randn(M, 4 * Hkv * D)
    pages, tables = random_pages(1, Hkv, D, [40], 64, device)
    step = step_of(tables, [Span(0, 40, M)], prompt=True)
    attention_prefill(qkv, AttentionLayer(0, make_rope(64, R), EPS), pages, step)
    given = qkv.view(M, -1, D)[:, 2 * Hkv : 3 * Hkv]
    stored = rows_of(pages.k, tables, 0, 40, M)[0]
    assert torch.equal(stored[..., R:], given[..., R:])
    assert not torch.equal(stored[..., :R], given[..., :R])
