"""Layers of DFlash drafters, which train_tiny_drafter.py and train_drafter.py train."""

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from tiny_heads import DRAFTS, EPS, Convolution, Gain
from torch import Tensor, nn
from torch.nn import functional


@dataclass(frozen=True)
class Sizes:
    """Sizes of a drafter's layers."""

    taps: tuple[int, ...]  # layers of the target whose outputs it reads
    layers: int
    inner: int  # width of the MLP
    heads: int
    kv_heads: int
    head_dim: int
    theta: float  # of the rotary embedding


TINY = Sizes((0, 1, 2), layers=2, inner=512, heads=4, kv_heads=2, head_dim=64, theta=10_000.0)


def drafter_config(target: dict[str, Any], sizes: Sizes = TINY) -> dict[str, Any]:
    """config.json of the drafter, as those on the Hub are."""
    text = target.get("text_config", target)
    return {
        "architectures": ["DFlashDraftModel"],
        "model_type": "qwen3",
        "dtype": "bfloat16",
        "vocab_size": text["vocab_size"],
        "hidden_size": text["hidden_size"],
        "intermediate_size": sizes.inner,
        "num_hidden_layers": sizes.layers,
        "num_attention_heads": sizes.heads,
        "num_key_value_heads": sizes.kv_heads,
        "head_dim": sizes.head_dim,
        "hidden_act": "silu",
        "max_position_embeddings": text["max_position_embeddings"],
        "rms_norm_eps": EPS,
        "rope_theta": sizes.theta,
        "attention_bias": False,
        "tie_word_embeddings": False,
        "layer_types": ["full_attention"] * sizes.layers,
        "block_size": 1 + DRAFTS,
        "num_target_layers": text["num_hidden_layers"],
        "dflash_config": {
            "mask_token_id": text["vocab_size"] - 1,  # padding, which no text has
            "target_layer_ids": list(sizes.taps),
        },
    }


def rotated(x: Tensor, positions: Tensor, theta: float) -> Tensor:
    """Rotate heads [B, H, T, D] by positions [B, T]."""
    D = x.shape[-1]
    frequencies = theta ** (-torch.arange(0, D, 2, device=x.device) / D)
    angles = positions[:, None, :, None] * frequencies
    a, b = x.chunk(2, dim=-1)
    cos, sin = angles.cos(), angles.sin()
    return torch.cat((a * cos - b * sin, b * cos + a * sin), dim=-1)


