"""Parts of a tokenizer.json whose time and output grow no faster than the text.

A regular expression can take exponential time, and a replacement can double a text again and again.
The parts listed here, those of published byte-level models, do neither.
"""

from collections.abc import Mapping
from typing import Any

_TAIL = r"+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
_HEAD = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?"
# Regular expressions that split text into words.
QWEN2 = _HEAD + r"\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]" + _TAIL
QWEN3_5 = _HEAD + r"[\p{L}\p{M}]+|\p{N}| ?[^\s\p{L}\p{M}\p{N}]" + _TAIL
LLAMA3 = _HEAD + r"\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]" + _TAIL
GPT2 = (
    r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+"
    r"|\s+(?!\S)|\s+"
)
SPLITS = {QWEN2, QWEN3_5, LLAMA3, GPT2}
FORMS = {"NFC", "NFD", "NFKC", "NFKD"}  # Unicode normalization; a character becomes at most 18
MAX_FRAME = 64  # tokens that a post-processor may put around a text


def is_linear(content: Mapping[str, Any]) -> bool:
    """Tell if a tokenizer takes time and memory in proportion to the text."""
    model = content.get("model")
    forms = members(content.get("normalizer"), "normalizers")
    splits = members(content.get("pre_tokenizer"), "pretokenizers")
    frames = members(content.get("post_processor"), "processors")
    decoders = members(content.get("decoder"), "decoders")
    added = content.get("added_tokens") or []
    return (
        _has_type(model, "BPE")
        and all(map(_is_form, forms))
        and all(map(_is_split, splits))
        and all(map(_is_frame, frames))
        and all(_has_type(part, "ByteLevel") for part in decoders)
        # These two scan all of the text before each occurrence.
        and not any(token.get("lstrip") or token.get("single_word") for token in added)
    )


def members(component: Any, key: str) -> list[Any]:
    """Parts of a component: a sequence's members, or the component itself; none for null.

    Args:
        key: key of a sequence's members, `normalizers`.
    """
    if component is None:
        return []
    if isinstance(component, dict) and component.get("type") == "Sequence":
        inner = component.get(key)
        return inner if isinstance(inner, list) else [inner]
    return [component]


def _has_type(part: Any, name: str) -> bool:
    return isinstance(part, dict) and part.get("type") == name


def _is_form(part: Any) -> bool:
    return any(_has_type(part, name) for name in FORMS)


def _is_split(part: Any) -> bool:
    if not _has_type(part, "Split"):
        return _has_type(part, "ByteLevel") or _has_type(part, "Digits")
    pattern = part.get("pattern")
    regex = pattern.get("Regex") if isinstance(pattern, dict) and len(pattern) == 1 else None
    return isinstance(regex, str) and regex in SPLITS


def _is_frame(part: Any) -> bool:
    if not _has_type(part, "TemplateProcessing"):
        return _has_type(part, "ByteLevel")
    pieces, special = part.get("single"), part.get("special_tokens")
    if not isinstance(pieces, list) or not isinstance(special, dict):
        return False
    tokens = [piece.get("SpecialToken") for piece in pieces if isinstance(piece, dict)]
    named = [token.get("id") for token in tokens if isinstance(token, dict)]
    if not all(
        isinstance(name, str) and name in special for name in named
    ):  # the library would panic
        return False
    ids = [token.get("ids") for token in special.values() if isinstance(token, dict)]
    longest = max((len(found) for found in ids if isinstance(found, list)), default=0)
    return len(pieces) * max(longest, 1) <= MAX_FRAME
