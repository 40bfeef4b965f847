"""Choose the scheme of each fused set under a budget of bits or bytes."""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from fractions import Fraction
from typing import Any

from lowbit.convert.plan.knapsack import Option, choose
from lowbit.convert.plan.patterns import overrides_for
from lowbit.convert.plan.plan import Plan, make_plan
from lowbit.convert.plan.recipe import Recipe
from lowbit.convert.plan.sensitivities import Row, by_set
from lowbit.convert.plan.sets import FusedSet, fused_sets
from lowbit.formats.architectures import tensor_table
from lowbit.formats.architectures.table import TensorSpec
from lowbit.formats.errors import FormatError, QuantizationError
from lowbit.formats.layout.scheme import Scheme
from lowbit.formats.safetensors.checkpoint import TensorInfo

Schemes = Mapping[str, Scheme | None]


@dataclass(frozen=True, slots=True)
class Target:
    """A budget; exactly one of the two is given.

    Attributes:
        bits_per_weight: of decoder and head, scales included, as `Plan.bits_per_weight`.
        size_bytes: of the weight files, headers included, as `Plan.output_bytes`.
    """

    bits_per_weight: Fraction | None = None
    size_bytes: int | None = None


@dataclass(frozen=True, slots=True)
class Allocation:
    """Result of a choice under a budget.

    Attributes:
        recipe: an ordinary recipe that says so.
        plan: of the conversion with it.
        schemes: of every set, None for as stored.
        kl: sum of the sets' measured KL; what the whole model's would be if they did not interact.
    """

    recipe: Recipe
    plan: Plan
    schemes: Schemes
    kl: float


@dataclass(frozen=True, slots=True)
class _Candidate:
    """One scheme for a set, and its measured KL; 0 for the only one of a set that is fixed."""

    scheme: Scheme | None
    kl: float


def allocate(
    config: Mapping[str, Any],
    tensors: Mapping[str, TensorInfo],
    recipe: Recipe,
    rows: Sequence[Row],
    target: Target,
    max_shard_bytes: int,
) -> Allocation:
    """The choice of schemes with the least sum of measured KL that the budget allows.

    Sets that the recipe's overrides or its head option name keep what those say; so does what
    only drafts (multi-token prediction). The headers of the files are counted as those of the
    choice itself.

    Args:
        config: content of config.json.
        tensors: headers of the checkpoint.
        recipe: what decides everything else.
        rows: measured sensitivities of this checkpoint.
        target: the budget.
        max_shard_bytes: limit of an output file.

    Raises:
        QuantizationError: no choice fits, or the model as stored fits.
        LowbitError: whatever `make_plan` refuses.
    """
    sets = fused_sets(config, tensors)
    candidates = _candidates(config, tensors, recipe, sets, rows)

    def plan_of(schemes: Schemes) -> Plan:
        chosen = replace(recipe, overrides=(*recipe.overrides, *overrides_for(sets, schemes)))
        return make_plan(config, tensors, chosen, max_shard_bytes)

    if target.size_bytes is None:
        schemes = _under_bits(sets, candidates, target.bits_per_weight or Fraction(0))
        plan = plan_of(schemes)
    else:
        plan, schemes = _under_bytes(sets, candidates, target.size_bytes, plan_of)
    kl = sum(
        next(one.kl for one in given if one.scheme == schemes[fused.name])
        for fused, given in zip(sets, candidates, strict=True)
    )
    return Allocation(plan.recipe, plan, schemes, kl)


def _candidates(
    config: Mapping[str, Any],
    tensors: Mapping[str, TensorInfo],
    recipe: Recipe,
    sets: Sequence[FusedSet],
    rows: Sequence[Row],
) -> list[list[_Candidate]]:
    """Choices of each set.

    Raises:
        FormatError: a set without sensitivities.
    """
    specs = {spec.module: spec for spec in tensor_table(config, tensors) if spec.quantizable}
    measured = by_set(rows)
    found = []
    for fused in sets:
        members = [specs[module] for module in fused.modules]
        is_fixed = any(o.matches(spec) for o in recipe.overrides for spec in members)
        if is_fixed or (members[0].role == "head" and recipe.head is not None):
            found.append([_Candidate(_one_scheme(recipe, members), 0.0)])
            continue
        if fused.name not in measured:
            raise FormatError(
                f"`{fused.name}` has no measured sensitivity",
                hint="measure again with `lowbit-convert sensitivity`",
            )
        given = [row for row in measured[fused.name] if math.isfinite(row.kl)]
        found.append([_Candidate(None, 0.0), *(_Candidate(row.scheme, row.kl) for row in given)])
    return found


