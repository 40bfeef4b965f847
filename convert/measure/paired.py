"""The difference of two packed forms of one model on one text, and its standard error."""

import math
from dataclasses import dataclass

import torch

from lowbit.convert.measure.record import LogitQuality
from lowbit.convert.measure.uncertainty import mean_error


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
