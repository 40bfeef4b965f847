"""A script of examples/ or of CI as a module."""

import importlib.util
from pathlib import Path
from types import ModuleType

ROOT = Path(__file__).parents[1]


def load_script(name: str) -> ModuleType:
    """Import the one script of this name; nothing of it is run but what an import runs."""
    [path] = (path for room in ("examples", ".ci") for path in (ROOT / room).rglob(f"{name}.py"))
    spec = importlib.util.spec_from_file_location(name, path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module
