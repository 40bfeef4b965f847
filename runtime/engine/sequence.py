"""A sequence: one request while it is in the engine."""

from collections import deque
from dataclasses import dataclass, field
from typing import Literal

from lowbit.formats.errors import LowbitError, RequestError
from lowbit.runtime.engine.request import TokenRequest, pages_needed
from lowbit.runtime.engine.speculate.proposals import Drafter, PlacedPace
from lowbit.runtime.engine.stats import Tally
from lowbit.runtime.state.host_rings import LogProbabilities
from lowbit.runtime.text.constraint import Constraint

Phase = Literal["waiting", "prompt", "decoding", "ended"]
Finish = Literal["stop", "length", "cancelled"]


@dataclass(frozen=True, slots=True)
class TokenLogProbabilities:
    """Natural logarithms of probabilities by the model's own logits, before any setting.

    Attributes:
        chosen: of the token that was chosen, or that the prompt has.
        top: (id, value) of the likeliest tokens, from the first down.
    """

    chosen: float
    top: tuple[tuple[int, float], ...]


@dataclass(slots=True)
class DraftState:
    """Drafts of a sequence; nothing changes where the engine drafts nothing.

    Attributes:
        drafter: proposes copies of earlier tokens; None where nobody does.
        told: tokens of the output that the drafter has been told.
        pace: chooses how many tokens the model's head, or a block drafter, drafts; None where
            neither does.
        ahead: copy of the constraint that knows the tokens that the host knows; None where nothing
            can be drafted.
        forced: tokens that the constraint forces next, as far as that was known then.
        seen: positions that the model's head has seen.
        verified: the last step checked drafts.
        due: most tokens that MTP rounds under way may still append to the output.
        tally: of drafts that were checked.
    """

    drafter: Drafter | None = None
    told: int = 0
    pace: PlacedPace | None = None
    ahead: Constraint | None = None
    forced: tuple[int, ...] = ()
    seen: int = 0
    verified: bool = False
    due: int = 0
    tally: Tally = field(default_factory=Tally)


@dataclass(slots=True, eq=False)
class Sequence:
    """One request on its way through the engine.

    Attributes:
        request: from the user.
        count: new tokens at most.
        seed: of its random numbers.
        phase: waiting for room, running its prompt, decoding, or ended.
        row: of block tables and sampler; 0 before it has one.
        slot: with its recurrent state, that of its row but for some steps with drafts.
        pages: its block table.
        length: tokens that have been sent through the layers.
        chosen: new tokens that the device has been told to choose.
        reused: tokens of the prompt that the cache held.
        output: new tokens that the host has read.
        unread: of them, those that the user has not taken.
        log_probabilities: of each token of the output, where the request wants them.
        prompt_log_probabilities: of each token of the prompt, where the request wants them and its
            first new token has been read; None for the first one, which follows nothing.
        scores: memory of the host that they come from.
        finish: why it ended; None before, and where an error ended it.
        error: that ended it.
        cancelled: set by the user, at any time and from any thread.
        cuts: lengths at which the chunks of its prompt end, those that it reuses included.
        fresh: see `Prefix.fresh`.
        snapshots: slot with the recurrent state, by length.
        released: its constraint is done.
        unbound: tokens after those of the output that come without a mask.
        masked: its row of the sampler has a mask that does not allow every token.
        drafts: see `DraftState`.
    """

    request: TokenRequest
    count: int
    seed: int
    phase: Phase = "waiting"
    row: int = 0
    slot: int = 0
    pages: list[int] = field(default_factory=list)
    length: int = 0
    chosen: int = 0
    reused: int = 0
    output: list[int] = field(default_factory=list)
    unread: deque[int] = field(default_factory=deque)
    log_probabilities: list[TokenLogProbabilities] = field(default_factory=list)
    prompt_log_probabilities: tuple[TokenLogProbabilities | None, ...] = ()
    scores: LogProbabilities | None = None
    finish: Finish | None = None
    error: LowbitError | None = None
    cancelled: bool = False
    cuts: list[int] = field(default_factory=list)
    fresh: int = 0
    snapshots: dict[int, int] = field(default_factory=dict)
    released: bool = False
    unbound: int = 0
    masked: bool = False
    drafts: DraftState = field(default_factory=DraftState)

    @property
    def bound(self) -> bool:
        """True if the token after those under way needs another mask, or may need one."""
        return self.limited and (self.masked or self.unbound <= self.under_way)

    @property
    def limited(self) -> bool:
        """True if it has a constraint that is not done."""
        return self.request.constraint is not None and not self.released

    @property
    def under_way(self) -> int:
        """Tokens that the device has been told to choose and the host has not read."""
        return self.chosen - len(self.output)

    def id_at(self, position: int) -> int:
        """The token at a position, of those that the host knows."""
        prompt = self.request.prompt
        return prompt[position] if position < len(prompt) else self.output[position - len(prompt)]

    @property
    def last(self) -> int:
        """Position of the last token that the host knows."""
        return len(self.request.prompt) + len(self.output) - 1

    @property
    def ended(self) -> bool:
        """True once no token comes any more."""
        return self.phase == "ended"

    def take(self) -> int | None:
        """The next token that the user has not taken, None where none is there.

        Several threads may take tokens of one sequence: each token goes to one of them.
        """
        try:
            return self.unread.popleft()
        except IndexError:
            return None

    def lose(self, error: LowbitError | None = None) -> None:
        """End it with a step that failed, or, without an error, was interrupted halfway."""
        self.error = error or RequestError(
            "a step was interrupted while this request ran", hint="ask again"
        )
        self.phase = "ended"

    @property
    def page_count(self) -> int:
        """Pages that it needs in all; its last new token takes no place."""
        return pages_needed(len(self.request.prompt), self.count)

    @property
    def ids(self) -> list[int]:
        """Tokens that have been sent through the layers."""
        return [*self.request.prompt, *self.output][: self.length]


Ended = list[tuple[Sequence, Finish | LowbitError]]  # sequences, and why they end
