"""Dense decoders that differ only in small features: Qwen3, Qwen2.5 and Llama 3.

The configuration and the tensor table; transformers `Qwen3ForCausalLM`, `Qwen2ForCausalLM` and
`LlamaForCausalLM`.
"""

from collections.abc import Collection, Mapping
from dataclasses import dataclass, replace
from typing import Any

from lowbit.formats.architectures.architecture import Architecture, Stream
from lowbit.formats.architectures.config import Config
from lowbit.formats.architectures.decoder import (
    FULL,
    HEAD_DIM,
    INNER,
    KV_HEADS,
    SIZES,
    TEXT,
    TIED_FIELD,
    check_features,
    check_multiple,
    read_layer_types,
    read_token_ids,
)
from lowbit.formats.architectures.experts import MLP_READERS, MLP_WRITERS, mlp_layer
from lowbit.formats.architectures.rope import (
    LLAMA3,
    PLAIN,
    SHARE,
    YARN,
    RopeConfig,
    read_rope,
)
from lowbit.formats.architectures.table import TensorSpec
from lowbit.formats.errors import UnsupportedModelError
from lowbit.formats.fields import REQUIRED, Field, read_field, read_fields, shown

MODEL_TYPES = ("qwen3", "qwen2", "llama")
QK_NORM = ("qwen3", "qwen3_moe")  # model types with an RMS norm on every q and k head
QKV_BIAS = ("qwen2",)  # model types with a bias on q, k and v
EXPLICIT_HEAD_DIM = ("qwen3",)  # others may leave it out: hidden_size // heads
WINDOW = Field("sliding_window", least=0, most=2**31, default=None, nullable=True)  # not in use
LLAMA_THETA = 10_000.0  # Llama 1 and 2, whose configs leave it out
FEATURES: Mapping[str, tuple[Any, ...]] = {TEXT: ()}  # vision and audio models have it
# transformers cuts its cache to the window of a Llama config, which has no key to turn it off.
LLAMA_FEATURES: Mapping[str, tuple[Any, ...]] = {**FEATURES, "sliding_window": (None,)}


@dataclass(frozen=True, slots=True)
class DenseConfig(Config):
    """Sizes of a dense decoder."""

    qk_norm: bool = True  # every q and k head is normed before it is rotated
    qkv_bias: bool = False  # q, k and v have a bias

    @classmethod
    def from_hf(cls, config: Mapping[str, Any]) -> "DenseConfig":
        """Read a `config.json` of one of MODEL_TYPES.

        Raises:
            UnsupportedModelError: see `read_config` of the package.
        """
        llama = config.get("model_type") == "llama"
        check_features(config, LLAMA_FEATURES if llama else FEATURES)
        return cls(intermediate_size=read_field(config, INNER), **read_values(config))


def read_values(config: Mapping[str, Any], kinds: Collection[str] = (FULL,)) -> dict[str, Any]:
    """Read what a DenseConfig holds beside the width of its MLP.

    kinds: of layers, those that the family has.

    Raises:
        UnsupportedModelError: a key is missing or out of range, or two keys disagree.
    """
    model_type = config.get("model_type")
    values = read_fields(config, (*SIZES, TIED_FIELD))
    read_field(config, WINDOW)
    values |= _heads(config, values)
    read_layer_types(config, values["num_hidden_layers"], kinds)
    theta = LLAMA_THETA if model_type == "llama" else REQUIRED
    rope = _rope(config, values["max_position_embeddings"], theta)
    return values | {
        "max_position_embeddings": rope.positions,
        "rope_theta": rope.theta,
        "qk_norm": model_type in QK_NORM,
        "qkv_bias": model_type in QKV_BIAS,
        "rope_scaling": rope.scaling,
        "eos_token_ids": read_token_ids(config, values["vocab_size"]),
    }


def _heads(config: Mapping[str, Any], sizes: Mapping[str, Any]) -> dict[str, int]:
    """Number of key/value heads and size of a head; absent keys default as in transformers."""
    model_type, heads = config.get("model_type"), sizes["num_attention_heads"]
    if model_type == "llama" or (KV_HEADS.key in config and config[KV_HEADS.key] is None):
        kv_heads = read_field(config, replace(KV_HEADS, default=heads, nullable=True))
    else:
        kv_heads = read_field(config, KV_HEADS)
    derived = model_type not in EXPLICIT_HEAD_DIM and config.get(HEAD_DIM.key) is None
    if derived or model_type == "llama":
        check_multiple(sizes, "hidden_size", "num_attention_heads")
    content = {HEAD_DIM.key: sizes["hidden_size"] // heads} if derived else config
    found = {KV_HEADS.key: kv_heads, HEAD_DIM.key: read_field(content, HEAD_DIM)}
    check_multiple({**sizes, **found}, "num_attention_heads", KV_HEADS.key)
    return found


def _rope(config: Mapping[str, Any], positions: int, theta: object) -> RopeConfig:
    rope = read_rope(config, positions, (PLAIN, LLAMA3, YARN), theta)
    if rope.share != 1.0:
        raise UnsupportedModelError(
            f"config.json: `{SHARE}: {shown(rope.share)}` is not implemented"
        )
    return rope


def tensor_table(config: DenseConfig, prefix: str) -> list[TensorSpec]:
    """All tensors of the checkpoint, in the order of the forward pass."""
    h = config.hidden_size
    return [
        TensorSpec(f"{prefix}embed_tokens.weight", (config.vocab_size, h), "embedding"),
        *layer_table(config, prefix),
        TensorSpec(f"{prefix}norm.weight", (h,), "norm"),
        TensorSpec("lm_head.weight", (config.vocab_size, h), "head"),
    ]


def layer_table(config: DenseConfig, prefix: str) -> list[TensorSpec]:
    """Tensors of all layers."""
    h = config.hidden_size
    table = []
    for i in range(config.num_hidden_layers):
        p = f"{prefix}layers.{i}"
        table += [
            TensorSpec(f"{p}.input_layernorm.weight", (h,), "norm"),
            *_attention(config, f"{p}.self_attn"),
            TensorSpec(f"{p}.post_attention_layernorm.weight", (h,), "norm"),
            *mlp_layer(config, f"{p}.mlp"),
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


ARCHITECTURE = Architecture(
    model_types=MODEL_TYPES,
    read_config=DenseConfig.from_hf,
    tensor_table=tensor_table,
    stream=Stream(
        readers={
            "input_layernorm": ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"),
            "post_attention_layernorm": MLP_READERS,
        },
        writers=("self_attn.o_proj", *MLP_WRITERS),
    ),
)
