"""The passage between plain steps and rounds, which look for tokens and states in different places.

A plain step finds the token of a sequence on the device, where the plain step before has left it,
and its recurrent state in the slot of its row. A round checks drafts: the host knows the token
behind it, and the state stays in the slot of the last token that was right, often a spare one.
"""

from collections.abc import Sequence as Numbers
from typing import TYPE_CHECKING

from lowbit.runtime.engine.sequence import Sequence

if TYPE_CHECKING:
    from lowbit.runtime.engine.runner import Runner


def advance(sequence: Sequence, slot: int, next_sent: bool = False) -> None:
    """Count the last token of the output as sent, by the round that has just been read.

    Args:
        sequence: that was in the round.
        slot: with the recurrent state after the token; NO_SLOT where that is lost.
        next_sent: the token behind it has been sent as well, by the next round.
    """
    sequence.length = sequence.last + 1 + next_sent
    sequence.chosen = sequence.length - len(sequence.request.prompt) + 1
    sequence.slot, sequence.drafts.verified = slot, True


def leave_rounds(runner: "Runner", sequences: Numbers[Sequence]) -> None:
    """Put tokens and states of sequences that were in a round where a plain step looks."""
    late = [each for each in sequences if each.drafts.verified]
    for each in late:
        if each.slot != each.row:
            runner.state.slots.copy(each.slot, each.row)
            each.slot = each.row
        each.drafts.verified = False
    if late:
        rows, tokens = runner.ints([[e.row, e.output[-1]] for e in late]).long().T
        runner.firsts[rows] = tokens


def enter_rounds(runner: "Runner") -> None:
    """Forget the inputs of the last plain step, which the next one must make anew."""
    runner.batch = []


def slots_after(
    spare: range | None, sequences: Numbers[Sequence], drafts: Numbers[int]
) -> list[tuple[int, ...]]:
    """Slots for the states after the last token of each sequence and after its drafts.

    The state after the last token goes to the slot of the row, the states after drafts go to spare
    slots in which no other sequence has its state: fewer than there are drafts where these are
    short.

    Args:
        spare: slots; None for a model without recurrent states.
        sequences: that are being decoded, all of them.
        drafts: of each.
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
