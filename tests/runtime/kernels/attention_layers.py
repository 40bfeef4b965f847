"""Heads of real models, and random attention layers over pages of random sequences."""

from dataclasses import dataclass, replace
from typing import NamedTuple

import torch
from torch import Tensor

from lowbit.runtime.kernels.attention.decode import attention_decode
from lowbit.runtime.state.pages import KVPages
from lowbit.runtime.state.rope import Rope
from lowbit.runtime.state.step import Span, Step
from lowbit.runtime.weights.layers import AttentionLayer
from tests.runtime.kernels.paged import clone, step_of

EPS = 1e-6
BF16, FP32 = torch.bfloat16, torch.float32
LAYER = 1


class Heads(NamedTuple):
    Hq: int
    Hkv: int
    D: int
    R: int
    gated: bool = False
    gain: torch.dtype | None = None

    def __str__(self) -> str:
        gain = str(self.gain).removeprefix("torch.")
        return f"{self.Hq}x{self.Hkv}x{self.D}-r{self.R}{'-gated' * self.gated}-{gain}"

    @property
    def width(self) -> int:
        """Elements of a token."""
        return ((2 if self.gated else 1) * self.Hq + 2 * self.Hkv) * self.D


REAL = {
    "qwen3-0.6b": Heads(16, 8, 128, 128, gain=BF16),
    "qwen3-8b": Heads(32, 8, 128, 128, gain=BF16),
    "qwen3-32b": Heads(64, 8, 128, 128, gain=BF16),
    "qwen3.5-2b": Heads(8, 2, 256, 64, gated=True, gain=FP32),
    "qwen3.5-9b": Heads(16, 4, 256, 64, gated=True, gain=FP32),
    "qwen3.5-27b": Heads(24, 4, 256, 64, gated=True, gain=FP32),
    "qwen2.5-0.5b": Heads(14, 2, 64, 64),
    "qwen2.5-7b": Heads(28, 4, 128, 128),
    "llama-3.2-1b": Heads(32, 8, 64, 64),
    "qwen3-235b": Heads(64, 4, 128, 128, gain=BF16),
}


def layer_of(heads: Heads, rope: Rope, device: str, index: int = LAYER) -> AttentionLayer:
    """A layer with random gains, so that some softmax weights dominate."""
    if heads.gain is None:
        return AttentionLayer(index, rope, EPS, gated=heads.gated)
    q_norm, k_norm = (1.5 + 0.3 * torch.randn(2, heads.D, device=device)).to(heads.gain)
    return AttentionLayer(index, rope, EPS, q_norm, k_norm, heads.gated)


@dataclass(frozen=True)
class Model:
    """Attention of one layer, and sequences of random tokens in pages."""

    heads: Heads
    layer: AttentionLayer
    pages: KVPages
    tables: Tensor

    def given(self, count: int) -> Tensor:
        """Random input of so many tokens."""
        return torch.randn(count, self.heads.width, device=self.tables.device).bfloat16()

    def attend(self, qkv: Tensor, step: Step) -> Tensor:
        return attention_decode(qkv, self.layer, self.pages, step).float()

    def attended(self, qkv: Tensor, spans: list[Span], reach: int = 0) -> tuple[Tensor, KVPages]:
        """The result and the pages after it; those of this model stay as they are."""
        own = replace(self, pages=clone(self.pages))
        return own.attend(qkv, step_of(self.tables, spans, reach)), own.pages

    def error(self, out: Tensor, ref: Tensor) -> float:
        """The largest error of a head, relative to its norm."""
        error = (out.double() - ref).view(len(ref), self.heads.Hq, -1).norm(dim=-1)
        return float((error / ref.view(len(ref), self.heads.Hq, -1).norm(dim=-1)).max())


def hopper() -> bool:
    return torch.cuda.is_available() and torch.cuda.get_device_capability()[0] == 9
