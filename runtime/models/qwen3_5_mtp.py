"""Head for multi-token prediction (MTP) of Qwen3.5: one layer that drafts after the trunk.

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
from lowbit.formats.head_rows import PackedRows
from lowbit.runtime.models.draft_output import DraftOutput
from lowbit.runtime.models.layer_parts import embed
from lowbit.runtime.models.qwen3_5 import Layer, Qwen35, read_gain, read_layer
from lowbit.runtime.models.selected_rows import SelectedRows, selected_rows
from lowbit.runtime.state.device_state import DeviceState
from lowbit.runtime.state.step import Step
from lowbit.runtime.weights.table import PackedTable
from lowbit.runtime.weights.weights import Weights

W = TypeVar("W")  # what the backend keeps a linear as


@dataclass(frozen=True, slots=True)
class MtpHead(Generic[W]):
    """A loaded head; gains are float32."""

    trunk: Qwen35[W]  # the model before it was given the head
    embedding_norm: Tensor  # [h]
    hidden_norm: Tensor  # [h]
    fc: W  # [h, 2 * h], columns of the embedding first
    layer: Layer[W]  # with attention
    norm: Tensor  # [h]
    rows: SelectedRows[W] | None = None  # that drafts are chosen from; None for all
    lone: bool = False  # its keys and values have pages of their own; see `lone_head`

    def hidden(
        self, ids: Tensor, x: Tensor, state: DeviceState, step: Step, own: bool = False
    ) -> Tensor:
        """Run M positions through the head; its keys and values are written.

        Args:
            ids: [M], the token after each position.
            x: [M, h], hidden state of each position before its norm.
            step: of the positions; what it has of embedded tokens is of those after them.
            own: x is the head's own, for positions behind a draft; else the trunk's.

        Returns:
            [M, h], before `mtp.norm`.
        """
        trunk, ops, eps = self.trunk, self.trunk.ops, self.trunk.config.rms_norm_eps
        gains = self.embedding_norm, self.norm if own else trunk.norm, self.hidden_norm
        table, step = trunk.embedding, trunk.turned(step)
        if step.embedded or isinstance(table, PackedTable):
            table = embed(ops, ids, table, step)
            ids = torch.arange(len(table), dtype=ids.dtype, device=ids.device)
        joined = ops.head_input(ids, table, x, gains, eps)
        return trunk.run_layer(ops.product(joined, self.fc), self.layer, state, step)

    @property
    def output(self) -> DraftOutput[W]:
        """Final norm and head, by which drafts are chosen."""
        trunk, config = self.trunk, self.trunk.config
        sizes = config.rms_norm_eps, trunk.head, config.vocab_size
        return DraftOutput(trunk.ops, self.norm, *sizes, self.rows)


def with_head(
    model: Qwen35[W], weights: Weights[W], draft: PackedRows | None = None, lone: bool = False
) -> Qwen35[W]:
    """The model with the head of its checkpoint.

    Args:
        draft: the rows of the trunk's head that drafts are chosen from; None for all.
        lone: see `MtpHead`.

    Raises:
        UnsupportedModelError: a head of several layers.
    """
    layers = model.config.mtp_layers
    if layers != 1:
        raise UnsupportedModelError(
            f"the head for multi-token prediction has {layers} layers, only one is supported",
            hint="run without it: --speculate ngram",
        )
    index = 0 if lone else model.config.layer_types.count(FULL)
    head = MtpHead(
        trunk=model,
        embedding_norm=read_gain(weights, "mtp.pre_fc_norm_embedding.weight"),
        hidden_norm=read_gain(weights, "mtp.pre_fc_norm_hidden.weight"),
        fc=weights.linear("mtp.fc"),
        layer=read_layer(weights, "mtp.layers.0", FULL, index, model.config, model.rope),
        norm=read_gain(weights, "mtp.norm.weight"),
        rows=selected_rows(draft, weights),
        lone=lone,
    )
    return replace(model, mtp=head)
