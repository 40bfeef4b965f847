"""Break the code in small ways, a copy of the tree at a time, and count what its tests catch.

    python examples/maintenance/mutants.py [MODULE ...] [--count 60] [--seed 1] [--limit 300]

A module is a file or a folder of the tree; left out, those that decide what runs when, and what a
conversion does and says. Each mutant is one change: a swapped sign or comparison, a number that is
one too large, a condition turned around, a call whose result nobody takes left out. Its tests are
those of `mirrored_tests.py`, then all of their folder and those that import the module. Survivors
are printed with their line: some change nothing that can be seen, each other one is a test that is
missing. The exit code is 3 if less than `--bound` percent are caught.
"""

import ast
import os
import random
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import click
from mirrored_tests import ROOT, mirrored

MODULES = ("runtime/engine", "runtime/state", "convert/plan", "convert/pipeline", "convert/report")
COPIED = ("convert", "formats", "runtime", "tests", "examples", "docs", "pyproject.toml")
USUAL = "not gpu and not kernels and not clients and not scripts and not commands"
NO_TESTS = 5  # pytest's exit code
FEW = 3  # of this script: too few are caught
OPERATORS: dict[type[ast.AST], type[Any]] = {
    ast.Add: ast.Sub,
    ast.Sub: ast.Add,
    ast.Mult: ast.Add,
    ast.FloorDiv: ast.Mult,
    ast.Lt: ast.LtE,
    ast.LtE: ast.Lt,
    ast.Gt: ast.GtE,
    ast.GtE: ast.Gt,
    ast.Eq: ast.NotEq,
    ast.NotEq: ast.Eq,
    ast.In: ast.NotIn,
    ast.NotIn: ast.In,
    ast.Is: ast.IsNot,
    ast.IsNot: ast.Is,
    ast.And: ast.Or,
    ast.Or: ast.And,
}


@dataclass(frozen=True, slots=True)
class Mutant:
    """A change of one expression or statement of a file."""

    path: Path  # in the tree
    line: int
    before: str
    after: str
    text: str  # of the whole file, changed

    def __str__(self) -> str:
        return f"{self.path}:{self.line}: `{self.before}` -> `{self.after}`"


def changes(node: ast.AST) -> Iterator[str]:
    """Texts that may stand in the place of a node."""
    if isinstance(node, ast.BinOp) and type(node.op) in OPERATORS:
        yield ast.unparse(ast.BinOp(node.left, OPERATORS[type(node.op)](), node.right))
    elif isinstance(node, ast.Compare) and type(node.ops[0]) in OPERATORS:
        ops = [OPERATORS[type(node.ops[0])](), *node.ops[1:]]
        yield ast.unparse(ast.Compare(node.left, ops, node.comparators))
    elif isinstance(node, ast.BoolOp):
        yield ast.unparse(ast.BoolOp(OPERATORS[type(node.op)](), node.values))
    elif isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.Not):
        yield ast.unparse(node.operand)
    elif isinstance(node, ast.Constant) and type(node.value) is int:
        yield str(node.value + 1)
    elif isinstance(node, ast.Expr) and isinstance(node.value, ast.Call):
        yield "None"


def of_functions(tree: ast.AST, inside: bool = False) -> Iterator[ast.AST]:
    """Nodes that run in functions, without annotations and what is raised."""
    for name, value in ast.iter_fields(tree):
        if name in ("annotation", "returns", "decorator_list", "defaults", "kw_defaults"):
            continue
        for node in value if isinstance(value, list) else [value]:
            if isinstance(node, ast.Raise | ast.JoinedStr) or not isinstance(node, ast.AST):
                continue
            if inside:
                yield node
            yield from of_functions(node, inside or isinstance(node, ast.FunctionDef))


def mutants_of(path: Path) -> list[Mutant]:
    """Every mutant of a file of the tree."""
    source = (ROOT / path).read_bytes()
    starts = [0]
    for line in source.splitlines(keepends=True):
        starts.append(starts[-1] + len(line))
    found = []
    for node in of_functions(ast.parse(source)):
        if not isinstance(node, ast.expr | ast.stmt):
            continue
        first = starts[node.lineno - 1] + node.col_offset
        last = starts[(node.end_lineno or node.lineno) - 1] + (node.end_col_offset or 0)
        for after in changes(node):
            text = source[:first] + f"({after})".encode() + source[last:]
            before = " ".join(source[first:last].decode().split())
            found.append(Mutant(path, node.lineno, before, after, text.decode()))
    return found


