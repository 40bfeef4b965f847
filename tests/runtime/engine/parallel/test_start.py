"""A rank's process ends with its parent, at any time."""

import os
import subprocess
import sys

import pytest

from lowbit.runtime.engine.parallel import start


def test_it_ends_with_its_parent(monkeypatch: pytest.MonkeyPatch) -> None:
    """A fork of the first rank may hold the socket for longer."""
    ended: list[int] = []
    parents = iter([7, 1])
    monkeypatch.setattr(start, "LOOK_S", 0)
    monkeypatch.setattr(os, "getppid", lambda: next(parents))
    monkeypatch.setattr(os, "_exit", ended.append)
    start.end_with(7)
    assert ended == [0]


def test_it_looks_before_libraries_are_imported() -> None:
    code = f"import sys; import {start.__name__}; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
