"""INT8 pages of a sequence as BF16 pages in order, against the reference of the format."""

import pytest
import torch

from lowbit.formats.kv_cache import widen_vectors
from lowbit.runtime.kernels.attention.widen_pages import widen_pages
from lowbit.runtime.state.page_counts import PAGE
from lowbit.runtime.state.step import Span
from tests.runtime.kernels.coded_pages import in_codes
from tests.runtime.kernels.paged import random_pages, rows_of, step_of

CASES = ((3, 64, 100, 29), (2, 256, 0, 7), (8, 128, 64, 64))
LONG = pytest.param(8, 128, 9000, 1024, marks=pytest.mark.gpu)


@pytest.mark.parametrize(("Hkv", "D", "past", "M"), [*CASES, LONG])
def test_rows_are_those_of_the_sequence(device: str, Hkv: int, D: int, past: int, M: int) -> None:
    """Of the second of two sequences whose pages lie in no order; more rows than it has."""
    context = past + M + 3 * PAGE
    wide, tables = random_pages(2, Hkv, D, [70, past + M], context, device)
    pages = in_codes(wide)
    step = step_of(tables, [Span(1, past, M)], prompt=True)
    where = (step.tables, step.rows, step.positions, step.starts, step.tables.shape[1])
    stored = (*pages.layer(1), *(pages.layer_scales(1) or ()))
    found = widen_pages(stored, where, step.tables.shape[1])
    codes, scales, k_scales, v_scales = (
        rows_of(x, tables, 1, 0, past + M)[1] for x in pages.stores
    )
    for rows, each, of in ((found[0], codes, k_scales), (found[1], scales, v_scales)):
        assert rows.shape == (step.tables.shape[1], PAGE, Hkv, D)
        expected = widen_vectors(each, of).bfloat16()
        kept = rows.flatten(0, 1)[: past + M]
        if device == "cpu":  # the interpreter cuts off what BF16 lacks
            torch.testing.assert_close(kept, expected, rtol=2.0**-7, atol=0)
        else:
            assert torch.equal(kept, expected)
