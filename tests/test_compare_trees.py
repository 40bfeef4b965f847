"""The script that times two trees in turn, on trees whose scripts return given rates."""

import shutil
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.scripts

SCRIPT = Path(__file__).parents[1] / "examples" / "benchmarks" / "compare_trees.py"
ENGINE = """
from pathlib import Path
import lowbit.runtime

def random_engine(size, bits, context, sequences):
    tree = Path(lowbit.runtime.__file__).resolve().parents[1]
    with (tree.parent / "order").open("a") as file:
        print(tree.name, size, bits, sequences, file=file)
    return lowbit.runtime.SPEED[size] * (2 if bits == 4 else 1)
"""
MODELS = """
GREEDY = None

def captured_us(engine, params):
    return [1e6 / engine / share for share in (0.9, 1.0, 1.1)]
"""
BATCHES = """
def batch_rate(engine, batch):
    return engine * batch / 2
"""
TORCH = "class cuda:\n    empty_cache = staticmethod(lambda: None)\n"


def tree(path: Path, speed: dict[str, float], folder: str = "benchmarks") -> Path:
    """A tree with as much of a checkout as the script asks for, and its scripts in a folder."""
    for room in ("convert", "formats", "runtime"):
        (path / room).mkdir(parents=True)
        (path / room / "__init__.py").write_text(f"SPEED = {speed}\n")
    (path / "examples" / folder).mkdir(parents=True)
    for name, text in (
        ("random_engine", ENGINE),
        ("bench_models", MODELS),
        ("bench_engine", BATCHES),
        ("torch", TORCH),
    ):
        (path / "examples" / folder / f"{name}.py").write_text(text)
    return path


def compare(new: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    """Run the script as if it stood in the new tree."""
    script = shutil.copy(SCRIPT, new / "examples" / "benchmarks")
    command = (sys.executable, str(script), *arguments)
    return subprocess.run(command, capture_output=True, text=True, check=False)


def test_trees_are_measured_in_turn_and_compared(tmp_path: Path) -> None:
    old = tree(tmp_path / "old", {"0.6B": 1000, "8B": 100}, ".")  # the layout of older trees
    new = tree(tmp_path / "new", {"0.6B": 996, "8B": 101})
    done = compare(new, str(old), "0.6B", "8B", "--together", "1,8", "--turns", "2")
    assert done.returncode == 0, done.stderr
    assert [line.split() for line in done.stdout.splitlines()] == [
        ["tok/s", "together", "old", "new", "difference", "spread"],
        ["0.6B", "INT4", "1", "2,000", "1,992", "-0.4%", "0.0%"],
        ["0.6B", "INT4", "8", "8,000", "7,968", "-0.4%", "0.0%"],
        ["0.6B", "INT8", "1", "1,000", "996", "-0.4%", "0.0%"],
        ["0.6B", "INT8", "8", "4,000", "3,984", "-0.4%", "0.0%"],
        ["8B", "INT4", "1", "200", "202", "+1.0%", "0.0%"],
        ["8B", "INT4", "8", "800", "808", "+1.0%", "0.0%"],
        ["8B", "INT8", "1", "100", "101", "+1.0%", "0.0%"],
        ["8B", "INT8", "8", "400", "404", "+1.0%", "0.0%"],
    ]
    order = [line.split() for line in (tmp_path / "order").read_text().splitlines()]
    trees = [line[0] for line in order if line[1:] == ["8B", "4", "1"]]
    assert trees == ["old", "new", "new", "old"]


def test_exit_code_of_a_slower_tree(tmp_path: Path) -> None:
    old, new = tree(tmp_path / "old", {"0.6B": 1000}), tree(tmp_path / "new", {"0.6B": 990})
    options = (str(old), "0.6B", "--together", "1", "--turns", "1")
    assert compare(new, *options).returncode == 3
    assert compare(new, *options, "--bound", "2").returncode == 0
