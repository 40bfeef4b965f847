"""State of a source of drafts, by sequence."""

from dataclasses import dataclass

from lowbit.runtime.engine.draft.ngram import Drafter
from lowbit.runtime.engine.draft.policy import AcceptanceRates
from lowbit.runtime.engine.sequence import Sequence
from lowbit.runtime.text.constraint import Constraint


@dataclass(slots=True)
class DraftState:
    """Drafts of a sequence."""

    drafter: Drafter | None = None  # proposes copies of earlier tokens; None without n-gram drafts
    told: int = 0  # tokens of the output that the drafter knows
    # Acceptance of drafts that are made on the device; None where none are
    rates: AcceptanceRates | None = None
    # Copy of the constraint that has accepted all tokens on the host; None if nothing can be
    # drafted under it
    ahead: Constraint | None = None
    # Tokens that the constraint forces next, found when `ahead` was made
    forced: tuple[int, ...] = ()
    full: int = 0  # last rounds in a row whose drafts were all accepted
    seen: int = 0  # positions that the MTP head has processed
    due: int = 0  # most tokens that rounds of made drafts under way may still append


def drafts_of(sequence: Sequence) -> DraftState:
    """Draft state of a sequence that has room, made at its first use."""
    if not isinstance(sequence.drafts, DraftState):
        sequence.drafts = DraftState(seen=sequence.reused)
    return sequence.drafts
