"""Attention of blocks of drafts against float64: windows, causality, splits, codes."""

from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from lowbit.formats.kv_cache import BF16_CACHE, INT8_CACHE, CacheType
from lowbit.formats.page_counts import PAGE
from lowbit.runtime.kernels.attention import block as kernels
from lowbit.runtime.kernels.attention.block import attend_block, write_context
from lowbit.runtime.kernels.attention.reference import attend_block_ref
from lowbit.runtime.kernels.launch.attention import BlockLaunch
from lowbit.runtime.state.pages import new_pages
from lowbit.runtime.state.rope import Rope
from lowbit.runtime.state.step import Span, Step
from lowbit.runtime.weights.layers import AttentionLayer, ContextLayers
from tests.runtime.kernels.attention_layers import BF16, EPS, LAYER, REAL, Heads, layer_of
from tests.runtime.kernels.coded_pages import in_codes
from tests.runtime.kernels.paged import random_pages, step_of

Randn = Callable[..., Tensor]
MakeRope = Callable[[int, int], Rope]
SMALL = Heads(4, 2, 32, 32, gain=BF16)
WIDE = Heads(3, 1, 64, 32)  # three query heads of a kv head, rotated in part, without norms
# Softmax weights, queries, keys and the result are rounded to bfloat16.
ROUNDINGS = 3


def block_step(tables: Tensor, spans: list[Span]) -> Step:
    """A step whose angles are its positions."""
    return replace(step_of(tables, spans), own_angles=None)


# heads, lengths of contexts, window, causal, splits, codes
CASES = [
    (SMALL, [21, 0, 40], None, False, 1, False),
    (SMALL, [70], None, False, 4, False),
    (SMALL, [35], 20, True, 1, True),
    (SMALL, [35, 2], 20, True, 2, False),
    (SMALL, [18], 3, False, 1, False),  # less than a block
    (WIDE, [33], None, True, 1, False),
    (WIDE, [40], 24, False, 2, True),
]
ON_GPU = [
    (REAL[name], lengths, window, causal, None, coded)
    for name in ("qwen3-8b", "qwen3-0.6b", "qwen2.5-0.5b")
    for lengths, window, causal in (
        ([1], None, False),
        ([4000, 100], None, False),
        ([3000], 2048, True),
    )
    for coded in (False, True)
]


@pytest.mark.parametrize(
    ("heads", "lengths", "window", "causal", "splits", "coded"),
    CASES + [pytest.param(*case, marks=pytest.mark.gpu) for case in ON_GPU],
    ids=str,
)
def test_blocks(
    randn: Randn,
    make_rope: MakeRope,
    bf16_error: float,
    device: str,
    monkeypatch: pytest.MonkeyPatch,
    heads: Heads,
    lengths: list[int],
    window: int | None,
    causal: bool,
    splits: int | None,
    coded: bool,
) -> None:
    size = 12 if splits else 16  # on a CPU more rows than a program takes
    T = max(lengths) + size
    layer = layer_of(heads, make_rope(T, heads.R), device)
    layer = replace(layer, window=window, causal=causal)
    pages, tables = random_pages(2, heads.Hkv, heads.D, lengths, T, device, room=1)
    pages = in_codes(pages) if coded else pages
    before = [store.clone() for store in pages.stores]
    step = block_step(tables, [Span(row, length, size) for row, length in enumerate(lengths)])
    M = size * len(lengths)
    qkv = randn(M, heads.width)
    if splits:  # small programs, several of a kv head
        launch = BlockLaunch(16, 16, splits, 4)
        monkeypatch.setattr(kernels, "block_launch", lambda *sizes: launch)
    found = attend_block(qkv, layer, pages, step)
    ref = attend_block_ref(qkv, layer, pages, step)
    assert (found.double() - ref).norm() / ref.norm() < ROUNDINGS * bf16_error
    for store, old in zip(pages.stores, before, strict=True):  # a block leaves nothing
        assert torch.equal(store.view(torch.int8), old.view(torch.int8))


