"""What was found on this machine, as tables on stdout."""

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from lowbit.formats.shell.tables import plain_table, results, styled
from lowbit.runtime.machine.checks import Finding, State

if TYPE_CHECKING:
    from lowbit.runtime.machine.expected import Speed  # needs torch, which may be missing

MARKS: Mapping[State, tuple[str, str]] = {
    "ok": ("✓", "green"),
    "note": ("!", "yellow"),
    "missing": ("✗", "bold red"),
}
EXPLAINED = {
    "cuda": "expected: the read, and the time a layer took beyond it on one H200 (BENCHMARKS.md); "
    "other GPUs may need more or less",
    "cpu": "expected: 40 % of the bandwidth, which two cores of an AMD EPYC reached beside other "
    "work; lowbit-run bench MODEL measures",
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
    columns = ("a token reads", "at most", "expected", "share", "memory")
    table = plain_table(title, ("model",), columns)
    for each in speed.models:
        memory = gigabytes(each.memory_bytes)
        table.add_row(
            each.name,
            gigabytes(each.token_bytes),
            f"{_speed(each.most_tokens_per_s)} tok/s",
            f"{_speed(each.tokens_per_s)} tok/s",
            f"{each.share:.0%}",
            styled(memory, (" too much", "yellow")) if each.fits is False else memory,
        )
    console = results()
    console.print(table)
    console.print(EXPLAINED[speed.device])
    if any(each.recipe is not None for each in speed.models):
        console.print("weights: INT4, as lowbit-convert makes them and --quantize int4 loads them")


def _speed(tokens_per_s: float) -> str:
    """Two digits: more are not known."""
    digits = 1 if tokens_per_s < 10 else 0
    rounded = float(f"{tokens_per_s:.2g}")
    return f"{rounded:,.{digits}f}"
