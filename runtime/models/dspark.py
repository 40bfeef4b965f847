"""DSpark: DFlash's layers, and a bias of each draft by the token before it."""

from dataclasses import dataclass, replace
from typing import Generic, TypeVar

import torch
from torch import Tensor

from lowbit.formats.architectures.dspark import DSparkConfig
from lowbit.runtime.backends.ops import DraftOps
from lowbit.runtime.models import dflash
from lowbit.runtime.models.block_head import Choice
from lowbit.runtime.models.dflash import DFlash
from lowbit.runtime.weights.weights import Weights

W = TypeVar("W")  # what the backend keeps a linear as


@dataclass(frozen=True, slots=True)
class Markov(Generic[W]):
    """A bias of logits by the token before, of low rank."""

    ops: DraftOps[W]
    embedding: Tensor  # [V, r]
    output: W  # [N, r], see `Choice.logits`

    def bias(self, ids: Tensor) -> Tensor:
        """Bias of the logits behind tokens [M]: [M, N or more] float32."""
        return self.ops.product(self.ops.embed(ids, self.embedding), self.output, logits=True)

    def draft(self, hidden: Tensor, choice: Choice[W]) -> Tensor:
        """See `BlockHead.draft`; every output of a block is a draft."""
        logits, turns = choice.logits(hidden[:, : choice.drafts]), choice.in_turn()
        before, drafts = choice.last, []
        for place in range(choice.drafts):
            bias = self.bias(before)[:, : logits.shape[2]]
            before = turns.choose(place, logits[:, place] + bias)
            drafts.append(before)
        return torch.stack(drafts, dim=1)


def build(config: DSparkConfig, weights: Weights[W], ops: DraftOps[W], context: int) -> DFlash[W]:
    """Read the weights of a checked checkpoint into a drafter for `context` positions."""
    drafter = dflash.build(config, weights, ops, context)
    if config.markov_rank == 0:
        return drafter
    embedding = weights.tensor("markov_head.markov_w1.weight")
    output = weights.linear("markov_head.markov_w2", head=True)
    return replace(drafter, head=Markov(ops, embedding, output))
