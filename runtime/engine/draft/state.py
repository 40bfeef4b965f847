"""State of a source of drafts, by sequence."""

from dataclasses import dataclass

from lowbit.runtime.engine.draft.ngram import Drafter
from lowbit.runtime.engine.draft.policy import AcceptanceRates
from lowbit.runtime.engine.sequence import Sequence
from lowbit.runtime.text.constraint import Constraint


@dataclass(slots=True)
class DraftState:
    """Drafts of a sequence.

    Attributes:
        drafter: proposes copies of earlier tokens; None without n-gram drafts.
        told: tokens of the output that the drafter knows.
        rates: of drafts by the MTP head or the block drafter; None without both.
        ahead: copy of the constraint that has accepted all tokens on the host; None if nothing can
            be drafted under it.
        forced: tokens that the constraint forces next, found when `ahead` was made.
        seen: positions that the MTP head has processed.
        due: most tokens that the MTP rounds under way may still append to the output.
    """

    drafter: Drafter | None = None
    told: int = 0
    rates: AcceptanceRates | None = None
    ahead: Constraint | None = None
    forced: tuple[int, ...] = ()
    seen: int = 0
    due: int = 0


def drafts_of(sequence: Sequence) -> DraftState:
    """Draft state of a sequence that has room, made at its first use."""
    if not isinstance(sequence.drafts, DraftState):
        sequence.drafts = DraftState(seen=sequence.reused)
    return sequence.drafts
