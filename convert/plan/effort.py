"""Choose a method, and how bits are chosen, by `--effort`: the best that some minutes buy.

    low       round-to-nearest, which reads no text
    default   the best that takes an hour on a CPU, or ten minutes on a GPU, and fits the memory;
              bits are chosen at the recipe's bytes, groups are the recipe's
    high      the best that fits the memory; groups are chosen, too

Ways to convert, best first, by the mean KL on WikiText of SmolLM2-135M, Qwen2.5-Coder-0.5B and
-1.5B at the bytes of INT4 with an INT8 head (BENCHMARKS.md): bits by measured costs and autoround;
bits by measured costs (.073 .019 .029 with groups); by estimated ones, whose costs sum to a
twentieth more; uniform bits by `gptq+rotate` and autoround, which takes 7 to 15 % off; by
`gptq+rotate` (.103 .042 .046), by `weighted` (.243 .161 .097; estimated costs take an eighth off
the first), by `rtn` (.427 .219 .145). On a GPU `default` never falls below `gptq` and estimated
costs, however long that takes. On an H200 `default` leaves .073 and .021 of the first two, `high`
.068 and .017. `default` keeps the recipe's groups, with which every product is
as fast as in uniform bits: on an H200 an 8B is within 1 to 2 % of their speed. With chosen groups
16 sequences together are 8 % slower, 64 12 %.

The choice is by rates that are constants, so that a command chooses the same on the same machine;
the times that are told are by a rate that is measured.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Literal, get_args

from lowbit.convert.plan.calibration_cost import (
    Shapes,
    Windows,
    conversion_seconds,
    costs_flops,
    estimates_flops,
    operations_a_second,
)
from lowbit.convert.plan.choice_of_method import GPTQ, WEIGHTED, WITH_EXPERTS, best_gptq
from lowbit.convert.plan.memory import Memory
from lowbit.convert.plan.method import RTN, Method
from lowbit.formats.errors import QuantizationError

Effort = Literal["low", "default", "high"]
Costs = Literal["measured", "estimated"]

EFFORTS: tuple[Effort, ...] = get_args(Effort)
LIMITS = {"cpu": 3600.0, "cuda": 600.0}  # seconds that `default` takes at most
LIMIT_WORDS = {"cpu": "an hour", "cuda": "ten minutes"}
# Weights of the layers below which `default` leaves autoround out. Its gain is measured from 106
# million on, and a model of a few million would take minutes for it.
AUTOROUND_WEIGHTS = 100_000_000


@dataclass(frozen=True, slots=True)
class Way:
    """A method and the costs by which bits are chosen at the recipe's bytes."""

    method: Method
    costs: Costs | None = None  # None where the bits are those of the recipe
    groups: bool = False  # group sizes are chosen with the bits

    def __str__(self) -> str:
        """`gptq+rotate, bits by measured costs`."""
        chosen = "bits and groups" if self.groups else "bits"
        return f"{self.method}, {chosen} by {self.costs} costs" if self.costs else str(self.method)


@dataclass(frozen=True, slots=True)
class Facts:
    """Facts about a model, a text and a machine that decide."""

    device: str  # `cpu` or `cuda`
    units: int  # cores of a CPU, multiprocessors of a GPU
    shapes: Shapes
    sets: int  # fused sets of the model, the head's included
    windows: Windows  # of the calibration text
    learned: Windows  # that costs are learned from
    measured: Windows  # that costs are measured on
    estimated: Windows  # that costs are estimated on
    rotatable: bool  # the checkpoint can be rotated, and gains by it
    uncalibrated: str | None = None  # reason why no method is worth a text; None where one is
    fixed_bits: str | None = None  # reason why the bits stay those of the recipe


@dataclass(frozen=True, slots=True)
class EffortPlan:
    """The way that an effort stands for."""

    effort: Effort
    way: Way
    seconds: float  # of the whole conversion, the measurement of costs included
    reason: str
    fixed_bits: str | None = None  # reason why the bits stay those of the recipe, where they do
    better: Way | None = None  # a better way that `high` takes
    better_seconds: float = 0.0
    rate: float | None = None  # operations a second that the times are told by, where measured
    costs_memory: Memory | None = None  # of the costs that bits are chosen by, where they are


def parse_effort(text: str) -> Effort:
    """Read the name of an effort.

    Raises:
        QuantizationError: it is none.
    """
    for effort in EFFORTS:
        if text == effort:
            return effort
    raise QuantizationError(
        f"effort `{text}` is not known", hint=f"known: {', '.join(EFFORTS)}; or name a method"
    )


