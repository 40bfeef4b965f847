"""Two packed models on the same windows: the error of their difference."""

import math
from dataclasses import replace
from statistics import stdev

import pytest
import torch

from lowbit.convert.measure.metrics import MAX_WINDOWS
from lowbit.convert.measure.record import LogitQuality, Window
from lowbit.convert.measure.uncertainty import mean_error, paired_difference
from tests.convert.report.samples import LOGITS


def quality(kl: list[float], sha256: str = "ab") -> LogitQuality:
    count = len(kl)
    return replace(
        LOGITS,
        text_sha256=sha256,
        windows=count,
        kl_mean=sum(kl) / count,
        window_series=tuple(
            Window(1.0, 1.0, float(piece.mean()))
            for piece in torch.tensor(kl).double().tensor_split(min(count, MAX_WINDOWS))
        ),
    )


def test_what_windows_share_does_not_count() -> None:
    generator = torch.Generator().manual_seed(0)
    shared = torch.rand(200, generator=generator, dtype=torch.float64)  # hard and easy windows
    own = torch.randn(200, generator=generator, dtype=torch.float64) * 0.01
    first, second = (shared + 1).tolist(), (shared + 1.005 + own).tolist()
    found = paired_difference(quality(first), quality(second))
    assert found is not None
    assert found.mean == pytest.approx(float(own.mean()) + 0.005)
    assert found.standard_error == pytest.approx(0.01 / math.sqrt(200), rel=0.15)
    assert found.standard_error < stdev(first) / math.sqrt(200) / 10
    back = paired_difference(quality(second), quality(first))
    assert back is not None
    assert back.mean == pytest.approx(-found.mean)


def test_only_the_same_windows_make_pairs() -> None:
    here = quality([0.1] * 10)
    assert paired_difference(here, quality([0.1] * 10, sha256="cd")) is None
    assert paired_difference(here, quality([0.1] * 11)) is None
    assert paired_difference(here, replace(here, window=256)) is None
    few = quality([0.1] * 7)
    assert paired_difference(few, few) is None


@pytest.mark.parametrize("windows", [8, 100, 256, 257, 300, 384, 511, 513, 1000])
def test_the_mean_is_the_difference_of_the_means(windows: int) -> None:
    """Pieces of the series hold unequal numbers of windows, and their KL grows along the text."""
    rise = [0.001 * n for n in range(windows)]
    first, second = quality([0.5 * value for value in rise]), quality(rise)
    found = paired_difference(first, second)
    assert found is not None
    assert found.mean == pytest.approx(second.kl_mean - first.kl_mean, rel=1e-12)


@pytest.mark.parametrize("smooth", [1, 3, 8])
def test_the_error_is_as_wide_as_that_of_a_mean(smooth: int) -> None:
    """Differences of neighbours that resemble each other tell less than so many windows."""
    generator = torch.Generator().manual_seed(1)
    drawn = torch.randn(200, generator=generator, dtype=torch.float64) * 0.01
    own = drawn.repeat_interleave(smooth)[:200]
    found = paired_difference(quality([0.0] * 200), quality((own + 0.1).tolist()))
    assert found is not None
    assert found.standard_error == pytest.approx(mean_error(own), rel=1e-6)
    alone = float(own.std()) / math.sqrt(200)
    assert found.standard_error >= (1.4 if smooth > 1 else 0.999) * alone


def test_no_difference_of_infinite_kl() -> None:
    finite, infinite = quality([0.1] * 10), quality([0.1] * 9 + [math.inf])
    for pair in ((finite, infinite), (infinite, finite), (infinite, infinite)):
        assert paired_difference(*pair) is None
    broken = replace(finite, kl_mean=math.inf)
    assert paired_difference(broken, broken) is None
