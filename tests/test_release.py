"""Workflows, their make targets, and the notes of a release."""

import importlib.util
import re
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import yaml

ROOT = Path(__file__).parents[1]
WORKFLOWS = sorted((ROOT / ".github" / "workflows").glob("*.yml"))
MAKE = re.compile(r"\bmake (\$\{\{[^}]+\}\}|[^\s&|;]+)")
SCRIPT = ROOT / ".ci" / "release_notes.py"

# The archive of sources has neither workflows nor scripts of the repository.
pytestmark = pytest.mark.skipif(not SCRIPT.exists(), reason="not in a clone")


@pytest.fixture(scope="module")
def script() -> ModuleType:
    spec = importlib.util.spec_from_file_location("release_notes", SCRIPT)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def targets() -> set[str]:
    """Targets of the Makefile that are no files."""
    found = re.findall(r"^([a-z][\w-]*):", (ROOT / "Makefile").read_text(), re.MULTILINE)
    return set(found)


def jobs(path: Path) -> dict[str, dict[str, Any]]:
    content = yaml.safe_load(path.read_text())
    assert {"name", "permissions", "jobs"} <= content.keys()
    assert content["permissions"] == {"contents": "read"}
    assert True in content, "`on`, which YAML 1.1 reads as a truth value"
    found: dict[str, dict[str, Any]] = content["jobs"]
    return found


def made(job: dict[str, Any]) -> Iterator[str]:
    """Targets that a job makes, those of its matrix one by one."""
    matrix = job.get("strategy", {}).get("matrix", {})
    for step in job["steps"]:
        for target in MAKE.findall(step.get("run", "")):
            if inner := re.search(r"matrix\.(\w+)", target):
                yield from matrix[inner[1]]
            else:
                yield target


def test_there_are_workflows() -> None:
    assert [path.name for path in WORKFLOWS] == ["release.yml", "test.yml"]


@pytest.mark.parametrize("path", WORKFLOWS, ids=lambda path: path.name)
def test_workflows_make_targets_that_exist(path: Path) -> None:
    for name, job in jobs(path).items():
        assert set(made(job)) <= targets(), name
        assert job["timeout-minutes"] <= 60, name
        for step in job["steps"]:
            assert ("run" in step) != ("uses" in step), step
            if "uses" in step:
                assert re.fullmatch(r"[\w-]+/[\w-]+@(v\d+|release/v\d+)", step["uses"])


def test_workflows_test_what_ci_runs() -> None:
    [tests] = [path for path in WORKFLOWS if path.name == "test.yml"]
    everywhere = {target for job in jobs(tests).values() for target in made(job)}
    local = set(MAKE.findall((ROOT / ".ci" / "run").read_text()))
    assert local <= targets()
    assert local - {"install-check-quick"} | {"install-check"} == everywhere


def test_every_supported_python_is_tested() -> None:
    [tests] = [path for path in WORKFLOWS if path.name == "test.yml"]
    found = jobs(tests)["python"]["strategy"]["matrix"]["python"]
    assert found == ["3.11", "3.12", "3.13", "3.14"]
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    assert project["requires-python"] == f">={found[0]}"
    prefix = "Programming Language :: Python :: "
    named = [each.removeprefix(prefix) for each in project["classifiers"] if prefix in each]
    assert named == ["3 :: Only", *found]


def test_publishing_needs_no_stored_secret() -> None:
    [release] = [path for path in WORKFLOWS if path.name == "release.yml"]
    assert "secrets." not in release.read_text()
    found = jobs(release)
    assert found["publish"]["permissions"] == {"id-token": "write"}
    assert found["publish"]["environment"] == "pypi"
    assert [name for name, job in found.items() if "id-token" in job.get("permissions", {})] == [
        "publish"
    ]
    order = {"build": None, "publish": "build", "announce": "publish"}
    assert {name: job.get("needs") for name, job in found.items()} == order


CHANGELOG = """# Changelog

## Unreleased
- Later.

## [0.2.0] - 2027-01-02
### Added
- This.

## 0.1.0
- That.

## 0.0.9
"""


@pytest.mark.parametrize(
    ("version", "text"),
    [("0.2.0", "### Added\n- This.\n"), ("0.1.0", "- That.\n"), ("Unreleased", "- Later.\n")],
)
def test_notes_are_the_section(script: ModuleType, version: str, text: str) -> None:
    assert script.notes(CHANGELOG, version) == text


@pytest.mark.parametrize("version", ["0.0.9", "0.2", "0.2.00", "1.0.0", ""])
def test_no_notes_no_release(script: ModuleType, version: str) -> None:
    with pytest.raises(ValueError, match="CHANGELOG"):
        script.notes(CHANGELOG, version)


def test_a_tag_is_the_version(script: ModuleType) -> None:
    pyproject = '[project]\nversion = "0.2.0"\n'
    assert script.checked_version("v0.2.0", pyproject) == "0.2.0"
    for tag in ("v0.2.1", "0.2.0", "v0.2.0rc1", "v"):
        with pytest.raises(ValueError, match="the tag is"):
            script.checked_version(tag, pyproject)


def test_the_script_refuses_another_tag() -> None:
    for argument, words in (("v99.0.0", "the tag is `v99.0.0`"), ("main", "python .ci/")):
        done = subprocess.run(
            [sys.executable, str(SCRIPT), argument], capture_output=True, text=True, check=False
        )
        assert (done.returncode, done.stdout) == (1, "")
        assert words in done.stderr


def test_the_version_stands_in_one_place() -> None:
    version = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["version"]
    rooms = ("convert", "formats", "runtime")
    files = [path for room in rooms for path in (ROOT / room).rglob("*.py")]
    assert not [path for path in files if f'"{version}"' in path.read_text()]
