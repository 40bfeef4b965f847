"""Qwen3.5 in GGUF and MLX.

llama.cpp repeats the query and key heads of a gated DeltaNet in turn (0 1 0 1), the checkpoint
each on the spot (0 0 1 1): value heads change places wherever they occur. GGUF holds norm gains as
w + 1 and decays as -exp(A_log), both computed in FP32.

mlx-lm writes the convolution with its channels last and norm gains as w + 1.
"""

from typing import Any

import torch
from torch import Tensor

from lowbit.convert.export.architectures.architecture import (
    ATTENTION,
    MLP,
    Change,
    Exported,
    Gguf,
    Mlx,
)
from lowbit.convert.export.gguf_file import BLOCK, Value
from lowbit.convert.export.rope import mlx_scaling
from lowbit.convert.export.source import PackedSource
from lowbit.formats.architectures.decoder import FULL, LINEAR, TEXT, text_part
from lowbit.formats.architectures.qwen3_5 import NESTED_PREFIX, Qwen35Config
from lowbit.formats.architectures.table import Role
from lowbit.formats.errors import FormatError

INSIDE = {
    **ATTENTION,
    "post_attention_layernorm": "post_attention_norm",
    **MLP,
    "linear_attn.in_proj_qkv": "attn_qkv",
    "linear_attn.in_proj_z": "attn_gate",
    "linear_attn.in_proj_b": "ssm_beta",
    "linear_attn.in_proj_a": "ssm_alpha",
    "linear_attn.conv1d": "ssm_conv1d",
    "linear_attn.A_log": "ssm_a",
    "linear_attn.dt_bias": "ssm_dt.bias",
    "linear_attn.norm": "ssm_norm",
    "linear_attn.out_proj": "ssm_out",
}
MTP = {
    "mtp.fc.weight": "nextn.eh_proj.weight",
    "mtp.pre_fc_norm_embedding.weight": "nextn.enorm.weight",
    "mtp.pre_fc_norm_hidden.weight": "nextn.hnorm.weight",
    "mtp.norm.weight": "nextn.shared_head_norm.weight",
}
VALUE_CHANNELS = ("linear_attn.in_proj_qkv", "linear_attn.conv1d")  # after those of q and k
VALUE_HEADS = (
    "linear_attn.in_proj_a",
    "linear_attn.in_proj_b",
    "linear_attn.A_log",
    "linear_attn.dt_bias",
)
GATED_NORM = "linear_attn.norm"
CONV = "linear_attn.conv1d.weight"
MLX_PREFIX = "language_model."


def _check(config: Qwen35Config, source: PackedSource) -> None:
    """Refuse sizes that llama.cpp does not have."""
    key, value = config.linear_key_head_dim, config.linear_value_head_dim
    if key != value or value % BLOCK:
        raise FormatError(
            f"linear heads of {key} and {value}: llama.cpp wants one size, a multiple of {BLOCK}"
        )
    if source.has_mtp and config.mtp_layers != 1:
        raise FormatError(f"{config.mtp_layers} layers of multi-token prediction, expected 1")


def _value_heads(config: Qwen35Config) -> Tensor | None:
    """The checkpoint's number of every value head, in GGUF's order; None where it is the same."""
    keys, values = config.linear_num_key_heads, config.linear_num_value_heads
    return None if keys == values else torch.arange(values).view(keys, -1).T.flatten()


def _spread(heads: Tensor, size: int) -> Tensor:
    """Row numbers of the heads, `size` rows each."""
    return (heads[:, None] * size + torch.arange(size)).flatten()


def _rows_of(config: Qwen35Config, model_type: str, kind: str) -> Tensor | None:
    """Row order of a tensor whose rows belong to value heads."""
    heads = _value_heads(config)
    if heads is None:
        return None
    if kind in VALUE_HEADS:
        return heads
    values = _spread(heads, config.linear_value_head_dim)
    if kind in VALUE_CHANNELS:
        keys = 2 * config.linear_layers.key_dim
        return torch.cat((torch.arange(keys), values + keys))
    return values if kind == "linear_attn.in_proj_z" else None


