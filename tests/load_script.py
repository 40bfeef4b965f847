"""A script of examples/ as a module."""

import importlib.util
from pathlib import Path
from types import ModuleType

EXAMPLES = Path(__file__).parents[1] / "examples"


def load_script(name: str) -> ModuleType:
    """Import the one script of this name; nothing of it is run but what an import runs."""
    [path] = EXAMPLES.rglob(f"{name}.py")
    spec = importlib.util.spec_from_file_location(name, path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module
