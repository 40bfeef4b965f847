"""Qwen3.5: layers of gated DeltaNet with gated full attention in between, over one backend."""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, Generic, TypeVar

import torch
from torch import Tensor

from lowbit.formats.architectures.decoder import FULL
from lowbit.formats.architectures.qwen3_5 import Qwen35Config
from lowbit.runtime.backends.ops import Ops
from lowbit.runtime.models.layer_parts import Mlp, embed, last_of, read_ends, read_mlp, run_mlp
from lowbit.runtime.models.selected_rows import SelectedRows, head_logits
from lowbit.runtime.state.device_state import DeviceState
from lowbit.runtime.state.rope import Rope, rope_by_axes, rope_tables
from lowbit.runtime.state.step import Step
from lowbit.runtime.weights.layers import AttentionLayer, DeltaLayer
from lowbit.runtime.weights.table import Table
from lowbit.runtime.weights.weights import Weights

if TYPE_CHECKING:
    from lowbit.runtime.models.qwen3_5_mtp import MtpHead

W = TypeVar("W")  # what the backend keeps a linear as


@dataclass(frozen=True, slots=True)
class Attention(Generic[W]):
    """Full attention with an output gate."""

    qkv: W  # [(2 * Hq + 2 * Hkv) * D, h]; each q head is its query, then its gate
    layer: AttentionLayer  # between the linears; gains are float32
    out: W  # [h, Hq * D]


@dataclass(frozen=True, slots=True)
class DeltaNet(Generic[W]):
    """Linear attention."""

    qkvz: W  # [C + Hv * Dv, h]
    ba: W  # [2 * Hv, h], dense
    layer: DeltaLayer  # between the linears
    out: W  # [h, Hv * Dv]


@dataclass(frozen=True, slots=True)
class Layer(Generic[W]):
    """Weights of one decoder layer; gains are float32."""

    input_norm: Tensor  # [h]
    mixer: Attention[W] | DeltaNet[W]
    post_norm: Tensor  # [h]
    mlp: Mlp[W]


@dataclass(frozen=True, slots=True)
class Qwen35(Generic[W]):
    """A loaded model: weights on one device and the ops that run there."""

    config: Qwen35Config
    embedding: Table  # [V, h]
    layers: tuple[Layer[W], ...]
    norm: Tensor  # [h] float32
    head: W  # [V, h]
    rope: Rope
    ops: Ops[W]
    frequent: SelectedRows[W] | None = None  # rows of the head in more bits; None without some
    mtp: "MtpHead[W] | None" = None

    def hidden(self, ids: Tensor, state: DeviceState, step: Step) -> Tensor:
        """Output of the last layer: see `each_layer`."""
        return last_of(self.each_layer(ids, state, step))

    def each_layer(self, ids: Tensor, state: DeviceState, step: Step) -> Iterator[Tensor]:
        """Run M tokens through the layers; keys, values and states are brought forward.

        Args:
            ids: [M] int64 on the model's device.

        Yields:
            Output of each layer [M, h]; of the last one, before the final norm, [1, h] of the last
            token where no other is wanted.
        """
        x, step = embed(self.ops, ids, self.embedding, step), self.turned(step)  # [M, h]
        for layer in self.layers:
            x = self.run_layer(x, layer, state, step, ends=layer is self.layers[-1])
            yield x

    def turned(self, step: Step) -> Step:
        """The step with rotary tables of its own where its tokens have three positions each."""
        if step.axes is None:
            return step
        rows = torch.arange(step.axes.shape[1], dtype=torch.int32, device=step.axes.device)
        rope = rope_by_axes(self.rope, step.axes, self.config.rope_sections)
        return replace(step, own_rope=(rope, rows))

    def run_layer(
        self, x: Tensor, layer: Layer[W], state: DeviceState, step: Step, ends: bool = False
    ) -> Tensor:
        """Run M tokens through a layer: [M, h] to [M, h]; see `Step.end` where it ends a model."""
        ops, eps, mixer = self.ops, self.config.rms_norm_eps, layer.mixer
        if isinstance(mixer, DeltaNet):
            qkvz, ba = ops.two_products(
                x, mixer.qkvz, mixer.ba, layer.input_norm, eps, few=not step.prompt
            )
            states = state.slots.layer(mixer.layer.index)
            x = ops.delta_linear(qkvz, ba, mixer.layer, states, step, mixer.out, x)
            finish = partial(run_mlp, ops, norm=layer.post_norm, eps=eps, mlp=layer.mlp)
            return step.end(finish, x) if ends else finish(x)
        qkv = ops.product(x, mixer.qkv, norm=layer.input_norm, eps=eps)
        mixed = ops.attention(qkv, mixer.layer, state.pages, step)
        attended = partial(self._finish, layer, mixer.out)
        return step.end(attended, mixed, x) if ends else attended(mixed, x)

    def _finish(self, layer: Layer[W], out: W, mixed: Tensor, x: Tensor) -> Tensor:
        """Output projection of heads [M, Hq * D], residual x [M, h], MLP: [M, h]."""
        x = self.ops.product(mixed, out, added=x)
        return run_mlp(self.ops, x, layer.post_norm, self.config.rms_norm_eps, layer.mlp)

    def logits(self, hidden: Tensor) -> Tensor:
        """Final norm and head: [M, h] to [M, V] float32."""
        ends = self.head, self.norm, self.config.rms_norm_eps
        return head_logits(self.ops, hidden, *ends, self.frequent)


