"""Combinations that run in a slower lane: the others stay, and an id that no test has is found."""

from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from tests.lanes import in_commands, in_kernels, mark_lanes, runs_elsewhere


@dataclass
class Item:
    """A collected test, as far as lanes ask."""

    nodeid: str
    marks: list[pytest.Mark]
    lanes: list[str] = field(default_factory=list)

    def iter_markers(self, name: str) -> Iterator[pytest.Mark]:
        return (mark for mark in self.marks if mark.name == name)

    def add_marker(self, mark: pytest.MarkDecorator) -> None:
        self.lanes.append(mark.name)


def test_each_id_has_the_mark_of_its_lane() -> None:
    marks = [in_commands("one-*").mark, in_kernels("two-2", "three-3").mark]
    ids = ("one-1", "one-2", "two-1", "two-2")
    items: list[Any] = [Item(f"a.py::test[{id}]", marks) for id in ids]
    items.append(Item("a.py::other", []))
    items.append(Item("a.py::test[one-3]", [*marks, pytest.mark.gpu.mark]))
    assert mark_lanes(items) == ["a.py::test[three-3]"]
    assert [item.lanes for item in items] == [["commands"], ["commands"], [], ["kernels"], [], []]


@pytest.mark.parametrize(
    ("text", "elsewhere"),
    [
        ("pytestmark = pytest.mark.gpu\n", True),
        ("pytestmark = [\n    pytest.mark.slow,\n    pytest.mark.commands,\n]\n", True),
        ("pytestmark = pytest.mark.slow\n", False),
        ("@pytest.mark.gpu\ndef test_a() -> None: ...\n", False),
    ],
)
def test_files_of_other_lanes_are_left_out(tmp_path: Path, text: str, elsewhere: bool) -> None:
    (tmp_path / "test_a.py").write_text("import pytest\n\n" + text)
    assert runs_elsewhere(tmp_path / "test_a.py", "not gpu and not commands") == elsewhere
    assert not runs_elsewhere(tmp_path / "test_a.py", "gpu and not kernels")
    assert not runs_elsewhere(tmp_path / "test_a.py", "gpu or not commands")
    assert not runs_elsewhere(tmp_path / "test_a.py", "")
