"""Qwen3.5 dense: gated DeltaNet layers beside full attention, an MTP layer, a vision tower.

transformers `Qwen3_5ForConditionalGeneration` and `Qwen3_5ForCausalLM`; Qwen3.6 and 3.8 dense
models have the same tensors. The vision tower is taken along by its prefix, unchecked.
"""

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Any

from lowbit.formats.architectures.table import TensorSpec, config_value
from lowbit.formats.errors import UnsupportedModelError

MODEL_TYPES = ("qwen3_5", "qwen3_5_text")
NESTED_PREFIX = "model.language_model."  # on the hub; text-only re-saves write `model.`
MTP_PREFIX = "mtp."
VISION_PREFIXES = ("model.visual.", "visual.")
VISION_PATTERN = "re:.*visual.*"
GATES_PATTERN = "re:.*linear_attn[.]in_proj_[ab]$"  # fewer rows than fast kernels take
FULL, LINEAR = "full_attention", "linear_attention"

# Some configs leave these out; every published model has these values.
DEFAULT_ROPE_THETA = 1e7
DEFAULT_ROTARY_SHARE = 0.25
DEFAULT_INTERVAL = 4


@dataclass(frozen=True, slots=True)
class Qwen35Config:
    """Sizes of a Qwen3.5 decoder.

    h = hidden_size, I = intermediate_size, D = head_dim; Hk, Hv and Dk, Dv of the linear layers.

    Attributes:
        layer_types: `full_attention` or `linear_attention` of every layer.
        rotary_dim: leading dimensions of a head that are rotated.
        mtp_layers: decoder layers of the multi-token-prediction head.
    """

    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_hidden_layers: int
    num_attention_heads: int
    num_key_value_heads: int
    head_dim: int
    linear_num_key_heads: int
    linear_num_value_heads: int
    linear_key_head_dim: int
    linear_value_head_dim: int
    linear_conv_kernel_dim: int
    max_position_embeddings: int
    rms_norm_eps: float
    rope_theta: float
    rotary_dim: int
    layer_types: tuple[str, ...]
    tie_word_embeddings: bool
    mtp_layers: int

    @property
    def key_dim(self) -> int:
        """Rows of q, and of k, in a linear layer: Hk * Dk."""
        return self.linear_num_key_heads * self.linear_key_head_dim

    @property
    def value_dim(self) -> int:
        """Rows of v, and of z, in a linear layer: Hv * Dv."""
        return self.linear_num_value_heads * self.linear_value_head_dim

    @classmethod
    def from_hf(cls, config: Mapping[str, Any]) -> "Qwen35Config":
        """Read a `config.json`, nested or text-only.

        Raises:
            UnsupportedModelError: a key is missing or names a feature that is not implemented.
        """
        text = config.get("text_config", config)
        if not isinstance(text, dict):
            raise UnsupportedModelError(f"config.json: text_config is not an object: {text!r}")
        _check_features(text)
        rope = text.get("rope_parameters") or text.get("rope_scaling") or {}
        if not isinstance(rope, dict):
            raise UnsupportedModelError(f"config.json: rope parameters are not an object: {rope!r}")
        rope_type = rope.get("rope_type", rope.get("type", "default"))
        if rope_type != "default":
            raise UnsupportedModelError(f"rope scaling `{rope_type}` is not implemented")
        theta = rope.get("rope_theta", text.get("rope_theta", DEFAULT_ROPE_THETA))
        share = rope.get(
            "partial_rotary_factor", text.get("partial_rotary_factor", DEFAULT_ROTARY_SHARE)
        )
        sizes = {key: config_value(text, key, int) for key in _SIZES}
        for key, value in sizes.items():
            if value < 1:
                raise UnsupportedModelError(f"config.json: `{key}` must be positive")
        head_dim = sizes["head_dim"]
        rotary = head_dim * config_value({"partial_rotary_factor": share}, _SHARE, float)
        if rotary != int(rotary) or int(rotary) % 2 or not 0 < rotary <= head_dim:
            raise UnsupportedModelError(
                f"config.json: partial_rotary_factor {share} of {head_dim} is no even dimension"
            )
        tied = config.get("tie_word_embeddings", text.get("tie_word_embeddings", False))
        parsed = cls(
            **sizes,
            rms_norm_eps=config_value(text, "rms_norm_eps", float),
            rope_theta=config_value({"rope_theta": theta}, "rope_theta", float),
            rotary_dim=int(rotary),
            layer_types=_layer_types(text, sizes["num_hidden_layers"]),
            tie_word_embeddings=config_value({_TIED: tied}, _TIED, bool),
            mtp_layers=config_value({_MTP: text.get(_MTP, 0)}, _MTP, int),
        )
        for heads, shared in (
            ("num_attention_heads", "num_key_value_heads"),
            ("linear_num_value_heads", "linear_num_key_heads"),
        ):
            if sizes[heads] % sizes[shared]:
                raise UnsupportedModelError(
                    f"config.json: {heads} = {sizes[heads]} is not a multiple of "
                    f"{shared} = {sizes[shared]}"
                )
        return parsed


