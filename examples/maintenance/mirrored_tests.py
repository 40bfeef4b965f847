"""Print the tests that a change of a few files wants, for `make quick`.

python examples/maintenance/mirrored_tests.py | xargs pytest

Tests of a module are `test_<its name>*.py` in its folder below tests/; where there are none, those
of the folder that import it; else the whole folder.
"""

import subprocess
import sys
from pathlib import Path

import click

ROOT = Path(__file__).parents[2]
ROOMS = ("convert", "formats", "runtime")
ALWAYS = [
    ROOT / "tests" / f"test_{name}.py"
    for name in ("architecture", "docs", "documented_commands", "help")
]


def mirrored(path: Path) -> list[Path]:
    """Files and folders of tests of a file, given by its path in the tree."""
    if path.parts[0] == "tests":
        return [ROOT / path] if path.name.startswith("test_") else []
    folder = ROOT / "tests" / path.parent
    if path.suffix != ".py" or path.parts[0] not in ROOMS or not folder.is_dir():
        return []
    if named := sorted(folder.glob(f"test_{path.stem}*.py")):
        return named
    module = ".".join(path.with_suffix("").parts)
    beside = sorted(folder.glob("test_*.py"))
    return [test for test in beside if module in test.read_text(encoding="utf-8")] or [folder]


def changed(base: str) -> list[Path]:
    """Files that differ from where a branch left another, committed or not."""

    def lines(*arguments: str) -> list[str]:
        done = subprocess.run(
            ["git", *arguments], cwd=ROOT, capture_output=True, text=True, check=False
        )
        if done.returncode:
            sys.exit(done.stderr)
        return done.stdout.split()

    [start] = lines("merge-base", base, "HEAD")
    names = {*lines("diff", "--name-only", start), *lines("ls-files", "-o", "--exclude-standard")}
    return [Path(name) for name in sorted(names)]


@click.command(help=__doc__)
@click.option("--base", default="main", help="The branch to differ from.")
def main(base: str) -> None:
    """Print paths, one a line."""
    found = [test for path in changed(base) for test in mirrored(path)]
    for path in dict.fromkeys([*ALWAYS, *found]):
        if path.exists():
            print(path.relative_to(ROOT))


if __name__ == "__main__":
    main()