def _columns_of(config: Qwen35Config, kind: str) -> Tensor | None:
    """Column order of the output projection, whose input are value heads."""
    heads = _value_heads(config) if kind == "linear_attn.out_proj" else None
    return None if heads is None else _spread(heads, config.linear_value_head_dim)


def _vector(kind: str, role: Role, value: Tensor) -> Tensor:
    """Gains around one, and decays instead of their logarithms."""
    if role == "norm" and kind != GATED_NORM:
        return value + 1
    return -torch.exp(value) if kind == "linear_attn.A_log" else value


def _metadata(config: Qwen35Config, source: PackedSource, arch: str) -> dict[str, Value]:
    result: dict[str, Value] = {
        f"{arch}.rope.dimension_sections": [*config.sections, 0],
        f"{arch}.ssm.conv_kernel": config.linear_conv_kernel_dim,
        f"{arch}.ssm.state_size": config.linear_key_head_dim,
        f"{arch}.ssm.group_count": config.linear_num_key_heads,
        f"{arch}.ssm.time_step_rank": config.linear_num_value_heads,
        f"{arch}.ssm.inner_size": config.linear_layers.value_dim,
        f"{arch}.attention.recurrent_layers": [
            *(kind == LINEAR for kind in config.layer_types),
            *([False] * source.has_mtp),
        ],
    }
    if FULL in config.layer_types:  # for llama.cpp releases that do not read the list
        result[f"{arch}.full_attention_interval"] = _interval(config)
    if source.has_mtp:
        result[f"{arch}.nextn_predict_layers"] = 1
    return result


def _interval(config: Qwen35Config) -> int:
    """Distance between full-attention layers; the number of layers plus one without any."""
    kinds = config.layer_types
    return kinds.index(FULL) + 1 if FULL in kinds else len(kinds) + 1


def _check_interval(config: Qwen35Config) -> None:
    """Refuse layers in an order that mlx-lm does not know."""
    interval = _interval(config)
    layers = range(1, config.num_hidden_layers + 1)
    if config.layer_types != tuple(LINEAR if i % interval else FULL for i in layers):
        raise FormatError(
            "config.json: full-attention layers are not at regular distances, as mlx-lm expects"
        )


def _mlx_name(name: str) -> str:
    if name.startswith(NESTED_PREFIX):
        return f"{MLX_PREFIX}model.{name.removeprefix(NESTED_PREFIX)}"
    return MLX_PREFIX + name


def _change(name: str) -> Change | None:
    if name.endswith(CONV):
        return "conv"
    if name.endswith("norm.weight") and not name.endswith(f"{GATED_NORM}.weight"):
        return "gain"
    return None


def _mlx_config(
    config: Qwen35Config, source: PackedSource, content: dict[str, Any]
) -> dict[str, Any]:
    """State the values that mlx-lm would otherwise default differently."""
    content = {**content, "model_type": "qwen3_5"}  # mlx-lm does not know the text-only name
    text = {**text_part(content)}
    rope = {**(text.pop("rope_scaling", None) or text.get("rope_parameters") or {})}
    rope |= {
        "rope_theta": config.rope_theta,
        "partial_rotary_factor": config.rotary_dim / config.head_dim,
        **mlx_scaling(config.rope_scaling),
    }
    text |= {
        "rope_parameters": {"rope_type": "default", **rope},
        "full_attention_interval": _interval(config),
        "tie_word_embeddings": source.checkpoint.tied,
    }
    return {**content, TEXT: text} if TEXT in content else content | text


EXPORTED = Exported(
    gguf=Gguf(
        names={"qwen3_5": "qwen35", "qwen3_5_text": "qwen35"},
        inside=INSIDE,
        mtp=MTP,
        check=_check,
        rows_of=_rows_of,
        columns_of=_columns_of,
        vector=_vector,
        metadata=_metadata,
    ),
    mlx=Mlx(name_of=_mlx_name, check=_check_interval, change=_change, config=_mlx_config),
)
