"""From the options of a command to the plan of a conversion, and its time and memory."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import torch

from lowbit.convert.calibrate.lookup import (
    Found,
    Settings,
    dense_weights,
    find_or_estimate,
    read_checked,
    rows_of,
)
from lowbit.convert.calibrate.session import CalibrationRequest
from lowbit.convert.cli.tables import target as render
from lowbit.convert.original.progress import Note, Progress
from lowbit.convert.pipeline.estimate import Estimate, automatic_plan, estimate
from lowbit.convert.pipeline.predicted_size import (
    PlannedTexts,
    SourceFiles,
    predicted_bytes,
    report_room,
)
from lowbit.convert.plan.allocate import Allocation, Target, allocate
from lowbit.convert.plan.method import RTN, Method
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
        bits: to choose from.
    """

    target: Target
    sensitivities: Path | None
    bits: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class PlanRequest:
    """The conversion that the options ask for.

    Attributes:
        recipe: which linear gets which scheme.
        automatic: the method is still to be chosen; the recipe's own is not looked at.
        target: a budget that decides the bits; None to take the recipe's.
        calibration: the text, for methods other than round-to-nearest and for sensitivities.
        device: where to compute.
        max_shard_bytes: limit of a weight file.
        draft_text: text for the tokens of a draft head; the bundled one when None.
    """

    recipe: Recipe
    automatic: bool
    target: TargetRequest | None
    calibration: CalibrationRequest
    device: torch.device
    max_shard_bytes: int
    draft_text: Path | None = None

    @property
    def texts(self) -> PlannedTexts:
        """The texts that the conversion reads."""
        return PlannedTexts(self.calibration, self.draft_text)

    def settled(self, source: Checkpoint, plan: Plan) -> Plan:
        """A plan with the method that will be used."""
        if not self.automatic:
            return plan
        return automatic_plan(source, plan, self.device, self.calibration)


def plan_ahead(
    source: Checkpoint,
    files: SourceFiles,
    request: PlanRequest,
    progress: Progress,
    note: Note | None,
) -> Estimate:
    """Plan a conversion, and estimate it.

    Args:
        source: headers of the original; with a target its weights are read, too.
        files: of the original, beside its weights.
        request: what to plan.
        progress: called with (phase, done, in all).
        note: called with lines for stderr; None for silence.

    Raises:
        LowbitError: a source or a recipe that cannot be converted, a target that cannot be met, and
            whatever stops `find_or_estimate`.
    """
    if note is not None:
        for text in source.notes:
            note(text)
    if request.target is None:
        plan = make_plan(source.config, source.tensors, request.recipe, request.max_shard_bytes)
    else:
        plan = _meet_target(source, files, request, request.target, progress, note)
    plan = request.settled(source, plan)
    return estimate(source, plan, request.device, request.calibration)


def _meet_target(
    source: Checkpoint,
    files: SourceFiles,
    request: PlanRequest,
    target: TargetRequest,
    progress: Progress,
    note: Note | None,
) -> Plan:
    """Choose schemes that meet a target, and say on stderr which.

    The sensitivities are those of the method that is then used, with the recipe's scale rule.

    Returns:
        A plan by the recipe with the schemes as overrides.
    """
    weights, recipe = dense_weights(source), request.recipe
    config, tensors = source.config, source.tensors
    settings = Settings(
        request.calibration.file, bits=target.bits, device=request.device.type, rule=recipe.rule
    )

    def folder_bytes(plan: Plan) -> int:
        made = request.settled(source, plan)
        return predicted_bytes(made, files, request.texts, request.device, at_most=True)

    def beside(plan: Plan) -> int:
        return folder_bytes(plan) + report_room(plan) - plan.output_bytes

    def allocated(rows: Sequence[Row]) -> Allocation:
        given = [row for row in rows if row.bits in target.bits]
        limit = request.max_shard_bytes
        return allocate(config, tensors, recipe, given, target.target, limit, beside)

    def by(method: Method) -> tuple[Found, Allocation]:
        found = find_or_estimate(weights, replace(settings, method=method), progress, note)
        if found.failure is not None and note is not None:
            note(f"the sensitivities are not kept for another time: {found.failure}")
        return found, allocated(found.sensitivities.rows)

    def method_of(plan: Plan) -> Method:
        return request.settled(source, plan).recipe.method

    if target.sensitivities is None:
        choices = choices_of(fused_sets(config, tensors), settings.groups, target.bits)
        guesses = [fused.weights * 4.0**-scheme.bits for fused, scheme in choices]
        # A target out of reach is known now, and mostly the method: auto rotates neither 8 bits nor
        # a head that stays the embedding.
        method = method_of(allocated(rows_of(choices, guesses)).plan)
        found, chosen = by(method)
        if (used := method_of(chosen.plan)) != method:
            found, chosen = by(used)
    else:
        found = read_checked(target.sensitivities, weights, target.bits, progress)
        chosen = allocated(found.sensitivities.rows)
    if note is not None:
        render.allocation(chosen, found, folder_bytes(chosen.plan))
        used = method_of(chosen.plan)
        known = found.sensitivities
        # Costs that another machine has measured count where this one would estimate them.
        measured = known.learned > 0 or replace(settings, method=used).measures(config)
        done = replace(
            known,
            scale_rule=recipe.rule,
            rotated=used.rotate,
            method=str(replace(used, autoround=False) if measured else RTN),
        ).conditions
        if done != known.conditions:
            note(f"! the sensitivities are of {known.conditions}; quantized: {done}")
    return chosen.plan


def method_by_default(
    source: Checkpoint, calibration: CalibrationRequest, device: torch.device
) -> Method:
    """The method of `quantize` where nothing else is asked for.

    Raises:
        LowbitError: a source that cannot be converted.
    """
    plan = make_plan(source.config, source.tensors, Recipe())
    return automatic_plan(source, plan, device, calibration).recipe.method
