"""A report measured again, in the terminal and as JSON."""

from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from lowbit.convert.cli.tables.lines import ok, warn
from lowbit.convert.measure.agreement import Agreement
from lowbit.convert.measure.record import QualityReport
from lowbit.convert.report.formatting import MISSING
from lowbit.formats.layout.records import finite
from lowbit.formats.printable import printable
from lowbit.formats.shell.tables import plain_table, results


def agreement(path: Path, claim: QualityReport, rows: Sequence[Agreement]) -> None:
    """Show every figure twice, and whether all agree."""
    title = f"{path}, measured on {claim.measured_on} by lowbit {claim.lowbit_version}"
    columns = ("recorded", "measured again", "may differ by", "agrees")
    table = plain_table(title, ("figure",), columns)
    for row in rows:
        measured = MISSING if row.measured is None else _figure(row.measured)
        allowed = _figure(row.allowed)
        name, yes = printable(row.figure), "yes" if row.agrees else "no"
        table.add_row(name, _figure(row.recorded), measured, allowed, yes)
    results().print(table)
    missed = sum(not row.agrees for row in rows)
    if missed:
        warn(f"{missed} of {len(rows)} figures disagree with the report")
    else:
        ok(f"all {len(rows)} figures agree with the report")


def _figure(value: float) -> str:
    return f"{value:,.5g}"


def agreement_json(path: Path, rows: Sequence[Agreement]) -> dict[str, Any]:
    """The object of `report --check --json`; an infinite figure is null."""
    figures = [{**finite(asdict(row)), "agrees": row.agrees} for row in rows]
    return {
        "report": str(path),
        "agrees": all(row.agrees for row in rows),
        "figures": figures,
    }
