"""Sizes and tokenizer of a model as GGUF metadata, under the keys that llama.cpp looks up."""

import json
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from lowbit.convert.export.gguf import family
from lowbit.convert.export.gguf_file import DENSE, KIND_OF_BITS, GgmlType, Value
from lowbit.convert.export.rope import gguf_keys
from lowbit.convert.export.source import PackedSource
from lowbit.formats.architectures.config import Experts
from lowbit.formats.architectures.decoder import text_part
from lowbit.formats.errors import FormatError
from lowbit.formats.layout.scheme import of_most_weights
from lowbit.formats.text.components import LLAMA3, QWEN2, QWEN3_5, members
from lowbit.formats.text.settings import TokenizerSettings, read_settings
from lowbit.formats.text.template import load_chat_template
from lowbit.formats.text.tokenizer import TOKENIZER_FILE, read_tokenizer
from lowbit.formats.text.vocabulary import added_tokens

# llama.cpp's number of a file whose weights are mostly of one type.
FILE_TYPES: Mapping[GgmlType, int] = {"F32": 0, "F16": 1, "Q4_0": 2, "Q8_0": 7, "BF16": 32}
QUANTIZATION_VERSION = 2
NORMAL, CONTROL, USER_DEFINED, UNUSED = 1, 3, 4, 5  # token types
# llama.cpp's name of each regular expression that splits text into words.
SPLITS = {QWEN2: "qwen2", QWEN3_5: "qwen35", LLAMA3: "llama-bpe"}
BYTE_LEVEL = "gpt-2"  # the split that a byte-level pre-tokenizer does by itself
SINGLE_DIGITS = "smollm"  # the same after every digit became a word of its own


def metadata(source: PackedSource, name: str) -> dict[str, Value]:
    """All metadata keys of the file.

    Args:
        name: shown by programs that load the file.

    Raises:
        FormatError: a tokenizer that cannot be expressed.
    """
    config = source.config
    names = family(source)
    arch = names.names[source.model_type]
    result: dict[str, Value] = {
        "general.architecture": arch,
        "general.type": "model",
        "general.name": name,
        "general.quantization_version": QUANTIZATION_VERSION,
        "general.file_type": FILE_TYPES[_most(source)],
        f"{arch}.block_count": config.num_hidden_layers + source.has_mtp,
        f"{arch}.context_length": config.max_position_embeddings,
        f"{arch}.embedding_length": config.hidden_size,
        f"{arch}.feed_forward_length": config.intermediate_size,
        f"{arch}.vocab_size": config.vocab_size,
        f"{arch}.attention.head_count": config.num_attention_heads,
        f"{arch}.attention.head_count_kv": config.num_key_value_heads,
        f"{arch}.attention.key_length": config.head_dim,
        f"{arch}.attention.value_length": config.head_dim,
        f"{arch}.attention.layer_norm_rms_epsilon": config.rms_norm_eps,
        f"{arch}.rope.freq_base": config.rope_theta,
        f"{arch}.rope.dimension_count": config.rotary_dim,
    }
    result |= gguf_keys(config.rope_scaling, arch)
    if config.experts is not None:
        result |= _expert_keys(config.experts, arch)
    result |= names.metadata(config, source, arch)
    text = text_part(source.checkpoint.config)
    return result | tokenizer_metadata(source.checkpoint.folder, config.vocab_size, text)


def _most(source: PackedSource) -> GgmlType:
    """The type of most packed weights; of most weights where none is packed."""
    packed = of_most_weights((linear.bits, linear.N * linear.K) for linear in source.linears)
    if packed is not None:
        return KIND_OF_BITS[packed]
    dtype = of_most_weights((info.dtype, math.prod(info.shape)) for info in source.dense)
    return "BF16" if dtype is None else DENSE[dtype]


def _expert_keys(experts: Experts, arch: str) -> dict[str, Value]:
    result: dict[str, Value] = {
        f"{arch}.expert_count": experts.count,
        f"{arch}.expert_used_count": experts.chosen,
        f"{arch}.expert_feed_forward_length": experts.inner,
    }
    if experts.shared_inner is not None:
        result[f"{arch}.expert_shared_feed_forward_length"] = experts.shared_inner
    return result


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
    if not isinstance(vocab, dict) or not isinstance(merges, list) or not merges:
        raise FormatError(f"`{path}` is not a BPE tokenizer: it has no merges")
    added = _added(content, settings, path)
    tokens, types = _tokens(vocab, added, vocab_size)
    result: dict[str, Value] = {
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": pre_tokenizer(content.get("pre_tokenizer"), path),
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.token_type": types,
        "tokenizer.ggml.merges": [_merge(pair, path) for pair in merges],
    }
    ids = {token["content"]: number for number, token in added.items()}
    for name, key in (("bos", "bos"), ("eos", "eos"), ("pad", "padding")):
        text = settings.special_tokens.get(f"{name}_token")
        number = _special(text, ids, config.get(f"{name}_token_id"))
        if number is not None:
            result[f"tokenizer.ggml.{key}_token_id"] = number
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
    apart = kinds == ["Digits", "ByteLevel"] and parts[0].get("individual_digits")
    if apart and parts[1].get("use_regex", True):
        return SINGLE_DIGITS
    if kinds == ["Split", "ByteLevel"] and not parts[1].get("use_regex", True):
        pattern = parts[0].get("pattern")
        name = SPLITS.get(str(pattern.get("Regex"))) if isinstance(pattern, dict) else None
        if name is not None and parts[0].get("behavior") == "Isolated":
            return name
    raise FormatError(
        f"`{path}`: llama.cpp has no name for the pre-tokenizer {json.dumps(section)[:200]}",
        hint=f"known: {', '.join([BYTE_LEVEL, SINGLE_DIGITS, *SPLITS.values()])}",
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