class Layer(nn.Module):
    """A layer of Qwen3 whose queries come from blocks alone."""

    attention_conv: Convolution | None = None
    mlp_conv: Convolution | None = None

    def __init__(self, h: int, convolved: bool, sizes: Sizes) -> None:
        """Random weights."""
        super().__init__()
        self.sizes = sizes
        width, kv_width = (n * sizes.head_dim for n in (sizes.heads, sizes.kv_heads))

        def linear(rows: int, columns: int) -> nn.Linear:
            made = nn.Linear(columns, rows, bias=False)
            nn.init.normal_(made.weight, std=columns**-0.5)
            return made

        self.self_attn = nn.ModuleDict(
            {
                "q_proj": linear(width, h),
                "k_proj": linear(kv_width, h),
                "v_proj": linear(kv_width, h),
                "o_proj": linear(h, width),
                "q_norm": Gain(sizes.head_dim),
                "k_norm": Gain(sizes.head_dim),
            }
        )
        self.mlp = nn.ModuleDict(
            {
                "gate_proj": linear(sizes.inner, h),
                "up_proj": linear(sizes.inner, h),
                "down_proj": linear(h, sizes.inner),
            }
        )
        self.input_layernorm, self.post_attention_layernorm = Gain(h), Gain(h)
        if convolved:
            self.attention_conv, self.mlp_conv = Convolution(h), Convolution(h)

    def forward(
        self, x: Tensor, context: Tensor, positions: Tensor, mask: Tensor, size: int
    ) -> Tensor:
        """[B, Q, h] of blocks behind a context [B, T, h]; mask is [B, Q, T + Q]."""
        own, mlp = self.self_attn, self.mlp

        def around(conv: Convolution | None, given: Tensor, x: Tensor, side: int) -> Tensor:
            return x if conv is None else conv(given, x, side, size)

        given = self.input_layernorm(x)
        normed = around(self.attention_conv, given, given, 0)
        both = torch.cat((context, normed), dim=1)

        def heads(values: Tensor) -> Tensor:
            return values.view(*values.shape[:-1], -1, self.sizes.head_dim).transpose(1, 2)

        theta, behind = self.sizes.theta, positions[:, context.shape[1] :]
        q = rotated(own["q_norm"](heads(own["q_proj"](normed))), behind, theta)
        k = rotated(own["k_norm"](heads(own["k_proj"](both))), positions, theta)
        v, shared = heads(own["v_proj"](both)), q.shape[1] // k.shape[1]
        if x.is_cuda:  # where shared keys beside a mask would have all scores in memory
            k, v = (each.repeat_interleave(shared, dim=1) for each in (k, v))
        mixed = functional.scaled_dot_product_attention(
            q, k, v, attn_mask=mask[:, None], enable_gqa=not x.is_cuda
        )
        mixed = own["o_proj"](mixed.transpose(1, 2).flatten(2))
        x = x + around(self.attention_conv, given, mixed, 1)
        given = self.post_attention_layernorm(x)
        normed = around(self.mlp_conv, given, given, 0)
        out = mlp["down_proj"](functional.silu(mlp["gate_proj"](normed)) * mlp["up_proj"](normed))
        return x + around(self.mlp_conv, given, out, 1)


class DFlash(nn.Module):
    """The layers of a drafter; its embedding and head are the target's."""

    def __init__(
        self, h: int, size: int = 1 + DRAFTS, convolved: bool = False, sizes: Sizes = TINY
    ) -> None:
        """Random weights; `size` is that of a block."""
        super().__init__()
        self.size = size
        self.fc = nn.Linear(len(sizes.taps) * h, h, bias=False)
        self.hidden_norm, self.norm = Gain(h), Gain(h)
        self.layers = nn.ModuleList(Layer(h, convolved, sizes) for _ in range(sizes.layers))

    def context(self, hidden_taps: Tensor) -> Tensor:
        """Context [B, T, h] of a text by outputs of the target's layers [B, T, n * h]."""
        normed: Tensor = self.hidden_norm(self.fc(hidden_taps))
        return normed

    def forward(self, context: Tensor, blocks: Tensor, anchors: Tensor) -> Tensor:
        """Hidden states of blocks.

        Args:
            context: [B, T, h] of a text.
            blocks: [B, A * size, h], embedded tokens.
            anchors: [B, A], place of each block's first token in the text.

        Returns:
            [B, A * size, h], after the last norm.
        """
        B, T, _ = context.shape
        places = torch.arange(max(T, self.size), device=anchors.device)
        own = (anchors[..., None] + places[: self.size]).flatten(1)
        first = anchors.repeat_interleave(self.size, dim=1)
        positions = torch.cat((places[:T].expand(B, T), own), dim=1)
        seen = places[:T] < first[..., None]
        number = torch.arange(anchors.shape[1], device=anchors.device)
        number = number.repeat_interleave(self.size)
        mask = torch.cat((seen, (number[:, None] == number).expand(B, -1, -1)), dim=2)
        x = blocks
        for layer in self.layers:
            x = layer(x, context, positions, mask, self.size)
        normed: Tensor = self.norm(x)
        return normed


def write(stored: dict[str, Tensor], config: dict[str, Any], out: Path) -> None:
    """Write a drafter as published ones look, its tensors in BF16."""
    out.mkdir(parents=True, exist_ok=True)
    tensors = {name: w.detach().bfloat16().contiguous().cpu() for name, w in stored.items()}
    save_file(tensors, out / "model.safetensors", metadata={"format": "pt"})
    (out / "config.json").write_text(json.dumps(config, indent=2) + "\n")
