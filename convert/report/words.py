"""Figures in the words of a report: the same rounding in terminal, page and card."""

import math

from lowbit.convert.quality.record import LogitQuality

MISSING = "\N{EN DASH}"  # in place of a figure that there is none of


def plain(name: str) -> str:
    """A name from a file without characters that steer a terminal or have no shape."""
    return "".join(char if char.isprintable() else "\N{REPLACEMENT CHARACTER}" for char in name)


def size(count: int) -> str:
    """Bytes for people: `5.62 MB`."""
    for unit, scale in (("GB", 1e9), ("MB", 1e6), ("kB", 1e3)):
        if count >= scale:
            return f"{count / scale:.2f} {unit}"
    return f"{count} B"


def percent(share: float, digits: int = 2) -> str:
    """A share as percent: `0.1 %`."""
    if not math.isfinite(share):
        return "∞"
    return f"{100 * share:.{digits}f} %"


def change(ratio: float) -> str:
    """A relative change in percent, with more digits below a tenth of a percent: `2.06 %`."""
    if not math.isfinite(ratio):
        return "∞"
    return f"{100 * ratio:.{_digits(ratio)}f} %"


def _digits(ratio: float) -> int:
    return 2 if abs(ratio) >= 0.001 else 4


def kl(value: float) -> str:
    """A divergence in nats with three significant digits: `0.0180`, `0.000104`, `2.10e-06`."""
    if not math.isfinite(value):
        return "∞"
    return f"{value:.2e}" if 0 < value < 1e-4 else f"{value:#.3g}"


def signed_kl(value: float) -> str:
    """A difference of divergences with its sign: `-0.00401`."""
    return f"{'+' if value >= 0 else '-'}{kl(abs(value))}"


def cosine(value: float) -> str:
    """A cosine, to the digit where it differs from one."""
    if not math.isfinite(value):
        return "not finite"
    return f"{value:.5f}" if value < 0.9999 else f"{value:.7f}"


def decibels(value: float) -> str:
    """A signal-to-noise ratio: `19.8 dB`."""
    return "∞" if value == float("inf") else f"{value:.1f} dB"


def token(text: str) -> str:
    """A token or a piece of text with its white space made visible where it is all there is."""
    shown = text.replace("\r", "").replace("\n", "↵").replace("\t", "⇥")
    return plain(shown) if shown.strip() else shown.replace(" ", "␣") or "∅"


def passage(text: str) -> str:
    """A piece of text with its line ends marked and kept."""
    lines = text.replace("\r", "").replace("\t", "    ").split("\n")
    return "↵\n".join(map(plain, lines))


def number(value: float, digits: int = 3) -> str:
    """A figure with fixed digits, `∞` where it is none: `3.286`."""
    return f"{value:,.{digits}f}" if math.isfinite(value) else "∞"


def perplexity(nll: float) -> str:
    """The perplexity of a mean NLL in nats."""
    return number(math.exp(nll) if nll < 700 else math.inf)


def sentence(text: str) -> str:
    """Some words with capital and full stop."""
    return f"{text[:1].upper()}{text[1:]}."


def signed(ratio: float) -> str:
    """A relative change with its sign: `+2.06 %`."""
    return f"{'+' if ratio >= 0 else ''}{change(ratio)}"


def tight(text: str) -> str:
    """The same with no line break between a figure and its percent sign."""
    return text.replace(" %", "\N{NO-BREAK SPACE}%")


def perplexity_change(logits: LogitQuality) -> str:
    """`+2.06 % ± 0.15`: the change and its standard error, where there are windows enough."""
    return f"{signed(logits.perplexity_change)} {perplexity_error(logits)}".rstrip()


def perplexity_error(logits: LogitQuality) -> str:
    """`± 0.15`: the standard error of the change in percent; empty with too few windows."""
    relative = logits.perplexity_change
    if logits.log_ratio_error is None or not math.isfinite(relative):
        return ""
    return f"± {100 * logits.log_ratio_error * (1 + relative):.{_digits(relative)}f}"


def scored(logits: LogitQuality) -> str:
    """How much was measured: `73,073 tokens in 143 windows of 512`."""
    windows = "1 window" if logits.windows == 1 else f"{logits.windows:,} windows"
    return f"{logits.scored_tokens:,} tokens in {windows} of {logits.window}"
