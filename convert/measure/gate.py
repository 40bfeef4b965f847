"""`--gate "kl_mean<0.03,top1>0.95"`: conditions that a quality report has to meet."""

import math
import operator
import re
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from lowbit.convert.measure.record import QualityReport
from lowbit.formats.errors import RequestError
from lowbit.formats.layout.records import finite

CONDITION = re.compile(r"\s*(.+?)\s*(<=|>=|<|>)\s*(\S+)\s*")
OPERATORS: Mapping[str, Callable[[float, float], bool]] = {
    "<": operator.lt,
    "<=": operator.le,
    ">": operator.gt,
    ">=": operator.ge,
}
# Names of figures, and of the fields that hold them.
HEADLINE: Mapping[str, str] = {
    "kl_mean": "kl_mean",
    "kl_stderr": "kl_error",
    "kl_p95": "kl_p95",
    "kl_p99": "kl_p99",
    "kl_max": "kl_max",
    "top1": "top1_agreement",
    "ppl_change": "perplexity_change",
    "cosine": "cosine_mean",
}
OF_A_TEXT = ("kl_mean", "kl_stderr", "kl_p99", "top1", "ppl_change")
OF_LONG_TEXTS: Mapping[str, str] = {"long_kl": "kl_mean", "cache_kl": "cache_kl_mean"}
OF_IMAGES: Mapping[str, str] = {"image_kl": "kl_mean"}
SIZE = "bits_per_weight"


@dataclass(frozen=True, slots=True)
class Condition:
    """A bound on a figure of the report."""

    figure: str  # its name, `kl_mean`
    text: str | None  # name of the evaluation text, `maths`; None for the headline figure
    operator: str  # one of < <= > >=
    bound: float  # what the figure is compared with

    def __str__(self) -> str:
        """As it is parsed."""
        text = "" if self.text is None else f"{self.text}."
        return f"{text}{self.figure}{self.operator}{self.bound:g}"


@dataclass(frozen=True, slots=True)
class Outcome:
    """A condition and the figure that it was held against."""

    condition: str  # as the user wrote it
    found: float | None  # the figure; None where it is not known, which meets no condition
    met: bool  # True where the figure meets the condition
    reason: str | None = None  # why the figure is not known


def gate_json(outcomes: Sequence[Outcome]) -> dict[str, Any]:
    """The object `gate` of --json; an infinite or unknown figure is null."""
    rows = [finite(asdict(outcome)) for outcome in outcomes]
    for row in rows:
        if row["reason"] is None:
            del row["reason"]
    return {"passed": all(outcome.met for outcome in outcomes), "conditions": rows}


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
    known = OF_A_TEXT if kind else (*HEADLINE, *OF_LONG_TEXTS, *OF_IMAGES, SIZE)
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


def check_measured(conditions: Sequence[Condition], names: Collection[str], long: bool) -> None:
    """Refuse a condition on a text without one of these names, or on long texts unless `long`.

    Raises:
        RequestError: naming the condition.
    """
    for condition in conditions:
        if condition.figure in OF_LONG_TEXTS and not long:
            raise RequestError(f"`{condition}`: only `report --long` measures {condition.figure}")
        if condition.text is not None and condition.text not in names:
            raise RequestError(
                f"`{condition}`: no evaluation text is named `{condition.text}`; "
                f"there is {', '.join(names)}"
            )


def check_tower(conditions: Sequence[Condition], has_tower: bool) -> None:
    """Refuse a condition on images where the packed model has no vision tower.

    Raises:
        RequestError: naming the condition.
    """
    for condition in conditions:
        if condition.figure in OF_IMAGES and not has_tower:
            raise RequestError(
                f"`{condition}`: the packed model has no vision tower, so {condition.figure} is "
                "not measured"
            )


def evaluate(conditions: Sequence[Condition], report: QualityReport) -> tuple[Outcome, ...]:
    """The outcome of every condition on a report's figures; one on an unknown figure is missed."""
    return tuple(_outcome(condition, report) for condition in conditions)


def _outcome(condition: Condition, report: QualityReport) -> Outcome:
    figure = _figure(condition, report)
    if isinstance(figure, str):
        return Outcome(str(condition), None, False, figure)
    return Outcome(str(condition), figure, OPERATORS[condition.operator](figure, condition.bound))


def _figure(condition: Condition, report: QualityReport) -> float | str:
    if condition.figure == SIZE:
        return report.sizes.bits_per_weight
    if condition.figure in OF_LONG_TEXTS:
        if report.long is None:
            return "which `report --long` measures"
        return float(getattr(report.long, OF_LONG_TEXTS[condition.figure]))
    logits = report.logits
    if logits is None:
        return "the logits were not measured"
    if condition.figure in OF_IMAGES:
        if logits.images is None:
            return "a vision tower is missing, or could not be run"
        return float(getattr(logits.images, OF_IMAGES[condition.figure]))
    kind = next((kind for kind in logits.kinds if kind.name == condition.text), None)
    is_first = condition.text is None or (not logits.kinds and logits.text_name == condition.text)
    if kind is None and not is_first:
        return "no text of that name was evaluated"
    value: float | None = getattr(kind or logits, HEADLINE[condition.figure])
    if value is None:
        return "which was not measured, or on too few windows; a longer text gives it"
    return value
