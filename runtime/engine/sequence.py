"""A sequence: one request on its way through the engine."""

import time
from collections import deque
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Literal

from lowbit.formats.errors import LowbitError, RequestError
from lowbit.runtime.engine.request import Request, pages_needed
from lowbit.runtime.engine.stats import Tally
from lowbit.runtime.state.step import NO_SLOT, Span

if TYPE_CHECKING:
    from lowbit.runtime.engine.prompt_images import PromptImages
    from lowbit.runtime.state.host_rings import LogProbabilities

Phase = Literal["waiting", "prompt", "decoding", "ended"]
Finish = Literal["stop", "length", "cancelled"]


@dataclass(frozen=True, slots=True)
class TokenLogProbabilities:
    """Natural log-probabilities of one place, by the logits before any sampling setting."""

    chosen: float  # of the chosen token, or of the prompt's
    top: tuple[tuple[int, float], ...]  # (id, value) of the likeliest tokens in descending order


@dataclass(slots=True, eq=False)
class Sequence:
    """A request with its place in the batch, the cache and the output."""

    request: Request  # what the user asked for
    count: int  # most new tokens
    seed: int  # of its random numbers
    phase: Phase = "waiting"  # waiting for room, running its prompt, decoding, or ended
    arrived_at: float = field(default_factory=time.perf_counter)  # time of its request
    admitted_at: float | None = None  # time when it got its row; None while it has had none
    row: int = 0  # of block tables and sampler; 0 while it has none
    slot: int = 0  # with its recurrent state; the slot of its row, or a spare one after drafts
    pages: list[int] = field(default_factory=list)  # its block table
    length: int = 0  # tokens sent through the layers
    chosen: int = 0  # new tokens that the device has been told to choose
    reused: int = 0  # tokens of the prompt taken from the prefix cache
    output: list[int] = field(default_factory=list)  # new tokens that the host has read
    # Tokens of the output that the user has not taken
    unread: deque[int] = field(default_factory=deque)
    # One for each token of the output, if the request asks for them
    log_probabilities: list[TokenLogProbabilities] = field(default_factory=list)
    # One for each token of the prompt, if the request asks for them and its first new token has
    # been read; None for the first token, which follows nothing
    prompt_log_probabilities: tuple[TokenLogProbabilities | None, ...] = ()
    scores: "LogProbabilities | None" = None  # host memory that kernels write these to
    finish: Finish | None = None  # reason of its end; None before, and after an error
    error: LowbitError | None = None  # that ended it
    cancelled: bool = False  # set by the user, at any time and from any thread
    # Lengths at which the chunks of its prompt end, reused ones included
    chunk_ends: list[int] = field(default_factory=list)
    fresh: int = 0  # see `Prefix.fresh`
    snapshots: dict[int, int] = field(default_factory=dict)  # numbers of its snapshots, by length
    constraint_done: bool = False  # its constraint is done
    free_tokens: int = 0  # number of tokens behind the output that need no mask
    masked: bool = False  # its sampler row has a mask that does not allow every token
    # Its last step checked drafts, so that the host alone has its last token, and its recurrent
    # state is in `slot`
    verified: bool = False
    tally: Tally = field(default_factory=Tally)  # counts of checked drafts
    drafts: object = None  # what a source of drafts keeps of it
    images: "PromptImages | None" = None  # of its prompt; None without

    @property
    def queued_s(self) -> float | None:
        """Seconds that it waited for its row; None while it waits, and if it ended before."""
        return None if self.admitted_at is None else self.admitted_at - self.arrived_at

    @property
    def needs_mask(self) -> bool:
        """True if the token behind those under way may need a new mask."""
        return self.constrained and (self.masked or self.free_tokens <= self.under_way)

    @property
    def constrained(self) -> bool:
        """True if it has a constraint that is not done."""
        return self.request.constraint is not None and not self.constraint_done

    @property
    def under_way(self) -> int:
        """Tokens that the device has been told to choose and that the host has not read."""
        return self.chosen - len(self.output)

    @property
    def shift(self) -> int:
        """Difference between positions of its new tokens and their indices; 0 without images."""
        return 0 if self.images is None else self.images.positions.delta

    @property
    def next_stop(self) -> int:
        """Length behind the next chunk of its prompt: the next cut, or the prompt's end."""
        stop = len(self.request.prompt)
        return min((end for end in self.chunk_ends if end > self.length), default=stop)

    @property
    def next_count(self) -> int:
        """Tokens of the next chunk of its prompt."""
        return self.next_stop - self.length

    def next_span(self, count: int) -> Span:
        """Span of its next tokens in a chunk of its prompt or a plain step, by its row's slot."""
        writes = [NO_SLOT] * (count - 1) + [self.row]
        return Span(self.row, self.length, count, tuple(self.pages), self.row, tuple(writes))

    def id_at(self, position: int) -> int:
        """Token at a position that the host has read."""
        prompt = self.request.prompt
        return prompt[position] if position < len(prompt) else self.output[position - len(prompt)]

    @property
    def last(self) -> int:
        """Position of the last token that the host has read."""
        return len(self.request.prompt) + len(self.output) - 1

    @property
    def ended(self) -> bool:
        """True once no more tokens come."""
        return self.phase == "ended"

    def take(self) -> int | None:
        """Next token that the user has not taken; None if there is none now.

        Each token goes to one of the threads that take them.
        """
        try:
            return self.unread.popleft()
        except IndexError:
            return None

    def cancel(self) -> None:
        """Let the next step end it, and threads leave its images at once; from any thread."""
        self.cancelled = True
        if self.images is not None:
            self.images.leave()

    def lose(self, error: LowbitError | None = None) -> None:
        """End it because its step failed or, without an error, was interrupted."""
        self.error = error or RequestError(
            "a step was interrupted while this request ran", hint="ask again"
        )
        if self.images is not None:
            self.images.drop(len(self.request.prompt))
        self.phase = "ended"

    def count_sent(self) -> None:
        """Count the token of a plain step that has been sent."""
        self.length += 1
        self.chosen += 1

    def advance(self, slot: int, next_sent: bool = False) -> None:
        """Advance past the newest token of the output, which a round with drafts has verified.

        Args:
            slot: with the recurrent state after the token; NO_SLOT if it is lost.
            next_sent: the next round has sent the token behind it as well.
        """
        self.length = self.last + 1 + next_sent
        self.chosen = self.length - len(self.request.prompt) + 1
        self.slot, self.verified = slot, True

    @property
    def page_count(self) -> int:
        """Pages that it needs for its whole length."""
        return pages_needed(len(self.request.prompt), self.count)

    @property
    def ids(self) -> list[int]:
        """Token ids that have been sent through the layers."""
        return [*self.request.prompt, *self.output][: self.length]


Ended = list[tuple[Sequence, Finish | LowbitError]]  # sequences and the reasons of their ends
