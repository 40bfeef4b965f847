"""The quality report in a terminal."""

from rich.console import Console
from rich.table import Table
from rich.text import Text

from lowbit.convert.measure.record import LongQuality, QualityReport
from lowbit.convert.measure.weights import WeightQuality
from lowbit.convert.report import formatting
from lowbit.convert.report.formatting import MISSING, cosine, kl, kl_with_error, percent, perplexity
from lowbit.convert.report.linears import kinds, scheme_text, worst
from lowbit.convert.report.verdict import judge
from lowbit.convert.report.warnings import tradeoff_note, warnings_of
from lowbit.formats.architectures.names import without_model
from lowbit.formats.printable import printable
from lowbit.formats.shell.tables import plain_table
from lowbit.formats.tasks import TaskReport

COLORS = {"good": "green", "caution": "yellow", "bad": "red", "unknown": "dim"}
WORST = 5
KIND_FIGURES = ("mean error", "worst", "clipped")


def render_terminal(console: Console, report: QualityReport, worst_rows: int = WORST) -> None:
    """Print the report: the verdict, the headline figures, then linears by kind and the worst."""
    console.print(_summary(report))
    if report.long is not None:
        console.print(_positions(report.long))
        console.print(_needles(report.long))
    if report.tasks is not None and report.tasks.tasks:
        console.print(_tasks(report.tasks))
    if report.weights:
        console.print(_kinds(report))
        if sentence := tradeoff_note(report):
            console.print(Text(sentence))
        if worst_rows and len(report.weights) > worst_rows:
            console.print(_worst(report, worst_rows))
    for sentence in warnings_of(report):
        console.print(Text.assemble(("! ", "yellow"), printable(sentence)))


def _summary(report: QualityReport) -> Table:
    table = Table(box=None, show_header=False, pad_edge=False, padding=(0, 2, 0, 0))
    table.add_column(style="bold", no_wrap=True)
    table.add_column(overflow="fold")
    verdict = judge(report)
    color = COLORS[verdict.level]
    table.add_row("verdict", Text.assemble((verdict.title, color), f": {verdict.reason}"))
    if verdict.hint:
        table.add_row("hint", Text(verdict.hint))
    for sentence in filter(None, (verdict.expected, *verdict.notes)):
        table.add_row("", Text(sentence))
    for place, step in enumerate(verdict.next_steps):
        table.add_row("" if place else "to try", Text(step))
    for name, figures in _figures(report).items():
        table.add_row(name, Text(figures))
    return table


def _figures(report: QualityReport) -> dict[str, str]:
    logits, long = report.logits, report.long
    found = {}
    if logits is not None:
        found["perplexity"] = (
            f"{logits.perplexity_original:.3f} → {logits.perplexity_packed:.3f}   "
            f"{formatting.perplexity_change(logits)}"
        )
        found["KL divergence"] = (
            f"mean {kl_with_error(logits.kl_mean, logits.kl_error)}   p95 {kl(logits.kl_p95)}   "
            f"p99 {kl(logits.kl_p99)}   max {kl(logits.kl_max)} nats"
        )
        if (noise := logits.noise) is not None:
            found["BF16 alone"] = f"mean {kl(noise.kl_mean)}   p99 {kl(noise.kl_p99)} nats"
        found["same top token"] = percent(logits.top1_agreement)
        found["logit cosine"] = f"mean {cosine(logits.cosine_mean)}   p1 {cosine(logits.cosine_p1)}"
        if logits.int8_inputs:
            found["INT8 inputs"] = formatting.int8_inputs(logits.int8_inputs[0], logits)
        if logits.images is not None:
            found["images"] = formatting.images(logits.images)
        if logits.routing is not None:
            found["same experts"] = formatting.routing(logits.routing)
        if logits.drafting is not None:
            found["drafts of MTP"] = formatting.drafts(logits.drafting)
    if long is not None:
        found["long texts"] = (
            f"mean KL {kl(long.kl_mean)} nats; an INT8 cache adds {kl(long.cache_kl_mean)}"
        )
    found["size"] = formatting.size_text(report)
    if tower := formatting.tower_text(report.sizes):
        found["vision tower"] = tower
    if logits is not None:
        text, machine = printable(logits.text_name), printable(report.measured_on)
        found["measured on"] = f"{text}: {formatting.scored(logits)}, on {machine}"
    return found


