"""The table of `bench_speculation`."""

from collections.abc import Sequence
from dataclasses import dataclass

from forced_drafts import ACCEPTED

from lowbit.formats.shell.tables import plain_table, results


@dataclass(frozen=True)
class Row:
    """Rounds with a number of drafts."""

    drafter: str  # `known`, `head`, `copied` or `repeat`
    k: int  # drafts of a round at most
    # Median of a round, drafts included; None where other steps were among them.
    round_ms: float | None
    plain_ms: float  # of a step of plain decoding after the same prompt
    cost: float | None  # of a round, in plain steps
    tokens_per_s: dict[str, float]  # by what is accepted
    tokens_per_round: dict[str, float]  # likewise
    same: bool  # the output is that of plain decoding


def show(title: str, plain_rate: float, rows: Sequence[Row]) -> None:
    """A table on stdout.

    Args:
        title: above it.
        plain_rate: tokens per second of plain decoding.
        rows: of a model.
    """
    figures = ("ms/round", "cost", *ACCEPTED, "unforced", "tokens/round", "x plain")
    table = plain_table(title, ("drafts", "k"), figures)

    def number(value: float | None, form: str) -> str:
        return "" if value is None else format(value, form)

    for row in rows:
        rates = row.tokens_per_s
        free = next((name for name in ("own", "auto", "copied", "repeat") if name in rates), "")
        gain = rates[free] / rates.get("plain", plain_rate) if free else None
        table.add_row(
            row.drafter + ("" if row.same else ", OTHER OUTPUT"),
            str(row.k),
            number(row.round_ms, ".3f"),
            number(row.cost, ".2f"),
            *(number(rates.get(accepted), ",.0f") for accepted in ACCEPTED),
            number(rates.get(free), ",.0f"),
            number(row.tokens_per_round.get(free), ".2f"),
            number(gain, ".2f"),
        )
    results().print(table)
