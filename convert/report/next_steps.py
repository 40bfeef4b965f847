"""Options that come next where a packed file loses too much, by those it was made with."""

import shlex
from collections.abc import Mapping
from dataclasses import dataclass
from itertools import pairwise

from lowbit.convert.measure.record import QualityReport
from lowbit.convert.plan.choice_of_method import (
    ROTATION_MEASURED,
    RTN_TO_GPTQ,
    WITH_EXPERTS,
    Gain,
    best_gptq,
    gain_of,
)
from lowbit.convert.plan.method import RTN, Method
from lowbit.convert.report.linears import main_bits
from lowbit.formats.architectures import MIXTURES
from lowbit.formats.errors import QuantizationError

MORE_BITS = 1.0  # of the budget that is proposed
MOST_BITS = 8.0
# Options that decide, and their values where a recorded command leaves them out.
UNSAID = {"--method": "rtn", "--recipe": "int4", "--group-size": "128"}


@dataclass(frozen=True, slots=True)
class Step:
    """One option to try.

    Attributes:
        option: its name.
        used: values that it is a step up from.
        value: to give instead.
        words: what it brings or costs.
    """

    option: str
    used: tuple[str, ...]
    value: str
    words: str


STEPS = (
    Step("--recipe", ("int2",), "int3", "about 1 bit per weight more"),
    Step("--recipe", ("int2", "int3"), "int4", "4 bits per weight, mostly usable"),
    Step("--recipe", ("int4",), "mixed", "attention in INT8, about 0.8 bits per weight more"),
    Step("--recipe", ("mixed",), "int8", "8 bits per weight"),
    Step("--group-size", ("row", "512", "256", "128"), "64", "up to 0.25 bits per weight more"),
    Step("--group-size", ("64",), "32", "0.25 bits per weight more"),
)


def next_steps(report: QualityReport) -> tuple[str, ...]:
    """Options to try, each with what it brings; empty for a file that lowbit did not make.

    Linears of 8 bits gain nothing from calibration or from a budget.
    """
    used = used_options(report.command)
    if used is None:
        return ()
    bits = main_bits(report.weights)
    few = bits is None or bits < MOST_BITS
    found = []
    if few and (gain := _better_method(used["--method"], report.model_type)) is not None:
        found.append(f"--method {gain.method} (same size, {gain.words})")
    found += [
        f"{step.option} {step.value} ({step.words})"
        for step in STEPS
        if used[step.option] in step.used and (few or step.option == "--group-size")
    ]
    budget = report.sizes.bits_per_weight + MORE_BITS
    if few and budget <= MOST_BITS:
        found.append(f"--target-bpw {budget:.1f} (bits where they are estimated to count)")
    return tuple(found)


def _better_method(used: str, model_type: str | None) -> Gain | None:
    """The method after the one used; a rounding without calibration is followed by the best."""
    rotatable = model_type in ROTATION_MEASURED
    try:
        method = RTN if used == "absmax" else Method.parse(used)
    except QuantizationError:  # a report may come from anybody
        return None
    experts = model_type in MIXTURES
    if method != RTN:
        return gain_of(method, rotatable, experts)
    best = best_gptq(rotatable)
    return None if experts and best not in WITH_EXPERTS else Gain(best, RTN_TO_GPTQ)


def used_options(command: str | None) -> Mapping[str, str] | None:
    """Values of the deciding options in the command of a report; None where there is none."""
    if command is None:
        return None
    try:
        words = shlex.split(command)
    except ValueError:  # a report may come from anybody
        return None
    given = {option: value for option, value in pairwise(words) if option in UNSAID}
    return {**UNSAID, **given}
