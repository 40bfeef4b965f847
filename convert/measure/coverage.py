"""Tokens that a calibration routed to every expert."""

from collections.abc import Sequence
from dataclasses import dataclass
from statistics import median_low

from lowbit.convert.quantize.experts import FEWEST_TOKENS
from lowbit.convert.quantize.store import LayerError


@dataclass(frozen=True, slots=True)
class Coverage:
    """Tokens that the experts of a layer were calibrated on."""

    layer: int  # number of the layer
    experts: int  # in the layer
    least: int  # tokens of the expert with the fewest
    middle: int  # of the median expert
    few: int  # experts with too few tokens, which are rounded to nearest


def coverage_of(errors: Sequence[LayerError]) -> tuple[Coverage, ...]:
    """Coverage of every layer with experts that a calibration passed through."""
    return tuple(
        Coverage(
            layer=row.layer,
            experts=len(row.expert_tokens),
            least=min(row.expert_tokens),
            middle=median_low(row.expert_tokens),
            few=sum(count < FEWEST_TOKENS for count in row.expert_tokens),
        )
        for row in errors
        if row.expert_tokens
    )


def few_tokens(rows: Sequence[Coverage]) -> str | None:
    """Sentence about the experts that a calibration could not learn from; None without any."""
    few = sum(row.few for row in rows)
    if not few:
        return None
    return (
        f"{few:,} of {sum(row.experts for row in rows):,} experts saw fewer than {FEWEST_TOKENS} "
        "tokens of the calibration text and are rounded to nearest; give more --calib-samples or "
        "a more varied --calib text."
    )
