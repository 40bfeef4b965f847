"""Log-probabilities of chosen tokens and of the likeliest ones, by the model's own logits."""

from dataclasses import dataclass

import torch
from torch import Tensor

from lowbit.formats.sampling_ranges import MOST_LOGPROBS
from lowbit.runtime.state.choice import best_ids
from lowbit.runtime.state.posted import PLACES


@dataclass(frozen=True, slots=True)
class LogProbabilities:
    """Memory of the host, page-locked beside a GPU, in which steps leave log-probabilities.

    Entry [position % PLACES, row] is of the token at that position; its first column is that token,
    the others are the likeliest tokens from the first down.

    Attributes:
        ids: [PLACES, R, MOST_LOGPROBS + 1] int64; -1 where the vocabulary has fewer tokens.
        values: [PLACES, R, MOST_LOGPROBS + 1] float32, natural logarithms; NaN where logits are.
    """

    ids: Tensor
    values: Tensor


def new_log_probabilities(rows: int, pinned: bool) -> LogProbabilities:
    """Memory for so many rows; page-locked if a GPU writes to it."""
    shape = (PLACES, rows, MOST_LOGPROBS + 1)
    return LogProbabilities(
        ids=torch.zeros(shape, dtype=torch.int64, pin_memory=pinned),
        values=torch.zeros(shape, dtype=torch.float32, pin_memory=pinned),
    )


def log_probabilities(
    logits: Tensor,
    vocabulary: int,
    rows: Tensor,
    positions: Tensor,
    token: Tensor,
    out: LogProbabilities,
) -> None:
    """Leave log-probabilities where the host reads them, on a CPU; see `Ops.log_probabilities`."""
    scores = logits[:, :vocabulary]
    best = best_ids(scores, min(MOST_LOGPROBS, vocabulary))
    ids = torch.cat((token[:, None], best), dim=1)
    wide = scores.double()
    values = wide.gather(1, ids) - wide.logsumexp(1, keepdim=True)
    count = ids.shape[1]
    for m, (row, position) in enumerate(zip(rows.tolist(), positions.tolist(), strict=True)):
        out.ids[position % PLACES, row].fill_(-1)[:count] = ids[m]
        out.values[position % PLACES, row].fill_(-torch.inf)[:count] = values[m]
