"""DFlash: drafts a block of tokens of another model, the target, in one pass.

The context of a position is made of outputs of the target's layers there, side by side:
`hidden_norm(fc(outputs))`. Every layer keeps the keys and values of that context, which the
layers above never change. A block is the last known token, then mask tokens; its queries see the
context before it, and the keys and values of the block itself, which are not kept. Embedding and
head are the target's.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import Generic, TypeVar

import torch
from torch import Tensor

from lowbit.formats.architectures.config import BlockDrafts
from lowbit.formats.architectures.dflash import DFlashConfig
from lowbit.formats.layout.scheme import Scheme
from lowbit.runtime.backends.ops import DraftOps
from lowbit.runtime.models.block_head import BlockHead
from lowbit.runtime.models.layer_parts import run_mlp
from lowbit.runtime.state.pages import KVPages
from lowbit.runtime.state.rope import rope_tables
from lowbit.runtime.state.step import Step
from lowbit.runtime.weights.layers import AttentionLayer, ContextLayers
from lowbit.runtime.weights.linear import MlpWeights
from lowbit.runtime.weights.weights import Weights

W = TypeVar("W")  # what the backend keeps a linear as
KEPT_TWICE = (".k_proj", ".v_proj")  # modules whose rows `Layer` and `Context` both have


@dataclass(frozen=True, slots=True)
class Convolution(Generic[W]):
    """A convolution over the tokens of a block, before and behind a part of a layer."""

    base: Tensor  # [2, T, h], T taps of both sides
    coefficients: W  # [2 * T * G, h], what a token's hidden state adds to them, in G groups


@dataclass(frozen=True, slots=True)
class Layer(Generic[W]):
    """Weights of one layer; q/k/v are fused by rows."""

    input_norm: Tensor  # [h]
    qkv: W  # [(Hq + 2 * Hkv) * D, h]
    attention: AttentionLayer
    o: W  # [h, Hq * D]
    post_norm: Tensor  # [h]
    mlp: MlpWeights[W]
    around_attention: Convolution[W] | None = None  # None without
    around_mlp: Convolution[W] | None = None


@dataclass(frozen=True, slots=True)
class Context(Generic[W]):
    """Keys and values of the context for layers of one scheme; their rows are in `Layer` too."""

    kv: W  # [L * 2 * Hkv * D, h], k, then v of each layer
    layers: ContextLayers  # the L layers


@dataclass(frozen=True, slots=True)
class DFlash(Generic[W]):
    """A loaded drafter: weights on one device and the ops that run there."""

    config: DFlashConfig
    fc: W  # [h, n * h]
    hidden_norm: Tensor  # [h]
    contexts: tuple[Context[W], ...]  # of all layers
    layers: tuple[Layer[W], ...]
    norm: Tensor  # [h]
    ops: DraftOps[W]
    head: BlockHead | None = None  # chooses drafts; None for the likeliest of each place

    @property
    def blocks(self) -> BlockDrafts:
        """Layers of the target that are read, and the size of a block."""
        return self.config.blocks

    def read(self, outputs: Tensor, pages: KVPages, step: Step) -> Tensor:
        """Write keys and values of the context at M positions.

        Args:
            outputs: [M, n * h], of the target's layers.

        Returns:
            [M, h], the context before `hidden_norm`.
        """
        ops, eps = self.ops, self.config.rms_norm_eps
        joined = ops.product(outputs, self.fc)  # [M, h]
        for context in self.contexts:
            kv = ops.product(joined, context.kv, norm=self.hidden_norm, eps=eps)
            ops.write_context(kv, context.layers, pages, step)
        return joined

    def hidden(self, x: Tensor, pages: KVPages, step: Step) -> Tensor:
        """Run a block of each sequence through the layers.

        Args:
            x: [M, h], embedded tokens.

        Returns:
            [M, h], before the final norm.
        """
        for layer in self.layers:
            x = self._attend(x, layer, pages, step)
            x = self._mlp(x, layer)
        return x

    def _attend(self, x: Tensor, layer: Layer[W], pages: KVPages, step: Step) -> Tensor:
        """Add the output of a layer's attention to x."""
        ops, eps, around = self.ops, self.config.rms_norm_eps, layer.around_attention
        if around is None:
            qkv = ops.product(x, layer.qkv, norm=layer.input_norm, eps=eps)
            mixed = ops.attend_block(qkv, layer.attention, pages, step)
            return ops.product(mixed, layer.o, added=x)
        before, own = self._convolved(x, layer.input_norm, around)
        mixed = ops.attend_block(ops.product(before, layer.qkv), layer.attention, pages, step)
        return ops.convolve(
            ops.product(mixed, layer.o), own, around.base, 1, self.blocks.size, added=x
        )

    def _mlp(self, x: Tensor, layer: Layer[W]) -> Tensor:
        """Add the output of a layer's MLP to x."""
        ops, eps, around = self.ops, self.config.rms_norm_eps, layer.around_mlp
        if around is None:
            return run_mlp(ops, x, layer.post_norm, eps, layer.mlp)
        before, own = self._convolved(x, layer.post_norm, around)
        inner = ops.product(before, layer.mlp.gate_up, swiglu=True)
        return ops.convolve(
            ops.product(inner, layer.mlp.down), own, around.base, 1, self.blocks.size, added=x
        )

    def _convolved(self, x: Tensor, norm: Tensor, around: Convolution[W]) -> tuple[Tensor, Tensor]:
        """Input of a part of a layer, and the coefficients of its convolution."""
        normed = self.ops.rms_norm(x, norm, self.config.rms_norm_eps)
        own = self.ops.product(normed, around.coefficients)
        return self.ops.convolve(normed, own, around.base, 0, self.blocks.size), own


