"""The few operations a decoder needs, as one backend (`lowbit.runtime.cpu`, `.cuda`) gives them.

A backend is a module of plain functions; `Ops` is the protocol that type-checks it. W is what
the backend keeps a linear layer as: `Linear` on a GPU, `lowbit.runtime.cpu.CpuLinear` on a CPU.
Activations are [M, ...] in the model's dtype; M = 1 is a decode step.
"""

from dataclasses import dataclass
from typing import Protocol, TypeVar

import torch
from torch import Tensor

from lowbit.runtime.cache import KVCache

W = TypeVar("W", contravariant=True)


@dataclass(frozen=True, slots=True)
class Rope:
    """Rotation tables, half-split pairing: cos, sin [T, D / 2] float32 for each position."""

    cos: Tensor
    sin: Tensor


def rope_tables(positions: int, dim: int, theta: float, device: str) -> Rope:
    """Tables for positions 0 to positions - 1; dim is the number of rotated dimensions.

    Angles are FP32 products, as the models were trained with.
    """
    exponents = torch.arange(0, dim, 2, dtype=torch.float32) / dim
    angles = torch.arange(positions, dtype=torch.float32)[:, None] * (1.0 / theta**exponents)
    return Rope(cos=angles.cos().to(device), sin=angles.sin().to(device))


class Ops(Protocol[W]):
    """What `lowbit.runtime.models` calls."""

    def embed(self, ids: Tensor, table: Tensor) -> Tensor:
        """Rows of table [V, h] for ids [M]: [M, h]."""

    def norm_linear(self, x: Tensor, norm: Tensor, eps: float, w: W) -> Tensor:
        """`rms_norm(x) * norm @ w.T`: [M, K] to [M, N]."""

    def norm_logits(self, x: Tensor, norm: Tensor, eps: float, w: W) -> Tensor:
        """The same for a head: [M, K] to [M, V] float32, not rounded where the kernel allows."""

    def norm_swiglu(self, x: Tensor, norm: Tensor, eps: float, gate_up: W) -> Tensor:
        """`silu(gate) * up` of the normed x: [M, K] to [M, N / 2]; gate is the first N / 2 rows."""

    def linear_add(self, x: Tensor, w: W, residual: Tensor) -> Tensor:
        """`residual + x @ w.T`: [M, N]; a new tensor or residual itself, updated."""

    def attention(
        self,
        qkv: Tensor,
        q_norm: Tensor,
        k_norm: Tensor,
        eps: float,
        rope: Rope,
        cache: KVCache,
        layer: int,
    ) -> Tensor:
        """Norm and rotate q and k, append k and v to the cache, attend causally.

        Args:
            qkv: [M, (Hq + 2 * Hkv) * D], q heads first, then k, then v.
            q_norm: [D] gain of every q head.
            k_norm: [D] gain of every k head.
            eps: of the norms.
            rope: tables for every position of the context.
            cache: [L, Hkv, T, D]; token m takes row `length + m` (host) = `position + m` (device).
            layer: which of the cache's L layers.

        Returns:
            [M, Hq * D].
        """
