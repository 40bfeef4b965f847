"""The notes of a release, and the tag that it is made from."""

from pathlib import Path
from types import ModuleType

import pytest

from tests.load_script import load_script

ROOT = Path(__file__).parents[1]
SCRIPT = ROOT / ".ci" / "release_notes.py"

# The archive of sources has no scripts of the repository.
pytestmark = pytest.mark.skipif(not SCRIPT.exists(), reason="not in a clone")


@pytest.fixture(scope="module")
def script() -> ModuleType:
    return load_script("release_notes")


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
