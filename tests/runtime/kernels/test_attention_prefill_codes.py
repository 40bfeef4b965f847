"""Prefill attention over INT8 codes: against float64 on what is stored."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from lowbit.formats.kv_cache import quantize_vectors, widen_vectors
from lowbit.formats.page_counts import PAGE
from lowbit.runtime.kernels.attention.prefill import attention_prefill
from lowbit.runtime.kernels.attention.reference import attention_ref
from lowbit.runtime.state.pages import KVPages
from lowbit.runtime.state.rope import Rope
from lowbit.runtime.state.step import Span
from lowbit.runtime.thresholds import PROMPT_TOKENS
from lowbit.runtime.weights.layers import AttentionLayer
from tests.lanes import in_kernels
from tests.runtime.kernels.attention_layers import BF16, EPS, FP32, REAL, Heads, layer_of
from tests.runtime.kernels.coded_pages import in_codes, same
from tests.runtime.kernels.paged import clone, random_pages, rows_of, step_of

# Queries, weights times the scales of values and the result are rounded to bfloat16, of gated heads
# also the result before the gate, of many tokens keys and values: relative to the result's norm.
ROUNDINGS = {False: 2, True: 3}

Randn = Callable[..., Tensor]
MakeRope = Callable[[int, int], Rope]


SMALL = [
    Heads(4, 2, 64, 64, gain=BF16),
    Heads(8, 1, 128, 128),
    Heads(4, 2, 64, 16, gated=True, gain=FP32),
    Heads(2, 1, 256, 64, gated=True, gain=FP32),
]
CASES = [(SMALL[1], 70, 20), (SMALL[2], 0, 7)]
WITH_KERNELS = [(heads, 70, 20) for heads in (SMALL[0], *SMALL[2:])] + [(SMALL[1], 0, 7)]
# Past PROMPT_TOKENS there are large programs on Hopper, PyTorch elsewhere.
MANY = Heads(1, 1, 32, 16, gated=True, gain=FP32)
CASES += [(MANY, 33, 130)]  # `test_attention_prefill` has other heads
WIDE = [REAL[name] for name in ("qwen3-0.6b", "qwen3-8b", "qwen3.5-9b", "llama-3.2-1b")]
LENGTHS = ((0, 777), (1000, 129), (0, 128), (3000, 33), (4001, 200))
ON_GPU = [(heads, past, M) for heads in WIDE for past, M in LENGTHS]


@in_kernels("1x1x32-*-33-130")
@pytest.mark.parametrize(
    ("heads", "past", "M"),
    [
        *CASES,
        *(pytest.param(*case, marks=pytest.mark.kernels) for case in WITH_KERNELS),
        *(pytest.param(*case, marks=pytest.mark.gpu) for case in ON_GPU),
    ],
    ids=str,
)
def test_prompts(
    randn: Randn,
    make_rope: MakeRope,
    bf16_error: float,
    device: str,
    heads: Heads,
    past: int,
    M: int,
) -> None:
    """Results, appended rows, and with padding behind the tokens the same bits."""
    context, given = past + M + PAGE, randn(M + 3, heads.width)
    layer = layer_of(heads, make_rope(context, heads.R), device)
    wide, tables = random_pages(2, heads.Hkv, heads.D, [5, past], context, device, room=M)
    before = in_codes(wide)
    step = step_of(tables, [Span(1, past, M)], prompt=True)
    ref, k, v = attention_ref(given[:M], layer, before, step)
    pages = clone(before)
    out = attention_prefill(given[:M], layer, pages, step)
    error = float((out.double() - ref).norm() / ref.norm())
    assert error < ROUNDINGS[heads.gated] * bf16_error
    new = tables, 1, past, M
    codes, scales, k_scales, v_scales = (rows_of(x, *new)[1] for x in pages.stores)
    assert torch.equal(scales, quantize_vectors(v.float())[0])
    assert torch.equal(v_scales, quantize_vectors(v.float())[1])
    _, best = quantize_vectors(k.float())
    assert bool(((k_scales.float() / best.float() - 1).abs() <= 2.0**-7).all())
    assert bool(
        ((widen_vectors(codes, k_scales) - k).abs() <= 0.501 * k_scales.float()[..., None]).all()
    )
    expected = clone(before)
    positions = torch.arange(past, past + M, device=device)
    places = tables[1].long()[positions // PAGE], positions % PAGE
    for rows, old in zip(pages.stores, expected.stores, strict=True):
        old[1][places] = rows[1][places]
    assert same(pages, expected)
    if M + 3 <= PROMPT_TOKENS:  # or other programs take the padded chunk
        given[M:] = float("inf")
        padded = clone(before)
        step = step_of(tables, [Span(1, past, M)], prompt=True, padding=3)
        assert torch.equal(attention_prefill(given, layer, padded, step)[:M], out)
        assert same(pages, padded)


@pytest.mark.filterwarnings("ignore:invalid value:RuntimeWarning")  # of the interpreter
def test_vectors_without_numbers(randn: Randn, make_rope: MakeRope, device: str) -> None:
    """Vectors of zeros have scale 0, and those with NaN or an infinity that as their scale."""
    Hkv, D = 3, 64
    given = randn(2, 3 * Hkv * D)
    values = given.view(2, -1, D)[:, -Hkv:]
    values[0, 0], values[0, 1, 5], values[0, 2, 63] = 0, float("nan"), float("-inf")
    wide, tables = random_pages(1, Hkv, D, [10], 64, device)
    pages: KVPages = in_codes(wide)
    step = step_of(tables, [Span(0, 10, 2)], prompt=True)
    attention_prefill(given, AttentionLayer(0, make_rope(64, D), EPS), pages, step)
    codes, scales = (rows_of(x, tables, 0, 10, 2)[0] for x in pages.stores[1::2])
    expected, expected_scales = quantize_vectors(values)
    assert torch.equal(codes, expected)
    assert torch.equal(scales.nan_to_num(-1, 9e9), expected_scales.nan_to_num(-1, 9e9))
