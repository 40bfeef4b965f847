"""Choose the scheme of each fused set under a budget of bits or bytes."""

import math
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from fractions import Fraction
from operator import attrgetter
from typing import Any

from lowbit.convert.budget.frequent import FREQUENT_ROWS, loss_left
from lowbit.convert.budget.knapsack import Option, choose
from lowbit.convert.budget.sensitivities import Row, by_set
from lowbit.convert.plan.plan import Plan
from lowbit.convert.plan.recipe import Override, Recipe
from lowbit.convert.plan.sets import FusedSet, fused_sets, patterns_for
from lowbit.formats.architectures import tensor_table
from lowbit.formats.architectures.table import TensorSpec
from lowbit.formats.errors import FormatError, QuantizationError
from lowbit.formats.frequent_rows import BITS as FREQUENT_BITS
from lowbit.formats.layout.scheme import Scheme
from lowbit.formats.safetensors.checkpoint import TensorInfo

Schemes = Mapping[str, Scheme | None]


@dataclass(frozen=True, slots=True)
class Target:
    """A budget; exactly one of the two is given."""

    bits_per_weight: Fraction | None = None  # of the weight files, `Plan.bits_per_weight`
    size_bytes: int | None = None  # of the whole folder

    def limit(self, parameters: int) -> int:
        """Bytes that the folder, or the weight files alone, of so many parameters may have."""
        if self.size_bytes is not None:
            return self.size_bytes
        return math.floor((self.bits_per_weight or Fraction(0)) * parameters / 8)

    def refusal(self, least: int, most: int, parameters: int) -> str:
        """Message that the budget cannot be met."""
        if self.bits_per_weight is None:
            return (
                f"{self.size_bytes:,} bytes cannot be met: the smallest choice takes {least:,}, "
                f"the model as stored {most:,}"
            )
        low, high = (math.ceil(8000 * size / parameters) / 1000 for size in (least, most))
        return (
            f"{float(self.bits_per_weight):g} bits per weight cannot be met: the smallest choice "
            f"has {low:g}, the model as stored {high:g}"
        )


@dataclass(frozen=True, slots=True)
class Allocation:
    """Result of a choice under a budget."""

    recipe: Recipe  # an ordinary recipe with the schemes as overrides
    plan: Plan  # of the conversion with that recipe
    schemes: Schemes  # scheme of every set by name, None for as stored
    # Sum of the sets' KL; the whole model's, if errors of different sets were independent.
    kl: float


@dataclass(frozen=True, slots=True)
class _Candidate:
    """One scheme for a set, with its bytes in a file and its KL."""

    scheme: Scheme | None
    option: Option


Candidates = Mapping[str, Sequence[_Candidate]]  # by the set's name
Picks = Mapping[str, _Candidate]


def allocate(
    config: Mapping[str, Any],
    tensors: Mapping[str, TensorInfo],
    recipe: Recipe,
    rows: Sequence[Row],
    target: Target,
    plan_with: Callable[[Recipe], Plan],
    beside: Callable[[Plan], int] | None = None,
    keeps_stored: bool = True,
) -> Allocation:
    """Choose the schemes with the least sum of KL that the budget allows.

    Where the recipe leaves frequent rows open, they are taken beside a head of 4 bits if that costs
    less than any head without them. Sets that the recipe's overrides or its head option name keep
    the scheme given there; so do linears of multi-token prediction. The budget counts the headers
    of the files of that choice.

    Args:
        rows: the cost of each scheme of each set.
        plan_with: makes the plan of a recipe, as `make_plan` does.
        beside: bytes that the folder of a plan has at most beside its weight files and frequent
            rows, for a target of its size; those of a draft head alone when None.
        keeps_stored: let sets stay as stored. A head that stays the embedding takes no bytes of the
            file, but those of BF16 in every step.

    Raises:
        QuantizationError: no choice fits, or the model as stored fits.
    """
    if recipe.frequent_rows is None:
        given = rows, target, plan_with, beside, keeps_stored
        without = replace(recipe, frequent_rows=0)
        found = [allocate(config, tensors, without, *given)]
        for number in FREQUENT_ROWS:
            # A head of other bits, a small vocabulary, or no room.
            with suppress(QuantizationError):
                some = replace(recipe, frequent_rows=number)
                found.append(allocate(config, tensors, some, *given))
        return min(found, key=attrgetter("kl"))
    sets = fused_sets(config, tensors)
    candidates = _candidates(config, tensors, recipe, sets, rows, keeps_stored)

    def plan_of(picks: Picks) -> Plan:
        schemes = {name: one.scheme for name, one in picks.items()}
        given = (Override.of(*pair) for pair in patterns_for(sets, schemes))
        chosen = replace(recipe, overrides=(*recipe.overrides, *given))
        return plan_with(chosen)

    stored = sum(fused.file_bytes(None) for fused in sets)
    counted: Callable[[Plan], int] = beside or (lambda plan: plan.draft_bytes)
    if target.size_bytes is None:
        counted = _nothing
    plan, picks = _under_bytes(candidates, target, plan_of, stored, counted)
    schemes = {name: one.scheme for name, one in picks.items()}
    kl = sum(one.option.loss for one in picks.values())
    return Allocation(plan.recipe, plan, schemes, kl)