def context_of(layer: AttentionLayer, layers: int, first: int = LAYER) -> ContextLayers:
    """The context of layers with the gains of a layer, each half of the one before."""
    if layer.k_norm is None:
        raise AssertionError
    gains = torch.stack([layer.k_norm / 2**place for place in range(layers)])
    return ContextLayers(first, layer.rope, EPS, gains)


@pytest.mark.parametrize("kind", [BF16_CACHE, INT8_CACHE], ids=lambda kind: kind.name)
def test_context_is_written_by_position(
    randn: Randn, make_rope: MakeRope, device: str, kind: CacheType
) -> None:
    """Sequences side by side, and padding, in two of three layers."""
    layer, Hkv, D = layer_of(SMALL, make_rope(80, SMALL.R), device), SMALL.Hkv, SMALL.D
    tables = torch.tensor([[0, 0], [3, 1], [2, 0]], dtype=torch.int32, device=device)
    pages = new_pages(3, 4, Hkv, D, kind, device)
    spans = [Span(1, PAGE - 2, 4), Span(2, 5, 1), Span(0, 0, 1), Span(0, 0, 1)]
    step, kv = block_step(tables, spans), randn(7, 2 * 2 * Hkv * D)
    write_context(kv, context_of(layer, 2), pages, step)
    places = [(3, PAGE - 2), (3, PAGE - 1), (1, 0), (1, 1), (2, 5)]
    rows = tuple(torch.tensor(each, device=device) for each in zip(*places, strict=True))
    heads = kv.view(7, 2, 2, Hkv, D)[:5]
    for place in (0, 1):
        k, v = pages.layer(LAYER + place)
        written = {(page, row) for page, row, *_ in k.nonzero().tolist()}
        assert written == {*places, (0, 0)}
        values, scales = heads[:, place, 1], pages.layer_scales(LAYER + place)
        if scales is None:
            assert torch.equal(v[rows], values)
            continue
        found = v[rows].float() * scales[1][rows].float()[..., None]
        assert (found - values.float()).abs().max() < values.abs().max() / 127
    assert not bool(pages.k[0].any())
    if kind.scaled:
        return
    both = torch.stack([pages.layer(LAYER + place)[0][rows].float() for place in (0, 1)])
    expected = rotated_by_cpu(heads[:, :, 0], layer, step, device)
    assert (both - expected).abs().max() < 0.02 * expected.abs().max()


def rotated_by_cpu(k: Tensor, layer: AttentionLayer, step: Step, device: str) -> Tensor:
    """Keys [M, L, Hkv, D] of two layers, normed and rotated in float32: [L, M, Hkv, D]."""
    x = k.float().transpose(0, 1)
    x = x * torch.rsqrt(x.square().mean(-1, keepdim=True) + EPS)
    gains = context_of(layer, 2).k_norms.float()
    x = x * gains[:, None, None]
    at = step.positions[: len(k)].long()
    cos, sin = layer.rope.cos[at][:, None], layer.rope.sin[at][:, None]
    low, high = x.chunk(2, dim=-1)
    return torch.cat((low * cos - high * sin, high * cos + low * sin), dim=-1).to(device)


def test_a_block_sees_the_context_that_was_written(
    randn: Randn, make_rope: MakeRope, device: str, bf16_error: float
) -> None:
    """Positions of one sequence in two steps, then a block behind them."""
    layer, width = layer_of(SMALL, make_rope(80, SMALL.R), device), SMALL.Hkv * SMALL.D
    tables = torch.tensor([[0], [1]], dtype=torch.int32, device=device)
    pages = new_pages(2, 2, SMALL.Hkv, SMALL.D, BF16_CACHE, device)
    qkv = randn(12, SMALL.width)
    for first, count in ((0, 7), (7, 1)):
        step, kv = block_step(tables, [Span(1, first, count)]), qkv[first:, -2 * width :]
        write_context(kv[:count].contiguous(), context_of(layer, 1), pages, step)
    causal = replace(layer, causal=True)
    behind = attend_block(qkv[8:], causal, pages, block_step(tables, [Span(1, 8, 4)]))
    whole = attend_block(qkv, causal, pages, block_step(tables, [Span(1, 0, 12)]))[8:]
    assert (behind.double() - whole.double()).norm() / whole.double().norm() < 2 * bf16_error
