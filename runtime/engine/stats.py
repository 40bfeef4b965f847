"""Counts of an engine: load, reused prompts, checked drafts."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import zip_longest
from math import log
from typing import TYPE_CHECKING, Literal, get_args

from lowbit.formats.page_counts import EXTRA

if TYPE_CHECKING:
    from lowbit.runtime.engine.engine import Engine

Source = Literal["forced", "copied", "head", "drafter"]  # of drafts
SOURCES: tuple[Source, ...] = get_args(Source)
MADE: tuple[Source, ...] = ("head", "drafter")  # trained for the model
# Share of right drafts by chance: who always drafts the commonest token of the bundled stories, the
# full stop, is right at 0.065.
CHANCE = 0.065
# Below it drafts never pay: checking one costs 1.25 plain steps at the least (docs/speculation.md).
PAYING = 0.25
# Logarithm of how much likelier CHANCE makes the drafts than PAYING does. Drafts that are right at
# PAYING or more often ever reach it with a probability of 1e-4 at most, whenever one looks and
# whenever drafting is paused (Wald's test, Ville's inequality).
EVIDENCE = log(1e4)


@dataclass(frozen=True, slots=True)
class Load:
    """Load of an engine, up to a step old."""

    running: int  # sequences that have room
    waiting: int  # sequences that wait for room
    pages_used: int  # pages of running sequences
    pages_kept: int  # pages of the prefix cache alone, given back when they are needed
    pages: int  # all pages
    prompts: int  # looked up in the prefix cache since the start
    hits: int  # prompts that began with a cached prefix
    reused_tokens: int  # tokens of prompts that were not run again


def load_of(engine: "Engine") -> Load:
    """Load of an engine, from any thread, without waiting for the running step."""
    running, pages = engine.scheduler.running, engine.runner.state.pages.count - EXTRA
    reuse = engine.scheduler.reuse
    used = len({page for sequence in running for page in sequence.pages})
    return Load(
        running=len(running),
        waiting=len(engine.scheduler.queued),
        pages_used=used,
        pages_kept=max(0, pages + EXTRA - 1 - engine.scheduler.blocks.pages.free - used),
        pages=pages,
        prompts=reuse.prompts,
        hits=reuse.hits,
        reused_tokens=reuse.tokens,
    )


@dataclass(slots=True)
class Reuse:
    """Counts of prompts that began with a cached prefix."""

    prompts: int = 0  # looked up
    hits: int = 0  # prompts that reused tokens
    tokens: int = 0  # reused

    def count(self, tokens: int) -> None:
        """Count a prompt that reused so many tokens."""
        self.prompts += 1
        self.hits += tokens > 0
        self.tokens += tokens


@dataclass(frozen=True, slots=True)
class OfSource:
    """Drafts of one source."""

    rounds: int  # steps that checked some
    drafted: int  # checked in all, those behind a wrong one included
    # drafts behind right ones alone, each of which was right or wrong by itself
    compared: int
    accepted: int  # right ones among them

    @property
    def like_chance(self) -> bool:
        """True if enough were compared to say that they are right as rarely as by chance.

        42 wrong ones are enough, or 200 of which 22 are right.
        """
        wrong = self.compared - self.accepted
        for_right, for_wrong = log(CHANCE / PAYING), log((1 - CHANCE) / (1 - PAYING))
        return self.accepted * for_right + wrong * for_wrong >= EVIDENCE


@dataclass(frozen=True, slots=True)
class Speculated:
    """Results of speculation, of one request or of several.

    Attributes:
        rounds: steps that checked drafts.
        drafted: by position, rounds that had a draft there.
        accepted: by position, rounds that accepted the draft there and all before it.
        tokens_a_round: mean tokens of a round, those behind a drafted stop token included; None
            without rounds.
        sources: counts of each source that drafted.
        like_chance: the head or the drafter, if it is right as rarely as by chance; most counts are
            too small to say.
    """

    rounds: int
    drafted: tuple[int, ...]
    accepted: tuple[int, ...]
    tokens_a_round: float | None
    sources: Mapping[Source, OfSource] = field(default_factory=dict)
    like_chance: tuple[Source, ...] = ()

    @property
    def words(self) -> str:
        """`3.1 tokens a round`; empty without rounds."""
        return "" if self.tokens_a_round is None else f"{self.tokens_a_round:.1f} tokens a round"


@dataclass(slots=True)
class Tally:
    """Running counts of checked drafts."""

    rounds: int = 0  # steps that checked drafts
    drafted: list[int] = field(default_factory=list)  # see `Speculated`
    accepted: list[int] = field(default_factory=list)  # see `Speculated`
    sources: dict[Source, OfSource] = field(default_factory=dict)  # see `Speculated`

    def count(self, drafted: int, accepted: int, source: Source) -> None:
        """Count a step that checked `drafted` drafts of a source and accepted `accepted`."""
        if not drafted:
            return
        right = [1] * accepted + [0] * (drafted - accepted)
        own = OfSource(1, drafted, min(accepted + 1, drafted), accepted)
        self.add(Tally(1, [1] * drafted, right, {source: own}))

    def add(self, other: "Tally | Speculated") -> None:
        """Add the counts of another."""
        self.rounds += other.rounds
        self.drafted = _sums(self.drafted, other.drafted)
        self.accepted = _sums(self.accepted, other.accepted)
        for source, own in other.sources.items():
            self.sources[source] = _sum(self.sources.get(source), own)

    @property
    def tokens_a_round(self) -> float | None:
        """Mean tokens of a step with drafts; None before the first."""
        return 1 + sum(self.accepted) / self.rounds if self.rounds else None

    @property
    def speculated(self) -> Speculated:
        """The counts so far."""
        counts = self.rounds, tuple(self.drafted), tuple(self.accepted)
        doubted = (name for name in MADE if name in self.sources and self.sources[name].like_chance)
        return Speculated(*counts, self.tokens_a_round, dict(self.sources), tuple(doubted))


def _sum(a: OfSource | None, b: OfSource) -> OfSource:
    if a is None:
        return b
    return OfSource(
        rounds=a.rounds + b.rounds,
        drafted=a.drafted + b.drafted,
        compared=a.compared + b.compared,
        accepted=a.accepted + b.accepted,
    )


def _sums(a: Sequence[int], b: Sequence[int]) -> list[int]:
    return [x + y for x, y in zip_longest(a, b, fillvalue=0)]
