"""`--gate "kl_mean<0.03,top1>0.95"`: conditions that a quality report has to meet."""

import math
import operator
import re
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from lowbit.convert.quality.record import LogitQuality, QualityReport, TextKind
from lowbit.formats.errors import RequestError

CONDITION = re.compile(r"\s*(.+?)\s*(<=|>=|<|>)\s*(\S+)\s*")
OPERATORS: Mapping[str, Callable[[float, float], bool]] = {
    "<": operator.lt,
    "<=": operator.le,
    ">": operator.gt,
    ">=": operator.ge,
}
HEADLINE: Mapping[str, Callable[[LogitQuality], float | None]] = {
    "kl_mean": lambda logits: logits.kl_mean,
    "kl_stderr": lambda logits: logits.kl_error,
    "kl_p95": lambda logits: logits.kl_p95,
    "kl_p99": lambda logits: logits.kl_p99,
    "kl_max": lambda logits: logits.kl_max,
    "top1": lambda logits: logits.top1_agreement,
    "ppl_change": lambda logits: logits.perplexity_change,
    "cosine": lambda logits: logits.cosine_mean,
}
OF_A_TEXT: Mapping[str, Callable[[TextKind], float | None]] = {
    "kl_mean": lambda kind: kind.kl_mean,
    "kl_stderr": lambda kind: kind.kl_error,
    "kl_p99": lambda kind: kind.kl_p99,
    "top1": lambda kind: kind.top1_agreement,
    "ppl_change": lambda kind: kind.perplexity_change,
}
SIZE = "bits_per_weight"


@dataclass(frozen=True, slots=True)
class Condition:
    """A bound on a figure of the report.

    Attributes:
        figure: its name, `kl_mean`.
        text: name of the evaluation text, `maths`; None for the headline figure.
        operator: one of < <= > >=.
        bound: what the figure is compared with.
    """

    figure: str
    text: str | None
    operator: str
    bound: float

    def __str__(self) -> str:
        """As it is parsed."""
        text = "" if self.text is None else f"{self.text}."
        return f"{text}{self.figure}{self.operator}{self.bound:g}"


@dataclass(frozen=True, slots=True)
class Outcome:
    """A condition, what was found, and whether that meets it."""

    condition: str
    found: float
    met: bool


@dataclass(frozen=True, slots=True)
class GateResult:
    """The outcomes of a gate's conditions."""

    outcomes: tuple[Outcome, ...]

    @property
    def passed(self) -> bool:
        """True if every condition is met."""
        return all(outcome.met for outcome in self.outcomes)

    def to_json(self) -> dict[str, Any]:
        """The object `gate` of --json; an infinite figure is null."""
        rows = [asdict(outcome) for outcome in self.outcomes]
        for row in rows:
            row["found"] = row["found"] if math.isfinite(row["found"]) else None
        return {"passed": self.passed, "conditions": rows}


def parse_gate(text: str) -> tuple[Condition, ...]:
    """Read conditions separated by commas.

    Raises:
        RequestError: not of the form FIGURE<NUMBER, or an unknown figure.
    """
    return tuple(_condition(part) for part in text.split(","))


def _condition(text: str) -> Condition:
    match = CONDITION.fullmatch(text)
    if match is None:
        raise RequestError(
            f"`{text.strip()}` is not a condition; write it like kl_mean<0.03 or top1>=0.95"
        )
    name, operator, number = match.groups()
    kind, _, figure = name.rpartition(".")
    known = OF_A_TEXT if kind else {**HEADLINE, SIZE: None}
    if figure not in known:
        of = f" of the text `{kind}`" if kind else ""
        raise RequestError(f"`{figure}` is no figure{of}; figures are {', '.join(known)}")
    try:
        bound = float(number)
    except ValueError:
        bound = math.nan
    if not math.isfinite(bound):
        raise RequestError(f"`{text.strip()}`: `{number}` is not a number")
    return Condition(figure, kind or None, operator, bound)


def check_texts(conditions: Sequence[Condition], names: Collection[str]) -> None:
    """Refuse a condition on a text that is not evaluated.

    Raises:
        RequestError: naming it.
    """
    for condition in conditions:
        if condition.text is not None and condition.text not in names:
            raise RequestError(
                f"`{condition}`: no evaluation text is named `{condition.text}`; "
                f"there is {', '.join(names)}"
            )


def hold(conditions: Sequence[Condition], report: QualityReport) -> GateResult:
    """The outcome of every condition on a report's figures.

    Raises:
        RequestError: a figure was not measured.
    """
    outcomes = []
    for condition in conditions:
        found = _figure(condition, report)
        if found is None:
            raise RequestError(
                f"`{condition}`: `{condition.figure}` was not measured, or on too few windows",
                hint="measure again, on a longer text",
            )
        met = OPERATORS[condition.operator](found, condition.bound)
        outcomes.append(Outcome(str(condition), found, met))
    return GateResult(tuple(outcomes))


def _figure(condition: Condition, report: QualityReport) -> float | None:
    if condition.figure == SIZE:
        return report.sizes.bits_per_weight
    if report.logits is None:
        raise RequestError(f"`{condition}`: the logits were not measured")
    if condition.text is None:
        return HEADLINE[condition.figure](report.logits)
    for kind in report.logits.kinds:
        if kind.name == condition.text:
            return OF_A_TEXT[condition.figure](kind)
    if not report.logits.kinds and report.logits.text_name == condition.text:
        return HEADLINE[condition.figure](report.logits)
    raise RequestError(f"`{condition}`: no text of that name was evaluated")