def _nothing(plan: Plan) -> int:
    """No bytes: bits per weight are of the weight files alone."""
    return 0


def _candidates(
    config: Mapping[str, Any],
    tensors: Mapping[str, TensorInfo],
    recipe: Recipe,
    sets: Sequence[FusedSet],
    rows: Sequence[Row],
    keeps_stored: bool,
) -> dict[str, list[_Candidate]]:
    """Choices of each set; one of no loss for a set that is fixed."""
    specs = {spec.module: spec for spec in tensor_table(config, tensors) if spec.quantizable}
    measured = by_set(rows)
    candidates: dict[str, list[_Candidate]] = {}
    for fused in sets:
        members = [specs[module] for module in fused.modules]
        is_fixed = any(o.matches(spec) for o in recipe.overrides for spec in members)
        if is_fixed or (members[0].role == "head" and recipe.head is not None):
            losses = {_one_scheme(recipe, members): 0.0}
        elif fused.name not in measured:
            raise FormatError(
                f"`{fused.name}` has no sensitivity",
                hint="compute them again with `lowbit-convert sensitivity`",
            )
        else:
            # A head that stays the embedding cannot be rotated.
            stays = fused.shared and recipe.method is not None and recipe.method.rotate
            losses = {} if stays or not keeps_stored else {None: 0.0}
            given = measured[fused.name]
            losses |= {row.scheme: row.kl for row in given if math.isfinite(row.kl)}
            if members[0].role == "head" and recipe.frequent_rows:  # beside a head of fewer bits
                left = loss_left(recipe.frequent_rows)
                losses = {s: left * kl for s, kl in losses.items() if s and s.bits < FREQUENT_BITS}
        candidates[fused.name] = [
            _Candidate(scheme, Option(fused.file_bytes(scheme), kl))
            for scheme, kl in losses.items()
        ]
    return candidates


def _one_scheme(recipe: Recipe, members: Sequence[TensorSpec]) -> Scheme | None:
    """Scheme that a recipe states for a set; None where it leaves the set as stored."""
    schemes = {recipe.scheme_of(spec) for spec in members}
    named = [spec for spec in members if any(o.matches(spec) for o in recipe.overrides)]
    if len(schemes) > 1 or len(named) not in (0, len(members)):
        raise QuantizationError(
            f"`{members[0].module}` and `{members[-1].module}` are fused and need one scheme, "
            "but --bits names only one of them, or gives them two",
            hint="let the pattern cover the whole set, for example '*.self_attn.[qkv]_proj=8'",
        )
    return schemes.pop()


def _under_bytes(
    candidates: Candidates,
    target: Target,
    plan_of: Callable[[Picks], Plan],
    stored: int,
    beside: Callable[[Plan], int],
) -> tuple[Plan, Picks]:
    """Best choice whose files, headers and those beside the weights too, keep to the budget."""
    smallest = {
        name: min(given, key=lambda one: one.option.size) for name, given in candidates.items()
    }
    least = plan_of(smallest)
    # Bytes of all other tensors and files.
    rest = least.weight_bytes + beside(least) - sum(one.option.size for one in smallest.values())
    limit = target.limit(least.written_parameters)
    options = [[one.option for one in given] for given in candidates.values()]
    room = limit - rest
    while (numbers := choose(options, room)) is not None:
        chosen = zip(candidates.items(), numbers, strict=True)
        picks = {name: given[number] for (name, given), number in chosen}
        if not any(one.scheme for one in picks.values()):
            break
        plan = plan_of(picks)
        excess = plan.weight_bytes + beside(plan) - limit
        if excess <= 0:
            return plan, picks
        # Records longer than the smallest choice's: the next best with as much less.
        room = sum(one.option.size for one in picks.values()) - excess
    raise QuantizationError(
        target.refusal(least.weight_bytes + beside(least), rest + stored, least.written_parameters),
        hint="give a target between the two"
        + ("" if target.size_bytes is None else "; units can be named, as in 5GB"),
    )
