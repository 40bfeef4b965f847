"""Standard errors of means over tokens that depend on each other."""

import math

from torch import Tensor

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
