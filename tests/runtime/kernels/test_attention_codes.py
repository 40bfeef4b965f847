"""Decode attention over INT8 codes: against float64 on what is stored, and against itself.

On a GPU the kernels run there; elsewhere they are emulated, where the kernel that joins splits is a
formula.
"""

import math
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from lowbit.formats.kv_cache import quantize_vectors, widen_vectors
from lowbit.runtime.kernels.attention import decode as module
from lowbit.runtime.kernels.attention.reference import attention_ref
from lowbit.runtime.kernels.launch.attention import attention_launch
from lowbit.runtime.state.rope import Rope
from lowbit.runtime.state.step import Span
from tests.lanes import in_kernels
from tests.runtime.kernels.attention_layers import BF16, FP32, LAYER, REAL, Heads, Model, layer_of
from tests.runtime.kernels.coded_pages import bits, in_codes, same
from tests.runtime.kernels.emulated_join import join_splits
from tests.runtime.kernels.emulator import run_kernel
from tests.runtime.kernels.paged import clone, random_pages, rows_of, step_of

# Weights times the scales of values are rounded to bfloat16, on a GPU the result as well: relative
# to a head's norm, in units of one such rounding.
ROUNDINGS = 2
HALF_ULP = 2.0**-8 * 1.001
CONTEXT = 1024

kernels = pytest.mark.kernels  # make test-kernels runs them


SMALL = {
    "one": Heads(1, 1, 64, 64, gain=BF16),
    "128": Heads(4, 2, 128, 128, gain=BF16),
    "gated-128": Heads(3, 1, 128, 48, True, FP32),
    "gated-256": Heads(4, 1, 256, 64, True, FP32),
    "most": Heads(8, 1, 128, 128),
    "tiny": Heads(2, 2, 16, 16, gain=BF16),
    "32": Heads(6, 2, 32, 32),
    "ten-shared": Heads(20, 2, 32, 32, True, BF16),
}
MORE = {
    "most-256": Heads(16, 2, 256, 64, gated=True, gain=FP32),
    "unsplit": Heads(600, 300, 16, 16),
}
ON_GPU = [
    pytest.param(heads, id=name, marks=pytest.mark.gpu) for name, heads in (REAL | MORE).items()
]
HEADS = [pytest.param(heads, id=name) for name, heads in SMALL.items()] + ON_GPU
FEW = ("128", "gated-128", "32")  # others with `kernels`, and alone in `test_one_token`
SOME = [
    pytest.param(heads, id=name, marks=() if name in FEW else kernels)
    for name, heads in SMALL.items()
]


