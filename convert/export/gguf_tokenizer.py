"""tokenizer.json as GGUF metadata: byte-level BPE with the pre-tokenizers llama.cpp knows."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from lowbit.convert.export.gguf_file import U32, I32s, Value
from lowbit.formats.checkpoint import read_json
from lowbit.formats.errors import FormatError

NORMAL, CONTROL, USER_DEFINED, UNUSED = 1, 3, 4, 5  # types of a token
_TAIL = r"+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
_HEAD = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?"
# Regular expressions that split text into words, and what llama.cpp calls them.
SPLITS = {
    _HEAD + r"\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]" + _TAIL: "qwen2",
    _HEAD + r"[\p{L}\p{M}]+|\p{N}| ?[^\s\p{L}\p{M}\p{N}]" + _TAIL: "qwen35",
    _HEAD + r"\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]" + _TAIL: "llama-bpe",
}
BYTE_LEVEL = "gpt-2"  # the split that a byte-level pre-tokenizer does by itself


def tokenizer_metadata(
    folder: Path, vocab_size: int, config: Mapping[str, Any]
) -> dict[str, Value]:
    """The `tokenizer.*` keys for a model folder.

    Args:
        folder: holds tokenizer.json, and maybe tokenizer_config.json and chat_template.jinja.
        vocab_size: rows of the embedding; ids without a token become unused ones.
        config: of the decoder, whose special token ids serve where the tokenizer names none.

    Raises:
        FormatError: no tokenizer.json, or one that llama.cpp's byte-level BPE cannot express.
    """
    path = folder / "tokenizer.json"
    if not path.exists():
        raise FormatError(
            f"`{folder}` has no tokenizer.json, and a GGUF file needs one",
            hint="copy it from the original model",
        )
    content = read_json(path)
    settings_file = folder / "tokenizer_config.json"
    settings = read_json(settings_file) if settings_file.exists() else {}
    model = content.get("model") or {}
    if model.get("type") != "BPE" or model.get("unk_token") or model.get("byte_fallback"):
        raise FormatError(f"`{path}`: only byte-level BPE is exported")
    added = _added(content, settings)
    tokens, types = _tokens(model["vocab"], added, vocab_size)
    result: dict[str, Value] = {
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": pre_tokenizer(content.get("pre_tokenizer"), path),
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.token_type": I32s(types),
        "tokenizer.ggml.merges": [_merge(pair) for pair in model["merges"]],
    }
    ids = {token["content"]: number for number, token in added.items()}
    for name, key in (("bos", "bos"), ("eos", "eos"), ("pad", "padding")):
        number = _special(settings.get(f"{name}_token"), ids, config.get(f"{name}_token_id"))
        if number is not None:
            result[f"tokenizer.ggml.{key}_token_id"] = U32(number)
    result["tokenizer.ggml.add_bos_token"] = _adds_bos(content.get("post_processor"))
    template = chat_template(folder, settings)
    if template is not None:
        result["tokenizer.chat_template"] = template
    return result


def pre_tokenizer(section: Any, path: Path) -> str:
    """llama.cpp's name of a pre-tokenizer.

    Raises:
        FormatError: it has none that is known here.
    """
    parts = section.get("pretokenizers", [section]) if isinstance(section, dict) else []
    kinds = [part.get("type") for part in parts]
    if kinds == ["ByteLevel"] and parts[0].get("use_regex", True):
        return BYTE_LEVEL
    if kinds == ["Split", "ByteLevel"] and not parts[1].get("use_regex", True):
        name = SPLITS.get(str((parts[0].get("pattern") or {}).get("Regex")))
        if name is not None and parts[0].get("behavior") == "Isolated":
            return name
    raise FormatError(
        f"`{path}`: llama.cpp has no name for the pre-tokenizer {json.dumps(section)[:200]}",
        hint=f"known: {', '.join([BYTE_LEVEL, *SPLITS.values()])}",
    )


def _added(content: Mapping[str, Any], settings: Mapping[str, Any]) -> dict[int, dict[str, Any]]:
    """Added tokens by id; some models list a few in tokenizer_config.json alone."""
    listed = settings.get("added_tokens_decoder") or {}
    added = {int(number): token for number, token in listed.items()}
    return added | {token["id"]: token for token in content.get("added_tokens") or []}


def _tokens(
    vocab: Mapping[str, int], added: Mapping[int, Mapping[str, Any]], vocab_size: int
) -> tuple[list[str], list[int]]:
    """Text and type of every id."""
    tokens = [f"[PAD{number}]" for number in range(vocab_size)]
    types = [UNUSED] * vocab_size
    highest = max([*vocab.values(), *added])
    if highest >= vocab_size:
        raise FormatError(f"the tokenizer has id {highest}, the embedding {vocab_size} rows")
    for text, number in vocab.items():
        tokens[number], types[number] = text, NORMAL
    for number, token in added.items():
        text = token["content"]
        control = token.get("special", False) or (text.startswith("<|") and text.endswith("|>"))
        tokens[number], types[number] = text, CONTROL if control else USER_DEFINED
    return tokens, types


def _merge(pair: Any) -> str:
    return pair if isinstance(pair, str) else " ".join(pair)


def _special(named: Any, ids: Mapping[str, int], default: Any) -> int | None:
    """Id of a special token, named as text or as an object; else the model's own."""
    text = named.get("content") if isinstance(named, dict) else named
    if isinstance(text, str) and text in ids:
        return ids[text]
    if isinstance(default, list):
        default = default[0] if default else None
    return default if isinstance(default, int) else None


def _adds_bos(section: Any) -> bool:
    """Whether a template puts a special token first."""
    if not isinstance(section, dict):
        return False
    return any(
        part.get("type") == "TemplateProcessing"
        and "SpecialToken" in (part.get("single") or [{}])[0]
        for part in section.get("processors", [section])
    )


def chat_template(folder: Path, settings: Mapping[str, Any]) -> str | None:
    """The chat template: from its own file, or from tokenizer_config.json."""
    path = folder / "chat_template.jinja"
    if path.exists():
        return path.read_text(encoding="utf-8")
    template = settings.get("chat_template")
    if isinstance(template, list):
        named = {row.get("name"): row.get("template") for row in template}
        template = named.get("default")
    return template if isinstance(template, str) else None
