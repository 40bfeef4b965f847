"""Attention of several prompts in one chunk: each has the bits that it has alone."""

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch
import triton
import triton.language as tl
from torch import Tensor

from lowbit.formats.page_counts import PAGE, pages_for
from lowbit.runtime.kernels.attention import prefill
from lowbit.runtime.kernels.attention.packed import sequence_of
from lowbit.runtime.kernels.attention.prefill import attention_prefill
from lowbit.runtime.kernels.attention.prefill_hopper import PromptPlan
from lowbit.runtime.kernels.launch import attention as launches
from lowbit.runtime.kernels.launch.attention import Packed
from lowbit.runtime.kernels.launch.card import Card
from lowbit.runtime.state.pages import KVPages
from lowbit.runtime.state.rope import Rope
from lowbit.runtime.state.step import Span, Step
from lowbit.runtime.thresholds import PROMPT_TOKENS
from tests.lanes import in_kernels
from tests.runtime.kernels.attention_layers import BF16, FP32, REAL, Heads, hopper, layer_of
from tests.runtime.kernels.coded_pages import in_codes
from tests.runtime.kernels.paged import clone, random_pages, step_of

Randn = Callable[..., Tensor]
MakeRope = Callable[[int, int], Rope]
Many = tuple[tuple[int, int], ...]  # tokens of each sequence, and those before them

CONTEXT = 1024
PLAIN = Heads(4, 2, 64, 64, gain=BF16)
GATED = Heads(2, 1, 64, 16, gated=True, gain=FP32)
SMALL = Heads(3, 3, 32, 24, gain=FP32)
FEW: Many = ((17, 0), (5, 70), (33, 1))
SEVERAL: Many = ((1, 64), (40, 0), (16, 90), (20, 3), (7, 130))
MIXED: Many = ((17, 0), (64, 1), (100, 700), (128, 0), (129, 0), (300, 1))
LATE: Many = ((300, 700), (17, 700), (129, 1), (128, 700), (100, 0), (200, 640))
LONG: Many = ((130, 1), (257, 700))
SHORT: Many = ((64, 700), (17, 0), (40, 1))
# Heads, sequences, tokens with padding, sequences with empty ones, and if pages have codes.
CASES = [
    (PLAIN, FEW, 64, 3, False),
    (GATED, SEVERAL, 96, 8, True),
    *((SMALL, FEW[:2], 22, 16, quantized) for quantized in (False, True)),
]
WITH_KERNELS = [
    (PLAIN, FEW, 64, 3, True),
    (GATED, SEVERAL, 96, 8, False),
    *(
        (*case, quantized)
        for case in ((PLAIN, SEVERAL, 84, 5), (GATED, FEW, 55, 4), (SMALL, SEVERAL, 128, 16))
        for quantized in (False, True)
    ),
]
WIDE = [REAL[name] for name in ("qwen3-0.6b", "qwen3-8b", "qwen3.5-2b", "qwen2.5-0.5b")]
ON_GPU = [
    (heads, each, width, sequences)
    for heads in (*WIDE, SMALL)
    for each, width, sequences in (
        (MIXED, 768, 16),
        (LATE, 896, 6),
        (LONG, 387, 2),
        (SHORT, 128, 16),
    )
]


@in_kernels("4x2x64-r64-bfloat16-*")
@in_kernels("3x3x32-*-False", "2x1x64-*-96-8-True")
@pytest.mark.parametrize(
    ("heads", "each", "tokens", "sequences", "quantized"),
    [
        *CASES,
        *(pytest.param(*case, marks=pytest.mark.kernels) for case in WITH_KERNELS),
        *(
            pytest.param(*case, quantized, marks=pytest.mark.gpu)
            for case in ON_GPU
            for quantized in (False, True)
        ),
    ],
    ids=str,
)
def test_company_changes_no_bit(
    randn: Randn,
    make_rope: MakeRope,
    device: str,
    heads: Heads,
    each: Many,
    tokens: int,
    sequences: int,
    quantized: bool,
) -> None:
    """Results and all pages are those of the sequences one by one, whatever padding holds."""
    if tokens > PROMPT_TOKENS and not hopper():
        pytest.skip("PyTorch attends to so many tokens, of one sequence")
    compare(randn, make_rope, device, heads, each, tokens, sequences, quantized)


