"""The figures that may show a loss, each graded by itself."""

import math
from dataclasses import dataclass, replace
from typing import Any

from lowbit.convert.measure.record import ImageQuality, Int8Inputs, LogitQuality, Position, TextKind
from lowbit.convert.measure.uncertainty import LEAST_WINDOWS
from lowbit.convert.report.formatting import about, kl, kl_with_error, number, percent
from lowbit.convert.report.limits import LIMITS, Grade, Scale, grade_of, upper_limit
from lowbit.formats.printable import printable

PRECISION = 0.1  # standard error that a verdict needs, as a share of the mean KL
SIGMAS = 2.0  # standard errors that a mean is judged with
UNREADABLE = 1000.0  # perplexity; trained models reach 3 to 100 on text they were trained for
USUAL_WINDOW = 512
MOST_TIMES = 1e6  # bound of the factor by which a standard error is too large
DRIFT = 2.0  # KL of late positions over that of early ones


@dataclass(frozen=True, slots=True)
class GradedFigure:
    """A figure and its grade."""

    text: str  # the figure in words, without capital and full stop
    value: float  # the figure
    judged: float  # the figure plus two standard errors to the bad side, where they are known
    scale: Scale  # the limits that apply

    @property
    def grade(self) -> Grade:
        """Grade with the standard errors counted."""
        return grade_of(self.judged, self.scale)

    @property
    def plain_grade(self) -> Grade:
        """Grade of the figure without its standard errors."""
        return grade_of(self.value, self.scale)

    @property
    def bound(self) -> str:
        """Range of the grade: `usable: up to 0.05`."""
        limit = next((limit for limit in LIMITS if limit.grade == self.grade), LIMITS[-1])
        value = upper_limit(limit, self.scale)
        shown = percent(value, 0) if self.scale == "flips" else f"{value:g}"
        return f"{self.grade}: {'above' if self.grade == 'broken' else 'up to'} {shown}"


def graded_figures(logits: LogitQuality) -> list[GradedFigure]:
    """All graded figures of a report, the mean KL of its first text first."""
    found = [_mean("mean KL", logits.kl_mean, logits.kl_error, " nats per token")]
    found += _tokens("", logits.kl_p99, logits.top1_agreement)
    for kind in _other_kinds(logits):
        if why_not_judged(kind, logits) is None:
            name = printable(kind.name)
            found.append(_mean(f"the mean KL on {name} is", kind.kl_mean, kind.kl_error))
            found += _tokens(f"on {name} ", kind.kl_p99, kind.top1_agreement)
    late = late_position(logits)
    if late is not None:
        found.append(_mean(f"the mean KL {_place(late)} is", late.kl_mean, late.kl_error))
    images = logits.images
    if images is not None and why_images_not_judged(images) is None:
        named = "the mean KL on answers about pictures is"
        found.append(_mean(named, images.kl_mean, images.kl_error))
    return found


def with_int8_inputs(logits: LogitQuality) -> LogitQuality:
    """The figures with inputs in eight bits in place of those of the folder as stored.

    Figures by position and on pictures, which are only measured as stored, are left out.
    """
    first, *_ = rounded = [_replacements(found) for found in logits.int8_inputs]
    kinds = tuple(
        replace(kind, **figures) for kind, figures in zip(logits.kinds, rounded, strict=False)
    )
    return replace(logits, **first, kinds=kinds, positions=(), images=None)


def _replacements(found: Int8Inputs) -> dict[str, Any]:
    names = ("perplexity_packed", "kl_mean", "kl_p99", "top1_agreement", "kl_error")
    return {name: getattr(found, name) for name in names}


def _mean(name: str, kl: float, error: float | None, unit: str = "") -> GradedFigure:
    text = f"{name} {kl_with_error(kl, error)}{unit}"
    return GradedFigure(text, kl, kl + SIGMAS * (error or 0.0), "mean")


def _tokens(where: str, p99: float, agreement: float) -> list[GradedFigure]:
    changed = 1 - agreement
    flips = f"{where}another token ranks first in {percent(changed)} of the predictions"
    tail = f"{where}one token in a hundred has a KL above {kl(p99)}"
    return [
        GradedFigure(flips, changed, changed, "flips"),
        GradedFigure(tail, p99, p99, "tail"),
    ]


