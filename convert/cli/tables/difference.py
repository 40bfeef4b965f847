"""A difference of two packed checkpoints, in the terminal and as JSON."""

import math
from dataclasses import asdict
from pathlib import Path
from typing import Any

from lowbit.convert.cli.tables.lines import aside, ok
from lowbit.convert.measure.difference import Difference
from lowbit.convert.report.formatting import percent
from lowbit.formats.shell.output import note
from lowbit.formats.shell.tables import plain_table, results

OTHER_BASIS = (
    "one is rotated: its weights differ everywhere, and yet the models may be alike; "
    "compare reports instead"
)


def difference(a: Path, b: Path, found: Difference) -> None:
    """Show what differs."""
    console = results()
    title = f"{a} against {b}"
    if found.same:
        ok(f"{title}: the same weights and configuration")
    entries = [("config.json", row) for row in found.config]
    entries += [("recipe", row) for row in found.recipe]
    if entries:
        table = plain_table(f"settings, {title}", ("where", "key", "first", "second"), ())
        for where, row in entries:
            table.add_row(where, *map(str, (row.key, row.a, row.b)))
        console.print(table)
    if found.other_basis:
        note(OTHER_BASIS)
    if found.linears:
        text = ("linear", "first", "second")
        table = plain_table(f"linears, {title}", text, ("codes", "scales", "distance"))
        for line in found.linears:
            shares = ("" if x is None else percent(x) for x in (line.codes, line.scales))
            distance = percent(line.distance) if math.isfinite(line.distance) else "∞"
            name = line.module if line.linears == 1 else f"{line.module} ({line.linears})"
            table.add_row(name, line.a, line.b, *shares, distance)
        console.print(table)
    for what, names in (
        ("differ", found.others),
        ("only in the first", found.only_a),
        ("only in the second", found.only_b),
    ):
        if names:
            console.print(f"{what}: {', '.join(names)}")
    aside(f"{found.equal} weights and other tensors are equal, byte for byte")


def difference_json(a: Path, b: Path, found: Difference) -> dict[str, Any]:
    """The object of `compare --diff --json`; an infinite distance is null."""
    content = asdict(found)
    for row in content["linears"]:
        if not math.isfinite(row["distance"]):
            row["distance"] = None
    return {"a": str(a), "b": str(b), "same": found.same, **content}
