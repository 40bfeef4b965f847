"""From the options of a target to a plan that meets it."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from lowbit.convert.cli.tables import target as render
from lowbit.convert.plan.allocate import Allocation, Target, allocate
from lowbit.convert.plan.lookup import (
    Progress,
    Settings,
    dense_weights,
    find_or_estimate,
    read_checked,
    rows_of,
)
from lowbit.convert.plan.plan import Plan
from lowbit.convert.plan.recipe import Recipe
from lowbit.convert.plan.sensitivities import Row
from lowbit.convert.plan.sets import choices_of, fused_sets
from lowbit.formats.safetensors.checkpoint import Checkpoint


@dataclass(frozen=True, slots=True)
class TargetRequest:
    """Budget and the sensitivities to meet it by.

    Attributes:
        target: the budget.
        sensitivities: file of sensitivities; None for the cache, computed where it has none.
    """

    target: Target
    sensitivities: Path | None


def meet_target(
    source: Checkpoint,
    recipe: Recipe,
    request: TargetRequest,
    settings: Settings,
    max_shard_bytes: int,
    progress: Progress,
    note: Callable[[str], None] | None,
) -> Plan:
    """Choose schemes that meet a target, and say on stderr which.

    Args:
        source: the original, on this machine.
        recipe: recipe for everything else.
        request: the target.
        settings: text, windows, group sizes and device of the sensitivities.
        max_shard_bytes: limit of an output file.
        progress: called with (phase, done, in all).
        note: called with lines for stderr; None for silence.

    Returns:
        A plan by the recipe with the schemes as overrides.

    Raises:
        LowbitError: a target that cannot be met, and whatever stops `find_or_estimate`.
    """
    weights = dense_weights(source)
    config, tensors = source.config, source.tensors

    def allocated(rows: Sequence[Row]) -> Allocation:
        return allocate(config, tensors, recipe, rows, request.target, max_shard_bytes)

    if request.sensitivities is None:
        choices = choices_of(fused_sets(config, tensors), settings.groups)
        allocated(rows_of(choices, [1.0] * len(choices)))  # a target out of reach is known now
        found = find_or_estimate(weights, settings, progress, note)
        if found.failure is not None and note is not None:
            note(f"the sensitivities are not kept for another time: {found.failure}")
    else:
        found = read_checked(request.sensitivities, weights, progress)
    chosen = allocated(found.sensitivities.rows)
    if note is not None:
        render.allocation(chosen, found)
    return chosen.plan
