"""INT8 pages of a sequence as BF16 pages in order, against the reference of the format."""

from dataclasses import replace

import pytest
import torch
from torch import Tensor

from lowbit.formats.kv_cache import widen_vectors
from lowbit.formats.page_counts import PAGE, pages_for
from lowbit.runtime.kernels.attention import widen_pages as module
from lowbit.runtime.kernels.attention.widen_pages import widen_pages
from lowbit.runtime.kernels.launch.attention import Packed
from lowbit.runtime.kernels.launch.card import Card
from lowbit.runtime.state.pages import KVPages
from lowbit.runtime.state.step import Span, Step
from tests.runtime.kernels.coded_pages import in_codes
from tests.runtime.kernels.paged import random_pages, rows_of, step_of

ALONE = Packed(1)
CASES = ((3, 64, 100, 29), (2, 256, 0, 7), (8, 128, 64, 64))
LONG = pytest.param(8, 128, 9000, 1024, marks=pytest.mark.gpu)


@pytest.mark.parametrize(("Hkv", "D", "past", "M"), [*CASES, LONG])
def test_rows_are_those_of_the_sequence(device: str, Hkv: int, D: int, past: int, M: int) -> None:
    """Of the second of two sequences whose pages lie in no order; more rows than it has."""
    context = past + M + 3 * PAGE
    wide, tables = random_pages(2, Hkv, D, [70, past + M], context, device)
    pages = in_codes(wide)
    found = widened(pages, step_of(tables, [Span(1, past, M)], prompt=True), tables.shape[1])
    codes, scales, k_scales, v_scales = (
        rows_of(x, tables, 1, 0, past + M)[1] for x in pages.stores
    )
    for rows, each, of in ((found[0], codes, k_scales), (found[1], scales, v_scales)):
        assert rows.shape == (tables.shape[1], PAGE, Hkv, D)
        expected = widen_vectors(each, of).bfloat16()
        kept = rows.flatten(0, 1)[: past + M]
        if device == "cpu":  # the interpreter cuts off what BF16 lacks
            torch.testing.assert_close(kept, expected, rtol=2.0**-7, atol=0)
        else:
            assert torch.equal(kept, expected)


@pytest.mark.parametrize(("fewest", "most"), [(1, 1 << 30), (60, 1 << 30), (1, 64)])
def test_pages_of_several_sequences_follow_one_another(
    device: str, fewest: int, most: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Those of the sequences taken alone, by three programs; empty sequences are behind."""
    Hkv, D, each = 2, 32, ((64, 70), (5, 0), (200, 0), (1, 383), (70, 1))
    monkeypatch.setattr(module, "EACH", 1)
    monkeypatch.setattr(module, "card_of", lambda x: Card((9, 0), 3))
    wide, tables = random_pages(2, Hkv, D, [9, *map(sum, each)], 512, device)
    pages = in_codes(wide)
    spans = [Span(row, past, count) for row, (count, past) in enumerate(each, 1)]
    taken = [span for span in spans if fewest <= span.count <= most]
    room = sum(pages_for(span.first + span.count) for span in taken)
    step = step_of(tables, spans, prompt=True)
    step = replace(step, starts=torch.cat([step.starts, step.starts[-1:].expand(3)]))
    found = widened(pages, step, room, Packed(8, fewest, most))
    at = 0
    for span in taken:
        count = pages_for(span.first + span.count)
        alone = widened(pages, step_of(tables, [span], prompt=True), count)
        for rows, own in zip(found, alone, strict=True):
            assert torch.equal(rows[at : at + count].view(torch.int16), own.view(torch.int16))
        at += count


def widened(pages: KVPages, step: Step, room: int, packed: Packed = ALONE) -> tuple[Tensor, Tensor]:
    """Pages of layer 1."""
    where = (step.tables, step.rows, step.positions, step.starts, step.tables.shape[1])
    stored = (*pages.layer(1), *(pages.layer_scales(1) or ()))
    return widen_pages(stored, where, room, packed)
