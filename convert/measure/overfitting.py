"""Overfitting of a calibration: errors on held-out windows beside those it learned from."""

from collections.abc import Sequence

from lowbit.convert.calibrate.store import LayerError


def held_out_excess(errors: Sequence[LayerError]) -> float | None:
    """Share by which the held-out error is above the learned one, over all layers.

    Args:
        errors: of the layers; those whose `learned` error is not known are left out.

    Returns:
        0.2 for a fifth; None where no layer has both errors.
    """
    pairs = [(row.chosen, row.learned) for row in errors if row.learned is not None]
    held, seen = sum(chosen for chosen, _ in pairs), sum(learned for _, learned in pairs)
    return held / seen - 1 if seen > 0 else None
