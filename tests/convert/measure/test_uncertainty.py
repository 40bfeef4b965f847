"""Standard errors against numpy, a bootstrap over windows, and simulated texts of known means."""

import math

import numpy as np
import pytest
import torch

from lowbit.convert.measure.uncertainty import mean_error
from tests.lanes import in_commands

TEXTS = 300  # simulated


def windows(seed: int, count: int, persistence: float, tokens: float = 0.0) -> np.ndarray:
    """[TEXTS, count] window means of mean 1; each window leans on the one before by `persistence`.

    `tokens` is the correlation of the 64 tokens that each mean is of: it only widens the spread,
    by the design effect 1 + 63 * tokens.
    """
    generator = np.random.default_rng(seed)
    noise = generator.gamma(2.0, 1.0, size=(TEXTS, count)) - 2.0  # skewed, as KL is
    out = np.empty_like(noise)
    out[:, 0] = noise[:, 0] / math.sqrt(1 - persistence**2)
    for i in range(1, count):
        out[:, i] = persistence * out[:, i - 1] + noise[:, i]
    scale = 0.2 * math.sqrt((1 + 63 * tokens) / 64)
    return 1.0 + scale * out


@pytest.mark.parametrize("count", [8, 20, 158, 1000])
def test_independent_windows_have_numpy_s_error(count: int) -> None:
    rows = windows(count, count, 0.0)
    plain = rows.std(axis=1, ddof=1) / math.sqrt(count)
    found = np.array([mean_error(torch.tensor(row)) for row in rows])
    assert np.all(found >= plain * (1 - 1e-9))
    assert float(np.median(found / plain)) < 1.1


def test_error_equals_a_bootstrap_over_windows() -> None:
    generator = np.random.default_rng(5)
    row = windows(1, 120, 0.0)[0]
    draws = generator.integers(0, len(row), size=(4000, len(row)))
    spread = row[draws].mean(axis=1).std()
    assert mean_error(torch.tensor(row)) == pytest.approx(float(spread), rel=0.15)


@in_commands("0.0-0.3-*", "0.2-0.0-*")
@pytest.mark.parametrize("count", [20, 40, 158, 400])
@pytest.mark.parametrize("persistence", [0.0, 0.3])
@pytest.mark.parametrize("tokens", [0.0, 0.2])
def test_two_errors_cover_the_true_mean(count: int, persistence: float, tokens: float) -> None:
    """Positions of a window and neighbouring windows depend on each other, as in any text."""
    rows = windows(count, count, persistence, tokens)
    errors = np.array([mean_error(torch.tensor(row)) for row in rows])
    covered = np.abs(rows.mean(axis=1) - 1.0) <= 2 * errors
    # 95 % nominally; correlated neighbours and few windows cost some of it.
    assert covered.mean() > (0.91 if persistence == 0 else 0.87)


def test_neighbours_that_agree_count_less() -> None:
    """Ignoring that neighbours agree covers the mean far too rarely."""
    rows = windows(7, 158, 0.5)
    plain = rows.std(axis=1, ddof=1) / math.sqrt(158)
    errors = np.array([mean_error(torch.tensor(row)) for row in rows])
    off = np.abs(rows.mean(axis=1) - 1.0)
    assert (off <= 2 * plain).mean() < 0.82
    assert (off <= 2 * errors).mean() > 0.86


def test_newey_west_in_fp64() -> None:
    row = windows(3, 64, 0.5)[0]
    d = row - row.mean()
    lags = 4  # 64 ** (1 / 3)
    total = sum(
        (1 - abs(i - j) / (lags + 1)) * d[i] * d[j]
        for i in range(64)
        for j in range(64)
        if abs(i - j) <= lags
    )
    assert mean_error(torch.tensor(row)) == pytest.approx(math.sqrt(total / 63 / 64), rel=1e-9)


@pytest.mark.parametrize(
    "values", [[], [1.0] * 7, [math.inf] * 9, [1.0] * 8 + [math.nan], [1e308, -1e308] * 5]
)
def test_no_error_of_too_few_or_of_no_numbers(values: list[float]) -> None:
    assert mean_error(torch.tensor(values, dtype=torch.float64)) is None


def test_windows_that_are_all_alike_have_no_error() -> None:
    assert mean_error(torch.full((9,), 0.25)) == 0.0
