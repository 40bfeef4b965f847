"""Qwen3.5 dense: gated DeltaNet layers beside full attention, an MTP layer, a vision tower.

transformers `Qwen3_5ForConditionalGeneration` and `Qwen3_5ForCausalLM`; Qwen3.6 and 3.8 dense
models have the same tensors. Tensors of the vision tower are carried by prefix, unchecked.
"""

from collections.abc import Collection, Mapping
from dataclasses import dataclass, replace
from typing import Any

from lowbit.formats.architectures.architecture import PREFIX, Architecture, Stream
from lowbit.formats.architectures.config import Config, LinearLayers
from lowbit.formats.architectures.decoder import (
    FULL,
    HEAD_DIM,
    INNER,
    KV_HEADS,
    LINEAR,
    MAX_HEAD_DIM,
    MAX_HEADS,
    SIZES,
    TEXT,
    TIED,
    TIED_FIELD,
    check_features,
    check_multiple,
    read_layer_types,
    read_token_ids,
)
from lowbit.formats.architectures.experts import MLP_READERS, MLP_WRITERS, mlp_layer
from lowbit.formats.architectures.names import (
    MTP_EMBEDDING_NORM,
    MTP_FC,
    MTP_HIDDEN_NORM,
    MTP_NORM,
    MTP_PREFIX,
)
from lowbit.formats.architectures.rope import SHARE, read_rope, read_sections
from lowbit.formats.architectures.table import TensorSpec
from lowbit.formats.errors import UnsupportedModelError
from lowbit.formats.fields import Field, read_field, read_fields, shown

MODEL_TYPES = ("qwen3_5", "qwen3_5_text")  # with nested config, text-only
TEXT_ONLY = "_text"  # ends the model_type of a config that is not nested
NESTED_PREFIX = "model.language_model."  # on the Hub; text-only checkpoints have `model.`
VISION_PREFIXES = ("model.visual.", "visual.")
VISION_PATTERN = "re:.*visual.*"
GATES_PATTERN = "re:.*linear_attn[.]in_proj_[ab]$"  # too few rows for fast kernels
MTP_LAYERS = "mtp_num_hidden_layers"