def _one_scheme(recipe: Recipe, members: Sequence[TensorSpec]) -> Scheme | None:
    """Scheme that a recipe states for a set; None where it leaves the set as stored.

    Raises:
        QuantizationError: the recipe names only a part of the set.
    """
    schemes = {recipe.scheme_of(spec) for spec in members}
    named = [spec for spec in members if any(o.matches(spec) for o in recipe.overrides)]
    if len(schemes) > 1 or len(named) not in (0, len(members)):
        raise QuantizationError(
            f"`{members[0].module}` and `{members[-1].module}` are fused and need one scheme, "
            "but --bits names only one of them, or gives them two",
            hint="let the pattern cover the whole set, for example '*.self_attn.[qkv]_proj=8'",
        )
    return schemes.pop()


def _under_bits(
    sets: Sequence[FusedSet], candidates: Sequence[Sequence[_Candidate]], target: Fraction
) -> Schemes:
    """The best choice whose bits of decoder and head, over their weights, stay below a target."""
    weights = sum(fused.weights for fused in sets)
    sizes = _sizes(sets, candidates, FusedSet.packed_bytes)
    schemes = _best(sets, candidates, sizes, math.floor(target * weights / 8))
    if schemes is None or not any(schemes.values()):
        bounds = (sum(map(min, sizes)), sum(fused.packed_bytes(None) for fused in sets))
        least, most = (8 * size / weights for size in bounds)
        raise QuantizationError(
            f"{float(target):g} bits per weight cannot be met: the smallest choice has "
            f"{math.ceil(1000 * least) / 1000:g}, the model as stored {most:g}",
            hint="give a target between the two",
        )
    return schemes


def _under_bytes(
    sets: Sequence[FusedSet],
    candidates: Sequence[Sequence[_Candidate]],
    target: int,
    plan_of: Callable[[Schemes], Plan],
) -> tuple[Plan, Schemes]:
    """The best choice whose files, headers included, take at most `target` bytes."""
    sizes = _sizes(sets, candidates, FusedSet.file_bytes)
    smallest = {
        fused.name: min(given, key=lambda one: fused.file_bytes(one.scheme)).scheme
        for fused, given in zip(sets, candidates, strict=True)
    }
    smallest_plan = plan_of(smallest)
    rest = smallest_plan.output_bytes - sum(map(min, sizes))  # of all that is not to choose
    room = target - rest
    while True:
        schemes = _best(sets, candidates, sizes, room)
        if schemes is None or not any(schemes.values()):
            break
        plan = plan_of(schemes)
        excess = plan.output_bytes - target
        if excess <= 0:
            return plan, schemes
        # Headers longer than the smallest choice's: the next best with as much less.
        room = sum(fused.file_bytes(schemes[fused.name]) for fused in sets) - excess
    stored = rest + sum(fused.file_bytes(None) for fused in sets)
    raise QuantizationError(
        f"{target:,} bytes cannot be met: the smallest choice takes "
        f"{smallest_plan.output_bytes:,}, the model as stored {stored:,}",
        hint="give a target between the two",
    )


def _sizes(
    sets: Sequence[FusedSet],
    candidates: Sequence[Sequence[_Candidate]],
    size_of: Callable[[FusedSet, Scheme | None], int],
) -> list[list[int]]:
    return [
        [size_of(fused, one.scheme) for one in given]
        for fused, given in zip(sets, candidates, strict=True)
    ]


def _best(
    sets: Sequence[FusedSet],
    candidates: Sequence[Sequence[_Candidate]],
    sizes: Sequence[Sequence[int]],
    limit: int,
) -> Schemes | None:
    """The scheme of every set, by its name."""
    options = [
        [Option(size, one.kl) for size, one in zip(row, given, strict=True)]
        for row, given in zip(sizes, candidates, strict=True)
    ]
    picks = choose(options, limit)
    if picks is None:
        return None
    chosen = zip(sets, candidates, picks, strict=True)
    return {fused.name: given[pick].scheme for fused, given, pick in chosen}
