"""The verdict on a packed file: its grade, the loss expected of its bits, and what to try next."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal, NamedTuple

from lowbit.convert.measure.record import LogitQuality, QualityReport
from lowbit.convert.original.runnable import WHERE_MEASURED
from lowbit.convert.plan import choice_of_method as choice
from lowbit.convert.plan.method import Method
from lowbit.convert.report import limits
from lowbit.convert.report.formatting import about, added, count, kl_with_error, number, sentence
from lowbit.convert.report.graded_figures import (
    UNREADABLE,
    GradedFigure,
    drift,
    figures_left_out,
    graded_figures,
    least_tokens,
    needed_tokens,
    with_int8_inputs,
)
from lowbit.convert.report.limits import GRADES, LEAST_BITS, SMALLEST, Expectation, Grade
from lowbit.convert.report.linears import main_bits
from lowbit.formats.architectures import DRAFTERS, MIXTURES
from lowbit.formats.errors import QuantizationError
from lowbit.formats.layout.recipes import AS_STORED
from lowbit.formats.printable import printable

Level = Literal["good", "caution", "bad", "unknown"]
LEVELS: tuple[Level, ...] = ("good", "caution", "bad")
GRADE_LEVELS: Mapping[Grade, Level] = {
    "close": "good",
    "usable": "good",
    "degraded": "caution",
    "broken": "bad",
}
FEW_FLIPS = 0.01  # share of changed first choices below which a verdict does not count them
# How a loss compares with the expected one: the largest ratio, the colour, the words.
BESIDE_EXPECTED: tuple[tuple[float, Level, str], ...] = (
    (1.0, "good", "As expected"),
    (limits.FAR, "caution", "Worse than expected"),
    (math.inf, "bad", "Far worse than expected"),
)
MORE_BITS = 1.0  # of the budget that is proposed
MOST_BITS = 8.0


@dataclass(frozen=True, slots=True)
class Verdict:
    """A judgement and its reasons."""

    grade: Grade | None  # the absolute one, whatever size and bits; None where nothing is judged
    # For colours: the worse of the grade and of what size and bits lead to expect; of files that
    # are close or usable, at most caution.
    level: Level
    title: str  # the grade in formatting
    reason: str  # what decides, without capital and full stop
    # The loss beside that of good files of this size and bits, as a sentence; empty where none is
    # known.
    expected: str = ""
    # Sentences on what the file is not usable for, further findings that count, texts that do not,
    # and a size whose loss is not known.
    notes: tuple[str, ...] = ()
    hint: str = ""  # what helps where nothing is judged; empty otherwise
    # Options to try where the file loses too much; empty where it does not.
    next_steps: tuple[str, ...] = ()


def judge(report: QualityReport) -> Verdict:
    """The verdict: the worst of all graded figures."""
    logits = report.logits
    if logits is None:
        if report.model_type in DRAFTERS:
            return _not_judged("a drafter predicts nothing without its target", WHERE_MEASURED)
        hint = "measure them with lowbit-convert report"
        return _not_judged("the predictions were not measured", hint)
    if (refused := _refusal(logits)) is not None:
        return refused
    found = graded_figures(logits)
    worst = max(found, key=lambda figure: GRADES.index(figure.grade))
    loss = expected_loss(report)
    expected, level = _beside_others(report, found[0], loss)
    growing = drift(logits)
    others = [a for a in found[1:] if a is not worst and a.grade == worst.grade != found[0].grade]
    color = _level(worst.grade, level, growing is not None)
    return Verdict(
        grade=worst.grade,
        level=color,
        title=limits.TITLES[worst.grade],
        reason=_reason(found[0], worst),
        expected=expected,
        notes=(
            *_unusable(logits, worst.grade),
            *(f"{sentence(a.text).rstrip('.')} ({a.bound})." for a in others),
            *_close_call(found, worst.grade),
            *filter(None, [growing]),
            *figures_left_out(logits),
            *(_with_int8_inputs(logits) if logits.int8_inputs else ()),
            *(_too_small(report) if loss is None else ()),
        ),
        next_steps=() if color == "good" else next_steps(report),
    )


def stated_verdict(verdict: Verdict) -> dict[str, str | None]:
    """The verdict as quality.json states it, for readers that do not judge."""
    return {"grade": verdict.grade, "title": verdict.title}


def _level(grade: Grade, beside: Level, grows: bool) -> Level:
    """The colour: never red under a title that reads well, whatever was expected."""
    own = GRADE_LEVELS[grade]
    if own == "good" and beside != "good":
        return "caution"
    return max(own, beside, "caution" if grows else "good", key=LEVELS.index)


def _refusal(logits: LogitQuality) -> Verdict | None:
    """No verdict on a text that the original cannot read, nor on too few tokens."""
    if not logits.perplexity_original < UNREADABLE:
        return _not_judged(
            f"the original itself cannot read {printable(logits.text_name)} (perplexity "
            f"{number(logits.perplexity_original, 0)}), so the figures say nothing about "
            f"text that it can",
            "measure on text of the kind that the model is for: --eval-text FILE",
        )
    mean, error = logits.kl_mean, logits.kl_error
    need = needed_tokens(mean, error, logits.scored_tokens, least_tokens(logits))
    if need is None:
        return None
    reason = f"a verdict takes {about(need)} scored tokens and there are {logits.scored_tokens:,}"
    if error is not None:
        reason += f", for the mean KL is only known as {kl_with_error(mean, error)}"
    return _not_judged(reason, "measure on a longer text: --eval-text FILE")


def _not_judged(reason: str, hint: str) -> Verdict:
    return Verdict(None, "unknown", "Not judged", reason, hint=hint)


def _reason(first: GradedFigure, worst: GradedFigure) -> str:
    if first.grade == worst.grade:
        return f"{first.text} ({first.bound})"
    return f"{first.text}, but {worst.text} ({worst.bound})"


def _unusable(logits: LogitQuality, grade: Grade) -> list[str]:
    """A sentence on what the file cannot be used for, with the tokens that it gets wrong."""
    if grade not in limits.UNUSABLE:
        return []
    changed = 1 - logits.top1_agreement
    if changed < FEW_FLIPS:
        return [f"{limits.UNUSABLE[grade]}."]
    tokens = (
        f"1 token in {1 / changed:.0f}" if changed < 0.15 else f"{changed * 10:.0f} tokens in 10"
    )
    return [f"{limits.UNUSABLE[grade]}: about {tokens} would differ from the original's."]


def _close_call(found: Sequence[GradedFigure], grade: Grade) -> list[str]:
    """A sentence where no figure is of the worst grade but for its standard error."""
    plain = max((figure.plain_grade for figure in found), key=GRADES.index)
    if plain == grade:
        return []
    return [
        f"The grade is a close call: it would be {plain} without the two standard errors that are "
        f"added to each mean. More text may lift it."
    ]


def expected_loss(report: QualityReport) -> Expectation | None:
    """The loss of good files of the report's bits in models of its size; None if there are none."""
    return limits.expectation(main_bits(report.weights), report.parameters)


