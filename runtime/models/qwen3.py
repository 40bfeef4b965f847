"""Qwen3 (dense): q/k-normed grouped-query attention and SwiGLU, over the ops of one backend."""

from dataclasses import dataclass

from torch import Tensor

from lowbit.formats.architectures.qwen3 import Qwen3Config
from lowbit.runtime.cache import KVCache
from lowbit.runtime.linear import Linear
from lowbit.runtime.ops import Ops, Rope


@dataclass(frozen=True, slots=True)
class Layer:
    """Weights of one decoder layer; q/k/v and gate/up are fused by rows."""

    input_norm: Tensor  # [h]
    qkv: Linear  # [(Hq + 2 * Hkv) * D, h]
    q_norm: Tensor  # [D]
    k_norm: Tensor  # [D]
    o: Linear  # [h, Hq * D]
    post_norm: Tensor  # [h]
    gate_up: Linear  # [2 * I, h], gate rows first
    down: Linear  # [h, I]


@dataclass(frozen=True, slots=True)
class Qwen3:
    """A loaded model: weights on one device and the ops that run there."""

    config: Qwen3Config
    embedding: Tensor  # [V, h]
    layers: tuple[Layer, ...]
    norm: Tensor  # [h]
    head: Linear  # [V, h]
    rope: Rope
    ops: Ops

    def hidden(self, ids: Tensor, cache: KVCache) -> Tensor:
        """Run M tokens through the layers and append their keys and values.

        Args:
            ids: [M] int64 on the model's device; they follow the tokens already in the cache.
            cache: written at rows `position .. position + M - 1`; its counters are the caller's.

        Returns:
            [M, h], before the final norm.
        """
        ops, eps = self.ops, self.config.rms_norm_eps
        x = ops.embed(ids, self.embedding)  # [M, h]
        for index, layer in enumerate(self.layers):
            qkv = ops.norm_linear(x, layer.input_norm, eps, layer.qkv)
            mixed = ops.attention(
                qkv, layer.q_norm, layer.k_norm, eps, self.rope, cache, index
            )  # [M, Hq * D]
            x = ops.linear_add(mixed, layer.o, x)
            act = ops.norm_swiglu(x, layer.post_norm, eps, layer.gate_up)  # [M, I]
            x = ops.linear_add(act, layer.down, x)
        return x

    def logits(self, hidden: Tensor) -> Tensor:
        """Final norm and head: [M, h] to [M, V] float32."""
        return self.ops.norm_linear(
            hidden, self.norm, self.config.rms_norm_eps, self.head
        ).float()
