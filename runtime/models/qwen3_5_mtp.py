"""The head for multi-token prediction of Qwen3.5: one layer that drafts behind the trunk.

At position t it takes the trunk's hidden state after the final norm, H_t, and the embedding of
token t + 1, and predicts token t + 2 through the trunk's head. Drafts further on take its own
output after `mtp.norm` in place of H. It has keys and values of its own, behind those of the
trunk's layers in the same pages. As vLLM and SGLang read these checkpoints; transformers does not
run the head.
"""

from dataclasses import dataclass, replace
from typing import Generic, TypeVar

import torch
from torch import Tensor

from lowbit.formats.architectures.decoder import FULL
from lowbit.formats.errors import UnsupportedModelError
from lowbit.runtime.models.qwen3_5 import Layer, Qwen35, read_gain, read_layer
from lowbit.runtime.state.device_state import DeviceState
from lowbit.runtime.state.step import Step
from lowbit.runtime.weights.weights import Weights

W = TypeVar("W")  # what the backend keeps a linear as


@dataclass(frozen=True, slots=True)
class MtpHead(Generic[W]):
    """A loaded head; gains are float32.

    Attributes:
        trunk: the model before it was given the head.
        embedding_norm: [h].
        hidden_norm: [h].
        fc: [h, 2 * h], columns of the embedding first.
        layer: with attention.
        norm: [h].
    """

    trunk: Qwen35[W]
    embedding_norm: Tensor
    hidden_norm: Tensor
    fc: W
    layer: Layer[W]
    norm: Tensor

    def hidden(self, ids: Tensor, after: Tensor, state: DeviceState, step: Step) -> Tensor:
        """Run M positions through the head; its keys and values are written.

        Args:
            ids: [M] int64, the token behind each position.
            after: [M, h], from `after_trunk`, or `after_head` for the position behind a draft.
            state: of the model.
            step: sequence and position of every token.

        Returns:
            [M, h], before `mtp.norm`.
        """
        trunk, ops, eps = self.trunk, self.trunk.ops, self.trunk.config.rms_norm_eps
        embedded = ops.rms_norm(ops.embed(ids, trunk.embedding), self.embedding_norm, eps)
        joined = torch.cat((embedded, ops.rms_norm(after, self.hidden_norm, eps)), dim=1)
        return trunk.run_layer(ops.linear(joined, self.fc), self.layer, state, step)

    def after_trunk(self, hidden: Tensor) -> Tensor:
        """What the head takes from the trunk's hidden states: [M, h]."""
        return self.trunk.ops.rms_norm(hidden, self.trunk.norm, self.trunk.config.rms_norm_eps)

    def after_head(self, hidden: Tensor) -> Tensor:
        """What the head takes from its own: [M, h]."""
        return self.trunk.ops.rms_norm(hidden, self.norm, self.trunk.config.rms_norm_eps)

    def logits(self, hidden: Tensor) -> Tensor:
        """Final norm and the trunk's head: [M, h] to [M, V] float32."""
        trunk = self.trunk
        return trunk.ops.norm_logits(hidden, self.norm, trunk.config.rms_norm_eps, trunk.head)


def with_head(model: Qwen35[W], weights: Weights[W]) -> Qwen35[W]:
    """The model with the head of its checkpoint.

    Raises:
        UnsupportedModelError: a head of several layers.
    """
    layers = model.config.mtp_layers
    if layers != 1:
        raise UnsupportedModelError(
            f"the head for multi-token prediction has {layers} layers, only one is supported",
            hint="run without it: --speculate ngram",
        )
    index = model.config.layer_types.count(FULL)
    head = MtpHead(
        trunk=model,
        embedding_norm=read_gain(weights, "mtp.pre_fc_norm_embedding.weight"),
        hidden_norm=read_gain(weights, "mtp.pre_fc_norm_hidden.weight"),
        fc=weights.linear("mtp.fc"),
        layer=read_layer(weights, "mtp.layers.0", FULL, index, model.config),
        norm=read_gain(weights, "mtp.norm.weight"),
    )
    return replace(model, mtp=head)
