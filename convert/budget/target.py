"""Bits for a target: sensitivities looked up or computed, and the schemes chosen by them."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from lowbit.convert.budget.allocate import Allocation, Target, allocate
from lowbit.convert.budget.lookup import (
    CachedSensitivities,
    Settings,
    find_or_estimate,
    read_checked,
    rows_of,
)
from lowbit.convert.budget.sensitivities import Row, by_set
from lowbit.convert.original.progress import Note, Progress
from lowbit.convert.original.weights import dense_weights
from lowbit.convert.plan.method import RTN, Method
from lowbit.convert.plan.plan import Plan
from lowbit.convert.plan.recipe import Recipe
from lowbit.convert.plan.sets import USUAL_BITS, choices_of, fused_sets
from lowbit.formats.safetensors.checkpoint import Checkpoint


@dataclass(frozen=True, slots=True)
class TargetRequest:
    """A budget, and the sensitivities to meet it by."""

    target: Target
    sensitivities: Path | None = None  # file of them; None for the cache, computed if it has none
    bits: tuple[int, ...] = USUAL_BITS  # to choose from
    keeps_stored: bool = True  # whether sets may stay as stored, such as a head the embedding
    measured: bool | None = None  # see `Settings`, as of the next
    must_keep: bool = True
    # choose bits alone: each set gets the largest of the group sizes that divide its rows
    largest_groups: bool = False


@dataclass(frozen=True, slots=True)
class TargetChoice:
    """Schemes chosen for a target."""

    allocation: Allocation
    costs: CachedSensitivities  # by which they are chosen
    folder_bytes: int  # size of the folder at most, its report aside
    # Conditions of the conversion where the costs were measured under others; None where not.
    unlike: str | None


def meet_target(
    source: Checkpoint,
    recipe: Recipe,
    request: TargetRequest,
    settings: Settings,
    plan_with: Callable[[Recipe], Plan],
    sizes: Callable[[Plan], tuple[int, int]],
    on_progress: Progress,
    note: Note,
) -> TargetChoice:
    """Choose the schemes that meet a target with the least loss.

    The sensitivities are those of the method that is then used, with the recipe's scale rule.

    Args:
        settings: of the sensitivities; the method there is replaced.
        plan_with: makes the plan of a recipe.
        sizes: bytes of a plan's folder at most, and those that a target leaves for the report.
        note: told what is computed, and what cannot be kept.

    Raises:
        QuantizationError: the target cannot be met.
    """
    weights, config, tensors = dense_weights(source), source.config, source.tensors

    def beside(plan: Plan) -> int:
        return sum(sizes(plan)) - plan.weight_bytes

    def allocated(rows: Sequence[Row]) -> Allocation:
        given = [row for row in rows if row.bits in request.bits]
        if request.largest_groups:
            given = _in_largest_groups(given)
        stored = request.keeps_stored
        return allocate(config, tensors, recipe, given, request.target, plan_with, beside, stored)

    def by(method: Method) -> tuple[CachedSensitivities, Allocation]:
        costs = find_or_estimate(weights, replace(settings, method=method), on_progress, note)
        if costs.failure is not None:
            note(f"the sensitivities are not kept for another time: {costs.failure}")
        return costs, allocated(costs.sensitivities.rows)

    if request.sensitivities is None:
        choices = choices_of(fused_sets(config, tensors), settings.groups, request.bits)
        guesses = [fused.weights * 4.0**-scheme.bits for fused, scheme in choices]
        # A target out of reach is known now, and mostly the method: auto rotates neither 8 bits nor
        # a head that stays the embedding.
        method = allocated(rows_of(choices, guesses)).plan.method
        costs, chosen = by(method)
        if chosen.plan.method != method:
            costs, chosen = by(chosen.plan.method)
    else:
        costs = read_checked(request.sensitivities, weights, request.bits, on_progress)
        chosen = allocated(costs.sensitivities.rows)
    known, used = costs.sensitivities, chosen.plan.method
    # Costs that another machine has measured count where this one would estimate them.
    measured = known.learned > 0 or replace(settings, method=used).measures(config)
    done = replace(
        known,
        scale_rule=recipe.rule,
        rotated=used.rotate,
        method=str(replace(used, autoround=False) if measured else RTN),
    ).conditions
    unlike = None if done == known.conditions else done
    return TargetChoice(chosen, costs, sizes(chosen.plan)[0], unlike)


def _in_largest_groups(rows: Sequence[Row]) -> list[Row]:
    """The rows of each set in its largest group size."""
    largest = {name: max(row.group_size for row in own) for name, own in by_set(rows).items()}
    return [row for row in rows if row.group_size == largest[row.name]]
