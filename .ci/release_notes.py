"""Print the changelog's section of a release, and refuse a tag that is not the version.

python .ci/release_notes.py v0.1.0
"""

import re
import sys
import tomllib
from pathlib import Path

ROOT = Path(__file__).parents[1]
HEADING = re.compile(r"^## \[?(?P<name>[^\]\s]+)\]?.*$", re.MULTILINE)


def notes(changelog: str, version: str) -> str:
    """The text below the heading of a version, up to the next version.

    Raises:
        ValueError: there is no such heading, or nothing below it.
    """
    headings = list(HEADING.finditer(changelog))
    for number, heading in enumerate(headings):
        if heading["name"] == version:
            end = headings[number + 1].start() if number + 1 < len(headings) else len(changelog)
            text = changelog[heading.end() : end].strip()
            if text:
                return text + "\n"
            raise ValueError(f"CHANGELOG.md says nothing about {version}")
    raise ValueError(f"CHANGELOG.md has no section `## {version}`")


def checked_version(tag: str, pyproject: str) -> str:
    """The version that a tag names.

    Raises:
        ValueError: pyproject.toml has another.
    """
    version: str = tomllib.loads(pyproject)["project"]["version"]
    if tag != f"v{version}":
        raise ValueError(f"the tag is `{tag}`, pyproject.toml has version {version}")
    return version


def main() -> None:
    """Print the notes of the tag that the command line names."""
    if len(sys.argv) != 2 or not sys.argv[1].startswith("v"):
        sys.exit(__doc__)
    try:
        version = checked_version(sys.argv[1], (ROOT / "pyproject.toml").read_text())
        print(notes((ROOT / "CHANGELOG.md").read_text(), version), end="")
    except ValueError as error:
        sys.exit(f"{error}")


if __name__ == "__main__":
    main()
