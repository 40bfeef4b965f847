"""The recipe that a target asks for, from what a command was given."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from lowbit.convert.cli.tables import target as render
from lowbit.convert.plan.allocate import Allocation, Target, allocate
from lowbit.convert.plan.lookup import (
    Progress,
    Settings,
    find_or_measure,
    open_original,
    read_checked,
    rows_of,
)
from lowbit.convert.plan.recipe import Recipe
from lowbit.convert.plan.sensitivities import Row
from lowbit.convert.plan.sensitivity import variants_of
from lowbit.convert.plan.sets import fused_sets
from lowbit.formats.hub.locate import locate


@dataclass(frozen=True, slots=True)
class TargetRequest:
    """Request of a budget.

    Attributes:
        target: the budget.
        sensitivities: a file of them; None for those of the cache, measured where it has none.
    """

    target: Target
    sensitivities: Path | None


def meet_target(
    source: str,
    revision: str | None,
    recipe: Recipe,
    request: TargetRequest,
    settings: Settings,
    max_shard_bytes: int,
    progress: Progress,
    note: Callable[[str], None] | None,
) -> Recipe:
    """The recipe with the schemes chosen that fit a target, and what was chosen on stderr.

    Args:
        source: folder or Hub id, whose weights are fetched.
        revision: of a Hub id.
        recipe: what decides everything else.
        request: the target.
        settings: how to measure.
        max_shard_bytes: limit of an output file.
        progress: called with (phase, done, in all).
        note: told what happens; None for silence.

    Raises:
        LowbitError: a target that cannot be met, and whatever stops a measurement or conversion.
    """
    folder = locate(source, revision).folder
    checkpoint = open_original(folder).checkpoint

    def allocated(rows: Sequence[Row]) -> Allocation:
        config, tensors = checkpoint.config, checkpoint.tensors
        return allocate(config, tensors, recipe, rows, request.target, max_shard_bytes)

    if request.sensitivities is None:
        variants = variants_of(fused_sets(checkpoint.config, checkpoint.tensors), settings.groups)
        allocated(rows_of(variants, [1.0] * len(variants)))  # a target out of reach is known now
        found = find_or_measure(folder, settings, progress, note)
        if found.failure is not None and note is not None:
            note(f"the sensitivities are not kept for another time: {found.failure}")
    else:
        found = read_checked(request.sensitivities, folder, progress)
    chosen = allocated(found.sensitivities.rows)
    if note is not None:
        render.allocation(chosen, found)
    return chosen.recipe
