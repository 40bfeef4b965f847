"""Options that come next where a packed file loses too much, by those it was made with."""

import shlex
from collections.abc import Mapping
from dataclasses import dataclass
from itertools import pairwise

from lowbit.convert.measure.record import QualityReport
from lowbit.convert.plan.choice_of_method import TO_AUTOROUND, TO_GPTQ
from lowbit.convert.report.linears import main_bits

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
    Step("--method", ("rtn", "absmax"), "auto", "same size, the loss typically a third"),
    Step("--method", ("weighted",), "gptq", f"same size, {TO_GPTQ}"),
    Step("--method", ("gptq",), "gptq+autoround", f"same size, {TO_AUTOROUND}"),
    Step("--method", ("gptq+rotate",), "gptq+rotate+autoround", f"same size, {TO_AUTOROUND}"),
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
    found = [
        f"{step.option} {step.value} ({step.words})"
        for step in STEPS
        if used[step.option] in step.used and (few or step.option == "--group-size")
    ]
    budget = report.sizes.bits_per_weight + MORE_BITS
    if few and budget <= MOST_BITS:
        found.append(f"--target-bpw {budget:.1f} (bits where they are estimated to count)")
    return tuple(found)


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
