"""The search for launches: each linear takes the one with which a whole step is fastest.

One linear after the other, those that read most first, each among the choices of the others. What
wins is compared once more with what was there, in turn, and has to win by more than noise.
"""

import statistics
from collections.abc import Callable, Container, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import zip_longest
from typing import Protocol

from lowbit.runtime.kernels.launch.card import Card
from lowbit.runtime.kernels.launch.linear import GemvLaunch, Tuned, gemv_launch
from lowbit.runtime.kernels.launch.tuned import Size
from lowbit.runtime.lab.tuning.candidates import capped, for_one, several, spread
from lowbit.runtime.lab.tuning.short_model import Linear

FIRST = 20  # launches of a lone token that are tried for a linear
REFINED = 3  # of them with other caps of registers, and the best of these spread
TURNS = 3  # of the last comparison
LEAST_GAIN = 0.003  # of a step's time
MANY = (16, 32, 64)  # tokens that `wgmma` may multiply

Launches = Mapping[Size, Tuned]
Vary = Callable[..., Iterable[GemvLaunch]]  # of a launch and, by name, the card


@dataclass(frozen=True, slots=True)
class Trial:
    """A launch to be tried."""

    linear: Linear  # whose launch it is
    tokens: int  # of a step
    launch: GemvLaunch  # of the linear for as many


@dataclass(frozen=True, slots=True)
class Choice:
    """Result of the search for a linear."""

    linear: Linear  # of the model
    tokens: int  # of a step
    before: GemvLaunch  # launch by the tables
    after: GemvLaunch  # the fastest; the same where none was faster
    before_us: float  # microseconds of a step of the short model by the one, in turn with the other
    after_us: float  # by the other
    tried: int  # launches

    @property
    def call_us(self) -> float:
        """Microseconds that each call of the linear gains."""
        return (self.before_us - self.after_us) / self.linear.calls


class Bench(Protocol):
    """A machine, as far as the search needs one."""

    def compiled(self, trials: Sequence[Trial], launches: Launches) -> Container[Trial]:
        """The trials whose kernels could be compiled in time, the first ones first."""

    def step_us(self, tokens: int, launches: Launches) -> float:
        """Microseconds of a step."""

    def takes(self, linear: Linear, tokens: int, one: GemvLaunch) -> bool:
        """Tell if GEMVs multiply a linear by so many tokens, given the launch of a lone one."""

    def is_over(self) -> bool:
        """Tell if the time for trials is over."""


def with_trial(launches: Launches, trial: Trial) -> Launches:
    """Launches with a trial in the place of the choice for its linear and tokens."""
    size = trial.linear.size
    own = {**dict(launches.get(size, ())), trial.tokens: trial.launch}
    return {**launches, size: tuple(sorted(own.items()))}


