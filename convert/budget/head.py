"""One pass over the head: the KL that quantizing it costs, and gradients of sampled tokens.

The head sees its vocabulary in blocks of rows. With p the original's distribution and d the
difference that a scheme makes to the logits,
    KL = log sum p exp(d) - sum p d,
where sum p exp(d) is 1 + sum p d + sum p (exp(d) - 1 - d), so that little cancels.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from lowbit.convert.original.model import LayeredModel
from lowbit.convert.original.threads import Pool, for_each
from lowbit.convert.original.walk import HEAD_ROWS, HEAD_TOKENS, blocks
from lowbit.convert.quantize.rounding import rounding_error_on
from lowbit.formats.errors import QuantizationError
from lowbit.formats.layout.rtn import ScaleRule
from lowbit.formats.layout.scheme import Scheme

SEED = 0


@dataclass(frozen=True, slots=True)
class HeadPass:
    """Results of a pass over the head."""

    # Mean KL of every scheme, in nats a token; infinite without finite logits.
    kl: tuple[float, ...]
    gradients: Tensor  # [draws, tokens, h], of log p(y) by the head's input, y drawn from p


def pass_head(
    model: LayeredModel,
    final: Tensor,
    schemes: Sequence[Scheme],
    draws: int,
    pool: Pool,
    rule: ScaleRule,
) -> HeadPass:
    """Measure every scheme of the head and draw tokens from the original's distribution.

    Args:
        final: [tokens, h] float32, output of the final norm.
        draws: tokens drawn at each position, independently.

    Raises:
        QuantizationError: the original gives NaN or infinite logits.
    """
    work = _Work(final, log_partition(model, final, pool), len(schemes), draws)
    parts = HEAD_TOKENS[final.device.type]
    for first, rows in model.weights.rows(model.head, HEAD_ROWS, final.device):
        errors = [rounding_error_on(pool, rows, scheme, rule) for scheme in schemes]
        is_last = first + len(rows) == model.vocabulary

        def add(
            tokens: slice,
            rows: Tensor = rows,
            errors: Sequence[Tensor] = errors,
            is_last: bool = is_last,
        ) -> None:
            p = work.probabilities(tokens, rows)
            work.add_gradients(tokens, rows, p, is_last)
            work.add_divergences(tokens, errors, p)

        for_each(pool, add, blocks(len(final), parts))
    return HeadPass(tuple(work.divergences()), work.gradients)


class _Work:
    """Sums over the blocks of rows seen so far."""

    def __init__(self, final: Tensor, log_z: Tensor, schemes: int, draws: int) -> None:
        generator = torch.Generator().manual_seed(SEED)
        device, tokens = final.device, len(final)
        self._final, self._log_z = final, log_z.to(torch.float32)
        uniform = torch.rand(draws, tokens, generator=generator, dtype=torch.float64)
        # Inverse of the distribution function: what is left of each uniform number to go.
        self._left = uniform.to(device)
        self._sums = torch.zeros(2, schemes, tokens, dtype=torch.float64, device=device)
        self.gradients = torch.zeros(draws, *final.shape, device=device)

    def probabilities(self, tokens: slice, rows: Tensor) -> Tensor:
        return (self._final[tokens] @ rows.T).sub_(self._log_z[tokens, None]).exp_()

    def add_gradients(self, tokens: slice, rows: Tensor, p: Tensor, is_last: bool) -> None:
        """Add W[y] - sum p W over these rows."""
        cumulated = p.cumsum(1, dtype=torch.float64)
        left = self._left[:, tokens]
        here = (left >= 0) & ((left < cumulated[:, -1]) | is_last)
        drawn = torch.searchsorted(cumulated, left.T.contiguous(), right=True).T
        gradients = self.gradients[:, tokens]
        gradients -= p @ rows
        draw, token = here.nonzero(as_tuple=True)
        gradients[draw, token] += rows[drawn[draw, token].clamp_(max=len(rows) - 1)]
        left -= cumulated[:, -1]

    def add_divergences(self, tokens: slice, errors: Sequence[Tensor], p: Tensor) -> None:
        for number, error in enumerate(errors):
            d = self._final[tokens] @ error.T
            self._sums[0, number, tokens] += torch.linalg.vecdot(p, d)
            self._sums[1, number, tokens] += torch.linalg.vecdot(p, d.expm1().sub_(d))

    def divergences(self) -> list[float]:
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
