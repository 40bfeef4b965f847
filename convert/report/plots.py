"""The plots of the page, each as a self-contained SVG."""

import io
import math
from collections.abc import Sequence
from statistics import median
from typing import TYPE_CHECKING, Any

from lowbit.convert.quality.record import LogitQuality
from lowbit.convert.quality.weights import WeightQuality
from lowbit.convert.report.verdict import OUTLIER, kinds, layer_of

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

INK, MUTED, GRID = "#1f2933", "#66727f", "#e3e7eb"
ORIGINAL, PACKED, GUIDE = "#7a8794", "#0b62c4", "#c2410c"
# Colours that stay apart for colour-blind readers, and markers that do so on paper.
COLORS = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#e69f00", "#56b4e9", "#6b5b95", "#333333")
MARKERS = ("o", "s", "^", "D", "v", "P", "X", "*")
STYLE: Any = {
    "font.size": 9.5,
    "axes.edgecolor": MUTED,
    "axes.labelcolor": INK,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.grid": True,
    "axes.axisbelow": True,
    "grid.color": GRID,
    "xtick.color": MUTED,
    "ytick.color": MUTED,
    "legend.frameon": False,
    "lines.linewidth": 1.4,
    "svg.hashsalt": "lowbit",
}


def errors_by_layer(rows: Sequence[WeightQuality]) -> bytes:
    """Relative error of the layers' linears, a line a kind, a panel for each number of bits.

    The axis starts at half the median and reaches the error beyond which a linear stands out.
    """
    from matplotlib import rc_context
    from matplotlib.ticker import MaxNLocator

    inside = [row for row in rows if layer_of(row.name)[0] is not None] or list(rows)
    widths = sorted({row.bits for row in inside})
    with rc_context(STYLE):
        figure, panels = _figure(7.6, 0.5 + 2.4 * len(widths), len(widths))
        for axes, bits in zip(panels, widths, strict=True):
            chosen = [row for row in inside if row.bits == bits]
            middle = 100 * median(row.relative_l2 for row in chosen)
            for number, kind in enumerate(kinds(chosen)):
                axes.plot(
                    [layer_of(row.name)[0] or 0 for row in kind.rows],
                    [100 * row.relative_l2 for row in kind.rows],
                    color=COLORS[number % len(COLORS)],
                    marker=MARKERS[number % len(MARKERS)],
                    markersize=4,
                    label=_label(kind.name),
                )
            axes.axhline(OUTLIER * middle, color=GUIDE, linestyle=":", label="stands out")
            highest = max(100 * row.relative_l2 for row in chosen)
            axes.set_ylim(0.5 * middle, 1.05 * max(highest, OUTLIER * middle) or 1.0)
            axes.set_ylabel("relative error (%)")
            axes.legend(
                title=f"INT{bits}", loc="center left", bbox_to_anchor=(1.01, 0.5), fontsize=8.5
            )
        panels[-1].set_xlabel("layer")
        panels[-1].xaxis.set_major_locator(MaxNLocator(integer=True))
        return _svg(figure)


def kl_distribution(logits: LogitQuality, guidance: float | None) -> bytes:
    """Histogram of the KL of every token on a log axis, and the share of tokens below."""
    from matplotlib import rc_context

    with rc_context(STYLE):
        figure, (axes,) = _figure(7.6, 3.1, 1)
        histogram = logits.kl_histogram
        bins = len(histogram.counts)
        step = (histogram.high_exponent - histogram.low_exponent) / bins
        edges = [10 ** (histogram.low_exponent + step * number) for number in range(bins + 1)]
        total = max(1, sum(histogram.counts))
        shares = [100 * count / total for count in histogram.counts]
        axes.stairs(shares, edges, fill=True, color=PACKED, alpha=0.3)
        axes.stairs(shares, edges, color=PACKED, linewidth=1.2)
        axes.set_xscale("log")
        axes.set_xlabel("KL divergence of a token (nats)")
        axes.set_ylabel("tokens (%)", color=PACKED)
        used = [number for number, count in enumerate(histogram.counts) if count] or [0]
        left, right = edges[used[0]], max(edges[used[-1] + 1], 1.5 * (guidance or 0))
        axes.set_xlim(left / 1.5, right * 1.5)
        below = axes.twinx()
        cumulative = [0.0]
        for share in shares:
            cumulative.append(cumulative[-1] + share)
        below.plot(edges, cumulative, color=INK, linewidth=1.1)
        below.set_ylim(0, 104)
        below.set_ylabel("tokens below (%)")
        below.grid(visible=False)
        below.spines["right"].set_visible(True)
        lines = [("mean", logits.kl_mean, "-", PACKED), ("p99", logits.kl_p99, "--", PACKED)]
        if guidance is not None:
            lines.append(("guidance for the mean", guidance, ":", GUIDE))
        for label, value, style, color in lines:
            if value > 0 and math.isfinite(value):
                axes.axvline(value, color=color, linestyle=style, label=f"{label} {value:.3g}")
        axes.legend(loc="upper left", fontsize=8.5)
        return _svg(figure)


def windows(logits: LogitQuality) -> bytes:
    """Perplexity of both models and mean KL, window by window."""
    from matplotlib import rc_context

    with rc_context(STYLE):
        figure, (top, bottom) = _figure(7.6, 4.2, 2)
        series = logits.window_series
        x = [(number + 0.5) * logits.windows / len(series) for number in range(len(series))]
        style = "none" if len(series) == 1 else "-"
        for label, color, values in (
            ("original", ORIGINAL, [window.nll_original for window in series]),
            ("packed", PACKED, [window.nll_packed for window in series]),
        ):
            perplexity = [math.exp(min(value, 700.0)) for value in values]
            top.plot(x, perplexity, color=color, linestyle=style, marker=".", ms=3.5, label=label)
        top.set_ylabel("perplexity")
        top.legend(loc="upper right", ncols=2, fontsize=8.5)
        bottom.plot(x, [w.kl for w in series], color=PACKED, linestyle=style, marker=".", ms=3.5)
        bottom.axhline(logits.kl_mean, color=MUTED, linestyle="--", linewidth=1)
        bottom.set_ylim(bottom=0)
        bottom.set_ylabel("mean KL (nats)")
        bottom.set_xlabel(f"window of {logits.window} tokens, in the order of the text")
        return _svg(figure)


def _label(name: str) -> str:
    """A name as matplotlib can draw it: letters its font has, no mathematics, not too long."""
    drawn = "".join(char if " " <= char <= "~" else "?" for char in name[:40])
    return drawn.replace("$", r"\$")


def _figure(width: float, height: float, panels: int) -> "tuple[Figure, list[Axes]]":
    """A figure of its own, apart from pyplot's global state, with panels over one x axis."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(width, height), layout="constrained")
    grid = figure.subplots(panels, 1, sharex=True, squeeze=False)
    return figure, list(grid[:, 0])


def _svg(figure: "Figure") -> bytes:
    out = io.BytesIO()
    figure.savefig(out, format="svg", metadata={"Date": None, "Creator": None})
    return out.getvalue()
