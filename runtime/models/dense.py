"""Qwen3, Qwen2.5 and Llama 3: attention, then an MLP or experts, over the ops of one backend."""

from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from typing import Generic, TypeVar

import torch
from torch import Tensor

from lowbit.formats.architectures.dense import DenseConfig
from lowbit.runtime.backends.ops import Ops
from lowbit.runtime.models.layer_parts import Mlp, embed, last_of, read_ends, read_mlp, run_mlp
from lowbit.runtime.models.selected_rows import SelectedRows, head_logits
from lowbit.runtime.state.device_state import DeviceState
from lowbit.runtime.state.rope import rope_tables
from lowbit.runtime.state.step import Step
from lowbit.runtime.weights.layers import AttentionLayer
from lowbit.runtime.weights.table import Table
from lowbit.runtime.weights.weights import Weights

W = TypeVar("W")  # what the backend keeps a linear as


@dataclass(frozen=True, slots=True)
class Layer(Generic[W]):
    """Weights of one decoder layer; q/k/v are fused by rows."""

    input_norm: Tensor  # [h]
    qkv: W  # [(Hq + 2 * Hkv) * D, h]
    o: W  # [h, Hq * D]
    post_norm: Tensor  # [h]
    mlp: Mlp[W]
    attention: AttentionLayer
    qkv_bias: Tensor | None = None  # [(Hq + 2 * Hkv) * D]


@dataclass(frozen=True, slots=True)
class Dense(Generic[W]):
    """A loaded model: weights on one device and the ops that run there."""

    config: DenseConfig
    embedding: Table  # [V, h]
    layers: tuple[Layer[W], ...]
    norm: Tensor  # [h]
    head: W  # [V, h]
    ops: Ops[W]
    frequent: SelectedRows[W] | None = None  # rows of the head in more bits; None without some
    mtp: None = None  # no checkpoint of these families has a head that predicts several tokens

    def hidden(self, ids: Tensor, state: DeviceState, step: Step) -> Tensor:
        """Output of the last layer: see `each_layer`."""
        return last_of(self.each_layer(ids, state, step))

    def each_layer(self, ids: Tensor, state: DeviceState, step: Step) -> Iterator[Tensor]:
        """Run M tokens through the layers and append their keys and values.

        Args:
            ids: [M] int64 on the model's device.

        Yields:
            Output of each layer [M, h]; of the last one, before the final norm, [1, h] of the last
            token where no other is wanted.
        """
        ops, eps = self.ops, self.config.rms_norm_eps
        x = embed(ops, ids, self.embedding, step)  # [M, h]
        for layer in self.layers:
            qkv = ops.product(x, layer.qkv, norm=layer.input_norm, eps=eps, added=layer.qkv_bias)
            mixed = ops.attention(qkv, layer.attention, state.pages, step)  # [M, Hq * D]
            finish = partial(self._finish, layer)
            x = step.end(finish, mixed, x) if layer is self.layers[-1] else finish(mixed, x)
            yield x

    def _finish(self, layer: Layer[W], mixed: Tensor, x: Tensor) -> Tensor:
        """Output projection of heads [M, Hq * D], residual x [M, h], MLP: [M, h]."""
        x = self.ops.product(mixed, layer.o, added=x)
        return run_mlp(self.ops, x, layer.post_norm, self.config.rms_norm_eps, layer.mlp)

    def logits(self, hidden: Tensor) -> Tensor:
        """Final norm and head: [M, h] to [M, V] float32."""
        ends = self.head, self.norm, self.config.rms_norm_eps
        return head_logits(self.ops, hidden, *ends, self.frequent)


def build(
    config: DenseConfig, prefix: str, weights: Weights[W], ops: Ops[W], context: int
) -> Dense[W]:
    """Read the weights of a checked checkpoint into a model for `context` positions."""
    rope = rope_tables(
        context, config.head_dim, config.rope_theta, weights.device, config.rope_scaling
    )
    layers = []
    for index in range(config.num_hidden_layers):
        p = f"{prefix}layers.{index}"
        attn = f"{p}.self_attn"
        qkv = [f"{attn}.{x}_proj" for x in "qkv"]
        layers.append(
            Layer(
                input_norm=weights.tensor(f"{p}.input_layernorm.weight"),
                qkv=weights.linear(*qkv, normed=True),
                o=weights.linear(f"{attn}.o_proj"),
                post_norm=weights.tensor(f"{p}.post_attention_layernorm.weight"),
                mlp=read_mlp(weights, f"{p}.mlp", config.experts),
                attention=AttentionLayer(
                    index,
                    rope,
                    config.rms_norm_eps,
                    weights.tensor(f"{attn}.q_norm.weight") if config.qk_norm else None,
                    weights.tensor(f"{attn}.k_norm.weight") if config.qk_norm else None,
                ),
                qkv_bias=(
                    torch.cat([weights.tensor(f"{module}.bias") for module in qkv])
                    if config.qkv_bias
                    else None
                ),
            )
        )
    embedding, head = read_ends(weights, prefix, config.tie_word_embeddings)
    return Dense(
        config=config,
        embedding=embedding,
        layers=tuple(layers),
        norm=weights.tensor(f"{prefix}norm.weight"),
        head=head,
        ops=ops,
    )
