"""Yields the new tokens of a step; length and slot of the sequence are updated before each."""

from collections.abc import Iterator
from collections.abc import Sequence as Numbers

from lowbit.runtime.engine.rounds import Part
from lowbit.runtime.engine.runner import Runner
from lowbit.runtime.engine.sent import Flight, Sent
from lowbit.runtime.engine.sequence import Sequence
from lowbit.runtime.state.step import NO_SLOT

NewTokens = Iterator[tuple[Sequence, int]]


def new_tokens(sent: Sent, runner: Runner) -> NewTokens:
    """Wait for a step: its new tokens, one after another, of sequences that have not ended."""
    found = runner.read(sent)
    for place, (sequence, tokens) in enumerate(zip(sent.sequences, found, strict=True)):
        if sent.flight is not None:
            yield from _of_flight(sequence, tokens, sent.flight, sent.flight.writes[place])
            continue
        for token in tokens:
            if not sequence.ended:
                yield sequence, token


def tokens_of_round(parts: Numbers[Part], chosen: Numbers[Numbers[int]]) -> NewTokens:
    """The new tokens of a round that has been read, see `new_tokens`."""
    for part, tokens in zip(parts, chosen, strict=True):
        sequence = part.sequence
        if sequence.ended:  # while its masks were made
            continue
        note = sequence.note_head if part.blocked else sequence.note
        note(len(part.drafts), _right(sequence, tokens))
        for slot, token in zip(part.writes, tokens, strict=False):
            if not sequence.ended:
                sequence.go_on(slot)
                yield sequence, token


def _of_flight(
    sequence: Sequence, tokens: Numbers[int], flight: Flight, writes: Numbers[int]
) -> NewTokens:
    """Yield the tokens of a round by the head.

    A later round under way has already sent the last one, and overwritten the recurrent states
    after the others.
    """
    sequence.due -= 1 + flight.drafts
    under_way = sequence.due > 0
    if not sequence.ended:
        sequence.headed = sequence.last
        sequence.note_head(flight.drafts, _right(sequence, tokens))
    for place, token in enumerate(tokens):
        if sequence.ended:
            return
        last = place + 1 == len(tokens)
        if under_way:
            sequence.go_on(sequence.row if last else NO_SLOT, under_way=last)
        else:
            sequence.go_on(writes[place])
        yield sequence, token


def _right(sequence: Sequence, tokens: Numbers[int]) -> int:
    """Drafts of a round that were right; those behind the end of the output do not count."""
    ends = (place for place, token in enumerate(tokens) if token in sequence.request.stop_ids)
    return min(next(ends, len(tokens)) + 1, len(tokens) - 1)
