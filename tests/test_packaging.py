"""What `python -m build` makes of the tree: every package, every data file, nothing else."""

import shutil
import subprocess
import sys
import tarfile
import tomllib
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
ROOMS = ("convert", "formats", "runtime")
TREE = (
    *(*ROOMS, "tests", "examples", "docs", "pyproject.toml", "MANIFEST.in", "LICENSE", "NOTICE"),
    *("README.md", "BENCHMARKS.md", "CHANGELOG.md", "CONTRIBUTING.md", "Makefile"),
    *("constraints.txt", "mkdocs.yml"),
)
NOT_SHIPPED = ("__pycache__", "*.pyc", "*.safetensors", "tokenizer.json")

pytestmark = [pytest.mark.commands, pytest.mark.slow]


def build(tree: Path, *kinds: str) -> None:
    command = [sys.executable, "-m", "build", "--no-isolation", *kinds, str(tree)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    said = done.stdout + done.stderr
    assert done.returncode == 0, said
    assert "Warning: " not in said, said


def wheel_names(path: Path) -> list[str]:
    with zipfile.ZipFile(path) as wheel:
        return sorted(wheel.namelist())


@pytest.fixture(scope="module")
def dist(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A wheel, made through an sdist, of a copy of the tree without its large files."""
    tree = tmp_path_factory.mktemp("build") / "lowbit"
    tree.mkdir()
    for name in TREE:
        if (ROOT / name).is_dir():
            ignore = shutil.ignore_patterns(*NOT_SHIPPED)
            shutil.copytree(ROOT / name, tree / name, ignore=ignore)
        else:
            shutil.copy(ROOT / name, tree / name)
    # A module that is no longer in the tree must not come back from here.
    (tree / "build" / "lib" / "lowbit").mkdir(parents=True)
    (tree / "build" / "lib" / "lowbit" / "stale.py").write_text("")
    build(tree)
    return tree / "dist"


@pytest.fixture(scope="module")
def wheel(dist: Path) -> Path:
    [path] = dist.glob("*.whl")
    return path


@pytest.fixture(scope="module")
def sdist(dist: Path) -> Path:
    [path] = dist.glob("*.tar.gz")
    return path


def files_of_the_rooms() -> set[str]:
    """Every file of the three folders, as `lowbit/...`."""
    return {
        "lowbit/" + path.relative_to(ROOT).as_posix()
        for room in ROOMS
        for path in (ROOT / room).rglob("*")
        if path.is_file() and "__pycache__" not in path.parts
    }


def test_wheel_holds_every_file_of_the_rooms(wheel: Path) -> None:
    shipped = {name for name in wheel_names(wheel) if name.startswith("lowbit/")}
    assert shipped == files_of_the_rooms()
    expected = {f"lowbit/{room}/py.typed" for room in ROOMS}
    expected |= {"lowbit/formats/SPEC.md", "lowbit/convert/report/quality.html.jinja"}
    assert expected <= shipped
    others = {name.split("/")[0] for name in wheel_names(wheel)}
    assert len(others) == 2, "lowbit and its dist-info"
    assert "lowbit/__init__.py" not in shipped


def test_metadata(wheel: Path) -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    info = f"lowbit-{project['version']}.dist-info"
    with zipfile.ZipFile(wheel) as archive:
        entry_points = archive.read(f"{info}/entry_points.txt").decode().split("\n")
        metadata = archive.read(f"{info}/METADATA").decode()
    assert entry_points[:3] == [
        "[console_scripts]",
        "lowbit-convert = lowbit.convert.__main__:main",
        "lowbit-run = lowbit.runtime.__main__:main",
    ]
    assert "License-Expression: MIT\n" in metadata
    assert f"Requires-Python: {project['requires-python']}\n" in metadata
    extras = project["optional-dependencies"]
    assert metadata.count("Provides-Extra: ") == len(extras)
    wanted = len(project["dependencies"]) + sum(len(extra) for extra in extras.values())
    assert metadata.count("Requires-Dist: ") == wanted
    for name in project["license-files"]:
        assert f"{info}/licenses/{name}" in wheel_names(wheel)


def test_sdist_holds_what_tests_and_demo_need(sdist: Path) -> None:
    with tarfile.open(sdist) as archive:
        names = {name.partition("/")[2] for name in archive.getnames()}
    assert {"Makefile", "constraints.txt", "pyproject.toml"} <= names
    assert {"README.md", "BENCHMARKS.md", "CHANGELOG.md"} <= names
    assert {"mkdocs.yml", "docs/index.md", "docs/hooks.py"} <= names
    assert {"tests/test_packaging.py", "tests/conftest.py"} <= names
    assert {"examples/models/tiny-qwen3/config.json", "examples/data/stories-eval.txt"} <= names
    assert {"examples/tasks/stories_cloze.yaml", "examples/tasks/stories_cloze.jsonl"} <= names
    assert {
        f"tests/{path.relative_to(ROOT / 'tests')}" for path in (ROOT / "tests").rglob("*.py")
    } <= names