def ways(facts: Facts, groups: bool) -> tuple[Way, ...]:
    """All ways that a model has, best first; the last one reads no text.

    Args:
        groups: let ways that choose bits choose groups, too.
    """
    if facts.uncalibrated is not None:
        return (Way(RTN),)
    if facts.shapes.routed:
        return tuple(Way(method) for method in reversed(WITH_EXPERTS))
    best = best_gptq(facts.rotatable)
    learned = replace(best, autoround=True)
    if facts.fixed_bits is not None:
        return Way(learned), Way(best), Way(WEIGHTED), Way(RTN)
    return (
        Way(learned, "measured", groups),
        Way(learned, "estimated", groups),
        Way(best, "measured", groups),
        Way(best, "estimated", groups),
        Way(learned),
        Way(best),
        Way(WEIGHTED, "estimated", groups),
        Way(WEIGHTED),
        Way(RTN),
    )


def way_seconds(facts: Facts, way: Way, rate: float | None = None) -> float:
    """Expected time of a whole conversion.

    Args:
        rate: operations a second of a calibration; that of usual machines where it is None.
    """
    shapes, device = facts.shapes, facts.device
    rate = rate or operations_a_second(device, facts.units)
    flops = 0.0
    if way.costs == "measured":
        flops = costs_flops(shapes, facts.sets, facts.learned, facts.measured)
    if way.costs == "estimated":
        flops = estimates_flops(shapes, facts.estimated)
    whole = conversion_seconds(shapes, way.method, facts.windows, device, facts.units, rate)
    return whole + flops / rate


def choose_way(
    effort: Effort,
    facts: Facts,
    fits: Callable[[Way], bool],
    machine: str,
    rate: float | None = None,
) -> EffortPlan:
    """Choose the best way that an effort allows.

    Args:
        fits: tells if a way fits the memory; asked of ways that read a text.
        machine: `2 cores`, for the reason.
        rate: operations a second of a calibration, for the times that are told.
    """

    def possible(groups: bool) -> list[Way]:
        return [way for way in ways(facts, groups) if way.method == RTN or fits(way)]

    best = possible(groups=True)[0]
    way = next(one for one in possible(effort == "high") if _allowed(effort, facts, one))
    better = None if way == best else best
    return EffortPlan(
        effort,
        way,
        way_seconds(facts, way, rate),
        _reason(effort, facts, way, best, machine),
        fixed_bits=facts.fixed_bits if way.method != RTN else None,
        better=better,
        better_seconds=0.0 if better is None else way_seconds(facts, better, rate),
        rate=rate,
    )


def _allowed(effort: Effort, facts: Facts, way: Way) -> bool:
    """Tell whether an effort takes so long for a way; round-to-nearest is always allowed."""
    if way.method == RTN or effort == "high":
        return True
    if effort == "low":
        return False
    if way.method.autoround and facts.shapes.weights < AUTOROUND_WEIGHTS:
        return False
    if way.costs == "measured" and facts.device == "cpu":  # half as long again for a twentieth
        return False
    plain = way.method.codes == GPTQ.codes and not way.method.autoround
    if facts.device == "cuda" and plain and way.costs != "measured":
        return True
    return way_seconds(facts, way) <= LIMITS[facts.device]


def _reason(effort: Effort, facts: Facts, way: Way, best: Way, machine: str) -> str:
    """Reason for a way, given the best one that fits the memory."""
    if facts.uncalibrated is not None:
        return facts.uncalibrated
    if effort == "low":
        return "it reads no text"
    first = ways(facts, groups=True)[0]
    if best != first and replace(way, groups=best.groups) == best:
        return f"the memory is too small for {first}"
    if way == best:
        return "the best there is"
    if replace(way, groups=True) == best:
        return "the best in groups that are as fast for many sequences together"
    plain = replace(best, method=replace(best.method, autoround=False), groups=way.groups)
    if way == plain and facts.shapes.weights < AUTOROUND_WEIGHTS:
        return "autoround is measured on larger models alone"
    if facts.device == "cuda" and way_seconds(facts, way) > LIMITS["cuda"]:
        return f"no less than {GPTQ} on {machine}"
    limit = LIMIT_WORDS[facts.device]
    what = "the best by estimated costs" if way.costs == "estimated" else "the best"
    return f"{what} that {machine} usually finishes within {limit}"
