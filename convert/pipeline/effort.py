"""An effort for a model on this machine: the facts that decide, and the target that follows."""

from dataclasses import replace
from fractions import Fraction

import torch

from lowbit.convert.budget.allocate import Target
from lowbit.convert.budget.costs import LEARNED
from lowbit.convert.budget.lookup import CPU_WINDOWS, WINDOW, WINDOWS
from lowbit.convert.budget.sensitivity import DRAWS
from lowbit.convert.budget.target import TargetRequest
from lowbit.convert.original.device import device_name
from lowbit.convert.pipeline.estimate import DRAFTER, expected_windows, obstacle_of, units_of
from lowbit.convert.plan.calibration_cost import Windows, measured_rate, shapes_of
from lowbit.convert.plan.calibration_memory import (
    calibration_memory,
    check_calibration,
    costs_memory,
)
from lowbit.convert.plan.choice_of_method import needs_no_calibration
from lowbit.convert.plan.effort import Effort, EffortPlan, Facts, Way, choose_way
from lowbit.convert.plan.memory import Memory, check_windows, sensitivity_memory
from lowbit.convert.plan.method import RTN
from lowbit.convert.plan.plan import Plan, make_plan
from lowbit.convert.plan.recipe import Recipe
from lowbit.convert.plan.sets import GROUPS, USUAL_BITS, fused_sets
from lowbit.convert.quantize.session import CalibrationRequest
from lowbit.formats.errors import ResourceError
from lowbit.formats.layout.recipes import GROUP_SIZE
from lowbit.formats.safetensors.checkpoint import Checkpoint
from lowbit.formats.shell.duration import about

HEAD_SCHEMES = len(GROUPS) * len(USUAL_BITS)  # that a head is estimated at


def plan_effort(
    effort: Effort,
    source: Checkpoint,
    recipe: Recipe,
    calibration: CalibrationRequest,
    device: torch.device,
) -> EffortPlan:
    """Choose the way that an effort stands for, from headers and this machine.

    Args:
        recipe: its method is left open.

    Raises:
        LowbitError: a source or a recipe that cannot be converted.
    """
    # Without frequent rows, which leave the head one of the sets that bits are chosen for.
    plain = replace(recipe, method=RTN, frequent_rows=0)
    plan = make_plan(source.config, source.tensors, plain)
    if source.sizes.block_drafts is not None:
        return EffortPlan(effort, Way(RTN), 0.0, DRAFTER)
    facts = gather_facts(source, recipe, plan, calibration, device)

    def fits(way: Way) -> bool:
        return _fits(source, facts, way)

    rate = measured_rate(device, facts.shapes)
    made = choose_way(effort, facts, fits, device_name(device), rate)
    if made.way.costs is None:
        return made
    need, _ = _costs_memory(source, facts, made.way, torch.get_num_threads())
    return replace(made, costs_memory=need)


def gather_facts(
    source: Checkpoint,
    recipe: Recipe,
    plan: Plan,
    calibration: CalibrationRequest,
    device: torch.device,
) -> Facts:
    """Facts that decide; `plan` is that of the recipe by round-to-nearest."""
    kind, context = device.type, source.sizes.max_position_embeddings
    length = min(WINDOW, context)
    uncalibrated = "calibration has nothing to gain at 8 bits"
    return Facts(
        device=kind,
        units=units_of(device),
        shapes=shapes_of(source.config, plan.schemes, source.tensors),
        sets=len(fused_sets(source.config, source.tensors)),
        windows=expected_windows(calibration, context, kind),
        learned=Windows(LEARNED[kind], length),
        measured=Windows(CPU_WINDOWS if kind == "cpu" else WINDOWS, length),
        estimated=Windows(WINDOWS, length),
        rotatable=obstacle_of(source, plan.schemes, plan.written) is None,
        uncalibrated=uncalibrated if needs_no_calibration(plan.schemes) else None,
        fixed_bits=_fixed_bits(source, recipe, plan),
    )


def target_like(uniform: Plan, way: Way) -> TargetRequest:
    """The target of a way that chooses bits: the bytes of the weight files of a plan."""
    bits = Fraction(8 * uniform.weight_bytes, uniform.written_parameters)
    return TargetRequest(
        Target(bits_per_weight=bits),
        keeps_stored=False,
        measured=way.costs == "measured",
        must_keep=False,
        largest_groups=not way.groups,
    )


def effort_line(made: EffortPlan) -> str:
    """The way, its time and its reason, and what more would bring."""
    line = f"effort {made.effort}: {made.way}"
    if made.way.costs is not None:
        line += " at the bytes of INT4"
    if made.seconds:
        line += f", {about(made.seconds)}"
    line += f" ({made.reason})"
    if made.better is None:
        return line
    return f"{line}; --effort high: {made.better}, {about(made.better_seconds)}"


def _fixed_bits(source: Checkpoint, recipe: Recipe, plan: Plan) -> str | None:
    """Reason why no bits are chosen; None where they are. `plan` is that of the recipe."""
    if source.sizes.experts is not None:
        return "vLLM takes one scheme for the experts of a layer"
    if recipe.base != "int4":
        return f"--recipe {recipe.base} gives them"
    if recipe.group_size != GROUP_SIZE:
        return "--group-size gives the groups"
    if not all(override.names_mtp for override in recipe.overrides):
        return "--bits gives them"
    sets = fused_sets(source.config, source.tensors)
    if any(fused.shapes[0][1] % min(GROUPS) for fused in sets):
        return f"rows of some linears are no multiple of {min(GROUPS)}"
    free = (fused for fused in sets if recipe.head is None or fused.layer is not None)
    schemes = [plan.schemes[module] for fused in free for module in fused.modules]
    if not any(scheme is not None and scheme.bits > min(USUAL_BITS) for scheme in schemes):
        return f"--lm-head fixes the head, and all else has {min(USUAL_BITS)} bits"
    return None


def _fits(source: Checkpoint, facts: Facts, way: Way) -> bool:
    """Tell if a way fits into the memory that is free."""
    device, threads = facts.device, torch.get_num_threads()
    try:
        need = calibration_memory(facts.shapes, way.method, facts.windows, device, threads)
        check_calibration(need, facts.windows, device)
        if way.costs is not None:
            need, windows = _costs_memory(source, facts, way, threads)
            check_windows("costs", need, windows, device, "{}")
    except ResourceError:
        return False
    return True


def _costs_memory(source: Checkpoint, facts: Facts, way: Way, threads: int) -> tuple[Memory, int]:
    """Memory of the costs that a way chooses bits by, and windows that they are computed on."""
    config, device = source.config, facts.device
    if way.costs == "measured":
        count, length = facts.measured.count, facts.measured.length
        sets = fused_sets(config, source.tensors)
        windows = facts.learned.count, count, length
        return costs_memory(config, sets, way.method, windows, device, threads), count
    count, length = facts.estimated.count, facts.estimated.length
    need = sensitivity_memory(config, (count, length), HEAD_SCHEMES, DRAWS, device, threads)
    return need, count
