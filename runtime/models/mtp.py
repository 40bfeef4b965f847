"""The head for multi-token prediction of Qwen3.5: one layer that drafts behind the trunk.

At position t it takes the trunk's hidden state after the final norm, H_t, and the embedding of
token t + 1, and predicts token t + 2 through the trunk's head. Drafts further on take its own
output after `mtp.norm` in place of H. It has keys and values of its own, behind those of the
trunk's layers in the same pages. As in vLLM's and SGLang's readings of the checkpoints;
transformers does not run it.
"""

from dataclasses import replace
from typing import TypeVar

import torch
from torch import Tensor

from lowbit.formats.architectures.decoder import FULL
from lowbit.formats.errors import UnsupportedModelError
from lowbit.runtime.models.qwen3_5 import MtpHead, Qwen35, read_gain, read_layer
from lowbit.runtime.state.device_state import DeviceState
from lowbit.runtime.state.step import Step
from lowbit.runtime.weights.weights import Weights

W = TypeVar("W")  # what the backend keeps a linear as


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
        embedding_norm=read_gain(weights, "mtp.pre_fc_norm_embedding.weight"),
        hidden_norm=read_gain(weights, "mtp.pre_fc_norm_hidden.weight"),
        fc=weights.linear("mtp.fc"),
        layer=read_layer(weights, "mtp.layers.0", FULL, index, model.config),
        norm=read_gain(weights, "mtp.norm.weight"),
    )
    return replace(model, mtp=head)


def draft_hidden(
    model: Qwen35[W], head: MtpHead[W], ids: Tensor, hidden: Tensor, state: DeviceState, step: Step
) -> Tensor:
    """Run M positions through the head; its keys and values are written.

    Args:
        model: the trunk.
        head: of the model.
        ids: [M] int64, the token after each position.
        hidden: [M, h], after the final norm of the trunk, or after `mtp.norm`.
        state: of the model.
        step: sequence and position of every H.

    Returns:
        [M, h], before `mtp.norm`.
    """
    ops, eps = model.ops, model.config.rms_norm_eps
    embedded = ops.rms_norm(ops.embed(ids, model.embedding), head.embedding_norm, eps)
    joined = torch.cat((embedded, ops.rms_norm(hidden, head.hidden_norm, eps)), dim=1)
    return model.run_layer(ops.linear(joined, head.fc), head.layer, state, step)
