"""The bundled texts of code: modules of Python's standard library, other ones for each use."""

import importlib.util
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[3]
DATA = ROOT / "convert" / "texts" / "data"
CALIBRATION = DATA / "python-stdlib-calibration-60kB.txt"
EVALUATION = DATA / "python-stdlib-evaluation-40kB.txt"
AT_LOAD = ROOT / "runtime" / "models" / "data" / "python-stdlib-2kB.txt"
CALIBRATED = ("queue", "json.decoder", "colorsys", "poplib", "graphlib", "html", "secrets")
JUDGED = (
    "asyncio.timeouts",
    "asyncio.base_tasks",
    "shelve",
    "zipapp",
    "netrc",
    "reprlib",
    "bisect",
)
MODULES = {CALIBRATION: CALIBRATED, EVALUATION: JUDGED, AT_LOAD: ("queue",)}


def long_lines(text: str) -> list[str]:
    return [line for line in text.splitlines() if len(line) > 40]


def source_of(module: str) -> str:
    spec = importlib.util.find_spec(module)
    assert spec is not None
    assert spec.origin is not None
    return Path(spec.origin).read_text(encoding="utf-8")


@pytest.mark.parametrize("path", MODULES, ids=lambda path: path.name)
def test_texts_are_the_modules_that_notice_names(path: Path) -> None:
    notice = re.sub(r"\s+", " ", (ROOT / "NOTICE").read_text())
    assert path.relative_to(ROOT).as_posix() in notice
    if len(MODULES[path]) > 1:
        assert "{} and {}".format(", ".join(MODULES[path][:-1]), MODULES[path][-1]) in notice
    lines = long_lines(path.read_text(encoding="utf-8"))
    for module in MODULES[path]:
        assert set(lines) & set(long_lines(source_of(module)))
    # Other releases of Python differ in a few lines.
    library = set(long_lines("\n".join(map(source_of, MODULES[path]))))
    assert sum(line in library for line in lines) > 0.8 * len(lines)


@pytest.mark.parametrize("path", MODULES, ids=lambda path: path.name)
def test_texts_hold_nothing_of_this_project(path: Path) -> None:
    lines = set(long_lines(path.read_text(encoding="utf-8")))
    for room in ("convert", "formats", "runtime", "examples", "tests"):
        for module in (ROOT / room).rglob("*.py"):
            assert not lines & set(long_lines(module.read_text(encoding="utf-8")))


def test_the_license_is_that_of_python() -> None:
    text = (DATA / "python-license.txt").read_text(encoding="utf-8")
    assert "PYTHON SOFTWARE FOUNDATION LICENSE VERSION 2" in text
    assert "Copyright (c) 2001" in text
