"""Charts of the quality page."""

import math
from collections.abc import Sequence

from lowbit.convert.measure.record import LogitQuality, Position
from lowbit.convert.report import formatting
from lowbit.formats.charts.axes import Axis, linear_axis, log_axis
from lowbit.formats.charts.chart import Bars, Line, Mark, Rule, chart


def kl_distribution(logits: LogitQuality, expected: float | None) -> str:
    """Histogram of KL per token on a log axis, with mean, p95, p99 and the expected mean."""
    histogram = logits.kl_histogram
    bins = len(histogram.counts)
    step = (histogram.high_exponent - histogram.low_exponent) / bins
    edges = [10 ** (histogram.low_exponent + step * number) for number in range(bins + 1)]
    total = max(1, sum(histogram.counts))
    shares = [100 * count / total for count in histogram.counts]
    used = [number for number, count in enumerate(histogram.counts) if count] or [0]
    marks: list[Mark] = [
        Bars(tuple((edges[n], edges[n + 1], shares[n]) for n in used), "packed-fill")
    ]
    rules = [
        (logits.kl_mean, "packed-line"),
        (logits.kl_p95, "packed-line dashed"),
        (logits.kl_p99, "packed-line dotted"),
        (expected, "guide-line"),
        (None if logits.noise is None else logits.noise.kl_mean, "original-line"),
    ]
    shown = [
        (value, style)
        for value, style in rules
        if value is not None and value > 0 and math.isfinite(value)
    ]
    marks += [Rule(value, style) for value, style in shown]
    low = min([edges[used[0]], *(value for value, _ in shown)])
    high = max([edges[used[-1] + 1], *(value for value, _ in shown)])
    return chart(
        f"Histogram of the KL divergence of {logits.scored_tokens:,} tokens: "
        f"mean {formatting.kl(logits.kl_mean)}, 95 % below {formatting.kl(logits.kl_p95)}, "
        f"99 % below {formatting.kl(logits.kl_p99)} nats",
        log_axis("KL divergence of a token (nats)", low / 1.5, high * 1.5),
        linear_axis("tokens (%)", shares, from_zero=True),
        marks,
    )


def kl_by_position(positions: Sequence[Position], kl_mean: float) -> str:
    """Mean KL in each range of positions, bars of equal width."""
    names = [_tokens(positions[0].start), *(_tokens(position.stop) for position in positions)]
    x = Axis("position in the text (tokens)", 0.0, float(len(positions)), tuple(enumerate(names)))
    bars = tuple(
        (n + 0.08, n + 0.92, position.kl_mean)
        for n, position in enumerate(positions)
        if math.isfinite(position.kl_mean)
    )
    described = ", ".join(f"up to {p.stop}: {formatting.kl(p.kl_mean)}" for p in positions)
    return chart(
        f"Mean KL divergence by position: {described}",
        x,
        linear_axis("mean KL (nats)", [kl_mean, *(p.kl_mean for p in positions)], from_zero=True),
        [Bars(bars, "packed-fill"), Rule(kl_mean, "original-line", vertical=False)],
    )


def kl_along(logits: LogitQuality) -> str:
    """Mean KL window by window."""
    values = [window.kl for window in logits.window_series]
    shown = f"{min(values):.3g} to {max(values):.3g}" if values else "nothing"
    step = logits.windows / max(1, len(values))
    points = tuple(((number + 0.5) * step, value) for number, value in enumerate(values))
    return chart(
        f"Mean KL divergence along the text, {shown} nats",
        linear_axis(f"window of {logits.window} tokens", [0.0, logits.windows], from_zero=True),
        linear_axis("mean KL (nats)", [*values, logits.kl_mean], from_zero=True),
        [Line(points, "packed-line"), Rule(logits.kl_mean, "original-line", vertical=False)],
    )


def _tokens(count: int) -> str:
    return f"{count // 1024}k" if count >= 1024 and count % 1024 == 0 else str(count)
