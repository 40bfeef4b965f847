"""Sums over a vocabulary in blocks against FP64 log-softmax over all of it."""

import math
from dataclasses import fields

import pytest
import torch
from torch import Tensor

from lowbit.convert.measure import metrics_cuda
from lowbit.convert.measure.metrics import (
    MAX_WINDOWS,
    LogitSums,
    TokenFigures,
    histogram,
    kl_error,
    log_ratio_error,
    percentile,
    positions,
    window_series,
)

T, V = 37, 211


def figures(a: Tensor, b: Tensor, labels: Tensor, rows: int, tokens: int) -> TokenFigures:
    sums = LogitSums(labels)
    for first in range(0, a.shape[1], rows):
        for start in range(0, len(a), tokens):
            part = slice(start, start + tokens)
            columns = slice(first, first + rows)
            sums.add(part, first, a[part, columns], b[part, columns])
    return sums.finish()


@pytest.mark.parametrize("scale", [3.0, 1e4])
def test_the_kernel_has_the_same_sums(scale: float, monkeypatch: pytest.MonkeyPatch) -> None:
    a, b, labels = (x[:6] for x in logits(1, scale, scale / 2))
    check_kernel((a, b, labels), 90, 4, monkeypatch)


@pytest.mark.gpu
def test_the_kernel_has_the_same_sums_on_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    a, b, _ = (torch.randn(300, 4096) * 5 for _ in range(3))
    labels = torch.randint(4096, (300,))
    b[2, 9] = a[3] = torch.nan
    check_kernel((a, a + 0.1 * b, labels), 2500, 128, monkeypatch)