def _positions(long: LongQuality) -> Table:
    """Mean KL by position: of the packed model, and what an INT8 cache adds."""
    title = f"a passage and its repetition, {long.repeated} x {long.length:,} tokens"
    table = plain_table(title, ("tokens",), ("perplexity", "KL", "KL of an INT8 cache"))
    for place, cache in zip(long.positions, long.cache, strict=False):
        table.add_row(
            f"{place.start:,} to {place.stop:,}",
            f"{perplexity(place.nll_original)} → {perplexity(place.nll_packed)}",
            kl_with_error(place.kl_mean, place.kl_error),
            kl_with_error(cache.kl_mean, cache.kl_error),
        )
    return table


def _needles(long: LongQuality) -> Table:
    """Lines found by their distance, by each model and with each cache."""
    title = f"lines found again in {long.length:,} tokens"
    figures = ("lines", "original", "packed", "BF16 cache", "INT8 cache")
    table = plain_table(title, ("tokens back",), figures)
    for row in long.needles:
        found = (row.found_original, row.found_packed, row.found_bf16, row.found_int8)
        table.add_row(f"{row.distance:,}", *map(str, (row.lines, *found)))
    return table


def _tasks(report: TaskReport) -> Table:
    """Results of tasks, beside those of the original where it was asked."""
    compared = any(row.original is not None for row in report.tasks)
    figures = ("original", "packed", "difference") if compared else ("packed",)
    title = f"tasks by {printable(report.harness)}, ± standard error"
    if any(formatting.score_change(row).endswith(formatting.UNPAIRED) for row in report.tasks):
        title += f" ({formatting.UNPAIRED} of two independent results)"
    table = plain_table(title, ("task", "metric"), (*figures, "samples"))
    for row in report.tasks:
        scores = [formatting.score(row)]
        if compared:
            scores = [formatting.score(row.original), *scores, formatting.score_change(row)]
        table.add_row(
            Text(printable(row.task)), Text(formatting.metric(row)), *scores, f"{row.samples:,}"
        )
    return table


def _kinds(report: QualityReport) -> Table:
    outputs = any(row.output_error is not None for row in report.weights)
    figures = ("count", *(("output",) if outputs else ()), *KIND_FIGURES)
    table = plain_table("weights by kind", ("linear", "scheme"), figures)
    for kind in kinds(report.weights):
        output = kind.mean_output_error
        shown = MISSING if output is None else percent(output)
        table.add_row(
            Text(printable(kind.name)),
            kind.scheme,
            str(len(kind.rows)),
            *((shown,) if outputs else ()),
            percent(kind.mean_error),
            percent(kind.worst.relative_l2),
            percent(kind.clipped_share),
        )
    return table


def _name_of(row: WeightQuality) -> str:
    """Name inside the decoder; of experts with the one that has the largest error."""
    name = without_model(printable(row.name)).removeprefix("layers.")
    if row.worst_expert is None or row.worst_expert_l2 is None:
        return name
    return f"{name}, expert {row.worst_expert} {percent(row.worst_expert_l2)}"


def _worst(report: QualityReport, count: int) -> Table:
    figures = ("error", "cosine", "clipped")
    table = plain_table("largest relative errors", ("linear", "scheme"), figures)
    for row in worst(report.weights, count):
        table.add_row(
            Text(_name_of(row)),
            scheme_text(row),
            percent(row.relative_l2),
            cosine(row.cosine),
            percent(row.clipped_share),
        )
    return table
