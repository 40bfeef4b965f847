"""The constraints of requests; an error of one ends its request alone."""

from collections.abc import Iterable
from collections.abc import Sequence as Numbers

import torch
from torch import Tensor

from lowbit.formats.errors import LowbitError, RequestError
from lowbit.runtime.engine.rounds import Part
from lowbit.runtime.engine.sequence import Sequence
from lowbit.runtime.state.sampler_rows import SamplerRows
from lowbit.runtime.text.constraint import Constraint

Failed = list[tuple[Sequence, LowbitError]]


def first_unbound(constraint: Constraint | None) -> int:
    """New tokens that come before the first mask, as far as that is known.

    Raises:
        LowbitError: the constraint failed.
    """
    try:
        return 0 if constraint is None or constraint.done else constraint.unbound
    except Exception as error:  # whatever a foreign object does
        raise _explained(error) from error


def restrict(sequences: Iterable[Sequence], sampler: SamplerRows) -> Failed:
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


def restrict_round(
    parts: Iterable[Part], sampler: SamplerRows
) -> tuple[Failed, list[tuple[int, ...]]]:
    """Set the masks behind every token of a round, of constrained sequences.

    Returns:
        The sequences whose constraint has failed, and the drafts of each part that can be checked:
        those with a mask behind them. Behind the others nothing that is chosen counts.
    """
    failed: Failed = []
    checked = []
    start = sampler.rows
    for part in parts:
        masks, drafts = sampler.mask[start : start + len(part.ids)], part.drafts
        start += len(part.ids)
        if part.sequence.limited:
            failed += restrict([part.sequence], sampler)
            masks[0] = sampler.mask[part.sequence.row]
            drafts = drafts[: _set_masks(part.sequence.ahead, drafts, masks[1:])]
        elif part.sequence.request.constraint is not None:  # done; the device still reads masks
            masks.fill_(-1)
        checked.append(drafts)
    return failed, checked


def _set_masks(ahead: Constraint | None, drafts: Numbers[int], masks: Tensor) -> int:
    """Set the masks behind drafts; returns the number of those that have one."""
    for count, (draft, place) in enumerate(zip(drafts, masks, strict=True)):
        if ahead is None:
            return count
        try:
            if not ahead.done:
                ahead.accept(draft)
            mask = mask_of(ahead, len(place))
        except Exception:  # of a copy; the request ends if the constraint itself comes here
            return count
        place.copy_(torch.tensor(-1) if mask is None else mask)
    return len(drafts)


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
        return mask_of(constraint, words)
    except Exception as error:  # whatever a foreign object does
        raise _explained(error) from error


def mask_of(constraint: Constraint, words: int) -> Tensor | None:
    """The mask of the next token, None where every token may come.

    Raises:
        Exception: whatever a foreign object does.
        RequestError: it is no mask of so many words, or allows no token.
    """
    mask = None if constraint.done or constraint.unbound > 0 else constraint.mask()
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


def foresee(sequences: Iterable[Sequence], most: int) -> Failed:
    """Copy the constraints of sequences, and ask the copies for the tokens that come next.

    Args:
        sequences: whose constraints know every token that the host knows.
        most: tokens of each.

    Returns:
        Those whose constraint has failed.
    """
    failed = []
    for each in sequences:
        each.ahead, each.forced = None, ()
        constraint = each.request.constraint
        if constraint is None or each.ended or not each.limited:
            continue
        try:
            each.ahead = None if constraint.done else constraint.copy()
        except Exception as error:  # whatever a foreign object does
            failed.append((each, _explained(error)))
        if each.ahead is not None:
            each.forced = _forced(each.ahead, most)
    return failed


def _forced(ahead: Constraint, most: int) -> tuple[int, ...]:
    """Tokens that a copy of a constraint forces next, none if it fails."""
    try:
        return tuple(ahead.forced(most))
    except Exception:  # of a copy
        return ()


def allowed(sequence: Sequence, drafts: Numbers[int]) -> Numbers[int]:
    """The drafts before the first one that the constraint of a sequence does not take."""
    if not drafts or not sequence.limited or sequence.forced:
        return drafts
    try:
        probe = None if sequence.ahead is None else sequence.ahead.copy()
    except Exception:  # of a copy
        return ()
    if probe is None:
        return ()
    for count, draft in enumerate(drafts):
        try:
            probe.accept(draft)
        except Exception:  # of a copy
            return drafts[:count]
    return drafts


def accept(sequence: Sequence, token: int) -> LowbitError | None:
    """Tell a sequence's constraint, if it still has one, its newest token; returns its error."""
    constraint = sequence.request.constraint
    if constraint is None or sequence.released:
        return None
    try:
        if not constraint.done:  # among the tokens of a round; the next step releases it
            constraint.accept(token)
        sequence.unbound = constraint.unbound
    except Exception as error:  # whatever a foreign object does
        return _explained(error)
    return None


def _explained(error: Exception) -> LowbitError:
    if isinstance(error, LowbitError):
        return error
    return RequestError(f"the constraint failed: {type(error).__name__}: {error}")
