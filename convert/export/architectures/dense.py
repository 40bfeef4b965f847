"""Dense decoders in GGUF and MLX; MLX has their tensors as the checkpoint does.

llama.cpp's `llama` rotates neighbours instead of halves, so rows of q and k are interleaved.
"""

import torch
from torch import Tensor

from lowbit.convert.export.architectures.architecture import ATTENTION, MLP, Exported, Gguf, Mlx
from lowbit.convert.export.gguf_file import GgufTensor
from lowbit.convert.export.rope import mlx_rope
from lowbit.convert.export.source import PackedSource
from lowbit.formats.architectures.dense import DenseConfig
from lowbit.formats.architectures.rope import Llama3Rope
from lowbit.formats.errors import FormatError


def _check(config: DenseConfig, source: PackedSource) -> None:
    """Refuse heads that llama.cpp's qwen2 does not have."""
    width = config.num_attention_heads * config.head_dim
    if source.model_type == "qwen2" and width != config.hidden_size:
        raise FormatError(
            f"{config.num_attention_heads} heads of {config.head_dim}: llama.cpp's qwen2 "
            f"wants them to add up to hidden_size = {config.hidden_size}"
        )


def _rows_of(config: DenseConfig, model_type: str, kind: str) -> Tensor | None:
    """Row order that interleaves the two halves of every head."""
    heads = {
        "self_attn.q_proj": config.num_attention_heads,
        "self_attn.k_proj": config.num_key_value_heads,
    }.get(kind)
    if model_type != "llama" or heads is None:
        return None
    return torch.arange(heads * config.head_dim).view(heads, 2, -1).transpose(1, 2).flatten()


def _rope_factors(config: DenseConfig) -> list[GgufTensor]:
    """Divisors of the rotation frequencies for a `llama3` rope scaling; empty for other ropes."""
    scaling = config.rope_scaling
    if not isinstance(scaling, Llama3Rope):
        return []
    D, theta = config.head_dim, config.rope_theta
    lengths = 2 * torch.pi * theta ** (torch.arange(0, D, 2, dtype=torch.float64) / D)
    low, high = scaling.low_freq_factor, scaling.high_freq_factor
    smooth = (scaling.original_max_position / lengths - low) / (high - low)
    factors = 1 / ((1 - smooth.clamp(0, 1)) / scaling.factor + smooth.clamp(0, 1))
    return [GgufTensor("rope_freqs.weight", "F32", (D // 2,), lambda: [factors.to(torch.float32)])]


EXPORTED = Exported(
    gguf=Gguf(
        names={"qwen3": "qwen3", "qwen2": "qwen2", "llama": "llama"},
        inside={**ATTENTION, "post_attention_layernorm": "ffn_norm", **MLP},
        check=_check,
        rows_of=_rows_of,
        more_tensors=_rope_factors,
    ),
    mlx=Mlx(config=lambda config, source, content: mlx_rope(config, content)),
)
