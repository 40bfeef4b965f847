"""Kernels that steps launch on a GPU that is not there, by what Triton compiles them for.

They are listed in a process of its own, since Triton knows one driver.
"""

import json
import os
import subprocess
import sys
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from torch import Tensor

ROOT = Path(__file__).parents[2]


@dataclass
class LaunchedKinds:
    """A stand-in for compiling (`lab.fake_gpu`) that notes each kind of launch once."""

    seen: set[str] = field(default_factory=set)

    def note(self, kernel: Any, grid: Any, arguments: Any, named: Any) -> None:
        options = sorted((name, repr(value)) for name, value in named.items())
        self.seen.add(f"{kernel.__name__} {[_kind(each) for each in arguments]} {options}")

    def take(self) -> list[str]:
        """Kinds since the last call."""
        found = sorted(self.seen)
        self.seen.clear()
        return found


def _kind(value: Any) -> str:
    """The part of an argument that Triton compiles for."""
    if isinstance(value, Tensor):
        return f"{value.dtype} {value.storage_offset() * value.itemsize % 16 == 0}"
    if isinstance(value, int) and not isinstance(value, bool):
        return f"{value == 1} {value % 16 == 0}"
    return repr(value)


def listed_by(module: str, *folders: Path) -> Any:
    """The JSON that a test module prints for a model, and for drafters."""
    env = {key: value for key, value in os.environ.items() if key != "TRITON_INTERPRET"}
    command = [sys.executable, "-m", module, *map(str, folders)]
    done = subprocess.run(command, check=False, capture_output=True, env=env, text=True, cwd=ROOT)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)
