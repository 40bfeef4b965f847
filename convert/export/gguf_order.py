"""Row and column orders in which GGUF differs from the checkpoint.

llama.cpp repeats the query and key heads of a gated DeltaNet in turn (0 1 0 1), the checkpoint
each on the spot (0 0 1 1): value heads change places wherever they occur. Its `llama` rotates
neighbours instead of halves, so rows of q and k are interleaved.
"""

from collections.abc import Iterator
from itertools import pairwise

import torch
from torch import Tensor

from lowbit.formats.architectures import Config
from lowbit.formats.architectures.dense import DenseConfig
from lowbit.formats.architectures.qwen3_5 import Qwen35Config


def value_heads(key_heads: int, value_heads: int) -> Tensor:
    """The checkpoint's number of every value head, in the order of GGUF."""
    return torch.arange(value_heads).view(key_heads, -1).T.flatten()


def _spread(heads: Tensor, size: int) -> Tensor:
    """Row numbers of the heads, `size` rows each."""
    return (heads[:, None] * size + torch.arange(size)).flatten()


def rows_of(config: Config, kind: str, model_type: str) -> Tensor | None:
    """The checkpoint's number of every row in GGUF's order; None where it is the same.

    Args:
        config: of the architecture.
        kind: name of the tensor within its layer, `.weight` and `.bias` left out.
        model_type: of config.json.
    """
    if isinstance(config, DenseConfig):
        return _interleaved(config, kind) if model_type == "llama" else None
    heads = value_heads(config.linear_num_key_heads, config.linear_num_value_heads)
    if config.linear_num_key_heads == config.linear_num_value_heads:
        return None
    if kind in ("linear_attn.in_proj_qkv", "linear_attn.conv1d"):
        keys = 2 * config.key_dim
        values = _spread(heads, config.linear_value_head_dim) + keys
        return torch.cat((torch.arange(keys), values))
    if kind == "linear_attn.in_proj_z":
        return _spread(heads, config.linear_value_head_dim)
    if kind in (
        "linear_attn.in_proj_a",
        "linear_attn.in_proj_b",
        "linear_attn.A_log",
        "linear_attn.dt_bias",
    ):
        return heads
    return None


def _interleaved(config: DenseConfig, kind: str) -> Tensor | None:
    """Row order that interleaves the two halves of every head."""
    heads = {
        "self_attn.q_proj": config.num_attention_heads,
        "self_attn.k_proj": config.num_key_value_heads,
    }.get(kind)
    if heads is None:
        return None
    return torch.arange(heads * config.head_dim).view(heads, 2, -1).transpose(1, 2).flatten()


def columns_of(config: Config, kind: str) -> Tensor | None:
    """The checkpoint's number of every column in GGUF's order; None where it is the same."""
    if kind != "linear_attn.out_proj" or not isinstance(config, Qwen35Config):
        return None
    if config.linear_num_key_heads == config.linear_num_value_heads:
        return None
    heads = value_heads(config.linear_num_key_heads, config.linear_num_value_heads)
    return _spread(heads, config.linear_value_head_dim)


def runs(order: Tensor | None, N: int, most: int) -> Iterator[tuple[int, int]]:
    """Consecutive rows in GGUF's order as (start, stop), at most `most` rows each."""
    if order is None:
        order = torch.arange(N)
    breaks = (order.diff() != 1).nonzero().flatten() + 1
    edges = [0, *breaks.tolist(), N]
    for first, last in pairwise(edges):
        start = int(order[first])
        for part in range(start, start + last - first, most):
            yield part, min(part + most, start + last - first)
