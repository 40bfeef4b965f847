"""Facts about the original, from its card or the user, that hold for the packed model too."""

import re
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import yaml

from lowbit.formats.files.reading import read_bytes

FRONT_MATTER = re.compile(r"\A---[ \t]*\r?\n(.*?)\r?\n---[ \t]*\r?$", re.DOTALL | re.MULTILINE)
MAX_FRONT_MATTER = 65_536  # characters; PyYAML takes a second for as many brackets
WORD = re.compile(r"[\w.+-]{1,64}", re.ASCII)
LANGUAGE = re.compile(r"[a-z]{2,3}([-_][a-z0-9]{1,8})*|multilingual|code", re.IGNORECASE)
NULLS = ("", "~", "null", "Null", "NULL")


@dataclass(frozen=True, slots=True)
class SourceCard:
    """Metadata of the original; facts that nobody states are None or empty."""

    license: str | None = None  # identifier, `apache-2.0` or `other`
    license_name: str | None = None  # of a license `other`
    license_link: str | None = None  # address or file of a license `other`
    languages: tuple[str, ...] = ()  # ISO codes
    pipeline_tag: str | None = None  # the Hub's category of the model
    base_model: str | None = None  # Hub id of the original; only the user can state it

    def stating(self, base_model: str | None, license: str | None) -> "SourceCard":
        """Put the user's statements in place of the card's; None leaves the card's."""
        stated = self if base_model is None else replace(self, base_model=base_model)
        if license is None:
            return stated
        return replace(stated, license=license, license_name=None, license_link=None)


def read_source_card(readme: Path) -> SourceCard:
    """The metadata of a card; empty where there is none, or none that can be read.

    Raises:
        CheckpointError: a pipe, a device, or a link out of the folder.
    """
    try:
        text = read_bytes(readme).decode(errors="replace")
    except FileNotFoundError:
        return SourceCard()
    match = FRONT_MATTER.search(text)
    if match is None or len(match[1]) > MAX_FRONT_MATTER:
        return SourceCard()
    try:
        # BaseLoader reads every value as text: no tag runs code, and `no` (Norwegian) is not False.
        found = yaml.load(match[1], Loader=yaml.BaseLoader)
    except (yaml.YAMLError, ValueError, OverflowError, RecursionError):
        found = None
    if not isinstance(found, dict):
        return SourceCard()
    spoken = found.get("language")
    return SourceCard(
        license=_word(found.get("license")),
        license_name=_line(found.get("license_name")),
        license_link=_line(found.get("license_link")),
        languages=tuple(
            language
            for language in (spoken if isinstance(spoken, list) else [spoken])
            if isinstance(language, str) and LANGUAGE.fullmatch(language)
        ),
        pipeline_tag=_word(found.get("pipeline_tag")),
    )


def _word(value: Any) -> str | None:
    if not isinstance(value, str) or value in NULLS:
        return None
    return value if WORD.fullmatch(value) else None


def _line(value: Any) -> str | None:
    if not isinstance(value, str) or value in NULLS:
        return None
    return value if value.isprintable() and 0 < len(value) <= 300 else None
