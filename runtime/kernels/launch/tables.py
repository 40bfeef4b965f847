"""Launches that were measured on a card, as rows of the JSON file beside this one.

A row names the model that it was measured for (`of`), the size of a linear, and only those numbers
of a launch that are not its defaults. `lowbit-run tune --json` prints such rows (`lines`).
"""

import json
from dataclasses import asdict, fields
from functools import cache
from pathlib import Path
from typing import Any, Literal

Section = Literal["one", "unpaired", "several", "gate_up", "down"]

H200 = Path(__file__).with_name("h200.json")
SIZE = ("bits", "tiles", "steps", "tokens")  # of a linear; tokens only in `several`


@cache
def _sections() -> dict[str, Any]:
    found: dict[str, Any] = json.loads(H200.read_text())
    return found


@cache
def rows(section: Section) -> dict[tuple[int, ...], tuple[dict[str, Any], ...]]:
    """Numbers of launches by size: of a row's `launch`, and of its `several` where it has one."""
    found = {}
    for row in _sections()[section]:
        size = tuple(row[name] for name in SIZE if name in row)
        found[size] = tuple(row[name] for name in ("launch", "several") if name in row)
    return found


def seconds_beside_read(kind: Literal["dense", "experts"]) -> float:
    """Seconds of a decode step's layer beyond the read of its bytes, of dense models or mixtures.

    What measurements of whole models leave (BENCHMARKS.md).
    """
    return float(_sections()["beside_read_us"][kind]) * 1e-6


def row_text(size: tuple[int, ...], launch: Any) -> str:
    """A row of the file, but for the model's name; launch: a record with defaults."""
    defaults = {field.name: field.default for field in fields(launch)}
    numbers = {name: it for name, it in asdict(launch).items() if it != defaults[name]}
    return json.dumps({**dict(zip(SIZE, size, strict=False)), "launch": numbers})
