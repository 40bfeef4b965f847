"""`lowbit-run tune`: launches for a model's linears, measured on this GPU and kept for `load`."""

import gc
import math
import statistics
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from pathlib import Path

import torch
from triton.runtime.errors import OutOfResources

from lowbit.formats.errors import UnsupportedModelError
from lowbit.runtime.kernels.launch.choose import choose
from lowbit.runtime.kernels.launch.device import card_of
from lowbit.runtime.kernels.launch.linear import GemvLaunch, Tuned, gemv_launch
from lowbit.runtime.kernels.launch.tables import row_text
from lowbit.runtime.kernels.launch.tuned import (
    Launches,
    MeasuredCard,
    Size,
    card_here,
    keep_launches,
    read_launches,
)
from lowbit.runtime.lab.tuning.search import TURNS, Choice, Search, Trial, with_trial
from lowbit.runtime.lab.tuning.short_model import Linear, linears_of, new_short_runner, shortened
from lowbit.runtime.lab.tuning.step import ShortSteps, short_steps
from lowbit.runtime.lab.tuning.workers import Job, Workers, new_workers
from lowbit.runtime.models.loader import OpenedModel

COMPARED = 0.85  # of the time limit, after which nothing more is tried, but choices are compared
LEAST_SHARE = 0.15  # of the time limit, with which steps of more tokens are begun
TIMES_L2 = 4  # weights of the short model's layers, in sizes of the L2 cache
WARM = 4  # captures before anything counts

Progressed = Callable[[str, int, int], None]  # phase, done, total


@dataclass(frozen=True, slots=True)
class StepTimes:
    """Microseconds of a step by the bundled tables, and by what was found."""

    tokens: int  # of the step, one of each sequence
    before_us: float  # of the short model by the tables
    after_us: float  # of the short model by what was found
    whole_before_us: float  # estimate for the whole model
    whole_after_us: float  # likewise


@dataclass(frozen=True, slots=True)
class Tuning:
    """Result of a search."""

    card: MeasuredCard  # that it ran on
    layers: int  # of the short model
    whole_layers: int  # of the model
    choices: tuple[Choice, ...]  # for every linear and number of tokens that was tried
    steps: tuple[StepTimes, ...]  # times of steps
    seconds: float  # that it took
    compile_s: float  # of that, until kernels were compiled
    complete: bool  # nothing was left out for want of time
    path: Path | None  # of the file that keeps the launches; None where they were not kept

    @property
    def lines(self) -> list[str]:
        """Found launches, as rows of the sections `one` and `several` of `launch.tables`."""
        found = []
        for each in self.choices:
            if each.after != each.before:
                several = () if each.tokens == 1 else (each.tokens,)
                found.append(row_text((*each.linear.size[:3], *several), each.after))
        return found


@dataclass(slots=True)
class GpuBench:
    """The GPU of this process, and the processes that compile for it; see `search.Bench`."""

    workers: Workers  # that compile
    steps: Mapping[int, ShortSteps]  # of the short model, by tokens
    trials_end: float  # time after which nothing more is tried
    show: Progressed  # shows progress
    complete: bool = True  # nothing was left out so far
    compile_s: float = 0.0  # seconds until kernels were compiled
    _measured: int = 0
    _total: int = 1

    def prepare(self, tokens: int, launches: Mapping[Size, Tuned]) -> None:
        """Compile all kernels of a step, the tables' too, and let the GPU settle."""
        count = self.workers.count
        both: list[Mapping[Size, Tuned]] = [{}, launches] if launches else [{}]
        self._compile([Job(tokens, it, share=n, shares=count) for it in both for n in range(count)])
        for _ in range(WARM):
            self.steps[tokens].step_us(launches)

    def compiled(self, trials: Sequence[Trial], launches: Mapping[Size, Tuned]) -> set[Trial]:
        """See `Bench`."""
        done = self._compile(
            [Job(it.tokens, with_trial(launches, it), wanted=it.launch) for it in trials]
        )
        self._measured, self._total = 0, max(1, len(done))
        return {trials[number] for number in done}

    def step_us(self, tokens: int, launches: Mapping[Size, Tuned]) -> float:
        """See `Bench`."""
        try:
            us = self.steps[tokens].step_us(launches)
        except OutOfResources:  # a launch that the card has no room for
            us = math.inf
        self._measured += 1
        self.show("measure", min(self._measured, self._total), self._total)
        return us

    def takes(self, linear: Linear, tokens: int, one: GemvLaunch) -> bool:
        """See `Bench`."""
        w = replace(linear.example, tuned=((1, one),))
        return choose(w, tokens, card_of(w.words)).way == "gemv"

    def is_over(self) -> bool:
        """See `Bench`."""
        return not self.has_time(0)

    def has_time(self, seconds: float) -> bool:
        """Tell if so many seconds are left for trials; what was asked for is left out if not."""
        left = time.monotonic() + seconds <= self.trials_end
        self.complete &= left
        return left

    def _compile(self, jobs: Sequence[Job]) -> set[int]:
        """Numbers of the jobs that are done in half of the time that is left."""
        done, asked = set[int](), time.monotonic()
        seconds = max(1.0, (self.trials_end - asked) / 2)
        for number in self.workers.compile(jobs, seconds):
            done.add(number)
            self.show("compile", len(done), len(jobs))
        took = time.monotonic() - asked
        self.compile_s += took
        self.complete &= took < seconds
        return done


