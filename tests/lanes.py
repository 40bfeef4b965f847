"""Combinations of parameters that `make test` leaves to a slower lane.

    @in_commands("hybrid-cpu", "dense-*")

The ids are those between the brackets of a test's name. `make test` keeps each value of each
parameter, and the pairs that matter; `.ci/run` runs all of them.
"""

import re
from collections import defaultdict
from fnmatch import fnmatchcase
from pathlib import Path

import pytest

OF_ALL = re.compile(r"^pytestmark = (\[[^]]*\]|.*)$", re.MULTILINE)  # the marks of a file


def in_commands(*ids: str) -> pytest.MarkDecorator:
    """Leave these ids to `make test-commands`."""
    return pytest.mark.later(pytest.mark.commands, *ids)


def in_kernels(*ids: str) -> pytest.MarkDecorator:
    """Leave these ids to `make test-kernels`."""
    return pytest.mark.later(pytest.mark.kernels, *ids)


def mark_lanes(items: list[pytest.Item]) -> list[str]:
    """Mark the combinations that run elsewhere; the ids that no test has."""
    found: dict[tuple[str, str], bool] = defaultdict(bool)
    for item in items:
        for mark in item.iter_markers("later"):
            lane, *ids = mark.args
            function, _, own = item.nodeid.partition("[")
            for id in ids:
                fits = fnmatchcase(own.removesuffix("]"), id)
                found[function, id] |= fits
                if fits and not any(item.iter_markers("gpu")):  # those have a lane
                    item.add_marker(lane)
    return [f"{function}[{id}]" for (function, id), fits in found.items() if not fits]


def runs_elsewhere(path: Path, expression: str) -> bool:
    """True if the marks of a whole file keep all of its tests from `-m expression`."""
    parts = expression.split(" and ")
    left_out = [part.removeprefix("not ") for part in parts if part.startswith("not ")]
    found = OF_ALL.search(path.read_text(encoding="utf-8"))
    return found is not None and any(f"mark.{mark}" in found[1] for mark in left_out)
