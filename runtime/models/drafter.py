"""A drafter's folder, checked against the model that it drafts for, becomes a drafter."""

from pathlib import Path

import torch

from lowbit.formats.architectures import DRAFTERS, kind_of, read_config
from lowbit.formats.errors import UnsupportedModelError
from lowbit.formats.layout.scheme import SERVED_BITS
from lowbit.formats.packed import open_packed
from lowbit.runtime.backends import cpu
from lowbit.runtime.backends.cpu_linear import CpuLinear, prepare
from lowbit.runtime.models.architectures import DRAFTER_BUILD, BlockDrafter
from lowbit.runtime.models.loader import OpenedModel
from lowbit.runtime.weights.weights import Weights


def open_drafter(folder: Path, target: OpenedModel) -> OpenedModel:
    """Read the headers of a packed (or plain BF16) drafter, and check that it suits a model.

    Args:
        folder: of the drafter.
        target: the model that it is to draft for.

    Raises:
        CheckpointError: no checkpoint, or a damaged one.
        FormatError: see `open_packed`.
        UnsupportedModelError: no drafter, or one for another model.
    """
    packed = open_packed(folder, SERVED_BITS)
    content = packed.checkpoint.config
    config = read_config(content)
    blocks = config.block_drafts
    if blocks is None:
        raise UnsupportedModelError(
            f"`{folder}` is no drafter but a model of its own (`{kind_of(content)}`)",
            hint=f"`architectures` in the config.json of a drafter is one of: "
            f"{', '.join(DRAFTERS)}",
        )
    name, model = f"the drafter `{folder}`", target.config
    for what, own, other in (
        ("a vocabulary of {} tokens", config.vocab_size, model.vocab_size),
        ("hidden states of {} numbers", config.hidden_size, model.hidden_size),
    ):
        if own != other:
            raise UnsupportedModelError(
                f"{name} is for {what.format(own)}, the model has {other}",
                hint="give the drafter that was trained for this model",
            )
    # The authors' code reads the last layer after the final norm; no published drafter does.
    most = model.num_hidden_layers - 2
    highest = max(blocks.target_layers)
    if highest > most:
        raise UnsupportedModelError(
            f"{name} reads layer {highest}, the model has layers up to {most} before the last",
            hint="give the drafter that was trained for this model",
        )
    return OpenedModel(packed.checkpoint, config, packed.specs, packed.schemes)


def load_drafter(opened: OpenedModel, dtype: torch.dtype, context: int) -> BlockDrafter[CpuLinear]:
    """Read the weights of a drafter onto the CPU, beside a model for `context` tokens.

    Raises:
        FormatError: a tensor holds NaN or Inf.
    """
    weights: Weights[CpuLinear] = Weights(
        opened.checkpoint, opened.schemes, "cpu", dtype, lambda w, _: prepare(w, dtype)
    )
    build = DRAFTER_BUILD[kind_of(opened.checkpoint.config)]
    made = build(opened.config, weights, cpu, context)
    weights.check_finite()
    return made
