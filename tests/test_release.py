"""The make targets of CI and its workflows, and the notes of a release."""

import importlib.util
import re
import subprocess
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import yaml

ROOT = Path(__file__).parents[1]
MAKE = re.compile(r"\bmake ([\w-]+)")
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


def test_workflows_and_ci_make_the_same_targets() -> None:
    """A matrix names its targets in a list, the rest stand behind `make`."""
    makefile = (ROOT / "Makefile").read_text()
    targets = set(re.findall(r"^([a-z][\w-]*):", makefile, re.MULTILINE))
    jobs = yaml.safe_load((ROOT / ".github" / "workflows" / "test.yml").read_text())["jobs"]
    lists = [values for job in jobs.values() for values in matrix(job).values()]
    everywhere = {name for values in lists for name in values if name in targets}
    steps = [step.get("run", "") for job in jobs.values() for step in job["steps"]]
    everywhere |= {name for step in steps for name in MAKE.findall(step)}
    local = set(MAKE.findall((ROOT / ".ci" / "run").read_text()))
    assert local <= targets
    assert local - {"install-check-quick"} | {"install-check"} == everywhere


def matrix(job: dict[str, Any]) -> dict[str, list[str]]:
    found: dict[str, list[str]] = job.get("strategy", {}).get("matrix", {})
    return found


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
