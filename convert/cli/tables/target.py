"""Sensitivities and choices in the terminal, and as JSON objects."""

from collections import Counter
from typing import Any

from lowbit.convert.budget.lookup import CachedSensitivities
from lowbit.convert.budget.sensitivities import Row, Sensitivities, by_set
from lowbit.convert.budget.target import TargetChoice
from lowbit.convert.cli.tables.lines import aside
from lowbit.convert.plan.sets import RANKED_BITS
from lowbit.convert.report import formatting
from lowbit.formats.architectures.names import split_layer
from lowbit.formats.shell.output import note
from lowbit.formats.shell.tables import plain_table, results, styled

WORST, LEAST = 10, 5
SHOWN = (2, 4, 8)  # 3 bits lie between; a terminal has no room for them


def sensitivities(found: CachedSensitivities) -> None:
    """Show the most and the least sensitive sets, and the file with the rest."""
    record = found.sensitivities
    ranked = _ranked(record)
    sizes = sorted({row.group_size for row in record.rows}, reverse=True)
    shown = [bits for bits in SHOWN if any(row.bits == bits for row in record.rows)]
    columns = [f"INT{bits} g{group}" for bits in shown for group in sizes]
    table = plain_table(
        "mean KL (nats a token) with one set quantized", ("set",), ("weights", *columns)
    )
    worst, rest = ranked[:WORST], ranked[WORST:]
    least = rest[-LEAST:]
    for name, rows in worst:
        table.add_row(_short(name), *_figures(rows, columns))
    if len(rest) > len(least):
        table.add_row(styled((f"{len(rest) - len(least)} between", "dim")))
    for name, rows in least:
        table.add_row(_short(name), *_figures(rows, columns))
    results().print(table)
    place = "" if found.failure else f": {found.file}"
    aside(
        f"of {record.conditions}, on {record.windows} windows of {record.window} tokens of "
        f"{record.text_name}; {'computed now' if found.is_new else 'known'}{place}"
    )


def _short(name: str) -> str:
    """Number of the layer and what follows: `0.mlp.gate_up`."""
    _, layer, kind = split_layer(name)
    return kind if layer is None else f"{layer}.{kind}"


def _ranked(record: Sensitivities) -> list[tuple[str, list[Row]]]:
    """Sets and their rows by falling KL at INT4 with the largest group size."""

    def key(pair: tuple[str, list[Row]]) -> float:
        narrow = [row for row in pair[1] if row.bits == RANKED_BITS]
        return -max(narrow, key=lambda row: row.group_size).kl

    return sorted(by_set(record.rows).items(), key=key)


def _figures(rows: list[Row], columns: list[str]) -> list[str]:
    by_scheme = {str(row.scheme): formatting.kl(row.kl) for row in rows}
    return [f"{rows[0].weights:,}", *(by_scheme.get(column, "") for column in columns)]


def sensitivities_json(found: CachedSensitivities) -> dict[str, Any]:
    """Object of `sensitivity --json`."""
    return {**found.sensitivities.to_json(), "file": str(found.file), "computed": found.is_new}


def choice(made: TargetChoice) -> None:
    """Note the schemes chosen for a target, the folder's size and the file of the sensitivities."""
    costs, chosen = made.costs, made.allocation
    origin = "computed now, kept in" if costs.is_new else "from"
    note(f"sensitivities {origin} {costs.file}")
    counts = Counter(str(scheme or "as stored") for scheme in chosen.schemes.values())
    parts = ", ".join(f"{count} {scheme}" for scheme, count in sorted(counts.items()))
    if chosen.plan.frequent_rows:
        parts += f", with {chosen.plan.frequent_rows:,} frequent rows of the head in INT8"
    note(
        f"chosen for {len(chosen.schemes)} sets: {parts}; "
        f"{chosen.plan.bits_per_weight:.3f} bits per weight, a folder of "
        f"{formatting.size(made.folder_bytes)}, expected KL {formatting.kl(chosen.kl)} "
        "(the sum of their costs)"
    )
    if made.unlike is not None:
        known = costs.sensitivities.conditions
        note(f"! the sensitivities are of {known}; quantized: {made.unlike}")
