"""A request, and its sequence while it is in the engine."""

from collections import deque
from collections.abc import Sequence as Ids
from dataclasses import dataclass, field
from typing import Literal

from lowbit.formats.errors import LowbitError, RequestError
from lowbit.runtime.engine.request import TokenRequest, pages_needed
from lowbit.runtime.speculation.drafter import Drafter
from lowbit.runtime.speculation.pace import Cost, PlacedPace
from lowbit.runtime.speculation.tally import Tally
from lowbit.runtime.state.logprobs import LogProbabilities
from lowbit.runtime.text.constraint import Constraint

Phase = Literal["waiting", "prompt", "decoding", "ended"]
Finish = Literal["stop", "length", "cancelled"]
LONG = 64  # tokens without a mask for which it is worthwhile that the model's head sees the prompt


@dataclass(frozen=True, slots=True)
class TokenLogProbabilities:
    """Natural logarithms of probabilities by the model's own logits, before any setting.

    Attributes:
        chosen: of the token that was chosen, or that the prompt has.
        top: (id, value) of the likeliest tokens, from the first down.
    """

    chosen: float
    top: tuple[tuple[int, float], ...]


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
        ahead: copy of its constraint, made when drafts were last considered; None where nothing can
            be drafted.
        forced: tokens that come next by its constraint, as far as that was known then.
        drafter: proposes its next tokens; None where nobody does.
        head_pace: chooses how many tokens the model's head, or a drafter, proposes; None where
            neither does.
        headed: positions that this head has seen.
        tally: of its drafts.
        verified: its last step was one that checks drafts.
        due: most tokens that rounds by the head under way may still append to its output.
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
    ahead: Constraint | None = None
    forced: tuple[int, ...] = ()
    drafter: Drafter | None = None
    head_pace: PlacedPace | None = None
    headed: int = 0
    tally: Tally = field(default_factory=Tally)
    verified: bool = False
    due: int = 0

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

    @property
    def behind(self) -> int:
        """Positions that the head has not seen, of those before the last token."""
        return self.last - self.headed

    def id_at(self, position: int) -> int:
        """The token at a position, of those that the host knows."""
        prompt = self.request.prompt
        return prompt[position] if position < len(prompt) else self.output[position - len(prompt)]

    @property
    def predictable(self) -> bool:
        """True if the model's head or a drafter may draft: no masks come soon."""
        return self.request.constraint is None or self.unbound >= LONG

    def most_head_drafts(self, most: int) -> int:
        """Drafts of a head or a drafter: neither they nor the token behind them need a mask."""
        if self.limited:
            free = 0 if self.masked else self.unbound - (self.due or self.under_way)
            most = min(most, free - 1)
        return self.most_drafts(most)

    def most_drafts(self, most: int) -> int:
        """Drafts that the request has tokens left for, up to `most`."""
        return max(0, min(most, self.count - len(self.output) - self.due - 1))

    def propose(self, most: int, cost: Cost, least_gain: float) -> Ids[int]:
        """Drafts of what follows: what its constraint forces, else what its drafter proposes.

        See `Drafter.propose`.
        """
        most = self.most_drafts(most)
        if most == 0 or (self.limited and self.ahead is None):
            return ()
        if self.limited and (forced := self.forced[self.under_way :]):
            return forced[:most]
        return () if self.drafter is None else self.drafter.propose(most, cost, least_gain)

    def go_on(self, slot: int, under_way: bool = False) -> None:
        """Count a token of a round, the last one of the output: it has been sent.

        Args:
            slot: with the recurrent state after it; NO_SLOT where that is lost.
            under_way: the token behind it has been sent as well, by the next round.
        """
        self.length = self.last + 1 + under_way
        self.chosen = self.length - len(self.request.prompt) + 1
        self.slot, self.verified = slot, True

    def note(self, drafted: int, right: int) -> None:
        """Take down how many drafts of a round have been checked, and were right."""
        self.tally.count(drafted, right)
        if self.drafter is not None and drafted and not self.forced:
            self.drafter.note(drafted, right)

    def note_head(self, drafted: int, right: int) -> None:
        """The same of drafts of the model's head, or of a drafter."""
        self.tally.count(drafted, right)
        if self.head_pace is not None:
            self.head_pace.note(drafted, right)

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
