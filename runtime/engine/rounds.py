"""Rounds: steps that check drafts of several sequences, and where these leave their states."""

from collections.abc import Sequence as Numbers
from dataclasses import dataclass
from itertools import accumulate

from lowbit.runtime.engine.sequence import Sequence
from lowbit.runtime.state.sampler_rows import SCRATCH
from lowbit.runtime.state.step import NO_SLOT, Span


@dataclass(frozen=True, slots=True)
class Part:
    """One sequence's tokens in a round.

    Attributes:
        sequence: all of whose tokens have been read.
        drafts: behind its last token.
        writes: slots that take the recurrent state after the last token and after each draft.
        blocked: its drafts are a block of the drafter's.
    """

    sequence: Sequence
    drafts: tuple[int, ...]
    writes: tuple[int, ...]
    blocked: bool = False

    @property
    def ids(self) -> tuple[int, ...]:
        """Tokens of the sequence in the round."""
        return (self.sequence.output[-1], *self.drafts)

    @property
    def ordered(self) -> bool:
        """True if what is chosen after a draft depends on what was chosen before it."""
        return bool(self.drafts) and self.sequence.request.sampling.penalized

    @property
    def span(self) -> Span:
        """These tokens as a step names them."""
        each = self.sequence
        pages = tuple(each.pages)
        return Span(each.row, each.last, len(self.writes), pages, each.slot, self.writes)


def new_round(
    sequences: Numbers[Sequence], drafts: Numbers[Numbers[int]], spare: range | None
) -> list[Part]:
    """A round of sequences with their drafts, fewer where slots for their states are short.

    The state after the last token goes to the slot of the sequence's row, the states after drafts
    go to spare slots in which no other sequence has its state.

    Args:
        sequences: that are being decoded, all of them.
        drafts: of each.
        spare: slots; None for a model without recurrent states.
    """
    if spare is None:
        return [
            Part(each, tuple(some), (each.row,) * (1 + len(some)))
            for each, some in zip(sequences, drafts, strict=True)
        ]
    held = {each.slot for each in sequences}
    free = [slot for slot in spare if slot not in held]
    parts = []
    for each, some in zip(sequences, drafts, strict=True):
        own = [each.slot] if each.slot in spare else []
        usable = (own + free)[: len(some)]
        free = [slot for slot in free if slot not in usable]
        parts.append(Part(each, tuple(some[: len(usable)]), (each.row, *usable)))
    return parts


def rows_and_positions(spans: Numbers[Span]) -> tuple[list[int], list[int]]:
    """Row and position of every token of the spans."""
    rows = [span.row for span in spans for _ in range(span.count)]
    return rows, [span.first + place for span in spans for place in range(span.count)]


def starts_of(spans: Numbers[Span]) -> list[int]:
    """The first token of each span, then the number of all tokens."""
    return [0, *accumulate(span.count for span in spans)]


def columns_of(parts: Numbers[Part], M: int, wide: int) -> list[list[int]]:
    """The tokens of a round as the device takes them, with padding up to M tokens.

    Padding is a last sequence, of row SCRATCH, which may be empty.

    Returns:
        The rows of `Links.block`, each of `wide` numbers.
    """
    spans = [part.span for part in parts]
    ids = [id for part in parts for id in part.ids]
    rows, positions = rows_and_positions(spans)
    reads = [span.read for span in spans]
    writes = [slot for span in spans for slot in span.writes]
    writes += [NO_SLOT] * (wide - len(writes))
    places = [place for span in spans for place in range(span.count)]
    columns = (ids, positions, rows, reads, writes, places, [*starts_of(spans), M])
    return [[*numbers, *[SCRATCH] * (wide - len(numbers))] for numbers in columns]


def step_spans(sequences: Numbers[Sequence]) -> tuple[Span, ...]:
    """The tokens of a step without drafts as the host knows them."""
    return tuple(
        Span(each.row, each.length, 1, tuple(each.pages), each.row, (each.row,))
        for each in sequences
    )