@pytest.fixture(autouse=True)
def _emulated(device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    if device == "cuda":
        return
    monkeypatch.setattr(module, "run", partial(run_kernel, frozen=True))
    monkeypatch.setattr(module, "join_splits", join_splits)

    def empty(shape: tuple[int, ...], **kind: Any) -> Tensor:  # results are not rounded to BF16
        return torch.empty(shape, dtype=torch.float32)

    monkeypatch.setattr(module, "torch", SimpleNamespace(empty=empty, float32=torch.float32))


class CodedModel(Model):
    """Attention over pages of codes."""

    def check(self, spans: list[Span], reach: int = 0) -> None:
        """Compare results and appended rows with float64; no other row may change."""
        step = step_of(self.tables, spans, reach)
        M, label = len(step.positions), str(spans)[:200]
        qkv = self.given(M)
        ref, k, v = attention_ref(qkv, self.layer, self.pages, step)
        out, pages = self.attended(qkv, spans, reach)
        assert self.error(out, ref) < ROUNDINGS * HALF_ULP, label
        rows, expected = clone(pages), clone(self.pages)
        done = 0
        for span in spans:
            new = slice(done, done + span.count)
            done += span.count
            place = self.tables, span.row, span.first, span.count
            codes, scales = (rows_of(x, *place)[LAYER] for x in pages.stores[::2])
            self.check_key(codes, scales, k[new].float())
            found = (rows_of(x, *place)[LAYER] for x in pages.stores[1::2])
            assert all(map(torch.equal, found, quantize_vectors(v[new].float()))), label
        for position, row in torch.stack((step.positions, step.rows), dim=1).tolist():
            at = LAYER, int(self.tables[row, position // 64]), position % 64
            for one, other in zip(rows.stores, expected.stores, strict=True):
                other[at] = one[at]
        assert same(rows, expected), label

    def check_key(self, codes: Tensor, scales: Tensor, k: Tensor) -> None:
        """Codes of keys, which may differ by what FP32 rounds on the way to them."""
        _, best = quantize_vectors(k)
        assert bool(((scales.float() / best.float() - 1).abs() <= 2.0**-7).all())
        error = (widen_vectors(codes, scales) - k).abs()
        assert bool((error <= 0.501 * scales.float()[..., None]).all())
        assert bool((codes.abs().amax(-1) >= 126).all())


MakeModel = Callable[..., CodedModel]


@pytest.fixture
def make_model(make_rope: Callable[[int, int], Rope], device: str) -> MakeModel:
    """`make_model(heads, lengths, context)`: sequences of such lengths."""

    def make(heads: Heads, lengths: list[int], context: int = CONTEXT) -> CodedModel:
        pages, tables = random_pages(2, heads.Hkv, heads.D, lengths, context, device)
        layer = layer_of(heads, make_rope(context, heads.R), device)
        return CodedModel(heads, layer, in_codes(pages), tables)

    return make


@in_kernels("gated-256", "ten-shared")
@pytest.mark.parametrize("heads", HEADS)
def test_one_token(make_model: MakeModel, heads: Heads) -> None:
    for position, reach in ((0, 1), (63, 64), (255, 256), (256, 512)):
        make_model(heads, [position]).check([Span(0, position, 1)], reach)
    for position in (257, 1023):
        make_model(heads, [position]).check([Span(0, position, 1)])


@in_kernels("32")
@in_kernels("128")
@pytest.mark.parametrize("heads", SOME + ON_GPU)
def test_tokens_of_several_sequences(make_model: MakeModel, heads: Heads) -> None:
    """Sequences of any length, some tokens of each: what they share is the launch."""
    lengths = [0, 60, 63, 250, 255, 300, 600]
    counts = [3, 4, 2, 7, 3, 1, 5]
    model = make_model(heads, lengths)
    spans = [Span(row, lengths[row], counts[row]) for row in (3, 6, 0, 2, 5, 1, 4)]
    model.check(spans)
    model.check([span for span in spans if span.first + span.count <= 256], 256)


COMPANY = [
    pytest.param(SMALL["gated-256"], id="gated-256"),
    pytest.param(SMALL["128"], id="128", marks=kernels),
]
TOGETHER = [
    pytest.param(SMALL["128"], id="128"),
    pytest.param(SMALL["gated-256"], id="gated-256", marks=kernels),
]


@pytest.mark.parametrize("heads", COMPANY + ON_GPU)
def test_same_bits_in_any_company(
    make_model: MakeModel, monkeypatch: pytest.MonkeyPatch, heads: Heads
) -> None:
    """A token alone and among others, in short and long launches, and with all splits in one."""
    lengths = [0, 64, 200, 255, 256, 257, 1023]
    model = make_model(heads, lengths)
    spans = [Span(row, length, 1) for row, length in enumerate(lengths)]
    given = model.given(len(lengths))
    alone = [model.attended(given[i : i + 1], [span]) for i, span in enumerate(spans)]
    short = [i for i, length in enumerate(lengths) if length < 256]
    for tokens in (1, 1000):  # as many programs as so many tokens have
        monkeypatch.setattr(
            module,
            "attention_launch",
            lambda kv, shared, D, reach, M, *rest, tokens=tokens: attention_launch(
                kv, shared, D, reach, max(M, tokens), *rest
            ),
        )
        for order, reach in ((range(len(lengths)), 0), (short[::-1], 256), (short, CONTEXT)):
            rows = list(order)
            out, pages = model.attended(given[rows], [spans[i] for i in rows], reach)
            for at, i in enumerate(rows):
                assert torch.equal(out[at], alone[i][0][0]), (lengths[i], tokens, reach)
                own = model.tables, i, lengths[i], 1
                for one, other in zip(bits(pages), bits(alone[i][1]), strict=True):
                    assert torch.equal(rows_of(one, *own), rows_of(other, *own))


@pytest.mark.parametrize("heads", TOGETHER + ON_GPU)
def test_same_bits_one_by_one_and_together(
    make_model: MakeModel, device: str, heads: Heads
) -> None:
    """k tokens of a sequence in one step are those of k steps, beside others too."""
    lengths, most = [0, 60, 125, 250, 700], 16 if device == "cuda" else 3
    model = make_model(heads, lengths)
    given = model.given(most * len(lengths)).view(len(lengths), most, -1)
    single = replace(model, pages=clone(model.pages))
    expected = torch.stack([
        torch.cat([
            single.attend(given[row, i : i + 1], step_of(model.tables, [Span(row, length + i, 1)]))
            for i in range(most)
        ])
        for row, length in enumerate(lengths)
    ])  # fmt: skip
    for k in (2, most):
        spans = [Span(row, length, k) for row, length in enumerate(lengths)]
        for together in ([spans[0]], spans[1:3], spans[2:]):
            rows = [span.row for span in together]
            out, pages = model.attended(given[rows, :k].flatten(0, 1), together)
            assert torch.equal(out.view(len(rows), k, -1), expected[rows, :k]), (k, together)
            for span in together:
                own = model.tables, span.row, span.first, k
                for one, other in zip(bits(pages), bits(single.pages), strict=True):
                    assert torch.equal(rows_of(one, *own)[LAYER], rows_of(other, *own)[LAYER])


@pytest.mark.parametrize("wrong", [float("inf"), float("nan")], ids=str)
def test_vectors_without_numbers(make_model: MakeModel, wrong: float) -> None:
    """Keys and values of zeros have scale 0; one that is not finite spoils its own head alone."""
    heads = SMALL["128"]
    model = make_model(heads, [70])
    given = model.given(1)
    rows = given.view(-1, heads.D)
    rows[-2 * heads.Hkv :] = 0
    _, pages = model.attended(given, [Span(0, 70, 1)])
    for store in pages.stores:
        assert not rows_of(store, model.tables, 0, 70, 1)[LAYER].any()
    rows[-1, 3] = wrong
    out, pages = model.attended(given, [Span(0, 70, 1)])
    codes, scales = (rows_of(x, model.tables, 0, 70, 1)[LAYER, 0] for x in pages.stores[1::2])
    assert not codes.any()
    assert scales.isnan().tolist() == [False, math.isnan(wrong)]
    assert scales.isinf().tolist() == [False, math.isinf(wrong)]
    shared = heads.Hq // heads.Hkv * heads.D
    assert bool(out[0, :-shared].isfinite().all())
    assert not bool(out[0, -shared:].isfinite().any())
