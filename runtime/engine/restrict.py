"""The constraints of requests; an error of one ends its request alone."""

from collections.abc import Iterable

import torch
from torch import Tensor

from lowbit.formats.errors import LowbitError, RequestError
from lowbit.runtime.engine.sequence import Sequence
from lowbit.runtime.state.sampler_rows import SamplerRows
from lowbit.runtime.text.constraint import Constraint


def restrict(
    sequences: Iterable[Sequence], sampler: SamplerRows
) -> list[tuple[Sequence, LowbitError]]:
    """Set the masks of constrained sequences; returns those whose constraint has failed."""
    failed = []
    for each in sequences:
        if each.ended:
            continue
        try:
            mask = next_mask(each, sampler.mask.shape[1])
        except LowbitError as error:
            failed.append((each, error))
            continue
        each.masked = mask is not None
        sampler.allow(each.row, mask)
    return failed


def next_mask(sequence: Sequence, words: int) -> Tensor | None:
    """The mask of a constrained sequence's next token; releases it where its constraint is done.

    Args:
        sequence: whose constraint knows every token before.
        words: of a mask.

    Raises:
        LowbitError: the constraint failed, gave no such mask, or allows no token.
    """
    constraint: Constraint | None = sequence.request.constraint
    if constraint is None:
        return None
    try:
        sequence.released, sequence.unbound = constraint.done, constraint.unbound
        mask = None if sequence.released or sequence.unbound > 0 else constraint.mask()
    except Exception as error:  # whatever a foreign object does
        raise _explained(error) from error
    if mask is None:
        return None
    if mask.shape != (words,) or mask.dtype != torch.int32 or mask.is_cuda:
        raise RequestError(
            f"the constraint gave a mask of {tuple(mask.shape)} {mask.dtype} on {mask.device}, "
            f"expected ({words},) torch.int32 on the host"
        )
    if not mask.any():
        raise RequestError("the constraint allows no token")
    return mask


def accept(sequence: Sequence, token: int) -> LowbitError | None:
    """Tell a sequence's constraint, if it still has one, its newest token; returns its error."""
    constraint = sequence.request.constraint
    if constraint is None or sequence.released:
        return None
    try:
        constraint.accept(token)
        sequence.unbound = constraint.unbound
    except Exception as error:  # whatever a foreign object does
        return _explained(error)
    return None


def _explained(error: Exception) -> LowbitError:
    if isinstance(error, LowbitError):
        return error
    return RequestError(f"the constraint failed: {type(error).__name__}: {error}")