def tune(
    opened: OpenedModel,
    tokens: Sequence[int],
    seconds: float,
    workers: int | None,
    keep: bool,
    missing: bool,
    show: Progressed,
) -> Tuning:
    """Search for the launches of a model's linears on this GPU.

    Args:
        opened: the model, of which only headers are read.
        tokens: of steps, powers of two.
        seconds: after which nothing more is tried.
        workers: processes that compile; None for as many as fit.
        keep: write the launches where `load` reads them.
        missing: leave out linears that have a launch for as many tokens there.
        show: shows progress of `compile` and `measure`.

    Raises:
        UnsupportedModelError: the model has no packed linears.
        FormatError: damaged launches of an earlier search.
        ResourceError: too little memory, or the file cannot be written.
    """
    started, card = time.monotonic(), card_here()
    earlier = read_launches(card)
    there = {} if earlier is None else {it: dict(own) for it, own in earlier.linears.items()}
    short = shortened(opened, TIMES_L2 * torch.cuda.get_device_properties().L2_cache_size)
    runner = new_short_runner(short, "cuda", max(tokens))
    linears = linears_of(runner, opened)
    if not linears:
        raise UnsupportedModelError(
            "the model has no packed linears to tune", hint="add --quantize int4"
        )
    choices, steps = list[Choice](), list[StepTimes]()
    kind = card_of(runner.tables)
    timers = {count: short_steps(runner, count) for count in tokens}
    with (
        _quick_collection(),
        new_workers(short, kind, max(tokens), workers) as pool,
    ):
        bench = GpuBench(pool, timers, started + COMPARED * seconds, show)
        search = Search(bench, kind)
        if missing or 1 not in tokens:
            search.chosen.update({size: dict(own) for size, own in there.items()})
        repeats = opened.config.num_hidden_layers / short.config.num_hidden_layers
        for count in sorted(tokens):
            if not bench.has_time(LEAST_SHARE * seconds):
                break
            bench.prepare(count, search.launches())
            wanted = [it for it in linears if not (missing and count in there.get(it.size, {}))]
            choices += search.run(wanted, count)
            steps.append(_times(timers[count], search.launches(), repeats))
    found = {size: _with_lone(size, each) for size, each in search.launches().items()}
    launches = Launches(card, datetime.now(UTC).date().isoformat(), found)
    path = keep_launches(launches) if keep and found else None
    return Tuning(
        card=card,
        layers=short.config.num_hidden_layers,
        whole_layers=opened.config.num_hidden_layers,
        choices=tuple(choices),
        steps=tuple(steps),
        seconds=time.monotonic() - started,
        compile_s=bench.compile_s,
        complete=bench.complete,
        path=path,
    )


@contextmanager
def _quick_collection() -> Iterator[None]:
    """Keep what exists out of garbage collections: PyTorch makes one before each capture."""
    gc.collect()
    gc.freeze()
    try:
        yield
    finally:
        gc.unfreeze()


def _times(steps: ShortSteps, launches: Mapping[Size, Tuned], repeats: float) -> StepTimes:
    """Times of a step, the tables' and the found launches' in turn."""
    us = {name: list[float]() for name in ("before", "after", "before layers", "after layers")}
    for _ in range(TURNS):
        for name, each in (("before", {}), ("after", launches)):
            us[name].append(steps.step_us(each))
            us[f"{name} layers"].append(steps.layers_us(each))
    found = {name: statistics.median(times) for name, times in us.items()}
    return StepTimes(
        tokens=steps.tokens,
        before_us=found["before"],
        after_us=found["after"],
        whole_before_us=found["before"] + (repeats - 1) * found["before layers"],
        whole_after_us=found["after"] + (repeats - 1) * found["after layers"],
    )


def _with_lone(size: Size, tuned: Tuned) -> Tuned:
    """Launches with that of a lone token, so that the parts of K are those of the file alone."""
    bits, tiles, steps, paired = size
    lone = gemv_launch(bits, tiles, steps, 1, paired, tuned)
    return tuple(sorted({**dict(tuned), 1: lone}.items()))
