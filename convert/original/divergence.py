"""Divergence of a distribution over the vocabulary from the original's, by what changes its logits.

With p the original's distribution and d the difference of the logits,
    KL = log sum p exp(d) - sum p d,
where sum p exp(d) is 1 + sum p d + sum p (exp(d) - 1 - d), so that little cancels. The vocabulary
comes in blocks of rows of the head.
"""

import torch
from torch import Tensor

from lowbit.convert.original.model import LayeredModel
from lowbit.convert.original.threads import Pool, for_each
from lowbit.convert.original.walk import HEAD_ROWS, HEAD_TOKENS, blocks
from lowbit.formats.errors import QuantizationError


class Divergences:
    """Sums over the blocks of the vocabulary seen so far, for several changes of the logits."""

    def __init__(self, changes: int, tokens: int, device: torch.device) -> None:
        """Start empty."""
        self._sums = torch.zeros(2, changes, tokens, dtype=torch.float64, device=device)

    def add(self, change: int, tokens: slice, p: Tensor, d: Tensor) -> None:
        """Add a block of the vocabulary for some of the tokens; threads may add others.

        Args:
            p: [tokens, rows] float32 probabilities in the original.
            d: same shape, what a change makes of the logits, less the original's; overwritten.
        """
        self._sums[0, change, tokens] += torch.linalg.vecdot(p, d)
        self._sums[1, change, tokens] += torch.linalg.vecdot(p, d.expm1().sub_(d))

    def means(self) -> list[float]:
        """Mean KL of every change, in nats a token; infinite where logits are not finite."""
        kl = torch.log1p(self._sums[0] + self._sums[1]) - self._sums[0]
        means = kl.clamp_(min=0.0).mean(1)  # below zero only by rounding
        return [float(mean) for mean in torch.where(means.isfinite(), means, torch.inf)]


def log_partition(model: LayeredModel, final: Tensor, pool: Pool) -> Tensor:
    """Log of the sum of exp(logits) of every token: [tokens] float64.

    Raises:
        QuantizationError: it is not finite.
    """
    log_z = torch.full((len(final),), -torch.inf, dtype=torch.float64, device=final.device)
    for _, rows in model.weights.rows(model.head, HEAD_ROWS, final.device):

        def add(tokens: slice, rows: Tensor = rows) -> None:
            part = (final[tokens] @ rows.T).logsumexp(1).double()
            log_z[tokens] = torch.logaddexp(log_z[tokens], part)

        for_each(pool, add, blocks(len(final), HEAD_TOKENS[final.device.type]))
    bad = int((~log_z.isfinite()).sum())
    if bad:
        raise QuantizationError(
            f"`{model.weights.name}`: {bad} of {len(log_z)} tokens have NaN or infinite logits"
        )
    return log_z