def check_kernel(
    given: tuple[Tensor, Tensor, Tensor], rows: int, tokens: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Sums of both, where a token's largest logits tie."""
    given[0][0, 7:] = given[0][0, 7]
    plain = figures(*given, rows, tokens)
    if torch.cuda.is_available():
        given = given[0].cuda(), given[1].cuda(), given[2].cuda()
    else:
        monkeypatch.setattr(Tensor, "is_cuda", True)
    monkeypatch.setattr(metrics_cuda, "BLOCK", 128)
    found = figures(*given, rows, tokens)
    finite = plain.kl.isfinite()
    for field in fields(TokenFigures):
        one, other = getattr(found, field.name), getattr(plain, field.name)
        if one.dtype == torch.int64:
            assert torch.equal(one[finite], other[finite]), field.name
        else:
            torch.testing.assert_close(one, other, rtol=1e-11, atol=1e-13, equal_nan=True)


def logits(seed: int, scale: float, noise: float) -> tuple[Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    a = torch.randn(T, V, generator=generator) * scale
    b = a + torch.randn(T, V, generator=generator) * noise
    return a, b, torch.randint(V, (T,), generator=generator)


@pytest.mark.parametrize(("rows", "tokens"), [(V, T), (50, 10), (1, T), (V, 1)])
@pytest.mark.parametrize(("scale", "noise"), [(3.0, 0.01), (3.0, 2.0), (1e4, 1e4), (0.0, 1.0)])
def test_equal_to_log_softmax(rows: int, tokens: int, scale: float, noise: float) -> None:
    a, b, labels = logits(0, scale, noise)
    found = figures(a, b, labels, rows, tokens)
    p, q = a.double().log_softmax(1), b.double().log_softmax(1)
    kl = torch.nn.functional.kl_div(q, p, reduction="none", log_target=True).sum(1)
    torch.testing.assert_close(found.kl, kl.clamp(min=0), rtol=1e-9, atol=1e-12)
    for nll, log_p in ((found.nll_original, p), (found.nll_packed, q)):
        expected = -log_p.gather(1, labels[:, None])[:, 0]
        torch.testing.assert_close(nll, expected, rtol=1e-12, atol=1e-11)
    if scale:
        cosine = torch.nn.functional.cosine_similarity(a.double(), b.double())
        torch.testing.assert_close(found.cosine, cosine, rtol=0, atol=1e-12)
    assert torch.equal(found.agree, a.argmax(1) == b.argmax(1))
    assert torch.equal(found.top_original, a.argmax(1))
    assert torch.equal(found.top_packed, b.argmax(1))
    first = a.argmax(1)[:, None]
    for share, log_p in ((found.p_original, p), (found.p_packed, q)):
        torch.testing.assert_close(share, log_p.gather(1, first)[:, 0].exp(), rtol=1e-9, atol=0)


def made_of(nll: Tensor, packed: Tensor, kl: Tensor) -> TokenFigures:
    top = torch.zeros(len(nll), dtype=torch.int64)
    return TokenFigures(nll, packed, kl, nll, top, top, nll, nll)


def test_a_constant_offset_changes_nothing_but_the_cosine() -> None:
    a, _, labels = logits(1, 3.0, 0.0)
    found = figures(a, a + 8.0, labels, 50, 10)
    assert float(found.kl.max()) < 1e-9  # FP32 addition rounds
    assert bool(found.agree.all())
    assert float(found.cosine.max()) < 0.9


def test_of_equal_logits_the_first_is_the_top_one() -> None:
    a, b = torch.zeros(1, 8), torch.zeros(1, 8)
    a[0, 2] = a[0, 6] = b[0, 2] = 1.0
    assert figures(a, b, torch.tensor([0]), 3, 1).agree.tolist() == [True]


def test_not_a_number_is_not_hidden() -> None:
    a, b, labels = logits(2, 1.0, 1.0)
    b[3, 100] = math.nan
    found = figures(a, b, labels, 50, 10)
    assert int(found.nll_packed.isnan().sum()) == 1
    assert not bool(found.nll_original.isnan().any())


def test_percentile_is_the_nearest_rank() -> None:
    values = torch.arange(1.0, 201.0)
    assert percentile(values, 0.99) == 198.0
    assert percentile(values, 0.01) == 2.0
    assert percentile(torch.tensor([7.0]), 0.01) == 7.0


def test_histogram_counts_everything_once() -> None:
    kl = torch.tensor([0.0, 1e-12, 1.1e-3, 0.5, 99.0, 1e6], dtype=torch.float64)
    found = histogram(kl)
    assert sum(found.counts) == len(kl)
    assert found.counts[0] == 2
    assert found.counts[30] == 1  # 1e-3 opens the 31st bin of a sixth of a decade from 1e-8
    assert found.counts[-1] == 2


@pytest.mark.parametrize("windows", [1, 5, MAX_WINDOWS, MAX_WINDOWS + 1, 1000])
def test_window_series_is_bounded_and_keeps_the_order(windows: int) -> None:
    nll = torch.arange(windows, dtype=torch.float64).repeat_interleave(3)
    flat = made_of(nll, nll + 1, nll + 2)
    series = window_series(flat, 3)
    assert len(series) == min(windows, MAX_WINDOWS)
    assert [w.nll_original for w in series] == sorted(w.nll_original for w in series)
    assert series[0].nll_packed == pytest.approx(series[0].nll_original + 1)


def test_errors_rest_on_windows() -> None:
    generator = torch.Generator().manual_seed(3)
    spread = torch.randn(400, generator=generator, dtype=torch.float64)
    nll = torch.zeros(400, dtype=torch.float64)
    flat = made_of(nll, spread, spread + 5)
    assert log_ratio_error(flat, 1) == pytest.approx(1 / 20, rel=0.2)
    assert kl_error(flat, 1) == log_ratio_error(flat, 1)
    assert log_ratio_error(flat, 100) is None
    # Tokens that repeat each other are no further evidence.
    again = made_of(*(column.repeat_interleave(50) for column in (nll, spread, spread + 5)))
    assert kl_error(again, 50) == pytest.approx(kl_error(flat, 1))


@pytest.mark.parametrize(
    ("length", "buckets"),
    [
        (1024, [(0, 128), (128, 256), (256, 512), (512, 1024)]),
        (1040, [(0, 128), (128, 256), (256, 512), (512, 1024), (1024, 1040)]),
        (1025, [(0, 128), (128, 256), (256, 512), (512, 1024)]),  # the last token is not scored
        (100, [(0, 100)]),
    ],
)
def test_positions_cover_every_scored_token_once(
    length: int, buckets: list[tuple[int, int]]
) -> None:
    place = torch.arange(length - 1, dtype=torch.float64).repeat(3)  # in three windows
    found = positions(made_of(place, place + 1, 2 * place), length)
    assert [(row.start, row.stop) for row in found] == buckets
    assert sum(row.tokens for row in found) == 3 * (length - 1)
    for row in found:
        mean = (row.start + min(row.stop, length - 1) - 1) / 2
        assert (row.nll_original, row.nll_packed, row.kl_mean) == pytest.approx(
            (mean, mean + 1, 2 * mean)
        )
        stretches = 3 * math.ceil((row.stop - row.start) / 128)
        assert (row.kl_error is None) == (stretches < 8)


def test_a_part_is_of_all_figures() -> None:
    a, b, labels = logits(4, 3.0, 1.0)
    whole = figures(a, b, labels, V, T)
    part = whole.part(slice(5, 9))
    alone = figures(a[5:9], b[5:9], labels[5:9], V, T)
    assert torch.equal(part.kl, alone.kl)
    assert torch.equal(part.agree, alone.agree)