@dataclass(slots=True)
class Search:
    """Choices so far."""

    bench: Bench  # machine
    card: Card  # that launches are for
    # launches by linear and tokens
    chosen: dict[Size, dict[int, GemvLaunch]] = field(default_factory=dict)
    # microseconds of a step by each launch that was tried, of a linear and tokens
    times: dict[tuple[Size, int], dict[GemvLaunch, float]] = field(default_factory=dict)

    def launches(self) -> Launches:
        """All choices."""
        return {size: tuple(sorted(each.items())) for size, each in self.chosen.items()}

    def run(self, linears: Sequence[Linear], tokens: int) -> list[Choice]:
        """Search for the launches of a step of so many tokens.

        Args:
            linears: of the model, in the order in which they are tried.
            tokens: a power of two; one before others, whose launches follow from it.
        """
        before = {each.size: self._now(each, tokens) for each in linears}
        taking = [each for each in linears if self.bench.takes(each, tokens, self._now(each, 1))]
        self._try(taking, tokens, lambda each: self._candidates(each, tokens))
        if tokens == 1:
            self._try(taking, 1, lambda each: self._variants(each, REFINED, capped))
            self._try(taking, 1, lambda each: self._variants(each, 1, partial(spread, K=each.K)))
        return [
            choice
            for each in taking
            if (choice := self._compared(each, tokens, before[each.size])) is not None
        ]

    def _now(self, linear: Linear, tokens: int) -> GemvLaunch:
        bits, tiles, steps, paired = linear.size
        own = tuple(self.chosen.get(linear.size, {}).items())
        return gemv_launch(bits, tiles, steps, tokens, paired, own, self.card.multiprocessors)

    def _candidates(self, linear: Linear, tokens: int) -> list[GemvLaunch]:
        bits, tiles, steps, _ = linear.size
        now = self._now(linear, tokens)
        if tokens == 1:
            other = replace(now, early=not now.early and self.card.overlaps)
            fits = partial(self._serves_many, linear, now)
            return [now, other, *for_one(bits, tiles, steps, linear.K, self.card, FIRST, fits)]
        return [now, *several(tokens, tiles, steps, self._now(linear, 1), self.card)]

    def _serves_many(self, linear: Linear, now: GemvLaunch, launch: GemvLaunch) -> bool:
        """Tell if many tokens keep their kernel, which has no room for K in too few parts."""
        takes = self.bench.takes
        return all(
            takes(linear, tokens, now) or not takes(linear, tokens, launch) for tokens in MANY
        )

    def _variants(self, linear: Linear, most: int, vary: Vary) -> Iterable[GemvLaunch]:
        """Variants of the fastest launches for one token."""
        best = self._best(linear, 1)[:most]
        return (variant for launch in best for variant in vary(launch, card=self.card))

    def _best(self, linear: Linear, tokens: int) -> list[GemvLaunch]:
        times = self.times.get((linear.size, tokens), {})
        return sorted(times, key=lambda launch: times[launch])[:REFINED]

    def _try(
        self,
        linears: Sequence[Linear],
        tokens: int,
        candidates: Callable[[Linear], Iterable[GemvLaunch]],
    ) -> None:
        """Compile the candidates of all linears, then time them; the best are chosen."""
        trials = [
            [
                Trial(each, tokens, launch)
                for launch in dict.fromkeys(candidates(each))
                if launch not in self.times.get((each.size, tokens), {})
            ]
            for each in linears
        ]
        likeliest = [trial for some in zip_longest(*trials) for trial in some if trial is not None]
        compiled = self.bench.compiled(likeliest, self.launches())
        for trial in (trial for some in trials for trial in some if trial in compiled):
            if self.bench.is_over():
                return
            us = self.bench.step_us(tokens, with_trial(self.launches(), trial))
            self.times.setdefault((trial.linear.size, tokens), {})[trial.launch] = us
            self._choose(trial.linear, tokens, self._best(trial.linear, tokens)[0])

    def _choose(self, linear: Linear, tokens: int, launch: GemvLaunch) -> None:
        self.chosen.setdefault(linear.size, {})[tokens] = launch

    def _compared(self, linear: Linear, tokens: int, before: GemvLaunch) -> Choice | None:
        """Compare a linear's best launches with the one that was there; None if none was tried."""
        tried = self.times.get((linear.size, tokens))
        if tried is None:
            return None
        us: dict[GemvLaunch, list[float]] = {
            launch: [] for launch in (before, *self._best(linear, tokens))
        }
        for _ in range(TURNS):
            for launch, times in us.items():
                launches = with_trial(self.launches(), Trial(linear, tokens, launch))
                times.append(self.bench.step_us(tokens, launches))
        medians = {launch: statistics.median(times) for launch, times in us.items()}
        after = min(medians, key=lambda launch: medians[launch])
        if medians[after] > medians[before] * (1 - LEAST_GAIN):
            after = before
        self._choose(linear, tokens, after)
        return Choice(linear, tokens, before, after, medians[before], medians[after], len(tried))