def build(
    config: Qwen35Config, prefix: str, weights: Weights[W], ops: Ops[W], context: int
) -> Qwen35[W]:
    """Read the weights of a checked checkpoint into a model for `context` positions."""
    rope = rope_tables(
        context, config.rotary_dim, config.rope_theta, weights.device, config.rope_scaling
    )
    layers = []
    for i, kind in enumerate(config.layer_types):
        index = config.layer_types[:i].count(kind)
        layers.append(read_layer(weights, f"{prefix}layers.{i}", kind, index, config, rope))
    embedding, head = read_ends(weights, prefix, config.tie_word_embeddings)
    return Qwen35(
        config=config,
        embedding=embedding,
        layers=tuple(layers),
        norm=read_gain(weights, f"{prefix}norm.weight"),
        head=head,
        rope=rope,
        ops=ops,
    )


def read_layer(
    weights: Weights[W], p: str, kind: str, index: int, config: Qwen35Config, rope: Rope
) -> Layer[W]:
    """Read the layer whose tensors begin with `p`, the index-th of its kind."""
    eps = config.rms_norm_eps
    return Layer(
        input_norm=read_gain(weights, f"{p}.input_layernorm.weight"),
        mixer=(
            _attention(weights, f"{p}.self_attn", index, rope, eps)
            if kind == FULL
            else _delta_net(config, weights, f"{p}.linear_attn", index)
        ),
        post_norm=read_gain(weights, f"{p}.post_attention_layernorm.weight"),
        mlp=read_mlp(weights, f"{p}.mlp", config.experts),
    )


def read_gain(weights: Weights[W], name: str) -> Tensor:
    """The gain of a norm that is stored around zero; 1 + w needs more digits than BF16 has."""
    return 1 + weights.tensor(name, torch.float32)


def _attention(weights: Weights[W], p: str, index: int, rope: Rope, eps: float) -> Attention[W]:
    q_norm, k_norm = (read_gain(weights, f"{p}.{x}_norm.weight") for x in "qk")
    return Attention(
        qkv=weights.linear(f"{p}.q_proj", f"{p}.k_proj", f"{p}.v_proj", normed=True),
        layer=AttentionLayer(index, rope, eps, q_norm, k_norm, gated=True),
        out=weights.linear(f"{p}.o_proj"),
    )


def _delta_net(config: Qwen35Config, weights: Weights[W], p: str, index: int) -> DeltaNet[W]:
    return DeltaNet(
        qkvz=weights.linear(f"{p}.in_proj_qkv", f"{p}.in_proj_z", normed=True),
        ba=weights.linear(f"{p}.in_proj_b", f"{p}.in_proj_a"),
        layer=DeltaLayer(
            index=index,
            conv=weights.tensor(f"{p}.conv1d.weight", torch.float32)[:, 0],
            decay=-weights.tensor(f"{p}.A_log", torch.float32).exp(),
            dt_bias=weights.tensor(f"{p}.dt_bias", torch.float32),
            norm=weights.tensor(f"{p}.norm.weight", torch.float32),  # stored around one
            key_heads=config.linear_num_key_heads,
            key_dim=config.linear_key_head_dim,
            eps=config.rms_norm_eps,
        ),
        out=weights.linear(f"{p}.out_proj"),
    )
