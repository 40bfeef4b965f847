"""Counts of an engine: its load, prompts that the cache held, drafts that were checked."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import zip_longest
from typing import TYPE_CHECKING

from lowbit.runtime.state.pages import EXTRA

if TYPE_CHECKING:
    from lowbit.runtime.engine.engine import Engine


@dataclass(frozen=True, slots=True)
class Load:
    """The load of an engine, which may be a step old.

    Attributes:
        running: sequences that have room.
        waiting: sequences that have none yet.
        pages_used: of keys and values, by running sequences.
        pages_kept: by prefixes of ended sequences alone; given back when they are needed.
        pages: in all.
        prompts: that were looked up in the cache, since the start.
        hits: of them, those that begin with tokens that it held.
        reused_tokens: of these prompts, those that were not run again.
    """

    running: int
    waiting: int
    pages_used: int
    pages_kept: int
    pages: int
    prompts: int
    hits: int
    reused_tokens: int


def load_of(engine: "Engine") -> Load:
    """The load of an engine, from any thread; it does not wait for the step under way."""
    running, pages = engine.scheduler.running, engine.runner.state.pages.count - EXTRA
    reuse = engine.scheduler.reuse
    used = len({page for sequence in running for page in sequence.pages})
    return Load(
        running=len(running),
        waiting=len(engine.scheduler.queued),
        pages_used=used,
        pages_kept=max(0, pages + EXTRA - 1 - engine.scheduler.room.pages.free - used),
        pages=pages,
        prompts=reuse.prompts,
        hits=reuse.hits,
        reused_tokens=reuse.tokens,
    )


@dataclass(slots=True)
class Reuse:
    """Counts prompts that began with tokens in the cache.

    Attributes:
        prompts: that were looked up.
        hits: of them, those that took over some tokens.
        tokens: that were taken over.
    """

    prompts: int = 0
    hits: int = 0
    tokens: int = 0

    def count(self, tokens: int) -> None:
        """Count a prompt that took over so many tokens."""
        self.prompts += 1
        self.hits += tokens > 0
        self.tokens += tokens


@dataclass(frozen=True, slots=True)
class Speculated:
    """Drafts of a request that has ended, or of several.

    Attributes:
        rounds: steps that verified drafts.
        drafted: drafts by position: how many rounds had a first one, a second one, and so on.
        accepted: how many of them were accepted, which takes all before them to be.
        tokens_a_round: mean number of tokens that a round gave, or would have given behind a stop
            token that was drafted; None without rounds.
    """

    rounds: int
    drafted: tuple[int, ...]
    accepted: tuple[int, ...]
    tokens_a_round: float | None

    @property
    def words(self) -> str:
        """`3.1 tokens a round`; empty without rounds."""
        return "" if self.tokens_a_round is None else f"{self.tokens_a_round:.1f} tokens a round"


@dataclass(slots=True)
class Tally:
    """Drafts of a request, or of many.

    Attributes:
        rounds: steps that checked drafts.
        drafted: how many had a draft in the first place, in the second, and so on.
        accepted: how many of these were right, with all before them.
    """

    rounds: int = 0
    drafted: list[int] = field(default_factory=list)
    accepted: list[int] = field(default_factory=list)

    def count(self, drafted: int, accepted: int) -> None:
        """Count a step that checked `drafted` drafts of which `accepted` were right."""
        right = [1] * accepted + [0] * (drafted - accepted)
        self.add(Tally(int(drafted > 0), [1] * drafted, right))

    def add(self, other: "Tally | Speculated") -> None:
        """Count what another has counted."""
        self.rounds += other.rounds
        self.drafted = _sums(self.drafted, other.drafted)
        self.accepted = _sums(self.accepted, other.accepted)

    @property
    def tokens_a_round(self) -> float | None:
        """Tokens that a step with drafts gave on average; None before the first."""
        return 1 + sum(self.accepted) / self.rounds if self.rounds else None

    @property
    def speculated(self) -> Speculated:
        """The counts so far."""
        counts = self.rounds, tuple(self.drafted), tuple(self.accepted)
        return Speculated(*counts, self.tokens_a_round)


def _sums(a: Sequence[int], b: Sequence[int]) -> list[int]:
    """Sums by place; the shorter list goes on with zeros."""
    return [x + y for x, y in zip_longest(a, b, fillvalue=0)]