def build(config: DFlashConfig, weights: Weights[W], ops: DraftOps[W], context: int) -> DFlash[W]:
    """Read the weights of a checked checkpoint into a drafter for `context` positions."""
    positions, scaling = context + config.blocks.size, config.rope_scaling
    rope = rope_tables(positions, config.head_dim, config.rope_theta, weights.device, scaling)
    layers = []
    for index in range(config.num_hidden_layers):
        p, attn = f"layers.{index}", f"layers.{index}.self_attn"
        layers.append(
            Layer(
                input_norm=weights.tensor(f"{p}.input_layernorm.weight"),
                qkv=weights.linear(*(f"{attn}.{x}_proj" for x in "qkv")),
                attention=AttentionLayer(
                    index,
                    rope,
                    config.rms_norm_eps,
                    weights.tensor(f"{attn}.q_norm.weight"),
                    weights.tensor(f"{attn}.k_norm.weight"),
                    window=config.windows[index],
                    causal=config.causal[index],
                ),
                o=weights.linear(f"{attn}.o_proj"),
                post_norm=weights.tensor(f"{p}.post_attention_layernorm.weight"),
                mlp=MlpWeights(
                    weights.linear(f"{p}.mlp.gate_proj", f"{p}.mlp.up_proj", paired=True),
                    weights.linear(f"{p}.mlp.down_proj"),
                ),
                around_attention=_convolution(config, weights, f"{p}.attention_conv"),
                around_mlp=_convolution(config, weights, f"{p}.mlp_conv"),
            )
        )
    return DFlash(
        config=config,
        fc=weights.linear("fc"),
        hidden_norm=weights.tensor("hidden_norm.weight"),
        contexts=tuple(_contexts(weights, [layer.attention for layer in layers])),
        layers=tuple(layers),
        norm=weights.tensor("norm.weight"),
        ops=ops,
    )


def _convolution(config: DFlashConfig, weights: Weights[W], p: str) -> Convolution[W] | None:
    if config.convolutions is None:
        return None
    base = weights.tensor(f"{p}.base_kernel")
    return Convolution(base, weights.linear(f"{p}.kernel_projection"))


def _contexts(weights: Weights[W], layers: Sequence[AttentionLayer]) -> Iterator[Context[W]]:
    """Linears of the context, one for all layers in a row that have the same scheme."""

    def scheme(layer: AttentionLayer) -> Scheme | None:
        return weights.schemes.get(f"layers.{layer.index}.self_attn.k_proj")

    for _, found in groupby(layers, scheme):
        some = list(found)
        names = [f"layers.{each.index}.self_attn.{x}_proj" for each in some for x in "kv"]
        gains = torch.stack([each.k_norm for each in some if each.k_norm is not None])
        rope, eps = some[0].rope, some[0].eps
        yield Context(weights.linear(*names), ContextLayers(some[0].index, rope, eps, gains))
