"""A comparison of packed folders in a terminal, as Markdown and as a page."""

import math
from collections.abc import Sequence
from pathlib import Path

from markupsafe import Markup
from rich.console import Console
from rich.table import Table
from rich.text import Text

from lowbit.convert.report.comparison import FolderComparison, FolderRow
from lowbit.convert.report.formatting import (
    MISSING,
    cosine,
    count,
    kl,
    number,
    percent,
    signed,
    size,
)
from lowbit.convert.report.limits import LIMITS
from lowbit.convert.report.page import render_page
from lowbit.convert.report.terminal import COLORS
from lowbit.formats.charts.axes import around, linear_axis, log_axis
from lowbit.formats.charts.chart import SIZE, Dot, Line, Mark, Rule, chart
from lowbit.formats.files.atomic import replace_files
from lowbit.formats.printable import printable
from lowbit.formats.shell.tables import plain_table

PLOT_SIZE = (SIZE[0], 320.0)
SAME_SIZE = 1.001  # folders whose sizes differ by less are equally large


def render_comparison(console: Console, found: FolderComparison, page: Path | None = None) -> None:
    """Print the tables, and the path of the page if one was written."""
    loss = plain_table("", ("folder", "method", "verdict"), ("size", "mean KL", "minus first"))
    rest = ("bits", "KL p99", "same top", "perplexity", "logit cosine")
    near = plain_table("", ("folder",), rest)
    for row in found.rows:
        name = Text(printable(row.name))
        loss.add_row(
            name,
            Text(printable(row.method)),
            Text(verdict_text(row), COLORS[row.verdict.level]),
            size(row.folder_bytes),
            kl(row.kl_mean),
            difference_text(row),
        )
        near.add_row(
            name,
            f"{row.bits_per_weight:.2f}",
            kl(row.kl_p99),
            percent(row.top1_agreement),
            perplexity_text(row),
            cosine(row.logit_cosine),
        )
    console.print(loss, near)
    if any(row.speed is not None or row.tasks for row in found.rows):
        console.print(_measured(found.rows))
    console.print(
        Text(
            f"{printable(found.text_name)}: {found.scored_tokens:,} tokens in {found.windows} "
            f"windows of {found.window}; perplexity of the original "
            f"{number(found.perplexity_original)}",
            style="dim",
        )
    )
    if page is not None:
        console.print(Text(f"page: {page}", style="dim"))


def _measured(rows: Sequence[FolderRow]) -> Table:
    table = plain_table("", ("folder", "device", "tasks"), ("tok/s", "first token"))
    for row in rows:
        speed = row.speed
        scores = (
            f"{task.task} {MISSING if task.value is None else number(task.value, 4)}"
            for task in row.tasks
        )
        table.add_row(
            Text(printable(row.name)),
            "" if speed is None else speed.device,
            ", ".join(scores),
            MISSING if speed is None else number(speed.decode_tokens_per_s, 1),
            MISSING if speed is None else f"{number(1e3 * speed.first_token_s, 1)} ms",
        )
    return table


def verdict_text(row: FolderRow) -> str:
    """Grade of a folder in a table, `usable` or `not judged`."""
    return row.verdict.grade or row.verdict.title.lower()


def difference_text(row: FolderRow) -> str:
    """Mean KL minus the first row's, `-0.00401 ± 0.00012`; a dash where there is none."""
    if row.difference is None:
        return MISSING
    mean, error = row.difference.mean, row.difference.standard_error
    if not (math.isfinite(mean) and error > 0):
        return f"{'+' if mean >= 0 else '-'}{kl(abs(mean))}"
    digits = min(8, max(0, 1 - math.floor(math.log10(error))))  # two digits of the error
    return f"{mean:+z.{digits}f} ± {error:.{digits}f}"


def perplexity_text(row: FolderRow) -> str:
    """Perplexity and its change, `3.354 (+2.06 %)`."""
    return f"{number(row.perplexity)} ({signed(row.perplexity_change)})"


def comparison_page(found: FolderComparison) -> str:
    """The page as HTML: a chart of size against loss, verdicts, and tables."""
    best = min(found.rows, key=lambda row: row.kl_mean)
    return render_page(
        "compare.html.jinja",
        found=found,
        model=model_name(found),
        best=best,
        smallest=frontier(found.rows)[0],
        difference=difference_text,
        verdict_text=verdict_text,
        size_plot=Markup(_plot(found)),
    )


def model_name(found: FolderComparison) -> str:
    """Name of the original, `Qwen/Qwen3-8B` or `a qwen3 model of 5.8 M parameters`."""
    if found.source is not None:
        return found.source
    return f"a {found.model_type} model of {count(found.parameters)} parameters"


def frontier(rows: Sequence[FolderRow]) -> list[FolderRow]:
    """Rows that no other row beats in both size and loss, smallest first."""
    best: list[FolderRow] = []
    for row in sorted(rows, key=lambda row: (row.folder_bytes, row.kl_mean)):
        if not best:
            best.append(row)
        elif row.kl_mean < best[-1].kl_mean:
            if row.folder_bytes <= best[-1].folder_bytes * SAME_SIZE:
                best.pop()
            best.append(row)
    return best


def _plot(found: FolderComparison) -> str:
    """Chart of each folder's size against its mean KL, with a line along the frontier."""
    largest = max(row.folder_bytes for row in found.rows)
    unit, name = (1e9, "GB") if largest >= 1e9 else (1e6, "MB")
    best = frontier(found.rows)
    sizes = linear_axis(f"size of the folder ({name})", [r.folder_bytes / unit for r in found.rows])
    loss = log_axis("mean KL (nats per token)", *around(row.kl_mean for row in found.rows))
    marks: list[Mark] = [
        Line(tuple((row.folder_bytes / unit, row.kl_mean) for row in best), "original-line")
    ]
    for row in found.rows:
        style = "packed-dot" if row in best else "guide-dot"
        marks.append(Dot(row.folder_bytes / unit, row.kl_mean, _short(row.name), style))
    marks += [
        Rule(limit.kl, "limit-line", vertical=False)
        for limit in LIMITS
        if loss.low < limit.kl < loss.high
    ]
    described = "; ".join(
        f"{row.name}: {size(row.folder_bytes)}, {kl(row.kl_mean)}" for row in found.rows
    )
    title = f"Size of the folder against mean KL divergence. {described}"
    return chart(title, sizes, loss, marks, size=PLOT_SIZE)


def _short(name: str, most: int = 24) -> str:
    return name if len(name) <= most else f"{name[: most - 1]}…"


def write_comparison(path: Path, found: FolderComparison) -> None:
    """Write the page.

    Raises:
        ResourceError: the place cannot be written to, or the disk is full.
    """
    replace_files({path: comparison_page(found).encode()})
