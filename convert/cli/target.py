"""From the options of a target to a plan that meets it."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from lowbit.convert.calibrate.session import CalibrationRequest
from lowbit.convert.cli.tables import target as render
from lowbit.convert.original.device import open_device
from lowbit.convert.pipeline.estimate import automatic_plan
from lowbit.convert.plan.allocate import Allocation, Target, allocate
from lowbit.convert.plan.lookup import (
    Found,
    Progress,
    Settings,
    dense_weights,
    find_or_estimate,
    read_checked,
    rows_of,
)
from lowbit.convert.plan.plan import Plan, make_plan
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
        automatic: the method is still to be chosen; the recipe's own is not looked at.
        bits: to choose from.
    """

    target: Target
    sensitivities: Path | None
    automatic: bool
    bits: tuple[int, ...]


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

    The sensitivities are those of the model that is quantized, with the recipe's scale rule and
    rotated where its method rotates; they are of weights rounded to nearest by every method.

    Args:
        source: the original, on this machine.
        recipe: recipe for everything else.
        request: the target.
        settings: text, windows, group sizes and device of the sensitivities; their scale rule and
            rotation are those of the recipe.
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
        given = [row for row in rows if row.bits in request.bits]
        return allocate(config, tensors, recipe, given, request.target, max_shard_bytes)

    def by(rotate: bool) -> tuple[Found, Allocation]:
        chosen = replace(settings, rule=recipe.rule, rotate=rotate)
        found = find_or_estimate(weights, chosen, progress, note)
        if found.failure is not None and note is not None:
            note(f"the sensitivities are not kept for another time: {found.failure}")
        return found, allocated(found.sensitivities.rows)

    def rotates(plan: Plan) -> bool:
        """Tell whether the plan's method rotates, or would by `auto`."""
        if not request.automatic:
            return plan.recipe.method.rotate
        text = CalibrationRequest(settings.calib)
        found = automatic_plan(source, plan, open_device(settings.device), text)
        return found.recipe.method.rotate

    if request.sensitivities is None:
        choices = choices_of(fused_sets(config, tensors), settings.groups)
        allocated(rows_of(choices, [1.0] * len(choices)))  # a target out of reach is known now
        # a target chooses the bits, not the base
        rotate = rotates(make_plan(config, tensors, replace(recipe, base="int4")))
        found, chosen = by(rotate)
        if rotates(chosen.plan) != rotate:  # auto rotates neither 8 bits nor some tied heads
            found, chosen = by(not rotate)
    else:
        found = read_checked(request.sensitivities, weights, progress)
        chosen = allocated(found.sensitivities.rows)
    if note is not None:
        render.allocation(chosen, found)
        is_rotated = rotates(chosen.plan)
        done = replace(found.sensitivities, scale_rule=recipe.rule, rotated=is_rotated).conditions
        if done != found.sensitivities.conditions:
            note(f"! the sensitivities are of {found.sensitivities.conditions}; quantized: {done}")
    return chosen.plan


def rotated_by_default(source: Checkpoint, request: CalibrationRequest, device: str) -> bool:
    """Tell whether `quantize` rotates an original where nothing else is asked for.

    Raises:
        LowbitError: a source that cannot be converted.
    """
    plan = make_plan(source.config, source.tensors, Recipe())
    return automatic_plan(source, plan, open_device(device), request).recipe.method.rotate
