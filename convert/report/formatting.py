"""Figures as text, rounded the same way in terminal, page and card."""

import math

from lowbit.convert.measure.record import (
    ImageQuality,
    Int8Inputs,
    LogitQuality,
    QualityReport,
    Sizes,
)
from lowbit.convert.measure.routing import Routing
from lowbit.convert.mtp.drafting import Drafting
from lowbit.formats.folder_size import size as size
from lowbit.formats.printable import printable
from lowbit.formats.tasks import OriginalResult, TaskResult

MISSING = "\N{EN DASH}"  # stands for a missing figure
UNPAIRED = "*"  # marks the error of a difference of independent results
HUGE = 1e9  # figures from here on are written as powers of ten


def percent(share: float, digits: int = 2) -> str:
    """A share as percent: `0.1 %`."""
    return f"{number(100 * share, digits)} %" if math.isfinite(share) else "∞"


def kl(value: float) -> str:
    """A divergence in nats with three significant digits: `0.0180`, `0.000104`, `2.10e-06`."""
    if not math.isfinite(value):
        return "∞"
    return f"{value:.2e}" if 0 < value < 1e-4 or value >= 1000 else f"{value:#.3g}"


def kl_with_error(value: float, error: float | None) -> str:
    """A divergence and its standard error to one digit: `0.0180 ± 0.0003`."""
    if error is None or not math.isfinite(value) or not 0 < error < math.inf or value < 1e-4:
        return kl(value)
    digits = min(7, max(0, -math.floor(math.log10(error))))
    return f"{value:.{digits}f} ± {error:.{digits}f}"


def count(number: int) -> str:
    """A number of parameters for people: `596 M`, `8.2 B`."""
    for unit, scale in ((" B", 1e9), (" M", 1e6), (" k", 1e3)):
        if number >= scale:
            value = number / scale
            return f"{value:.0f}{unit}" if value >= 99.5 else f"{value:.2g}{unit}"
    return str(number)


def about(number: int) -> str:
    """An estimated number: `about 31,000`; small numbers are exact."""
    if number < 10_000:
        return f"{number:,}"
    unit = 10 ** (len(str(number)) - 2)
    return f"about {-(-number // unit) * unit:,}"


def cosine(value: float) -> str:
    """A cosine: `0.99718`."""
    return f"{value:z.5f}" if math.isfinite(value) else "not finite"


ORDINALS = ("first", "second", "third", "fourth")


def routing(found: Routing) -> str:
    """Share of tokens that keep their experts."""
    layer = min(range(len(found.by_layer)), key=lambda number: found.by_layer[number])
    beside = [f"least in layer {layer}: {percent(found.by_layer[layer])}"]
    if found.same_set_bf16 is not None:
        beside.append(f"BF16 alone: {percent(found.same_set_bf16)}")
    return (
        f"all {found.chosen} for {percent(found.same_set)} of tokens, "
        f"{percent(found.same_experts)} one by one ({', '.join(beside)})"
    )


def drafts(drafting: Drafting) -> str:
    """Drafts of the packed head and what they bring, in one line."""
    best = drafting.packed[-1]
    right = ", ".join(
        f"{name} {percent(draft.agreement, 0)}"
        for name, draft in zip(ORDINALS, drafting.packed, strict=False)
    )
    text = f"{right} right; {number(best.tokens_a_round, 2)} tokens a round"
    beside = []
    if len(drafting.original) == len(drafting.packed):
        beside.append(f"original {number(drafting.original[-1].tokens_a_round, 2)}")
    if drafting.draft_head:
        few = drafting.draft_head[-1].tokens_a_round
        beside.append(f"from {drafting.draft_rows:,} tokens {number(few, 2)}")
    return f"{text} ({', '.join(beside)})" if beside else text


def token(text: str) -> str:
    """A token or a piece of text; white space is made visible if there is nothing else."""
    shown = text.replace("\r", "").replace("\n", "↵").replace("\t", "⇥")
    return printable(shown) if shown.strip() else shown.replace(" ", "␣") or "∅"


def passage(text: str) -> str:
    """A piece of text with its line ends marked and kept."""
    lines = text.replace("\r", "").replace("\t", "    ").split("\n")
    return "↵\n".join(map(printable, lines))


def number(value: float, digits: int = 3) -> str:
    """A figure with fixed digits, a power of ten where it is huge, or `∞`: `3.286`."""
    if not math.isfinite(value):
        return "∞"
    return f"{value:z,.{digits}f}" if abs(value) < HUGE else f"{value:.2e}"


def bits(value: float | None) -> str:
    """Bits that a model needs for a byte of text: `1.2345`; a mark where it was not measured."""
    return MISSING if value is None else number(value, 4)


def perplexity(nll: float) -> str:
    """The perplexity of a mean NLL in nats."""
    return number(math.exp(nll) if nll < 700 else math.inf)


