"""Heads that are whole on the first of several ranks, which drafts alone.

A draft is a small part of a round. Sharing it out would cost it two exchanges and a choice among
ranks; so the others wait for the tokens that the first one gives them, on GPUs inside the round.
"""

from dataclasses import replace
from typing import Any, TypeVar

from torch import Tensor

from lowbit.formats.architectures import kind_of, part_of
from lowbit.runtime.models.architectures import HEADS
from lowbit.runtime.models.loader import OpenedModel
from lowbit.runtime.weights.share import HEAD
from lowbit.runtime.weights.weights import Weights

W = TypeVar("W")  # what the backend keeps a linear as


def lone_head(opened: OpenedModel) -> OpenedModel:
    """Weights that the first rank reads besides its shard, to draft with.

    They are the head for multi-token prediction where it drafts, and the model's head where drafts
    are chosen from it. A drafter has a checkpoint of its own, and is no part of them.

    opened: a model with a head for multi-token prediction, or with a drafter.
    """
    config = opened.checkpoint.config
    own = opened.draft is None and not opened.config.tie_word_embeddings
    specs = tuple(
        spec
        for spec in opened.specs
        if part_of(config, spec.name) == "mtp" or (own and spec.module == HEAD)
    )
    return replace(opened, specs=specs, drafter=None, frequent=None)


def lone_trunk(model: Any, lone: OpenedModel, weights: Weights[W], ops: Any) -> Any:
    """A rank's model as drafts see it: with the whole head, over ops that exchange nothing.

    Args:
        model: of the rank, over ops that exchange.
        lone: see `lone_head`.
        weights: of the whole model, on the model's device.
        ops: that exchange nothing.
    """
    embedding, head = model.embedding, None
    if lone.draft is None:  # else drafts are chosen from rows of their own
        tied = lone.config.tie_word_embeddings and isinstance(embedding, Tensor)
        head = weights.dense(embedding, HEAD) if tied else weights.linear(HEAD, head=True)
    return replace(model, config=lone.config, head=head, ops=ops)


def with_lone_head(model: Any, lone: OpenedModel, weights: Weights[W], ops: Any) -> Any:
    """A rank's model with a head for multi-token prediction that needs no other rank.

    Arguments as of `lone_trunk`.
    """
    trunk = lone_trunk(model, lone, weights, ops)
    made = HEADS[kind_of(lone.checkpoint.config)](trunk, weights, lone.draft, lone=True)
    return replace(model, mtp=made.mtp)
