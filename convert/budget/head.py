"""One pass over the head: the KL that quantizing it costs, and gradients of sampled tokens."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from lowbit.convert.original.divergence import Divergences, log_partition
from lowbit.convert.original.model import LayeredModel
from lowbit.convert.original.threads import Pool, for_each
from lowbit.convert.original.walk import HEAD_ROWS, HEAD_TOKENS, blocks
from lowbit.convert.quantize.rounding import rounding_error_on
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
    device, tokens = final.device, len(final)
    log_z = log_partition(model, final, pool).to(torch.float32)
    generator = torch.Generator().manual_seed(SEED)
    uniform = torch.rand(draws, tokens, generator=generator, dtype=torch.float64)
    # Inverse of the distribution function: what is left of each uniform number to go.
    left = uniform.to(device)
    gradients = torch.zeros(draws, *final.shape, device=device)
    divergences = Divergences(len(schemes), tokens, device)
    for first, rows in model.weights.rows(model.head, HEAD_ROWS, device):
        errors = [rounding_error_on(pool, rows, scheme, rule) for scheme in schemes]
        is_last = first + len(rows) == model.vocabulary

        def add(
            part: slice,
            rows: Tensor = rows,
            errors: Sequence[Tensor] = errors,
            is_last: bool = is_last,
        ) -> None:
            p = (final[part] @ rows.T).sub_(log_z[part, None]).exp_()
            _add_gradients(gradients[:, part], left[:, part], rows, p, is_last)
            for number, error in enumerate(errors):
                divergences.add(number, part, p, final[part] @ error.T)

        for_each(pool, add, blocks(tokens, HEAD_TOKENS[device.type]))
    return HeadPass(tuple(divergences.means()), gradients)


def _add_gradients(gradients: Tensor, left: Tensor, rows: Tensor, p: Tensor, is_last: bool) -> None:
    """Add W[y] - sum p W over some rows, in place."""
    cumulated = p.cumsum(1, dtype=torch.float64)
    here = (left >= 0) & ((left < cumulated[:, -1]) | is_last)
    drawn = torch.searchsorted(cumulated, left.T.contiguous(), right=True).T
    gradients -= p @ rows
    draw, token = here.nonzero(as_tuple=True)
    gradients[draw, token] += rows[drawn[draw, token].clamp_(max=len(rows) - 1)]
    left -= cumulated[:, -1]
