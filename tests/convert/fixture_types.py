"""Types of the fixtures of this folder."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

from click.testing import Result
from torch import Tensor

Config = dict[str, Any]
Edit = Callable[[dict[str, Tensor]], object]
MakeModel = Callable[..., Path]
Cli = Callable[..., Result]
Hashes = Callable[[Path], dict[str, str]]
