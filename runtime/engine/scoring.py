"""Log-probabilities of a prompt's tokens, computed chunk by chunk as the prompt runs."""

import math
from collections.abc import Callable

import torch
from torch import Tensor

from lowbit.formats.sampling_ranges import MOST_LOGPROBS
from lowbit.runtime.engine.sequence import Sequence, TokenLogProbabilities
from lowbit.runtime.models.loader import Decoder
from lowbit.runtime.state.host_rings import LogProbabilities, to_device

ROWS = 128  # of logits at a time: 78 MB with a vocabulary of 150,000


def score_chunk(
    sequence: Sequence,
    first: int,
    hidden: Tensor,
    decoder: Decoder,
    logits: Callable[[Tensor], Tensor],
) -> None:
    """Compute log-probabilities of the tokens that follow those of a chunk; the host does not wait.

    They count every row of the head, padding included, as `Model.logits` does.

    Args:
        first: position of the chunk's first token.
        hidden: [M, h], its hidden states.
        decoder: the model.
        logits: of hidden states, see `Runner.logits`.
    """
    prompt, device = sequence.request.prompt, hidden.device
    if sequence.scores is None:
        shape, pinned = (1, len(prompt), MOST_LOGPROBS + 1), device.type == "cuda"
        sequence.scores = LogProbabilities(
            ids=torch.zeros(shape, dtype=torch.int64, pin_memory=pinned),
            values=torch.zeros(shape, dtype=torch.float32, pin_memory=pinned),
        )
    followed = min(len(hidden), len(prompt) - 1 - first)  # the last token is followed by none
    for start in range(0, followed, ROWS):
        part = hidden[start : min(start + ROWS, followed)]
        at = first + start + 1
        rows = torch.arange(at, at + len(part), dtype=torch.int32, device=device)
        tokens = to_device(prompt[at : at + len(part)], torch.int64, device)
        decoder.ops.log_probabilities(
            logits(part),
            decoder.config.vocab_size,
            rows,
            torch.zeros_like(rows),
            tokens,
            sequence.scores,
        )


def take_scores(sequence: Sequence) -> int | None:
    """Read the log-probabilities of a prompt, all of whose chunks are done.

    Returns:
        Length of the prompt up to the first logits that are not finite; None if all are.
    """
    if sequence.scores is None:
        return None
    top = 1 + (sequence.request.prompt_logprobs or 0)
    all_ids = sequence.scores.ids[0, :, 1:top].tolist()
    all_values = sequence.scores.values[0, :, :top].tolist()
    sequence.scores = None
    found: list[TokenLogProbabilities | None] = [None]
    for at in range(1, len(all_values)):
        chosen, *values = all_values[at]
        if math.isnan(chosen):
            return at
        found.append(TokenLogProbabilities(chosen, tuple(zip(all_ids[at], values, strict=True))))
    sequence.prompt_log_probabilities = tuple(found)
    return None