def chosen(modules: tuple[str, ...], count: int, draw: random.Random) -> list[Mutant]:
    """Mutants of files in turn, so that a long one has no more than a short one."""
    files = [
        path.relative_to(ROOT)
        for name in modules
        for path in ([ROOT / name] if (ROOT / name).is_file() else (ROOT / name).rglob("*.py"))
    ]
    by_file = {path: mutants_of(path) for path in sorted(files)}
    by_file = {path: some for path, some in by_file.items() if some and mirrored(path)}
    paths = [path for _ in range(count) for path in draw.sample(list(by_file), len(by_file))]
    return [draw.choice(by_file[path]) for path in paths[:count]]


def copied(folder: Path) -> Path:
    """A copy of the tree, where `lowbit` is imported from."""
    for name in COPIED:
        source = ROOT / name
        if source.is_dir():
            shutil.copytree(source, folder / name, ignore=shutil.ignore_patterns("__pycache__"))
        else:
            shutil.copy(source, folder / name)
    (folder / "lowbit").mkdir()
    for room in ("convert", "formats", "runtime"):
        (folder / "lowbit" / room).symlink_to(folder / room)
    return folder


def run_tests(tree: Path, tests: list[Path], limit: float) -> int | None:
    """pytest's exit code on some tests in a copy; None if they take too long."""
    names = [str(test.relative_to(ROOT)) for test in tests]
    command = [sys.executable, "-m", "pytest", "-x", "-q", "-p", "no:cacheprovider", "-m", USUAL]
    environment = {**os.environ, "PYTHONPATH": str(tree), "OMP_NUM_THREADS": "1"}
    try:
        done = subprocess.run(
            [*command, *names], cwd=tree, env=environment, capture_output=True, timeout=limit
        )
    except subprocess.TimeoutExpired:
        return None
    return done.returncode


def around(path: Path) -> list[Path]:
    """The folder of tests beside a file, and tests elsewhere that name its module."""
    folder, module = ROOT / "tests" / path.parent, ".".join(path.with_suffix("").parts)
    tests = sorted((ROOT / "tests").rglob("test_*.py"))
    naming = [test for test in tests if f"lowbit.{module} " in test.read_text(encoding="utf-8")]
    return [folder, *(test for test in naming if folder not in test.parents)]


def is_caught(tree: Path, mutant: Mutant, limit: float) -> bool | None:
    """True if a test fails or never ends; None if no test could."""
    file = tree / mutant.path
    before = file.read_text(encoding="utf-8")
    file.write_text(mutant.text, encoding="utf-8")
    try:
        codes = [run_tests(tree, mirrored(mutant.path), limit)]
        if codes[0] in (0, NO_TESTS):
            codes.append(run_tests(tree, around(mutant.path), limit))
    finally:
        file.write_text(before, encoding="utf-8")
    return None if set(codes) == {NO_TESTS} else any(code not in (0, NO_TESTS) for code in codes)


@click.command(help=__doc__)
@click.argument("modules", nargs=-1)
@click.option("--count", default=60, help="How many mutants.")
@click.option("--seed", default=1, help="Of their choice.")
@click.option("--limit", default=300.0, help="Seconds that the tests of one may take.")
@click.option("--bound", default=0.0, help="Percent that must be caught.")
def main(modules: tuple[str, ...], count: int, seed: int, limit: float, bound: float) -> None:
    """Print each mutant and what became of it, and how many were caught."""
    found: list[bool] = []
    with tempfile.TemporaryDirectory(prefix="mutants-") as place:
        tree = copied(Path(place).resolve())
        for mutant in chosen(modules or MODULES, count, random.Random(seed)):
            caught = is_caught(tree, mutant, limit)
            print(f"{'no tests' if caught is None else 'caught' if caught else 'ALIVE'}  {mutant}")
            sys.stdout.flush()
            found += [] if caught is None else [caught]
    share = 100 * sum(found) / max(1, len(found))
    print(f"{sum(found)} of {len(found)} mutants caught, {share:.0f} %")
    if share < bound:
        sys.exit(FEW)


if __name__ == "__main__":
    main()
