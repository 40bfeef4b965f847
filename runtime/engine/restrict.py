"""The constraint of a request, whose errors end that request alone."""

from torch import Tensor, int32

from lowbit.formats.errors import LowbitError, RequestError
from lowbit.runtime.engine.sequence import Sequence
from lowbit.runtime.text.constraint import Constraint


def next_mask(constraint: Constraint, words: int) -> Tensor | None:
    """The mask of the next token.

    Args:
        constraint: of a request.
        words: of a mask.

    Raises:
        LowbitError: the constraint failed, gave no such mask, or allows no token.
    """
    try:
        mask = constraint.mask()
    except Exception as error:  # whatever a foreign object does
        raise _explained(error) from error
    if mask is None:
        return None
    if mask.shape != (words,) or mask.dtype != int32 or mask.is_cuda:
        raise RequestError(
            f"the constraint gave a mask of {tuple(mask.shape)} {mask.dtype} on {mask.device}, "
            f"expected ({words},) torch.int32 on the host"
        )
    if not mask.any():
        raise RequestError("the constraint allows no token")
    return mask


def accept(sequence: Sequence, token: int) -> LowbitError | None:
    """Tell a sequence's constraint, if it has one, its newest token; returns the error of it."""
    constraint = sequence.request.constraint
    if constraint is None:
        return None
    try:
        constraint.accept(token)
    except Exception as error:  # whatever a foreign object does
        return _explained(error)
    return None


def _explained(error: Exception) -> LowbitError:
    if isinstance(error, LowbitError):
        return error
    return RequestError(f"the constraint failed: {type(error).__name__}: {error}")