DEFAULT_ROTARY_SHARE = 0.25  # default in transformers, like the sections and interval below
DEFAULT_SECTIONS = (11, 11, 10)
INTERVAL = Field("full_attention_interval", least=1, most=1024, default=4)
FIELDS = (
    *SIZES,
    KV_HEADS,
    HEAD_DIM,
    Field("linear_num_key_heads", least=1, most=MAX_HEADS),
    Field("linear_num_value_heads", least=1, most=MAX_HEADS),
    Field("linear_key_head_dim", least=1, most=MAX_HEAD_DIM),
    Field("linear_value_head_dim", least=1, most=MAX_HEAD_DIM),
    Field("linear_conv_kernel_dim", least=2, most=64),
)
MTP_FIELD = Field(MTP_LAYERS, least=0, most=64, default=0)
FEATURES: Mapping[str, tuple[Any, ...]] = {
    "attn_output_gate": (True,),
    "output_gate_type": ("swish", "silu"),  # two names of one function
    "mtp_use_dedicated_embeddings": (False,),
    "sliding_window": (None,),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Qwen35Config(Config):
    """Sizes of a Qwen3.5 decoder."""

    linear_num_key_heads: int
    linear_num_value_heads: int
    linear_key_head_dim: int
    linear_value_head_dim: int
    linear_conv_kernel_dim: int
    rotary_share: float  # part of a head's dimensions that is rotated
    sections: tuple[int, ...]  # pairs of rotated dimensions that take time, row, column
    layer_types: tuple[str, ...]  # `full_attention` or `linear_attention` of every layer
    mtp_layers: int  # decoder layers of the multi-token-prediction head

    @property
    def rotary_dim(self) -> int:
        """Leading dimensions of a head that are rotated."""
        return _rotary_dim(self.head_dim, self.rotary_share)

    @property
    def rope_sections(self) -> tuple[int, ...]:
        """Pairs of rotated dimensions that take their position from time, row and column."""
        return self.sections

    @property
    def kv_layers(self) -> int:
        """Number of layers with full attention."""
        return self.layer_types.count(FULL)

    @property
    def linear_layers(self) -> LinearLayers:
        """Sizes of the gated DeltaNet layers."""
        return LinearLayers(
            count=self.layer_types.count(LINEAR),
            key_heads=self.linear_num_key_heads,
            value_heads=self.linear_num_value_heads,
            key_head_dim=self.linear_key_head_dim,
            value_head_dim=self.linear_value_head_dim,
            taps=self.linear_conv_kernel_dim,
        )

    @classmethod
    def from_hf(cls, config: Mapping[str, Any]) -> "Qwen35Config":
        """Read a `config.json`, nested or text-only.

        Raises:
            UnsupportedModelError: see `read_config` of the package.
        """
        text = text_of(config)
        check_features(text, FEATURES)
        return cls(intermediate_size=read_field(text, INNER), **read_values(config))


def read_values(config: Mapping[str, Any]) -> dict[str, Any]:
    """Read what a Qwen35Config holds beside the width of its MLP.

    Raises:
        UnsupportedModelError: a key is missing or out of range, or two keys disagree.
    """
    text = text_of(config)
    values = read_fields(text, FIELDS)
    check_multiple(values, "num_attention_heads", "num_key_value_heads")
    check_multiple(values, "linear_num_value_heads", "linear_num_key_heads")
    sections = read_sections(text)
    rope = read_rope(text, values["max_position_embeddings"], share=DEFAULT_ROTARY_SHARE)
    _check_rotary(values["head_dim"], rope.share)
    return values | {
        "max_position_embeddings": rope.positions,
        "rope_theta": rope.theta,
        "rope_scaling": rope.scaling,
        "rotary_share": rope.share,
        "sections": DEFAULT_SECTIONS if sections is None else tuple(sections),
        "layer_types": _layer_types(text, values["num_hidden_layers"]),
        "tie_word_embeddings": is_tied(config),
        "mtp_layers": read_field(text, MTP_FIELD),
        "eos_token_ids": read_token_ids(text, values["vocab_size"]),
    }


def text_of(config: Mapping[str, Any]) -> Mapping[str, Any]:
    """Part of a `config.json` that describes the decoder.

    Raises:
        UnsupportedModelError: there is none where transformers looks for it.
    """
    model_type, text = str(config.get("model_type", MODEL_TYPES[0])), config.get(TEXT)
    nested = model_type.removesuffix(TEXT_ONLY)
    if model_type != nested:
        if TEXT in config:
            raise UnsupportedModelError(
                f"config.json: `{TEXT}` beside model_type `{model_type}`, which has none",
                hint=f"the model_type of a nested config is `{nested}`",
            )
        return config
    if not isinstance(text, dict):
        raise UnsupportedModelError(
            f"config.json: `{TEXT}` must be an object, got {shown(text)}",
            hint=f"the model_type of a config without it is `{nested}{TEXT_ONLY}`",
        )
    for key in ("rope_scaling", "rope_parameters"):
        if config.get(key) and config[key] != text.get(key):
            raise UnsupportedModelError(
                f"config.json: `{key}` beside `{TEXT}`, where transformers does not read it",
                hint=f"move it into `{TEXT}`",
            )
    inner = text.get("model_type", nested)
    if inner not in (nested, nested + TEXT_ONLY):
        raise UnsupportedModelError(
            f"config.json: `{TEXT}.model_type` {shown(inner)} beside model_type `{model_type}`"
        )
    return text


def is_tied(config: Mapping[str, Any]) -> bool:
    """Tell if the head shares the embedding's weight.

    transformers reads the outer key for the model with its vision tower and the inner one for the
    decoder alone; an absent key means false.

    Raises:
        UnsupportedModelError: no flag, or an outer and an inner one that disagree.
    """
    outer: bool = read_field(config, TIED_FIELD)
    inner: bool = read_field(text_of(config), replace(TIED_FIELD, default=outer))
    if outer != inner:
        raise UnsupportedModelError(
            f"config.json: `{TIED}` is {shown(outer)}, `{TEXT}.{TIED}` is {shown(inner)}",
            hint=f"a `{TIED}` that is absent is false, as in transformers",
        )
    return outer


def _rotary_dim(head_dim: int, share: float) -> int:
    """Rotated dimensions of a head, rounded down as in transformers."""
    return int(head_dim * share)


def _check_rotary(head_dim: int, share: float) -> None:
    rotary = _rotary_dim(head_dim, share)
    if rotary < 2 or rotary % 2:
        raise UnsupportedModelError(
            f"config.json: `{SHARE}` {share:g} of `head_dim` {head_dim} rotates {rotary} "
            "dimensions, expected an even number"
        )


def _layer_types(text: Mapping[str, Any], layers: int) -> tuple[str, ...]:
    """Kinds of all layers; a list in the config wins over the interval."""
    interval = read_field(text, INTERVAL)
    every = tuple(LINEAR if (i + 1) % interval else FULL for i in range(layers))
    return read_layer_types(text, layers, (FULL, LINEAR)) or every


def prefix_of(config: Mapping[str, Any], names: Collection[str]) -> str:
    """Prefix of decoder tensors: that of `names`, or without names that used on the Hub."""
    nested = TEXT in config
    if names:
        nested = any(name.startswith(NESTED_PREFIX) for name in names)
    return NESTED_PREFIX if nested else PREFIX


def tensor_table(config: Qwen35Config, prefix: str) -> list[TensorSpec]:
    """All tensors except the vision tower's, in the order of the forward pass."""
    h = config.hidden_size
    table = [TensorSpec(f"{prefix}embed_tokens.weight", (config.vocab_size, h), "embedding")]
    for i, kind in enumerate(config.layer_types):
        table += _layer(config, f"{prefix}layers.{i}", kind)
    return [
        *table,
        TensorSpec(f"{prefix}norm.weight", (h,), "norm"),
        TensorSpec("lm_head.weight", (config.vocab_size, h), "head"),
        *_mtp(config),
    ]


def _layer(config: Qwen35Config, p: str, kind: str) -> list[TensorSpec]:
    h = config.hidden_size
    mixer = _attention if kind == FULL else _delta_net
    return [
        TensorSpec(f"{p}.input_layernorm.weight", (h,), "norm"),
        *mixer(config, p),
        TensorSpec(f"{p}.post_attention_layernorm.weight", (h,), "norm"),
        *mlp_layer(config, f"{p}.mlp"),
    ]


def _attention(config: Qwen35Config, p: str) -> list[TensorSpec]:
    h, D = config.hidden_size, config.head_dim
    q, kv = config.num_attention_heads * D, config.num_key_value_heads * D
    p = f"{p}.self_attn"
    qkv = f"{p}.qkv"
    return [
        # Rows of a head: its query, then its output gate.
        TensorSpec(f"{p}.q_proj.weight", (2 * q, h), "attention", qkv),
        TensorSpec(f"{p}.k_proj.weight", (kv, h), "attention", qkv),
        TensorSpec(f"{p}.v_proj.weight", (kv, h), "attention", qkv),
        TensorSpec(f"{p}.q_norm.weight", (D,), "norm"),
        TensorSpec(f"{p}.k_norm.weight", (D,), "norm"),
        TensorSpec(f"{p}.o_proj.weight", (h, q), "attention"),
    ]


def _delta_net(config: Qwen35Config, p: str) -> list[TensorSpec]:
    h, linear = config.hidden_size, config.linear_layers
    channels, Hv = linear.channels, linear.value_heads
    p = f"{p}.linear_attn"
    qkvz, ba = f"{p}.in_proj_qkvz", f"{p}.in_proj_ba"
    return [
        TensorSpec(f"{p}.in_proj_qkv.weight", (channels, h), "delta_in", qkvz),
        TensorSpec(f"{p}.in_proj_z.weight", (linear.value_dim, h), "delta_in", qkvz),
        TensorSpec(f"{p}.in_proj_b.weight", (Hv, h), "delta_gate", ba),
        TensorSpec(f"{p}.in_proj_a.weight", (Hv, h), "delta_gate", ba),
        TensorSpec(f"{p}.conv1d.weight", (channels, 1, linear.taps), "delta_state"),
        TensorSpec(f"{p}.A_log", (Hv,), "delta_state"),
        TensorSpec(f"{p}.dt_bias", (Hv,), "delta_state"),
        TensorSpec(f"{p}.norm.weight", (linear.value_head_dim,), "norm"),
        TensorSpec(f"{p}.out_proj.weight", (h, linear.value_dim), "delta_out"),
    ]


def _mtp(config: Qwen35Config) -> list[TensorSpec]:
    """Tensors of the multi-token-prediction head: full-attention layers after a projection."""
    if not config.mtp_layers:
        return []
    h = config.hidden_size
    table = [
        TensorSpec(MTP_EMBEDDING_NORM, (h,), "norm"),
        TensorSpec(MTP_HIDDEN_NORM, (h,), "norm"),
        TensorSpec(MTP_FC, (h, 2 * h), "mtp"),
    ]
    for i in range(config.mtp_layers):
        for spec in _layer(config, f"mtp.layers.{i}", FULL):
            role = "mtp" if spec.quantizable else spec.role
            table.append(TensorSpec(spec.name, spec.shape, role, spec.fused_set))
    return [*table, TensorSpec(MTP_NORM, (h,), "norm")]


ARCHITECTURE = Architecture(
    model_types=MODEL_TYPES,
    read_config=Qwen35Config.from_hf,
    tensor_table=tensor_table,
    prefix_of=prefix_of,
    is_tied=is_tied,
    parts={"vision": VISION_PREFIXES, "mtp": (MTP_PREFIX,)},
    mtp_layers=MTP_LAYERS,
    unquantized={"vision": (VISION_PATTERN,), "decoder": (GATES_PATTERN,)},
    float32_roles=("norm", "delta_state"),
    stream=Stream(
        readers={
            "input_layernorm": (
                *(f"self_attn.{x}_proj" for x in "qkv"),
                *(f"linear_attn.in_proj_{x}" for x in ("qkv", "z", "b", "a")),
            ),
            "post_attention_layernorm": MLP_READERS,
        },
        writers=("self_attn.o_proj", "linear_attn.out_proj", *MLP_WRITERS),
        zero_centred=True,
    ),
)
