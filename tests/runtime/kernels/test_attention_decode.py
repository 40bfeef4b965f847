"""Decode attention against float64, and bit for bit against itself in other company."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from lowbit.runtime.kernels.attention import decode as module
from lowbit.runtime.kernels.attention.join import join_splits
from lowbit.runtime.kernels.attention.prefill import attention_prefill
from lowbit.runtime.kernels.attention.reference import attention_ref
from lowbit.runtime.kernels.launch.attention import (
    AttentionLaunch,
    KeySplit,
    attention_launch,
)
from lowbit.runtime.state.rope import Rope
from lowbit.runtime.state.step import Span
from lowbit.runtime.thresholds import ROUND_TOKENS
from tests.runtime.kernels.attention_layers import BF16, FP32, LAYER, REAL, Heads, Model, layer_of
from tests.runtime.kernels.paged import clone, random_pages, rows_of, step_of, with_axes

pytestmark = pytest.mark.gpu

Randn = Callable[..., Tensor]
MakeRope = Callable[[int, int], Rope]

# Softmax weights and the result are rounded to bfloat16: relative to a head's norm, in units of one
# such rounding.
ROUNDINGS = 2


ODD = {
    "tiny-qwen3": Heads(4, 2, 64, 64, gain=BF16),
    "tiny-qwen3.5": Heads(4, 2, 64, 16, gated=True, gain=FP32),
    "one-head": Heads(1, 1, 16, 16, gain=FP32),
    "none-shared": Heads(3, 3, 32, 32, gain=BF16),
    "rotated-48": Heads(5, 1, 128, 48, gain=FP32),
    "gated-only": Heads(8, 1, 64, 32, gated=True),
    "most": Heads(16, 2, 256, 64, gated=True, gain=FP32),
    "unsplit": Heads(600, 300, 16, 16),
    "ten-shared": Heads(20, 2, 64, 32, gated=True, gain=FP32),
    "eleven-shared": Heads(11, 1, 32, 32),
}
BITS = ("qwen3-0.6b", "qwen3-8b", "qwen3.5-9b", "qwen3.5-27b", "qwen2.5-0.5b", "qwen3-235b")
CONTEXT = 4096
POSITIONS = (0, 1, 15, 16, 17, 63, 64, 65, 127, 128, 129, 255, 256, 257, 1000, 4095)


class PlainModel(Model):
    """Attention over pages of BF16."""

    def check(self, spans: list[Span], bf16_error: float, reach: int = 0) -> None:
        """Compare results and appended rows with float64; no other row may change."""
        step = step_of(self.tables, spans, reach)
        M, label = len(step.positions), str(spans)[:200]
        qkv = self.given(M)
        before = clone(self.pages)
        ref, k, v = attention_ref(qkv, self.layer, self.pages, step)
        out, again = self.attend(qkv, step), self.attend(qkv, step)
        assert torch.equal(out, again), label
        assert self.error(out, ref) < ROUNDINGS * bf16_error, label
        done = 0
        for span in spans:
            new = slice(done, done + span.count)
            done += span.count
            place = self.tables, span.row, span.first, span.count
            stored = rows_of(self.pages.k, *place)[LAYER].double()
            # FP32 sums of a rotation may cancel: allow their rounding beside the half ulp.
            allowed = bf16_error * k[new].abs() + 1e-6 * k[new].abs().max()
            assert bool(((stored - k[new]).abs() <= allowed).all()), label
            assert torch.equal(rows_of(self.pages.v, *place)[LAYER].double(), v[new]), label
        places = torch.stack((step.positions, step.rows), dim=1).tolist()
        for new_rows, old in ((self.pages.k, before.k), (self.pages.v, before.v)):
            for position, row in places:
                page, offset = int(self.tables[row, position // 64]), position % 64
                old[LAYER, page, offset] = new_rows[LAYER, page, offset]
            assert torch.equal(new_rows.view(torch.int16), old.view(torch.int16)), label


MakeModel = Callable[..., PlainModel]


@pytest.fixture
def make_model(make_rope: MakeRope, device: str) -> MakeModel:
    """`make_model(heads, lengths, context)`: sequences of such lengths."""

    def make(heads: Heads, lengths: list[int], context: int = CONTEXT) -> PlainModel:
        pages, tables = random_pages(2, heads.Hkv, heads.D, lengths, context, device)
        layer = layer_of(heads, make_rope(context, heads.R), device)
        return PlainModel(heads, layer, pages, tables)

    return make


@pytest.mark.parametrize("reach", [256, 1024, CONTEXT])
@pytest.mark.parametrize("heads", REAL.values(), ids=REAL)
def test_real_heads(make_model: MakeModel, bf16_error: float, heads: Heads, reach: int) -> None:
    for position in (position for position in POSITIONS if position < reach):
        make_model(heads, [position]).check([Span(0, position, 1)], bf16_error, reach)


@pytest.mark.parametrize("context", [100, 200, 601])
@pytest.mark.parametrize("heads", ODD.values(), ids=ODD)
def test_odd_heads(make_model: MakeModel, bf16_error: float, heads: Heads, context: int) -> None:
    for position in (0, 1, 33, context // 2, context - 1):
        make_model(heads, [position], context).check([Span(0, position, 1)], bf16_error)


@pytest.mark.parametrize("heads", [*REAL.values(), *ODD.values()], ids=[*REAL, *ODD])
def test_tokens_of_several_sequences(
    make_model: MakeModel, bf16_error: float, heads: Heads
) -> None:
    """Sequences of any length, some tokens of each: what they share is the launch."""
    lengths = [0, 1, 60, 63, 128, 250, 255, 300, 600]
    counts = [3, 1, 4, 2, 16, 7, 3, 1, 5]
    model = make_model(heads, lengths, 1024)
    spans = [Span(row, lengths[row], counts[row]) for row in (4, 8, 0, 3, 1, 7, 2, 6, 5)]
    model.check(spans, bf16_error)
    short = [span for span in spans if span.first + span.count <= 256]
    make_model(heads, lengths, 1024).check(short, bf16_error, 256)


@pytest.mark.parametrize("count", [1, 2, 7, 16])
def test_a_short_chunk_may_have_rotary_tables_of_its_own(
    make_model: MakeModel, bf16_error: float, count: int
) -> None:
    """A program reads the rows of earlier tokens of the chunk again."""
    model = make_model(REAL["qwen3.5-9b"], [70])
    qkv, pages = model.given(count), clone(model.pages)
    step = with_axes(step_of(model.tables, [Span(0, 70, count)]), model.layer.rope)
    ref, _, _ = attention_ref(qkv, model.layer, pages, step)
    assert model.error(model.attend(qkv, step), ref) < ROUNDINGS * bf16_error


@pytest.mark.parametrize("name", BITS)
def test_same_bits_in_any_company(make_model: MakeModel, name: str) -> None:
    """A token beside 1 to 63 others of other lengths, in two orders."""
    ours = [0, 7, 64, 200, 255, 256, 257, 500, 1023, 1025, 2100, 4000]
    lengths = ours + [
        n for most in (CONTEXT, 1024) for n in torch.randint(most - 64, (63,)).tolist()
    ]
    model = make_model(REAL[name], lengths)
    spans = [Span(row, length, 1) for row, length in enumerate(lengths)]
    given = model.given(len(lengths))
    for row, length in enumerate(ours):
        alone, pages = model.attended(given[row : row + 1], [spans[row]], length + 1)
        own = model.tables, row, length, 1
        for count in (1, 3, 7, 15, 16, 23, 32, 47, 63):
            short = len(ours) + 63  # from here on the others' reach is that of the shorter launch
            company, shorter = (list(range(n, n + count)) for n in (len(ours), short))
            for order in ([row, *company], [*company[::-1], row], [*shorter, row]):
                out, after = model.attended(given[order], [spans[i] for i in order])
                assert torch.equal(out[order.index(row)], alone[0]), (length, count)
                for one, other in ((pages.k, after.k), (pages.v, after.v)):
                    assert torch.equal(rows_of(one, *own)[LAYER], rows_of(other, *own)[LAYER])


@pytest.mark.parametrize("name", BITS)
def test_same_bits_one_by_one_and_together(make_model: MakeModel, name: str) -> None:
    """k tokens of a sequence in one step are those of k steps, beside others too."""
    lengths = [0, 5, 60, 120, 250, 256, 300, 1020, 2046, 4000]
    model = make_model(REAL[name], lengths)
    most = 16
    given = model.given(most * len(lengths)).view(len(lengths), most, -1)
    single = replace(model, pages=clone(model.pages))
    alone = []
    for row, length in enumerate(lengths):
        for i in range(most):
            reach = length + i + 1
            step = step_of(model.tables, [Span(row, length + i, 1)], reach)
            alone.append(single.attend(given[row, i : i + 1], step))
    expected = torch.cat(alone).view(len(lengths), most, -1)
    for k in (1, 2, 3, 4, 5, 8, 16):
        spans = [Span(row, length, k) for row, length in enumerate(lengths)]
        several = ROUND_TOKENS // k
        groups = [spans[i : i + several] for i in range(0, len(spans), several)]
        for together in [[span] for span in spans] + groups:
            rows = [span.row for span in together]
            out, pages = model.attended(given[rows, :k].flatten(0, 1), together)
            assert torch.equal(out.view(len(rows), k, -1), expected[rows, :k]), (k, together)
            for span in together:
                own = model.tables, span.row, span.first, k
                for one, other in ((pages.k, single.pages.k), (pages.v, single.pages.v)):
                    assert torch.equal(rows_of(one, *own)[LAYER], rows_of(other, *own)[LAYER])


@pytest.mark.parametrize("name", BITS)
def test_reach_changes_nothing(make_model: MakeModel, name: str) -> None:
    lengths = [0, 100, 250, 255, 256, 700, 1500]
    model = make_model(REAL[name], lengths)
    for row, length in enumerate(lengths):
        given = model.given(1)
        reaches = [length + 1, 256, 1024, 2048, CONTEXT]
        outs = [
            model.attended(given, [Span(row, length, 1)], reach)[0]
            for reach in reaches
            if reach > length
        ]
        assert all(torch.equal(out, outs[0]) for out in outs), length


@pytest.mark.parametrize("name", ["qwen3-8b", "qwen3.5-9b"])
def test_programs_change_nothing(
    make_model: MakeModel, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    """Parts of the columns, turns loaded ahead and early starts are a matter of speed."""

    def programs(**changes: Any) -> None:
        monkeypatch.setattr(
            module, "attention_launch", lambda *sizes: replace(attention_launch(*sizes), **changes)
        )

    positions = (0, 63, 64, 129, 255)
    model = make_model(REAL[name], list(positions))
    spans = [Span(row, first, 1) for row, first in enumerate(positions)]
    given = model.given(len(spans))
    expected, _ = model.attended(given, spans, CONTEXT)
    for parts, ahead, early in ((1, 0, False), (1, 0, True), (2, 2, True), (2, 0, False)):
        programs(parts=parts, ahead=ahead, early=early)
        out, _ = model.attended(given, spans, 256)
        assert torch.equal(out, expected), (parts, ahead, early)


def test_padding_is_harmless(make_model: MakeModel) -> None:
    """Tokens of row 0 at position 0 write the scratch page, whatever its rows hold."""
    model = make_model(REAL["qwen3-8b"], [0, 300, 70])
    model.tables[0] = 0
    given = model.given(8)
    spans = [Span(1, 300, 2), Span(2, 70, 1), *([Span(0, 0, 1)] * 5)]
    out, pages = model.attended(given, spans)
    expected, alone = model.attended(given[:3], spans[:2])
    assert torch.equal(out[:3], expected)
    assert torch.equal(pages.k[:, 1:].view(torch.int16), alone.k[:, 1:].view(torch.int16))
    assert torch.equal(pages.v[:, 1:].view(torch.int16), alone.v[:, 1:].view(torch.int16))


@pytest.mark.parametrize("name", ["qwen3-8b", "qwen3.5-2b"])
def test_a_recorded_step_follows_its_sequences(make_model: MakeModel, name: str) -> None:
    """Positions that advance on the device, and a table that is filled as pages are taken."""
    lengths = [250, 60, 1000]
    model = make_model(REAL[name], lengths, 2048)
    spans = [Span(row, length, 1) for row, length in enumerate(lengths)]
    step, given = step_of(model.tables, spans), model.given(len(lengths))
    once = replace(model, pages=clone(model.pages))
    once.attend(given, step)  # compiles
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = model.attend(given, step)
        step.positions.add_(1)
        step.angles.add_(1)
    firsts = step_of(model.tables, spans)
    step.positions.copy_(firsts.positions)
    step.angles.copy_(firsts.angles)
    again = replace(model, pages=clone(model.pages))
    for i in range(10):
        expected = again.attend(given, step_of(model.tables, [
            Span(row, length + i, 1) for row, length in enumerate(lengths)
        ]))  # fmt: skip
        graph.replay()
        assert torch.equal(out, expected)
        given.normal_()


@pytest.mark.parametrize("splits", [2, 8, 33, 64])
@pytest.mark.parametrize(("heads", "D", "gated"), [(3, 16, False), (2, 128, False), (4, 256, True)])
def test_splits_join(
    randn: Randn, bf16_error: float, device: str, heads: int, D: int, gated: bool, splits: int
) -> None:
    """In float64 they make the same; what splits without rows have left is not looked at."""
    keys, M = KeySplit(most=64, warps=4, groups=1, blocks=1, whole=0), 4
    launch = AttentionLaunch(keys, splits)
    running = (splits, splits // 2, 1, 1)
    positions = torch.tensor([32 * n for n in running], dtype=torch.int32, device=device)
    sums = randn(M, heads, splits, D).float()
    tops, totals = 30 * randn(M, heads, splits).float(), randn(M, heads, splits).float().abs() + 1
    for sequence, count in enumerate(running):
        for each in (sums, tops, totals):
            each[sequence, :, count:] = float("nan")
    qkv, out = randn(M, 2 * heads * D + 2 * D), randn(M, heads * D)
    state = torch.stack((tops, totals), dim=-1).flatten(0, 1)
    join_splits(sums.flatten(0, 1), state, qkv, positions, out, launch, gated, False)
    weights = torch.exp2((tops - tops.nan_to_num(-1e30).amax(-1, True)).double())
    weights = weights.nan_to_num(0)[..., None]
    whole = (weights * totals.nan_to_num(0)[..., None]).sum(2)
    ref = (weights * sums.nan_to_num(0)).sum(2) / whole
    if gated:
        ref *= qkv[:, : 2 * heads * D].double().view(M, heads, 2, D)[:, :, 1].sigmoid()
    error = (out.view(M, heads, D).double() - ref).abs()
    assert bool((error <= bf16_error * ref.abs() + 1e-6 * ref.abs().max()).all())


@pytest.mark.parametrize("position", [0, 1, 40])
def test_appends_what_prefill_appends(
    make_model: MakeModel, bf16_error: float, position: int
) -> None:
    """Tokens through either path leave the same pages and nearly the same result."""
    model = make_model(ODD["tiny-qwen3"], [position], 128)
    span, given = Span(0, position, 3), model.given(3)
    a, pages = model.attended(given, [span])
    prompt = step_of(model.tables, [span], prompt=True)
    b = attention_prefill(given, model.layer, model.pages, prompt)
    assert float((a.double() - b.double()).norm() / b.double().norm()) < ROUNDINGS * bf16_error
    assert torch.equal(pages.v.view(torch.int16), model.pages.v.view(torch.int16))
    torch.testing.assert_close(pages.k, model.pages.k, rtol=2.0**-7, atol=1e-5, equal_nan=True)


def test_a_closed_gate_gives_nothing(make_model: MakeModel) -> None:
    """The gate of a head is what follows its query: closing one silences that head alone."""
    model = make_model(ODD["tiny-qwen3.5"], [9], 64)
    given = model.given(1)
    heads = given.view(-1, 64)
    heads[1:8:2] = 100.0  # open
    heads[2 * 2 + 1] = -float("inf")  # of head 2
    out, _ = model.attended(given, [Span(0, 9, 1)])
    assert (out.view(4, 64) == 0).all(dim=-1).tolist() == [False, False, True, False]


def test_the_rest_of_a_head_is_not_rotated(make_model: MakeModel) -> None:
    model = make_model(Heads(2, 2, 64, 16), [40], 64)
    given = model.given(1)
    _, pages = model.attended(given, [Span(0, 40, 1)])
    key, stored = given.view(-1, 64)[2:4], rows_of(pages.k, model.tables, 0, 40, 1)[LAYER, 0]
    assert torch.equal(stored[:, 16:], key[:, 16:])
    assert not torch.equal(stored[:, :16], key[:, :16])
