"""tokenizer_config.json, and the files that older models have beside it, read into one record."""

from collections.abc import Mapping, Set
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from lowbit.formats.errors import CheckpointError
from lowbit.formats.files.reading import read_bytes
from lowbit.formats.files.strict_json import object_of

SETTINGS_FILE = "tokenizer_config.json"
SPECIAL_TOKENS_FILE = "special_tokens_map.json"  # older models
ADDED_TOKENS_FILE = "added_tokens.json"  # older models
MAX_SETTINGS_BYTES = 10_000_000  # twice the size of 25,000 listed tokens
NAMES = [f"{name}_token" for name in ("bos", "eos", "unk", "sep", "pad", "cls", "mask")]
ADDED_FLAGS = {  # flags of an added token, with their defaults
    "single_word": False,
    "lstrip": False,
    "rstrip": False,
    "normalized": True,
    "special": False,
}


@dataclass(frozen=True, slots=True)
class TokenizerSettings:
    """Special and added tokens of a model folder, and its template, from outside tokenizer.json."""

    special_tokens: Mapping[str, str]  # `bos_token`, `eos_token` and so on, as text
    # tokens that the vocabulary must have, ordered by id; entries as in tokenizer.json
    added: tuple[dict[str, Any], ...]
    # texts of special tokens that the vocabulary must have, in transformers' order
    named: tuple[str, ...]
    template: Any  # value of `chat_template`, unchecked


def read_settings(folder: Path) -> TokenizerSettings:
    """Read the settings of a model folder; empty where it has none of the files.

    Raises:
        CheckpointError: a file that is no JSON object, or a token of the wrong type.
    """
    path = folder / SETTINGS_FILE
    config = read_object(path, MAX_SETTINGS_BYTES) or {}
    listed: dict[int, dict[str, Any]] | None = None
    if "added_tokens_decoder" in config:
        listed = _listed_tokens(config["added_tokens_decoder"], path)
    else:
        older = read_object(folder / SPECIAL_TOKENS_FILE, MAX_SETTINGS_BYTES) or {}
        config = config | older
        path = folder / SPECIAL_TOKENS_FILE if older else path
    extra = config.get("extra_special_tokens") or config.get("additional_special_tokens")
    candidates = {key: value for key, value in config.items() if _is_token(key, value)}
    if isinstance(extra, dict):
        candidates |= extra
    special = {
        key: text
        for key, value in candidates.items()
        if (text := _text(key, value, path)) is not None
    }
    if listed is None:
        listed = _older_tokens(folder, set(special.values()))
    return TokenizerSettings(
        special_tokens=special,
        added=tuple(listed[id] for id in sorted(listed)),
        named=(*_in_order(special), *_extra_tokens(extra, path)),
        template=config.get("chat_template"),
    )


def read_object(path: Path, max_bytes: int) -> dict[str, Any] | None:
    """Read a JSON object from a file; None where there is no such file.

    Raises:
        CheckpointError: not a regular file of the folder, too long, or no JSON object.
    """
    try:
        data = read_bytes(path, max_bytes)
    except FileNotFoundError:
        return None
    return object_of(data, path)


def _listed_tokens(listed: Any, path: Path) -> dict[int, dict[str, Any]]:
    """Tokens of `added_tokens_decoder` by id."""
    if not isinstance(listed, dict):
        raise CheckpointError(f"`{path}`: added_tokens_decoder is not an object")
    found = {}
    for number, entry in listed.items():
        if not (number.isascii() and number.isdigit() and len(number) < 10):
            raise CheckpointError(f"`{path}`: added_tokens_decoder has the id {number[:40]!r}")
        if not isinstance(entry, dict) or not isinstance(entry.get("content"), str):
            raise CheckpointError(f"`{path}`: added token {number} has no `content`")
        flags = {name: entry.get(name, default) for name, default in ADDED_FLAGS.items()}
        if not all(isinstance(flag, bool) for flag in flags.values()):
            raise CheckpointError(f"`{path}`: a flag of added token {number} is not a boolean")
        found[int(number)] = {"id": int(number), "content": entry["content"], **flags}
    return found


def _older_tokens(folder: Path, special: Set[str]) -> dict[int, dict[str, Any]]:
    """Tokens of added_tokens.json by id."""
    path = folder / ADDED_TOKENS_FILE
    listed = read_object(path, MAX_SETTINGS_BYTES) or {}
    found = {}
    for content, number in listed.items():
        if type(number) is not int or number < 0:
            raise CheckpointError(f"`{path}`: token {content[:40]!r} has the id {number!r:.40}")
        named = content in special
        flags = ADDED_FLAGS | {"special": named, "normalized": not named}
        found[number] = {"id": number, "content": content, **flags}
    return found


def _in_order(special: Mapping[str, str]) -> list[str]:
    """Special tokens in transformers' order: those with standard names first."""
    ranks = {name: rank for rank, name in enumerate(NAMES)}
    return [special[key] for key in sorted(special, key=lambda key: ranks.get(key, len(ranks)))]


def _extra_tokens(extra: Any, path: Path) -> list[str]:
    """Special tokens without a name of their own."""
    if isinstance(extra, dict) or extra is None:
        return []
    if not isinstance(extra, list):
        raise CheckpointError(f"`{path}`: extra_special_tokens is not a list")
    texts = [_text("a token of extra_special_tokens", value, path) for value in extra]
    return [text for text in texts if text is not None]


def _is_token(key: str, value: Any) -> bool:
    """Tell if an entry names a special token, by transformers' rule.

    A standard name always does; another name does if its value could be a token.
    """
    if isinstance(value, dict):
        value = value.get("content")
    return key in NAMES or (key.endswith("_token") and isinstance(value, str))


def _text(key: str, value: Any, path: Path) -> str | None:
    """Text of a special token; None for a switch (`add_bos_token`) or null."""
    if value is None or isinstance(value, bool):
        return None
    text = value.get("content") if isinstance(value, dict) else value
    if not isinstance(text, str):
        raise CheckpointError(f"`{path}`: {key} is not text, got {text!r:.80}")
    return text
