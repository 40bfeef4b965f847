"""Qwen3 dense: the configuration and the tensor table (transformers `Qwen3ForCausalLM`)."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from lowbit.formats.architectures.table import TensorSpec, config_value
from lowbit.formats.errors import UnsupportedModelError

MODEL_TYPE = "qwen3"
SIZES = (
    "vocab_size",
    "hidden_size",
    "intermediate_size",
    "num_hidden_layers",
    "num_attention_heads",
    "num_key_value_heads",
    "head_dim",
    "max_position_embeddings",
)


@dataclass(frozen=True, slots=True)
class Qwen3Config:
    """Sizes of a Qwen3 decoder; h = hidden_size, I = intermediate_size, D = head_dim."""

    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_hidden_layers: int
    num_attention_heads: int
    num_key_value_heads: int
    head_dim: int
    rms_norm_eps: float
    rope_theta: float
    max_position_embeddings: int
    tie_word_embeddings: bool

    @classmethod
    def from_hf(cls, config: Mapping[str, Any]) -> "Qwen3Config":
        """Read a `config.json`.

        Raises:
            UnsupportedModelError: a key is missing or names a feature that is not implemented.
        """
        rope = config.get("rope_parameters") or config.get("rope_scaling") or {}
        if not isinstance(rope, dict):
            raise UnsupportedModelError(f"config.json: rope parameters are not an object: {rope!r}")
        rope_type = rope.get("rope_type", rope.get("type", "default"))
        if rope_type != "default":
            raise UnsupportedModelError(f"rope scaling `{rope_type}` is not implemented")
        refused = {
            "use_sliding_window": config.get("use_sliding_window", False),
            "attention_bias": config.get("attention_bias", False),
        }
        for key, value in refused.items():
            if value:
                raise UnsupportedModelError(f"config.json: `{key}: true` is not implemented")
        act = config_value(config, "hidden_act", str)
        if act != "silu":
            raise UnsupportedModelError(
                f"config.json: `hidden_act: {act}`, only silu is implemented"
            )
        theta = rope.get("rope_theta", config.get("rope_theta"))
        parsed = cls(
            vocab_size=config_value(config, "vocab_size", int),
            hidden_size=config_value(config, "hidden_size", int),
            intermediate_size=config_value(config, "intermediate_size", int),
            num_hidden_layers=config_value(config, "num_hidden_layers", int),
            num_attention_heads=config_value(config, "num_attention_heads", int),
            num_key_value_heads=config_value(config, "num_key_value_heads", int),
            head_dim=config_value(config, "head_dim", int),
            rms_norm_eps=config_value(config, "rms_norm_eps", float),
            rope_theta=config_value({"rope_theta": theta}, "rope_theta", float),
            max_position_embeddings=config_value(config, "max_position_embeddings", int),
            tie_word_embeddings=config_value(config, "tie_word_embeddings", bool),
        )
        for key in SIZES:
            if getattr(parsed, key) < 1:
                raise UnsupportedModelError(f"config.json: `{key}` must be positive")
        if parsed.num_attention_heads % parsed.num_key_value_heads:
            raise UnsupportedModelError(
                f"config.json: {parsed.num_attention_heads} attention heads are not a multiple "
                f"of {parsed.num_key_value_heads} key/value heads"
            )
        return parsed


def tensor_table(config: Qwen3Config) -> list[TensorSpec]:
    """Every tensor of the checkpoint, in the order of the forward pass."""
    h, inner, D = config.hidden_size, config.intermediate_size, config.head_dim
    q, kv = config.num_attention_heads * D, config.num_key_value_heads * D
    table = [TensorSpec("model.embed_tokens.weight", (config.vocab_size, h), "embedding")]
    for i in range(config.num_hidden_layers):
        p = f"model.layers.{i}"
        qkv, gate_up = f"{p}.self_attn.qkv", f"{p}.mlp.gate_up"
        table += [
            TensorSpec(f"{p}.input_layernorm.weight", (h,), "norm"),
            TensorSpec(f"{p}.self_attn.q_proj.weight", (q, h), "attention", qkv),
            TensorSpec(f"{p}.self_attn.k_proj.weight", (kv, h), "attention", qkv),
            TensorSpec(f"{p}.self_attn.v_proj.weight", (kv, h), "attention", qkv),
            TensorSpec(f"{p}.self_attn.q_norm.weight", (D,), "norm"),
            TensorSpec(f"{p}.self_attn.k_norm.weight", (D,), "norm"),
            TensorSpec(f"{p}.self_attn.o_proj.weight", (h, q), "attention"),
            TensorSpec(f"{p}.post_attention_layernorm.weight", (h,), "norm"),
            TensorSpec(f"{p}.mlp.gate_proj.weight", (inner, h), "mlp", gate_up),
            TensorSpec(f"{p}.mlp.up_proj.weight", (inner, h), "mlp", gate_up),
            TensorSpec(f"{p}.mlp.down_proj.weight", (h, inner), "mlp"),
        ]
    table += [
        TensorSpec("model.norm.weight", (h,), "norm"),
        TensorSpec("lm_head.weight", (config.vocab_size, h), "head"),
    ]
    return table
