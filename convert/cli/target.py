"""From the options of a target to a recipe that meets it."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from lowbit.convert.calibrate.request import CalibrationRequest
from lowbit.convert.cli.tables import target as render
from lowbit.convert.pipeline.prospect import automatic_recipe
from lowbit.convert.plan.allocate import Allocation, Target, allocate
from lowbit.convert.plan.lookup import (
    Found,
    Progress,
    Settings,
    find_or_estimate,
    open_original,
    read_checked,
    rows_of,
)
from lowbit.convert.plan.recipe import Recipe
from lowbit.convert.plan.sensitivities import Row
from lowbit.convert.plan.sets import choices_of, fused_sets
from lowbit.formats.hub.locate import locate
from lowbit.formats.safetensors.checkpoint import Checkpoint


@dataclass(frozen=True, slots=True)
class TargetRequest:
    """Budget and the sensitivities to meet it by.

    Attributes:
        target: the budget.
        sensitivities: file of sensitivities; None for the cache, computed where it has none.
        automatic: the method is still to be chosen; the recipe's own is not looked at.
    """

    target: Target
    sensitivities: Path | None
    automatic: bool


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
    """Choose schemes that meet a target, and say on stderr which.

    The sensitivities are those of the model that is quantized, with the recipe's scale rule and
    rotated where its method rotates; they are of weights rounded to nearest by every method.

    Args:
        source: folder or Hub id, whose weights are fetched.
        revision: branch, tag or commit of a Hub id.
        recipe: recipe for everything else.
        request: the target.
        settings: text, windows, group sizes and device of the sensitivities; their scale rule and
            rotation are those of the recipe.
        max_shard_bytes: limit of an output file.
        progress: called with (phase, done, in all).
        note: called with lines for stderr; None for silence.

    Returns:
        The recipe with the schemes as overrides.

    Raises:
        LowbitError: a target that cannot be met, and whatever stops `find_or_estimate`.
    """
    folder = locate(source, revision).folder
    checkpoint = open_original(folder).checkpoint

    def allocated(rows: Sequence[Row]) -> Allocation:
        config, tensors = checkpoint.config, checkpoint.tensors
        return allocate(config, tensors, recipe, rows, request.target, max_shard_bytes)

    def by(rotate: bool) -> tuple[Found, Allocation]:
        chosen = replace(settings, rule=recipe.rule, rotate=rotate)
        found = find_or_estimate(folder, chosen, progress, note)
        if found.failure is not None and note is not None:
            note(f"the sensitivities are not kept for another time: {found.failure}")
        return found, allocated(found.sensitivities.rows)

    def rotates(recipe: Recipe) -> bool:
        return _rotates(checkpoint, recipe, request.automatic, settings)

    if request.sensitivities is None:
        choices = choices_of(fused_sets(checkpoint.config, checkpoint.tensors), settings.groups)
        allocated(rows_of(choices, [1.0] * len(choices)))  # a target out of reach is known now
        rotate = rotates(replace(recipe, base="int4"))  # a target chooses the bits, not the base
        found, chosen = by(rotate)
        if rotates(chosen.recipe) != rotate:  # auto rotates neither 8 bits nor some tied heads
            found, chosen = by(not rotate)
    else:
        found = read_checked(request.sensitivities, folder, progress)
        chosen = allocated(found.sensitivities.rows)
    if note is not None:
        render.allocation(chosen, found)
        is_rotated = rotates(chosen.recipe)
        done = replace(found.sensitivities, scale_rule=recipe.rule, rotated=is_rotated).conditions
        if done != found.sensitivities.conditions:
            note(f"! the sensitivities are of {found.sensitivities.conditions}; quantized: {done}")
    return chosen.recipe


def _rotates(checkpoint: Checkpoint, recipe: Recipe, automatic: bool, settings: Settings) -> bool:
    """Tell whether the recipe's method rotates, or would by `auto`."""
    if not automatic:
        return recipe.method.rotate
    return _automatic(checkpoint, recipe, CalibrationRequest(settings.calib), settings.device)


def rotated_by_default(folder: Path, request: CalibrationRequest, device: str) -> bool:
    """Tell whether `quantize` rotates an original where nothing else is asked for.

    Raises:
        LowbitError: a source that cannot be converted.
    """
    return _automatic(open_original(folder).checkpoint, Recipe(), request, device)


def _automatic(
    checkpoint: Checkpoint, recipe: Recipe, text: CalibrationRequest, device: str
) -> bool:
    config, tensors = checkpoint.config, checkpoint.tensors
    found = automatic_recipe(config, tensors, recipe, device=device, request=text)
    return found.method.rotate
