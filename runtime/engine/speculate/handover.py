"""Handover between plain steps and rounds, which keep tokens and states in different places.

A plain step finds the token of a sequence on the device, where the plain step before left it, and
the recurrent state in the slot of its row. After a round the host has the last token, and the state
is in the slot of the last accepted token, often a spare one.
"""

from collections.abc import Sequence as Numbers
from typing import TYPE_CHECKING

from lowbit.runtime.engine.sequence import Sequence

if TYPE_CHECKING:
    from lowbit.runtime.engine.runner import Runner


def advance(sequence: Sequence, slot: int, next_sent: bool = False) -> None:
    """Count the last token of the output as sent, after a round has been read.

    Args:
        sequence: that was in the round.
        slot: with the recurrent state after the token; NO_SLOT if it is lost.
        next_sent: the next round has sent the token behind it as well.
    """
    sequence.length = sequence.last + 1 + next_sent
    sequence.chosen = sequence.length - len(sequence.request.prompt) + 1
    sequence.slot, sequence.drafts.verified = slot, True


def leave_rounds(runner: "Runner", sequences: Numbers[Sequence]) -> list[int | None]:
    """Bring the states of sequences that were in a round to where a plain step looks.

    Returns:
        The last token of each sequence that was in a round; None for those whose is on the device.
    """
    tokens: list[int | None] = []
    for each in sequences:
        verified = each.drafts.verified
        if verified and each.slot != each.row:
            runner.state.slots.copy(each.slot, each.row)
            each.slot = each.row
        tokens.append(each.output[-1] if verified else None)
        each.drafts.verified = False
    return tokens


def enter_rounds(runner: "Runner") -> None:
    """Invalidate the inputs of the last plain step."""
    runner.batch = []


def slots_after(
    spare: range | None, sequences: Numbers[Sequence], drafts: Numbers[int]
) -> list[tuple[int, ...]]:
    """Slots for the recurrent states after the last token of each sequence and after its drafts.

    The state after the last token goes to the slot of the row, those after drafts to spare slots in
    which no other sequence has its state. If these run short, a sequence gets fewer slots.

    Args:
        spare: slots; None for a model without recurrent states.
        sequences: all that are being decoded.
        drafts: number for each sequence.
    """
    if spare is None:
        return [(each.row,) * (1 + count) for each, count in zip(sequences, drafts, strict=True)]
    taken = {each.slot for each in sequences}
    free = [slot for slot in spare if slot not in taken]
    slots = []
    for each, count in zip(sequences, drafts, strict=True):
        own = [each.slot] if each.slot in spare else []
        usable = (own + free)[:count]
        free = [slot for slot in free if slot not in usable]
        slots.append((each.row, *usable))
    return slots
