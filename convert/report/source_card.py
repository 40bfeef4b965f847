"""Facts about the original that its card, or the user, states and that hold when packed too."""

import re
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import yaml

FRONT_MATTER = re.compile(r"\A---[ \t]*\r?\n(.*?)\r?\n---[ \t]*\r?$", re.DOTALL | re.MULTILINE)
WORD = re.compile(r"[\w.+-]{1,64}", re.ASCII)


@dataclass(frozen=True, slots=True)
class SourceCard:
    """Metadata of the original; what nobody states is None or empty.

    Attributes:
        license: identifier, `apache-2.0` or `other`.
        license_name: of a license `other`.
        license_link: address or file of a license `other`.
        languages: ISO codes.
        pipeline_tag: what the Hub lists the model under.
        base_model: Hub id of the original; its own card cannot say it, only the user.
    """

    license: str | None = None
    license_name: str | None = None
    license_link: str | None = None
    languages: tuple[str, ...] = ()
    pipeline_tag: str | None = None
    base_model: str | None = None

    def stating(self, base_model: str | None, license: str | None) -> "SourceCard":
        """The same with what a user states in its place; None leaves what there is."""
        stated = self if base_model is None else replace(self, base_model=base_model)
        if license is None:
            return stated
        return replace(stated, license=license, license_name=None, license_link=None)


def read_source_card(readme: Path) -> SourceCard:
    """The metadata of a card; empty where there is none, or none that can be read."""
    if not readme.is_file():
        return SourceCard()
    match = FRONT_MATTER.search(readme.read_text(encoding="utf-8", errors="replace"))
    try:
        found = yaml.safe_load(match[1]) if match else None
    except (yaml.YAMLError, ValueError, RecursionError):  # ValueError: a date that does not exist
        found = None
    if not isinstance(found, dict):
        return SourceCard()
    spoken = found.get("language")
    return SourceCard(
        license=_word(found.get("license")),
        license_name=_line(found.get("license_name")),
        license_link=_line(found.get("license_link")),
        languages=tuple(
            word
            for language in (spoken if isinstance(spoken, list) else [spoken])
            if (word := _word(language))
        ),
        pipeline_tag=_word(found.get("pipeline_tag")),
    )


def _word(value: Any) -> str | None:
    return value if isinstance(value, str) and WORD.fullmatch(value) else None


def _line(value: Any) -> str | None:
    fits = isinstance(value, str) and value.isprintable() and 0 < len(value) <= 300
    return value if fits else None
