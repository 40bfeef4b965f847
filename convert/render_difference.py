"""A difference of two packed checkpoints, in the terminal and as JSON."""

import math
from dataclasses import asdict
from pathlib import Path
from typing import Any

from rich.markup import escape

from lowbit.convert.difference import Difference
from lowbit.convert.report.words import percent, plain
from lowbit.convert.terminal import plain_table, stderr


def difference(a: Path, b: Path, found: Difference) -> None:
    """Show what differs."""
    console = stderr()
    title = escape(plain(f"{a} against {b}"))
    if found.same:
        console.print(f"[bold green]✓[/] {title}: the same weights and configuration")
    entries = [("config.json", row) for row in found.config]
    entries += [("recipe", row) for row in found.recipe]
    if entries:
        table = plain_table(f"settings, {title}", ("where", "key", "first", "second"), ())
        for where, row in entries:
            table.add_row(where, *(escape(plain(str(x))) for x in (row.key, row.a, row.b)))
        console.print(table)
    if found.linears:
        text = ("linear", "first", "second")
        table = plain_table(f"linears, {title}", text, ("codes", "scales", "distance"))
        for line in found.linears:
            shares = ("" if x is None else percent(x) for x in (line.codes, line.scales))
            distance = percent(line.distance) if math.isfinite(line.distance) else "∞"
            table.add_row(escape(plain(line.module)), line.a, line.b, *shares, distance)
        console.print(table)
    for what, names in (
        ("differ", found.others),
        ("only in the first", found.only_a),
        ("only in the second", found.only_b),
    ):
        if names:
            console.print(f"{what}: {escape(plain(', '.join(names)))}")
    console.print(f"[dim]{found.equal} weights and other tensors are equal, byte for byte[/]")


def difference_json(a: Path, b: Path, found: Difference) -> dict[str, Any]:
    """The object of `diff --json`; an infinite distance is null."""
    content = asdict(found)
    for row in content["linears"]:
        if not math.isfinite(row["distance"]):
            row["distance"] = None
    return {"a": str(a), "b": str(b), "same": found.same, **content}