_SIZES = (
    *("vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers"),
    *("num_attention_heads", "num_key_value_heads", "head_dim"),
    *("linear_num_key_heads", "linear_num_value_heads"),
    *("linear_key_head_dim", "linear_value_head_dim", "linear_conv_kernel_dim"),
    "max_position_embeddings",
)
_SHARE, _TIED, _MTP = "partial_rotary_factor", "tie_word_embeddings", "mtp_num_hidden_layers"


def _check_features(text: Mapping[str, Any]) -> None:
    """Refuse by name what the table or the runtime does not have."""
    act = config_value(text, "hidden_act", str)
    refused = {
        f"hidden_act: {act}": act != "silu",
        "attention_bias: true": text.get("attention_bias", False),
        "use_sliding_window: true": text.get("use_sliding_window", False),
        "attn_output_gate: false": not text.get("attn_output_gate", True),
        "mtp_use_dedicated_embeddings: true": text.get("mtp_use_dedicated_embeddings", False),
        "num_experts (a mixture of experts)": text.get("num_experts"),
    }
    for feature, present in refused.items():
        if present:
            raise UnsupportedModelError(f"config.json: `{feature}` is not implemented")


def _layer_types(text: Mapping[str, Any], layers: int) -> tuple[str, ...]:
    """The kind of every layer; a list in the config wins over the interval."""
    kinds = text.get("layer_types")
    if kinds is None:
        interval = config_value(
            {"full_attention_interval": text.get("full_attention_interval", DEFAULT_INTERVAL)},
            "full_attention_interval",
            int,
        )
        return tuple(FULL if (i + 1) % max(1, interval) == 0 else LINEAR for i in range(layers))
    if not isinstance(kinds, list) or len(kinds) != layers:
        raise UnsupportedModelError(f"config.json: layer_types must name {layers} layers")
    for kind in kinds:
        if kind not in (FULL, LINEAR):
            raise UnsupportedModelError(f"config.json: layer type `{kind}` is not implemented")
    return tuple(kinds)


def prefix_of(config: Mapping[str, Any], names: Collection[str]) -> str:
    """What decoder tensors are named below: as in the checkpoint, or as on the hub without one."""
    nested = "text_config" in config
    if names:
        nested = any(name.startswith(NESTED_PREFIX) for name in names)
    return NESTED_PREFIX if nested else "model."


def tensor_table(
    config: Qwen35Config, prefix: str = NESTED_PREFIX, with_mtp: bool = True
) -> list[TensorSpec]:
    """Every tensor of the checkpoint but the vision tower's, in the order of the forward pass."""
    h = config.hidden_size
    table = [TensorSpec(f"{prefix}embed_tokens.weight", (config.vocab_size, h), "embedding")]
    for i, kind in enumerate(config.layer_types):
        table += _layer(config, f"{prefix}layers.{i}", kind)
    table += [
        TensorSpec(f"{prefix}norm.weight", (h,), "norm"),
        TensorSpec("lm_head.weight", (config.vocab_size, h), "head"),
    ]
    return table + (_mtp(config) if with_mtp else [])


