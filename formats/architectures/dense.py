"""Dense decoders that differ only in small features: Qwen3, Qwen2.5 and Llama 3.

The configuration and the tensor table; transformers `Qwen3ForCausalLM`, `Qwen2ForCausalLM` and
`LlamaForCausalLM`.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from lowbit.formats.architectures.table import TensorSpec, config_value
from lowbit.formats.errors import UnsupportedModelError

MODEL_TYPES = ("qwen3", "qwen2", "llama")
QK_NORM = ("qwen3",)  # an RMS norm on every q and k head
QKV_BIAS = ("qwen2",)  # a bias on q, k and v
EXPLICIT_HEAD_DIM = ("qwen3",)  # elsewhere it may be left out: hidden_size // heads
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
class Llama3Rope:
    """Rope scaling of type `llama3`: slow rotations are slowed down further.

    Attributes:
        factor: divides the frequency of rotations that are longer than the low border.
        low_freq_factor: `original_max_position / low_freq_factor` is the low border.
        high_freq_factor: rotations shorter than `original_max_position / high_freq_factor` stay.
        original_max_position: positions before the model was extended.
    """

    factor: float
    low_freq_factor: float
    high_freq_factor: float
    original_max_position: int


@dataclass(frozen=True, slots=True)
class DenseConfig:
    """Sizes of a dense decoder; h = hidden_size, I = intermediate_size, D = head_dim.

    Attributes:
        qk_norm: every q and k head is normed before it is rotated.
        qkv_bias: q, k and v have a bias.
        rope_scaling: None for plain rotations.
    """

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
    qk_norm: bool = True
    qkv_bias: bool = False
    rope_scaling: Llama3Rope | None = None

    @classmethod
    def from_hf(cls, config: Mapping[str, Any]) -> "DenseConfig":
        """Read a `config.json` of one of MODEL_TYPES.

        Raises:
            UnsupportedModelError: a key is missing or names a feature that is not implemented.
        """
        model_type = config.get("model_type")
        _check_features(config)
        rope = config.get("rope_parameters") or config.get("rope_scaling") or {}
        if not isinstance(rope, dict):
            raise UnsupportedModelError(f"config.json: rope parameters are not an object: {rope!r}")
        theta = rope.get("rope_theta", config.get("rope_theta"))
        sizes = dict(config)
        if model_type not in EXPLICIT_HEAD_DIM and config.get("head_dim") is None:
            heads = max(1, config_value(config, "num_attention_heads", int))
            sizes["head_dim"] = config_value(config, "hidden_size", int) // heads
        parsed = cls(
            vocab_size=config_value(sizes, "vocab_size", int),
            hidden_size=config_value(sizes, "hidden_size", int),
            intermediate_size=config_value(sizes, "intermediate_size", int),
            num_hidden_layers=config_value(sizes, "num_hidden_layers", int),
            num_attention_heads=config_value(sizes, "num_attention_heads", int),
            num_key_value_heads=config_value(sizes, "num_key_value_heads", int),
            head_dim=config_value(sizes, "head_dim", int),
            rms_norm_eps=config_value(config, "rms_norm_eps", float),
            rope_theta=config_value({"rope_theta": theta}, "rope_theta", float),
            max_position_embeddings=config_value(config, "max_position_embeddings", int),
            tie_word_embeddings=config_value(config, "tie_word_embeddings", bool),
            qk_norm=model_type in QK_NORM,
            qkv_bias=model_type in QKV_BIAS,
            rope_scaling=_rope_scaling(rope),
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


def _check_features(config: Mapping[str, Any]) -> None:
    """Refuse by name what the table or the runtime does not have."""
    act = config_value(config, "hidden_act", str)
    if act != "silu":
        raise UnsupportedModelError(f"config.json: `hidden_act: {act}`, only silu is implemented")
    for key in ("use_sliding_window", "attention_bias", "mlp_bias"):
        if config.get(key, False):
            raise UnsupportedModelError(f"config.json: `{key}: true` is not implemented")
    kinds = config.get("layer_types") or []
    for kind in kinds if isinstance(kinds, list) else [kinds]:
        if kind != "full_attention":
            raise UnsupportedModelError(f"config.json: layer type `{kind}` is not implemented")


def _rope_scaling(rope: Mapping[str, Any]) -> Llama3Rope | None:
    """The scaling that rope parameters ask for."""
    rope_type = rope.get("rope_type", rope.get("type", "default"))
    if rope.get("partial_rotary_factor", 1.0) != 1.0:
        raise UnsupportedModelError("config.json: `partial_rotary_factor` is not implemented")
    if rope_type == "default":
        return None
    if rope_type != "llama3":
        raise UnsupportedModelError(f"rope scaling `{rope_type}` is not implemented")
    scaling = Llama3Rope(
        factor=config_value(rope, "factor", float),
        low_freq_factor=config_value(rope, "low_freq_factor", float),
        high_freq_factor=config_value(rope, "high_freq_factor", float),
        original_max_position=config_value(rope, "original_max_position_embeddings", int),
    )
    low, high = scaling.low_freq_factor, scaling.high_freq_factor
    if not 0 < low < high or scaling.factor <= 0 or scaling.original_max_position < 1:
        raise UnsupportedModelError(f"config.json: rope factors out of order: {scaling}")
    return scaling


def tensor_table(config: DenseConfig) -> list[TensorSpec]:
    """Every tensor of the checkpoint, in the order of the forward pass."""
    h, inner = config.hidden_size, config.intermediate_size
    table = [TensorSpec("model.embed_tokens.weight", (config.vocab_size, h), "embedding")]
    for i in range(config.num_hidden_layers):
        p = f"model.layers.{i}"
        gate_up = f"{p}.mlp.gate_up"
        table += [
            TensorSpec(f"{p}.input_layernorm.weight", (h,), "norm"),
            *_attention(config, f"{p}.self_attn"),
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


def _attention(config: DenseConfig, p: str) -> list[TensorSpec]:
    h, D = config.hidden_size, config.head_dim
    q, kv = config.num_attention_heads * D, config.num_key_value_heads * D
    table = []
    for module, rows in (("q_proj", q), ("k_proj", kv), ("v_proj", kv)):
        table.append(TensorSpec(f"{p}.{module}.weight", (rows, h), "attention", f"{p}.qkv"))
        if config.qkv_bias:
            table.append(TensorSpec(f"{p}.{module}.bias", (rows,), "bias"))
    if config.qk_norm:
        table += [TensorSpec(f"{p}.{x}_norm.weight", (D,), "norm") for x in "qk"]
    return [*table, TensorSpec(f"{p}.o_proj.weight", (h, q), "attention")]
