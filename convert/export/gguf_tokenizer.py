"""tokenizer.json as GGUF metadata: byte-level BPE with the pre-tokenizers llama.cpp knows."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from lowbit.convert.export.gguf_file import U32, I32s, Value
from lowbit.formats.errors import FormatError
from lowbit.formats.text.components import LLAMA3, QWEN2, QWEN3_5, members
from lowbit.formats.text.settings import TokenizerSettings, read_settings
from lowbit.formats.text.template import load_chat_template
from lowbit.formats.text.tokenizer import TOKENIZER_FILE, read_tokenizer
from lowbit.formats.text.vocabulary import added_tokens

NORMAL, CONTROL, USER_DEFINED, UNUSED = 1, 3, 4, 5  # token types
# llama.cpp's name of each regular expression that splits text into words.
SPLITS = {QWEN2: "qwen2", QWEN3_5: "qwen35", LLAMA3: "llama-bpe"}
BYTE_LEVEL = "gpt-2"  # the split that a byte-level pre-tokenizer does by itself


def tokenizer_metadata(
    folder: Path, vocab_size: int, config: Mapping[str, Any]
) -> dict[str, Value]:
    """The `tokenizer.*` keys of a model folder.

    Args:
        folder: holds tokenizer.json, and maybe tokenizer_config.json and chat_template.jinja.
        vocab_size: rows of the embedding; ids without a token are marked unused.
        config: of the decoder, whose special token ids serve where the tokenizer names none.

    Raises:
        CheckpointError: no tokenizer.json, or a malformed one.
        FormatError: a tokenizer that llama.cpp's byte-level BPE cannot express.
    """
    path = folder / TOKENIZER_FILE
    content = read_tokenizer(folder, "a GGUF file")
    settings = read_settings(folder)
    model = content["model"]
    vocab, merges = model["vocab"], model.get("merges")
    if model.get("type") != "BPE" or model.get("unk_token") or model.get("byte_fallback"):
        raise FormatError(f"`{path}`: only byte-level BPE is exported")
    if not isinstance(vocab, dict) or not isinstance(merges, list):
        raise FormatError(f"`{path}` is not a BPE tokenizer: it has no merges")
    added = _added(content, settings, path)
    tokens, types = _tokens(vocab, added, vocab_size)
    result: dict[str, Value] = {
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": pre_tokenizer(content.get("pre_tokenizer"), path),
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.token_type": I32s(types),
        "tokenizer.ggml.merges": [_merge(pair, path) for pair in merges],
    }
    ids = {token["content"]: number for number, token in added.items()}
    for name, key in (("bos", "bos"), ("eos", "eos"), ("pad", "padding")):
        text = settings.special_tokens.get(f"{name}_token")
        number = _special(text, ids, config.get(f"{name}_token_id"))
        if number is not None:
            result[f"tokenizer.ggml.{key}_token_id"] = U32(number)
    result["tokenizer.ggml.add_bos_token"] = _adds_bos(content.get("post_processor"))
    template = load_chat_template(folder)
    if template is not None:
        result["tokenizer.chat_template"] = template.source
    return result


def pre_tokenizer(section: Any, path: Path) -> str:
    """llama.cpp's name of a pre-tokenizer.

    Raises:
        FormatError: it has none that is known here.
    """
    parts = [part if isinstance(part, dict) else {} for part in members(section, "pretokenizers")]
    kinds = [part.get("type") for part in parts]
    if kinds == ["ByteLevel"] and parts[0].get("use_regex", True):
        return BYTE_LEVEL
    if kinds == ["Split", "ByteLevel"] and not parts[1].get("use_regex", True):
        pattern = parts[0].get("pattern")
        name = SPLITS.get(str(pattern.get("Regex"))) if isinstance(pattern, dict) else None
        if name is not None and parts[0].get("behavior") == "Isolated":
            return name
    raise FormatError(
        f"`{path}`: llama.cpp has no name for the pre-tokenizer {json.dumps(section)[:200]}",
        hint=f"known: {', '.join([BYTE_LEVEL, *SPLITS.values()])}",
    )


def _added(
    content: Mapping[str, Any], settings: TokenizerSettings, path: Path
) -> dict[int, dict[str, Any]]:
    """Added tokens by id; some models list a few in tokenizer_config.json alone."""
    listed = {token["id"]: token for token in settings.added}
    return listed | {token["id"]: token for token in added_tokens(content, path)}


def _tokens(
    vocab: Mapping[str, int], added: Mapping[int, Mapping[str, Any]], vocab_size: int
) -> tuple[list[str], list[int]]:
    """Text and type of every token, by id."""
    tokens = [f"[PAD{number}]" for number in range(vocab_size)]
    types = [UNUSED] * vocab_size
    highest = max([*vocab.values(), *added], default=-1)
    if highest >= vocab_size:
        raise FormatError(f"the tokenizer has id {highest}, the embedding {vocab_size} rows")
    for text, number in vocab.items():
        tokens[number], types[number] = text, NORMAL
    for number, token in added.items():
        text = token["content"]
        control = token.get("special", False) or (text.startswith("<|") and text.endswith("|>"))
        tokens[number], types[number] = text, CONTROL if control else USER_DEFINED
    return tokens, types


def _merge(pair: Any, path: Path) -> str:
    parts = [pair] if isinstance(pair, str) else pair
    if not isinstance(parts, list) or not all(isinstance(part, str) for part in parts):
        raise FormatError(f"`{path}`: {pair!r:.80} is no merge")
    return " ".join(parts)


def _special(text: str | None, ids: Mapping[str, int], default: Any) -> int | None:
    """Id of a special token by its text, or the id that the model's config names."""
    if text is not None and text in ids:
        return ids[text]
    if isinstance(default, list):
        default = default[0] if default else None
    return default if type(default) is int and default >= 0 else None


def _adds_bos(section: Any) -> bool:
    """Tell if a template puts a special token first."""
    for part in members(section, "processors"):
        if isinstance(part, dict) and part.get("type") == "TemplateProcessing":
            pieces = part.get("single")
            if isinstance(pieces, list) and pieces and "SpecialToken" in pieces[0]:
                return True
    return False
