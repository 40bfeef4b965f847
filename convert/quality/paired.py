"""The difference of two packed forms of one model on one text, and its standard error."""

import math
from dataclasses import dataclass
from statistics import fmean, stdev

from lowbit.convert.quality.record import LogitQuality
from lowbit.convert.quality.uncertainty import LEAST_WINDOWS


@dataclass(frozen=True, slots=True)
class Difference:
    """Of the mean KL, in nats: how much larger the second's is, and its standard error."""

    mean: float
    standard_error: float


def paired_difference(first: LogitQuality, second: LogitQuality) -> Difference | None:
    """How much more the second of two packed models diverges than the first, window by window.

    Windows that are hard for one are hard for the other, so the error of their difference is much
    smaller than that of either mean.

    Returns:
        None where the two were not measured on the same windows, or on fewer than 8.
    """
    series = (first.window_series, second.window_series)
    same = (first.text_sha256, first.window, first.windows) == (
        second.text_sha256,
        second.window,
        second.windows,
    )
    if not same or len(series[0]) < LEAST_WINDOWS:
        return None
    differences = [b.kl - a.kl for a, b in zip(*series, strict=True)]
    return Difference(fmean(differences), stdev(differences) / math.sqrt(len(differences)))
