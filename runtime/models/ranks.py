"""The model of a rank: its shard of the weights over ops that exchange partial sums."""

from collections.abc import Callable

import torch

from lowbit.formats.activation_modes import Activations
from lowbit.runtime.backends.cpu_linear import prepare
from lowbit.runtime.backends.cpu_parallel import RankLinear, RankOps, rank_form
from lowbit.runtime.backends.exchange import Exchange
from lowbit.runtime.models.architectures import Model
from lowbit.runtime.models.loader import OpenedModel, build_decoder
from lowbit.runtime.models.shards import head_rows
from lowbit.runtime.weights.linear import Linear
from lowbit.runtime.weights.share import Share
from lowbit.runtime.weights.weights import Weights


def unsaid(module: str) -> None:
    """No progress."""


def load_rank(
    shard: OpenedModel,
    exchange: Exchange,
    dtype: torch.dtype,
    context: int,
    progress: Callable[[str], None] = unsaid,
) -> Model[RankLinear]:
    """Read a rank's weights onto the CPU, for sequences of up to `context` tokens.

    progress: is told of each module that has been read, and may raise.

    Raises:
        FormatError: a tensor holds NaN or Inf.
    """
    ranks = exchange.share.ranks
    rows = tuple(head_rows(shard.config.vocab_size, Share(rank, ranks)) for rank in range(ranks))

    def made(w: Linear, paired: bool, activations: Activations) -> RankLinear:
        return prepare(w, dtype, activations)

    def formed(module: str, form: RankLinear) -> RankLinear:
        progress(module)
        return rank_form(module, form, exchange.share, rows)

    weights = Weights(shard.checkpoint, shard.schemes, "cpu", dtype, made, formed=formed)
    decoder = build_decoder(shard, weights, RankOps(exchange), context)
    weights.check_finite()
    return decoder