def _beside_others(
    report: QualityReport, mean: GradedFigure, loss: Expectation | None
) -> tuple[str, Level]:
    """The loss beside that of good files of the same bits and size: a sentence and its level."""
    bits = main_bits(report.weights)
    if loss is None or bits is None:
        return "", "good"
    ratio = mean.judged / loss.kl
    level, start = next(row[1:] for row in BESIDE_EXPECTED if ratio <= row[0])
    few = f" (held to the measure of {LEAST_BITS} bits)" if bits < LEAST_BITS else ""
    return (
        f"{start} of {bits}-bit weights{few} in a model of {count(report.parameters)} parameters: "
        f"good files stay below {loss.kl:g}.",
        level,
    )


def _too_small(report: QualityReport) -> list[str]:
    """A sentence about a model that only its size leaves without an expectation."""
    known = limits.expectation(main_bits(report.weights), math.inf)  # of larger models
    if known is None:
        return []
    return [
        f"The loss to expect is only known of models from {count(SMALLEST)} parameters on; "
        f"this one has {count(report.parameters)}."
    ]


def _with_int8_inputs(logits: LogitQuality) -> list[str]:
    """A sentence on the grade with inputs in eight bits, by the limits that the folder has."""
    found = logits.int8_inputs[0]
    figures = graded_figures(with_int8_inputs(logits))
    grade = max((figure.grade for figure in figures), key=GRADES.index)
    return [
        f"With inputs in eight bits, by --activations int8: {grade}, {figures[0].text}, "
        f"{added(found)}."
    ]


class Suggestion(NamedTuple):
    """An option, values that are used, the one to try after them, and what it brings or costs."""

    option: str
    used: tuple[str, ...]
    value: str
    words: str


WIDE_GROUPS = ("row", "512", "256", "128")
SUGGESTIONS = (
    Suggestion("--recipe", ("int2",), "int3", "about 1 bit per weight more"),
    Suggestion("--recipe", ("int2", "int3"), "int4", "4 bits per weight, mostly usable"),
    Suggestion("--recipe", ("int4",), "int8", "8 bits per weight"),
    Suggestion("--group-size", WIDE_GROUPS, "64", "up to 0.25 bits per weight more"),
    Suggestion("--group-size", ("64",), "32", "0.25 bits per weight more"),
)


def next_steps(report: QualityReport) -> tuple[str, ...]:
    """Options to try, each with what it brings; empty for a file that lowbit did not make.

    Linears of 8 bits gain nothing from calibration or from a budget.
    """
    recipe = report.recipe
    if recipe is None:
        return ()
    used = {"--recipe": recipe.base, "--group-size": str(recipe.group_size or "row")}
    bits = main_bits(report.weights)
    few = bits is None or bits < MOST_BITS
    found = []
    if few and (gain := _better_method(recipe.method, report.model_type)) is not None:
        found.append(f"--method {gain.method} (same size, {gain.words})")
    # Experts in several schemes load in lowbit-run alone, and what they gain is not measured.
    uniform = not recipe.overrides and report.model_type not in MIXTURES
    if few and uniform and report.sizes.bits_per_weight <= AS_STORED:
        same = math.ceil(100 * report.sizes.bits_per_weight) / 100
        found.append(f"--target-bpw {same:g} (same size, {choice.TO_CHOSEN_BITS})")
    found += [
        f"{step.option} {step.value} ({step.words})"
        for step in SUGGESTIONS
        if used[step.option] in step.used
        # One group size for all would take back bits that were chosen by set.
        and (few if step.option != "--group-size" else not recipe.overrides)
    ]
    budget = report.sizes.bits_per_weight + MORE_BITS
    if few and budget <= MOST_BITS:
        found.append(f"--target-bpw {budget:.1f} (bits where they count)")
    return tuple(found)


def _better_method(used: str, model_type: str) -> choice.Gain | None:
    """The method after the one used; a rounding without calibration is followed by the best."""
    rotatable = model_type in choice.ROTATION_MEASURED
    try:
        method = Method.parse(used)
    except QuantizationError:  # a report may come from anybody
        return None
    experts = model_type in MIXTURES
    if method.calibrated:
        return choice.gain_of(method, rotatable, experts)
    best = choice.best_gptq(rotatable)
    if experts and best not in choice.WITH_EXPERTS:
        return None
    return choice.Gain(best, choice.RTN_TO_GPTQ)
