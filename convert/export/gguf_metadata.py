"""The model's sizes as GGUF metadata, under the keys that llama.cpp looks up."""

from lowbit.convert.export.gguf import blocks_in_all, family
from lowbit.convert.export.gguf_file import U32, Value
from lowbit.convert.export.gguf_tokenizer import tokenizer_metadata
from lowbit.convert.export.rope import gguf_keys
from lowbit.convert.export.source import PackedSource
from lowbit.formats.architectures.config import Experts
from lowbit.formats.architectures.decoder import text_part

FILE_TYPES = {4: 2, 8: 7}  # "mostly Q4_0", "mostly Q8_0"
QUANTIZATION_VERSION = 2


def metadata(source: PackedSource, name: str) -> dict[str, Value]:
    """All metadata keys of the file.

    Args:
        source: packed folder.
        name: shown by programs that load the file.

    Raises:
        FormatError: a tokenizer that cannot be expressed.
    """
    config = source.config
    names = family(source)
    arch = names.names[source.model_type]
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
        f"{arch}.rope.dimension_count": U32(config.rotary_dim),
    }
    result |= gguf_keys(config.rope_scaling, arch)
    if config.experts is not None:
        result |= _expert_keys(config.experts, arch)
    result |= names.metadata(config, source, arch)
    text = text_part(source.checkpoint.config)
    return result | tokenizer_metadata(source.checkpoint.folder, config.vocab_size, text)


def _expert_keys(experts: Experts, arch: str) -> dict[str, Value]:
    """Sizes of a mixture of experts."""
    result: dict[str, Value] = {
        f"{arch}.expert_count": U32(experts.count),
        f"{arch}.expert_used_count": U32(experts.chosen),
        f"{arch}.expert_feed_forward_length": U32(experts.inner),
    }
    if experts.shared_inner is not None:
        result[f"{arch}.expert_shared_feed_forward_length"] = U32(experts.shared_inner)
    return result
