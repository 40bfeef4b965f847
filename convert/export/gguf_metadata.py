"""The model's sizes as GGUF metadata, under the keys that llama.cpp looks up."""

from typing import Any

from lowbit.convert.export.gguf import blocks_in_all
from lowbit.convert.export.gguf_file import U32, I32s, Value
from lowbit.convert.export.gguf_tokenizer import tokenizer_metadata
from lowbit.convert.export.source import PackedSource
from lowbit.formats.architectures.decoder import FULL, LINEAR
from lowbit.formats.architectures.qwen3_5 import MODEL_TYPES, Qwen35Config

FILE_TYPES = {4: 2, 8: 7}  # "mostly Q4_0", "mostly Q8_0"
QUANTIZATION_VERSION = 2
SECTIONS = (11, 11, 10)  # default rope sections: rotations over time, height and width


def metadata(source: PackedSource, name: str) -> dict[str, Value]:
    """All metadata keys of the file.

    Args:
        source: packed folder.
        name: shown by programs that load the file.

    Raises:
        FormatError: a tokenizer that cannot be expressed.
    """
    config = source.config
    content = source.checkpoint.config
    arch = "qwen35" if content["model_type"] in MODEL_TYPES else str(content["model_type"])
    weights = dict.fromkeys(FILE_TYPES, 0)
    for linear in source.linears:
        weights[linear.bits] += linear.N * linear.K
    result: dict[str, Value] = {
        "general.architecture": arch,
        "general.type": "model",
        "general.name": name,
        "general.quantization_version": U32(QUANTIZATION_VERSION),
        "general.file_type": U32(FILE_TYPES[max(weights, key=lambda bits: weights[bits])]),
        f"{arch}.block_count": U32(blocks_in_all(source)),
        f"{arch}.context_length": U32(config.max_position_embeddings),
        f"{arch}.embedding_length": U32(config.hidden_size),
        f"{arch}.feed_forward_length": U32(config.intermediate_size),
        f"{arch}.vocab_size": U32(config.vocab_size),
        f"{arch}.attention.head_count": U32(config.num_attention_heads),
        f"{arch}.attention.head_count_kv": U32(config.num_key_value_heads),
        f"{arch}.attention.key_length": U32(config.head_dim),
        f"{arch}.attention.value_length": U32(config.head_dim),
        f"{arch}.attention.layer_norm_rms_epsilon": config.rms_norm_eps,
        f"{arch}.rope.freq_base": config.rope_theta,
    }
    if isinstance(config, Qwen35Config):
        result |= _hybrid(source, config, arch)
    else:
        result[f"{arch}.rope.dimension_count"] = U32(config.head_dim)
    text: dict[str, Any] = content.get("text_config", content)
    folder = source.checkpoint.folder
    return result | tokenizer_metadata(folder, config.vocab_size, text)


def _hybrid(source: PackedSource, config: Qwen35Config, arch: str) -> dict[str, Value]:
    """Keys of a Qwen3.5: sizes of the gated DeltaNet, kinds of layer, rope sections."""
    content = source.checkpoint.config
    text = content.get("text_config", content)
    rope = text.get("rope_parameters") or {}
    sections = [*rope.get("mrope_section", SECTIONS), 0, 0, 0, 0][:4]
    extra = blocks_in_all(source) - config.num_hidden_layers
    result: dict[str, Value] = {
        f"{arch}.rope.dimension_count": U32(config.rotary_dim),
        f"{arch}.rope.dimension_sections": I32s(sections),
        f"{arch}.ssm.conv_kernel": U32(config.linear_conv_kernel_dim),
        f"{arch}.ssm.state_size": U32(config.linear_key_head_dim),
        f"{arch}.ssm.group_count": U32(config.linear_num_key_heads),
        f"{arch}.ssm.time_step_rank": U32(config.linear_num_value_heads),
        f"{arch}.ssm.inner_size": U32(config.value_dim),
        f"{arch}.attention.recurrent_layers": [
            *(kind == LINEAR for kind in config.layer_types),
            *([False] * extra),
        ],
    }
    if FULL in config.layer_types:  # for llama.cpp releases that do not read the list
        interval = config.layer_types.index(FULL) + 1
        result[f"{arch}.full_attention_interval"] = U32(interval)
    if extra:
        result[f"{arch}.nextn_predict_layers"] = U32(extra)
    return result