def needed_tokens(kl: float, error: float | None, tokens: int, least: int) -> int | None:
    """Scored tokens that a verdict on a mean KL needs; None where there are enough.

    Tokens are enough if the standard error is at most 10 % of the mean, or if the mean plus and
    minus its errors has one grade. Where the error is not known, None, it takes `least` tokens.
    """
    if error is None or not math.isfinite(kl):
        return least if tokens < least else None
    low, high = kl - SIGMAS * error, kl + SIGMAS * error
    if kl <= 0 or error <= PRECISION * kl or grade_of(low) == grade_of(high):
        return None
    times = min(error / PRECISION / kl, MOST_TIMES)  # an error read from a file may be infinite
    return math.ceil(tokens * times**2)


def least_tokens(logits: LogitQuality) -> int:
    """Scored tokens in the 8 windows that a standard error needs.

    A text shorter than a window is one window of its own length. Another text need not be that
    short, so windows of 512 tokens are counted then.
    """
    whole = logits.text_tokens > logits.window
    return LEAST_WINDOWS * ((logits.window if whole else USUAL_WINDOW) - 1)


def why_not_judged(kind: TextKind, logits: LogitQuality) -> str | None:
    """A sentence on why a further text is not judged by itself; None where it is."""
    name = printable(kind.name)
    if not kind.perplexity_original < UNREADABLE:
        perplexity = number(kind.perplexity_original, 0)
        return (
            f"The text {name} is left out: the original itself cannot read it (perplexity "
            f"{perplexity})."
        )
    need = needed_tokens(kind.kl_mean, kind.kl_error, kind.tokens, least_tokens(logits))
    if need is None:
        return None
    return (
        f"The text {name} is left out: of {about(need)} tokens that a verdict takes, "
        f"{kind.tokens:,} were scored."
    )


def why_images_not_judged(images: ImageQuality) -> str | None:
    """A sentence on why answers about pictures are not judged; None where they are."""
    if not images.perplexity_original < UNREADABLE:
        return (
            "The pictures are left out: the original itself cannot read them (perplexity "
            f"{number(images.perplexity_original, 0)} of the answers)."
        )
    mean, error, tokens = images.kl_mean, images.kl_error, images.tokens
    if needed_tokens(mean, error, tokens, tokens + 1) is not None and math.isfinite(mean):
        shown = kl_with_error(mean, error)
        return f"The pictures are left out: their mean KL, {shown}, is not known well enough."
    return None


def figures_left_out(logits: LogitQuality) -> list[str]:
    """Sentences about the further texts, and the pictures, that are not judged."""
    found = [why_not_judged(kind, logits) for kind in _other_kinds(logits)]
    if logits.images is not None:
        found.append(why_images_not_judged(logits.images))
    return [sentence for sentence in found if sentence is not None]


def _other_kinds(logits: LogitQuality) -> list[TextKind]:
    return [kind for kind in logits.kinds if kind.sha256 != logits.text_sha256]


def late_position(logits: LogitQuality) -> Position | None:
    """The last range of positions beyond ordinary windows with enough tokens."""
    least = least_tokens(logits)
    far = [
        place
        for place in logits.positions
        if place.start >= min(logits.window, USUAL_WINDOW)
        and needed_tokens(place.kl_mean, place.kl_error, place.tokens, least) is None
    ]
    return far[-1] if far else None


def drift(logits: LogitQuality) -> str | None:
    """A sentence if late positions surely have more than twice the KL of early ones."""
    late = late_position(logits)
    early = [place for place in logits.positions if place.stop <= USUAL_WINDOW]
    tokens = sum(place.tokens for place in early)
    if late is None or not tokens:
        return None
    before = sum(place.kl_mean * place.tokens for place in early) / tokens
    if not late.kl_mean - SIGMAS * (late.kl_error or 0.0) > DRIFT * before:
        return None
    return (
        f"The loss grows along the context: the mean KL is {kl(before)} at the first "
        f"{early[-1].stop:,} positions and {kl(late.kl_mean)} {_place(late)}. Beyond, it may "
        f"grow further."
    )


def _place(place: Position) -> str:
    return f"at positions {place.start:,} to {place.stop:,}"
