"""Tables on stdout: findings on this machine, speeds, models."""

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from rich.table import Table

from lowbit.formats.shell.tables import plain_table, results, styled
from lowbit.runtime.machine.checks import Finding, State

if TYPE_CHECKING:
    from lowbit.runtime.machine.expected import Speed  # needs torch, which may be missing
    from lowbit.runtime.machine.models import Cache, Listed

MARKS: Mapping[State, tuple[str, str]] = {
    "ok": ("✓", "green"),
    "note": ("!", "yellow"),
    "missing": ("✗", "bold red"),
}
EXPLAINED = {
    "cuda": "expected: the read, and the time a layer took beyond it on one H200 (BENCHMARKS.md); "
    "other GPUs may need more or less",
    "cpu": "expected: 40 % of the bandwidth, which two cores of an AMD EPYC reached beside other "
    "work, and the time of calls, measured now; prompt: of 512 tokens, by the speed of products, "
    "measured now; lowbit-run bench MODEL measures both",
}


def show_findings(findings: Sequence[Finding]) -> None:
    """A row for each thing that was looked at."""
    table = plain_table("this machine", ("", "what", "found"))
    for each in findings:
        words = f"{each.found} ({each.hint})" if each.hint else each.found
        table.add_row(styled(MARKS[each.state]), each.what, words)
    results().print(table)


def show_speed(speed: "Speed") -> None:
    """A row for each model."""
    from lowbit.runtime.engine.memory import gigabytes

    name = "this processor" if speed.device == "cpu" else speed.name
    title = f"one answer at a time on {name}, which reads {gigabytes(int(speed.bandwidth))}/s"
    prompts = ("prompt",) if speed.device == "cpu" else ()
    columns = ("a token reads", "at most", "expected", "share", *prompts, "memory")
    table = plain_table(title, ("model",), columns)
    for each in speed.models:
        memory, prompt = gigabytes(each.memory_bytes), each.prompt_tokens_per_s
        table.add_row(
            each.name,
            gigabytes(each.token_bytes),
            f"{_speed(each.most_tokens_per_s)} tok/s",
            f"{_speed(each.tokens_per_s)} tok/s",
            f"{each.share:.0%}",
            *(() if prompt is None else (f"{_speed(prompt)} tok/s",)),
            styled(memory, (" too much", "yellow")) if each.fits is False else memory,
        )
    console = results()
    console.print(table)
    console.print(EXPLAINED[speed.device])
    if any(each.recipe is not None for each in speed.models):
        console.print("weights: INT4, as lowbit-convert makes them and --quantize int4 loads them")


def show_models(models: "Sequence[Listed]", cache: "Cache | None") -> None:
    """A row for each model, and a line for each that is broken."""
    console, cached = results(), () if cache is None else cache.models
    sections = {"folders": models, "cache of the Hub": cached}
    for title, found in sections.items():
        if whole := [each for each in found if each.kind != "broken"]:
            console.print(_models_table(title, whole))
    for each in (*models, *cached):
        if each.problem:
            mark = MARKS["missing" if each.kind == "broken" else "note"]
            console.print(styled(mark, f" {each.name}: {each.problem}"))
    if not any(sections.values()):
        console.print("no models here")
    if cache is not None and cache.others:
        console.print(f"{cache.others} more in {cache.folder}, which lowbit does not run")


def _models_table(title: str, models: "Sequence[Listed]") -> Table:
    from lowbit.formats.folder_size import size

    columns = ("model", "weights", "verdict")
    table = plain_table(title, columns, ("KL", "bits", "size", "date"))
    for each in models:
        judged, bits = each.judgement, each.bits_per_weight
        verdict = "" if judged is None else judged.title
        if judged is not None and not judged.current:
            verdict = "of an earlier conversion"
        known = judged is not None and judged.current and judged.kl_mean is not None
        table.add_row(
            each.name,
            each.recipe or "",
            verdict,
            f"{judged.kl_mean:#.3g}" if known and judged is not None else "",
            "" if bits is None else f"{bits:.2f}",
            size(each.size_bytes),
            each.date or "",
        )
    return table


def _speed(tokens_per_s: float) -> str:
    """Two digits: more are not known."""
    digits = 1 if tokens_per_s < 10 else 0
    rounded = float(f"{tokens_per_s:.2g}")
    return f"{rounded:,.{digits}f}"