@pytest.mark.parametrize(
    "quantized", [False, pytest.param(True, marks=pytest.mark.kernels)], ids=["bf16", "int8"]
)
def test_long_sequences_are_left_to_other_programs(
    randn: Randn,
    make_rope: MakeRope,
    device: str,
    quantized: bool,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """As on Hopper, with small programs over the pages that its large ones would read."""
    heads = Heads(1, 1, 64, 16, gated=True, gain=FP32)
    limit = 32  # in place of PROMPT_TOKENS: the interpreter takes seconds for its multiples
    each: Many = ((20, 3), (34, 70), (33, 0))
    asked: list[tuple[int, Packed]] = []

    def attend(
        q: Tensor,
        k: Tensor,
        v: Tensor,
        qkv: Tensor,
        out: Tensor,
        where: tuple[Tensor | int, ...],
        scale: float,
        plan: PromptPlan,
    ) -> None:
        asked.append((len(k), plan.packed))
        if plan.in_order:
            where = in_order(where, plan.packed)
        prefill._attend_in_blocks(
            q, (k, v, None, None), qkv, out, where, scale, plan.heads, plan.packed
        )

    monkeypatch.setattr(launches, "PROMPT_TOKENS", limit)
    monkeypatch.setattr(prefill, "card_of", lambda x: Card((9, 0)))
    monkeypatch.setattr(prefill, "attend_on_hopper", attend)
    compare(randn, make_rope, device, heads, each, 91, 5, quantized)
    room, packed = asked[0]
    assert packed == Packed(5, fewest=limit + 1)
    if quantized:
        assert room == sum(pages_for(count + past) for count, past in each) + 5
    assert [packed for _, packed in asked[1:]] == [Packed(1)] * 2  # of the long ones, alone


def in_order(where: tuple[Tensor | int, ...], packed: Packed) -> tuple[Tensor | int, ...]:
    """Tables by which the pages of the sequences that are taken follow one another."""
    tables, rows, positions, starts, stride = where
    assert isinstance(tables, Tensor)
    assert isinstance(rows, Tensor)
    assert isinstance(positions, Tensor)
    assert isinstance(starts, Tensor)
    found, at = torch.full_like(tables, 1 << 30), 0
    for first, stop in zip(starts.tolist(), starts.tolist()[1:], strict=False):
        if packed.sequences == 1 or packed.fewest <= stop - first <= packed.most:
            count = pages_for(int(positions[stop - 1]) + 1)
            found[rows[first], :count] = torch.arange(at, at + count, device=tables.device).int()
            at += count
    return found, rows, positions, starts, stride


def compare(
    randn: Randn,
    make_rope: MakeRope,
    device: str,
    heads: Heads,
    each: Many,
    tokens: int,
    sequences: int,
    quantized: bool,
) -> None:
    """Attend to sequences together, then to one after another."""
    lengths = [past for _, past in each]
    longest = max(count for count, _ in each)
    layer = layer_of(heads, make_rope(CONTEXT + 16, heads.R), device)
    wide, tables = random_pages(2, heads.Hkv, heads.D, [9, *lengths], CONTEXT, device, room=longest)
    pages = in_codes(wide) if quantized else wide
    expected, qkv = clone(pages), randn(tokens, heads.width)
    spans = [Span(row, past, count) for row, (count, past) in enumerate(each, 1)]
    total = sum(span.count for span in spans)
    qkv[total:] = float("inf")
    out = attention_prefill(qkv, layer, pages, packed(tables, spans, tokens, sequences))
    assert bool(out[:total].isfinite().all())
    first = 0
    for span in spans:
        own = qkv[first : first + span.count]
        alone = attention_prefill(own, layer, expected, step_of(tables, [span], prompt=True))
        assert torch.equal(out[first : first + span.count], alone), span
        first += span.count
    assert same_bytes(pages, expected)


def packed(tables: Tensor, spans: Sequence[Span], tokens: int, sequences: int) -> Step:
    """The step of several prompts, with padding; the host knows no spans."""
    pages = sum(pages_for(span.first + span.count) for span in spans)
    padding = tokens - sum(span.count for span in spans)
    step = step_of(tables, list(spans), pages * PAGE, prompt=True, padding=padding)
    empty = step.starts[-1:].expand(sequences - len(spans))
    return replace(step, starts=torch.cat([step.starts, empty]), spans=())


def same_bytes(one: KVPages, other: KVPages) -> bool:
    return all(
        torch.equal(a.view(torch.uint8), b.view(torch.uint8))
        for a, b in zip(one.stores, other.stores, strict=True)
    )


def test_several_sequences_are_not_for_pytorch(
    randn: Randn, make_rope: MakeRope, device: str
) -> None:
    if hopper():
        pytest.skip("kernels attend to them")
    heads, spans = SMALL, [Span(0, 0, 100), Span(1, 0, 29)]
    pages, tables = random_pages(2, heads.Hkv, heads.D, [0, 0], 128, device, room=128)
    layer, before = layer_of(heads, make_rope(128, heads.R), device), clone(pages)
    with pytest.raises(ValueError, match="2 sequences in 129 tokens"):
        attention_prefill(randn(129, heads.width), layer, pages, packed(tables, spans, 129, 2))
    assert same_bytes(pages, before)


@triton.jit  # type: ignore[untyped-decorator]
def _places_kernel(
    out_ptr: Any, starts_ptr: Any, positions_ptr: Any,
    PACKED: tl.constexpr, TOKENS: tl.constexpr, ROWS: tl.constexpr,
) -> None:  # fmt: skip
    block = tl.program_id(0)
    first, count, own, pages = sequence_of(block, starts_ptr, positions_ptr, PACKED, TOKENS, ROWS)
    tl.store(out_ptr + 4 * block, first)
    tl.store(out_ptr + 4 * block + 1, count)
    tl.store(out_ptr + 4 * block + 2, own)
    tl.store(out_ptr + 4 * block + 3, pages)


COUNTS = ([17, 64, 128, 129, 300], [1], [129, 1, 130], [128, 128], [500], [16, 32, 15], [1] * 16)


@in_kernels(
    "?17, *-(1, 128)",
    "?500?-(1, 1*",
    "?500?-(129, *",
    "?1, 1, *-(1, 1073741824)",
    "?128, 128?-(1, *",
    "?129, 1, *-(1, 1073741824)",
)
@pytest.mark.parametrize("limits", [(1, 1 << 30), (1, 128), (129, 1 << 30)], ids=str)
@pytest.mark.parametrize("counts", COUNTS, ids=str)
def test_programs_find_each_block_once(
    device: str, counts: list[int], limits: tuple[int, int]
) -> None:
    """A program for each block of the sequences taken, and no more than those of `blocks`."""
    each, B, pasts = 16, max(8, len(counts)), [0, 1, 700, 63, 64, *range(11)][: len(counts)]
    packed = Packed(B, *limits)
    expected, at, pages = [], 0, 0
    for count, past in zip(counts, pasts, strict=True):
        if limits[0] <= count <= limits[1]:
            expected += [[at, count, i, pages] for i in range(-(-count // each))]
            pages += pages_for(past + count)
        at += count
    starts = torch.tensor([sum(counts[:i]) for i in range(B + 1)], device=device).int()
    positions = [past + i for count, past in zip(counts, pasts, strict=True) for i in range(count)]
    most = packed.blocks(at, each)
    assert most >= len(expected)
    found = torch.empty(most + 1, 4, dtype=torch.int32, device=device)
    _places_kernel[(most + 1,)](
        found,
        starts,
        torch.tensor(positions, device=device).int(),
        PACKED=packed,
        TOKENS=each,
        ROWS=PAGE,
    )
    assert found[: len(expected)].tolist() == expected
    assert found[len(expected) :, 1].tolist() == [0] * (most + 1 - len(expected))