def _layer(config: Qwen35Config, p: str, kind: str) -> list[TensorSpec]:
    h, inner = config.hidden_size, config.intermediate_size
    gate_up = f"{p}.mlp.gate_up"
    mixer = _attention if kind == FULL else _delta_net
    return [
        TensorSpec(f"{p}.input_layernorm.weight", (h,), "norm"),
        *mixer(config, p),
        TensorSpec(f"{p}.post_attention_layernorm.weight", (h,), "norm"),
        TensorSpec(f"{p}.mlp.gate_proj.weight", (inner, h), "mlp", gate_up),
        TensorSpec(f"{p}.mlp.up_proj.weight", (inner, h), "mlp", gate_up),
        TensorSpec(f"{p}.mlp.down_proj.weight", (h, inner), "mlp"),
    ]


def _attention(config: Qwen35Config, p: str) -> list[TensorSpec]:
    h, D = config.hidden_size, config.head_dim
    q, kv = config.num_attention_heads * D, config.num_key_value_heads * D
    p = f"{p}.self_attn"
    qkv = f"{p}.qkv"
    return [
        # A head's rows are its query, then its output gate.
        TensorSpec(f"{p}.q_proj.weight", (2 * q, h), "attention", qkv),
        TensorSpec(f"{p}.k_proj.weight", (kv, h), "attention", qkv),
        TensorSpec(f"{p}.v_proj.weight", (kv, h), "attention", qkv),
        TensorSpec(f"{p}.q_norm.weight", (D,), "norm"),
        TensorSpec(f"{p}.k_norm.weight", (D,), "norm"),
        TensorSpec(f"{p}.o_proj.weight", (h, q), "attention"),
    ]


def _delta_net(config: Qwen35Config, p: str) -> list[TensorSpec]:
    h, Hv = config.hidden_size, config.linear_num_value_heads
    channels = 2 * config.key_dim + config.value_dim
    p = f"{p}.linear_attn"
    qkvz, ba = f"{p}.in_proj_qkvz", f"{p}.in_proj_ba"
    return [
        TensorSpec(f"{p}.in_proj_qkv.weight", (channels, h), "delta_in", qkvz),
        TensorSpec(f"{p}.in_proj_z.weight", (config.value_dim, h), "delta_in", qkvz),
        TensorSpec(f"{p}.in_proj_b.weight", (Hv, h), "delta_gate", ba),
        TensorSpec(f"{p}.in_proj_a.weight", (Hv, h), "delta_gate", ba),
        TensorSpec(
            f"{p}.conv1d.weight", (channels, 1, config.linear_conv_kernel_dim), "delta_state"
        ),
        TensorSpec(f"{p}.A_log", (Hv,), "delta_state"),
        TensorSpec(f"{p}.dt_bias", (Hv,), "delta_state"),
        TensorSpec(f"{p}.norm.weight", (config.linear_value_head_dim,), "norm"),
        TensorSpec(f"{p}.out_proj.weight", (h, config.value_dim), "delta_out"),
    ]


def _mtp(config: Qwen35Config) -> list[TensorSpec]:
    """The multi-token-prediction head: full-attention layers behind a joint of two streams."""
    if not config.mtp_layers:
        return []
    h = config.hidden_size
    table = [
        TensorSpec("mtp.pre_fc_norm_embedding.weight", (h,), "norm"),
        TensorSpec("mtp.pre_fc_norm_hidden.weight", (h,), "norm"),
        TensorSpec("mtp.fc.weight", (h, 2 * h), "mtp"),
    ]
    for i in range(config.mtp_layers):
        for spec in _layer(config, f"mtp.layers.{i}", FULL):
            role = "mtp" if spec.quantizable else spec.role
            table.append(TensorSpec(spec.name, spec.shape, role, spec.fused_set))
    return [*table, TensorSpec("mtp.norm.weight", (h,), "norm")]
