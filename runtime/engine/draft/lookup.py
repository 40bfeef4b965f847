"""Copies that join the drafts of a block drafter: lookup and drafter under one source.

A round makes drafts of every sequence; where the end of a sequence stood before, what followed
there may take their place. A long match does so alone, a short one where the first drafts agree.
Copies are made by the host, which may be a round behind the device: they go on for as many tokens
as that round may accept, and hold if its last token is the one that was copied.
"""

from collections.abc import Iterable
from collections.abc import Sequence as Numbers
from dataclasses import dataclass

from lowbit.runtime.engine.draft.state import DraftState
from lowbit.runtime.engine.load_options import MOST_DRAFTS

ALONE = 8  # tokens of a match from which on no draft needs to agree
AGREEING = 2  # drafts that agree with a shorter one
FULL_ROUNDS = 2  # in a row, before more tokens are copied than a block has drafts
COPIED = 2 * (MOST_DRAFTS + 1)  # tokens of a copy: those of a round under way, and of the next


@dataclass(frozen=True, slots=True)
class Copy:
    """Tokens that may come next in a sequence."""

    start: int  # position of the first
    ids: tuple[int, ...]  # COPIED tokens
    rate: float  # how often such a token is accepted
    alone: bool  # they take the place of drafts that do not agree

    def row(self, drafts: int) -> tuple[int, ...]:
        """Row of `DraftOps.join_copies`, for a sequence with so many made drafts."""
        return self.start, 0 if self.alone else min(AGREEING, drafts), *self.ids


def copy_of(state: DraftState, last: int) -> Copy | None:
    """Copy for a sequence whose drafter knows its tokens; None without a match.

    A match that was wrong more often than the drafter does not stand alone, however long.

    Args:
        state: of the sequence.
        last: position of its last token.
    """
    drafter = state.drafter
    if drafter is None or drafter.match_length == 0:
        return None
    ids, rate = drafter.propose(COPIED)
    rates = [] if state.rates is None else state.rates.rates
    better = expected_tokens([rate] * len(rates)) >= expected_tokens(rates)
    return Copy(last + 1, tuple(ids), rate, drafter.match_length >= ALONE and better)


def expected_tokens(rates: Iterable[float]) -> float:
    """Tokens of a round by the acceptance rates of its drafts, see `AcceptanceRates`."""
    tokens, accepted = 1.0, 1.0
    for rate in rates:
        accepted *= rate
        tokens += accepted
    return tokens


def rates_of(state: DraftState, copy: Copy | None, most: int) -> Numbers[float]:
    """Acceptance rates of a sequence's drafts by place, copied or made; () if none can be made.

    Args:
        state: of the sequence.
        copy: for it.
        most: drafts that a step has room for, of which blocks may have fewer.
    """
    if state.rates is None:
        return ()
    if copy is None or not copy.alone:
        return state.rates.rates
    made = len(state.rates.rates)
    return [copy.rate] * (max(most, made) if state.full >= FULL_ROUNDS else made)