def sentence(text: str) -> str:
    """A sentence: the words with a capital and a full stop."""
    return f"{text[:1].upper()}{text[1:]}."


def int8_inputs(found: Int8Inputs, logits: LogitQuality) -> str:
    """Figures of the first text with inputs in eight bits, in one line."""
    change = signed(found.perplexity_packed / logits.perplexity_original - 1)
    return (
        f"mean {kl_with_error(found.kl_mean, found.kl_error)} nats ({added(found)})   "
        f"perplexity {number(found.perplexity_packed)}, {change}   "
        f"same top token {percent(found.top1_agreement)}"
    )


def added(found: Int8Inputs) -> str:
    """The part of a mean KL that inputs in eight bits add: `0.0024 ± 0.0003 more`."""
    amount = kl_with_error(abs(found.kl_added), found.added_error)
    return f"{amount} {'less' if found.kl_added < 0 else 'more'}"


def images(found: ImageQuality) -> str:
    """Figures on answers about pictures, in one line."""
    change = signed(found.perplexity_packed / found.perplexity_original - 1)
    return (
        f"mean KL {kl_with_error(found.kl_mean, found.kl_error)}   perplexity "
        f"{number(found.perplexity_original)} → {number(found.perplexity_packed)}, {change}   "
        f"read {found.read_original} → {found.read_packed} of {found.pictures}"
    )


def signed(ratio: float) -> str:
    """A relative change with its sign: `+2.06 %`; `+0.00 %` where it rounds to none."""
    shown = percent(ratio)
    return shown if shown.startswith("-") else f"+{shown}"


def tight(text: str) -> str:
    """Text without line breaks between a figure and its percent sign."""
    return text.replace(" %", "\N{NO-BREAK SPACE}%")


def perplexity_change(logits: LogitQuality) -> str:
    """Change of perplexity, `+2.06 % ± 0.15`; without the error where windows are too few."""
    relative = logits.perplexity_change
    if logits.log_ratio_error is None or not math.isfinite(relative):
        return signed(relative)
    return f"{signed(relative)} ± {number(100 * logits.log_ratio_error * (1 + relative), 2)}"


def error_of(shown: str) -> str:
    """The standard error in a figure, `± 0.15`; empty where it has none."""
    return shown[shown.index("±") :] if "±" in shown else ""


def scored(logits: LogitQuality) -> str:
    """Scored tokens and windows: `73,073 tokens in 143 windows of 512`."""
    windows = "1 window" if logits.windows == 1 else f"{logits.windows:,} windows"
    return f"{logits.scored_tokens:,} tokens in {windows} of {logits.window}"


def metric(row: TaskResult) -> str:
    """A task's metric: `acc`, `bpb ↓, INT8 cache`."""
    worse = " ↓" if row.higher_is_better is False else ""
    return f"{printable(row.metric)}{worse}{row.rounding}"


def score(row: TaskResult | OriginalResult | None) -> str:
    """A value and its standard error, `0.8123 ± 0.0080`; a mark where there is none."""
    if row is None or row.value is None:
        return MISSING
    return number(row.value, 4) + ("" if row.stderr is None else f" ± {number(row.stderr, 4)}")


def score_change(row: TaskResult) -> str:
    """A task's change from the original: `-0.0110 ± 0.0040`, `-0.0110 ± 0.0113 *` unpaired.

    An error of 0 would claim more than equal scores show. A mark stands for an unknown change.
    """
    found = row.original
    if found is None or found.difference is None:
        return MISSING
    error = found.difference_stderr
    if found.paired and error == 0 == found.difference:
        return "no score changed"
    change = f"{found.difference:+z,.4f}"
    if error is None:
        return change
    return f"{change} ± {number(error, 4)}" + ("" if found.paired else f" {UNPAIRED}")


def tower_text(sizes: Sizes) -> str:
    """The vision tower in one line: `921.46 MB, not quantized (BF16)`; empty without one."""
    if sizes.vision_bytes:
        return f"{size(sizes.vision_bytes)}, not quantized ({printable(sizes.vision_dtypes)})"
    dropped = sizes.vision_dropped
    return f"left out (--drop-vision), {size(dropped)}: text only" if dropped else ""


def size_text(report: QualityReport) -> str:
    """Sizes before and after: `11.83 MB → 5.95 MB (50.3 %), 4.85 bits per weight`."""
    sizes = report.sizes
    bits = f"{sizes.bits_per_weight:.2f} bits per weight"
    if sizes.source_bytes is None:
        return f"{size(sizes.folder_bytes)}, {bits}"
    share = percent(sizes.folder_bytes / sizes.source_bytes, 1)
    return f"{size(sizes.source_bytes)} → {size(sizes.folder_bytes)} ({share}), {bits}"
