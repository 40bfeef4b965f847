"""DSpark: DFlash's layers, and a bias of each draft by the token before it."""

from dataclasses import replace
from typing import TypeVar

from lowbit.formats.architectures.dspark import DSparkConfig
from lowbit.runtime.backends.ops import DraftOps
from lowbit.runtime.models import dflash
from lowbit.runtime.models.dflash import DFlash
from lowbit.runtime.models.draft_output import Markov
from lowbit.runtime.weights.weights import Weights

W = TypeVar("W")  # what the backend keeps a linear as


def build(config: DSparkConfig, weights: Weights[W], ops: DraftOps[W], context: int) -> DFlash[W]:
    """Read the weights of a checked checkpoint into a drafter for `context` positions."""
    drafter = dflash.build(config, weights, ops, context)
    if config.markov_rank == 0:
        return drafter
    embedding = weights.tensor("markov_head.markov_w1.weight")
    output = weights.linear("markov_head.markov_w2", head=True)
    return replace(drafter, markov=Markov(embedding, output))
