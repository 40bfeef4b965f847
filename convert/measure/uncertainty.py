"""Standard errors of means over tokens that depend on each other."""

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from lowbit.convert.measure.record import LogitQuality

LEAST_WINDOWS = 8  # below them a spread is too uncertain to be shown


def mean_error(means: Tensor) -> float | None:
    """Standard error of the mean of some windows; None below 8, or where one is not finite.

    Tokens of one window depend on each other, so a window is one observation. Neighbouring windows
    are often about one subject, which a Newey-West estimate over the nearest n^(1/3) windows
    allows for; where it is smaller than that of independent windows, the latter counts.

    Args:
        means: [windows], in the order of the text.
    """
    count = len(means)
    if count < LEAST_WINDOWS or not bool(means.isfinite().all()):
        return None
    deviations = means.double() - means.double().mean()
    alone = total = float(deviations.square().sum())
    lags = round(count ** (1 / 3))
    for lag in range(1, lags + 1):
        weight = 1 - lag / (lags + 1)
        total += 2 * weight * float((deviations[lag:] * deviations[:-lag]).sum())
    error = math.sqrt(max(alone, total) / (count - 1) / count)
    return error if math.isfinite(error) else None


@dataclass(frozen=True, slots=True)
class PairedDifference:
    """The second model's mean KL minus the first's, in nats, and its standard error."""

    mean: float
    standard_error: float


def paired_difference(first: LogitQuality, second: LogitQuality) -> PairedDifference | None:
    """The mean KL of the second of two packed models minus the first's, paired window by window.

    Windows that are hard for one are hard for the other, and the difference of the two is steadier
    than either. Its error is estimated like that of a mean: neighbouring windows that resemble each
    other count as less.

    Returns:
        None where the two were not measured on the same windows, or on fewer than 8, or where a
        KL is infinite.
    """
    series = (first.window_series, second.window_series)
    same = (first.text_sha256, first.window, first.windows) == (
        second.text_sha256,
        second.window,
        second.windows,
    )
    if not same or len(series[0]) != len(series[1]):
        return None
    differences = [b.kl - a.kl for a, b in zip(*series, strict=True)]
    error = mean_error(torch.tensor(differences, dtype=torch.float64))
    # The series of a long text averages neighbours, by ones and twos: the mean is not its mean.
    mean = second.kl_mean - first.kl_mean
    return None if error is None or not math.isfinite(mean) else PairedDifference(mean, error)
