"""Figures in the words of a report: the same rounding in terminal, page and card."""

from lowbit.convert.quality.record import LogitQuality


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
    return f"{100 * share:.{digits}f} %"


def change(ratio: float) -> str:
    """A relative change in percent, with more digits below a tenth of a percent: `2.06 %`."""
    return f"{100 * ratio:.{_digits(ratio)}f} %"


def _digits(ratio: float) -> int:
    return 2 if abs(ratio) >= 0.001 else 4


def kl(value: float) -> str:
    """A divergence in nats with three significant digits: `0.0180`, `1.04e-04`."""
    return f"{value:#.3g}" if value == 0 or value >= 1e-3 else f"{value:.2e}"


def cosine(value: float) -> str:
    """A cosine, to the digit where it differs from one."""
    return f"{value:.5f}" if value < 0.9999 else f"{value:.7f}"


def decibels(value: float) -> str:
    """A signal-to-noise ratio: `19.8 dB`."""
    return "∞" if value == float("inf") else f"{value:.1f} dB"


def perplexity_change(logits: LogitQuality) -> str:
    """`+2.06 % ± 0.15`: the change and its standard error, where there are windows enough."""
    relative = logits.perplexity_change
    text = f"{'+' if relative >= 0 else ''}{change(relative)}"
    if logits.log_ratio_error is None:
        return text
    error = 100 * logits.log_ratio_error * (1 + relative)
    return f"{text} ± {error:.{_digits(relative)}f}"


def scored(logits: LogitQuality) -> str:
    """How much was measured: `73,073 tokens in 143 windows of 512`."""
    windows = "1 window" if logits.windows == 1 else f"{logits.windows:,} windows"
    return f"{logits.scored_tokens:,} tokens in {windows} of {logits.window}"
