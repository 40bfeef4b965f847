"""Number of CPU threads for decode steps, chosen by their measured times.

A step of a small model is some hundred short products, and after each one its threads wait for the
slowest. On an idle machine more threads are faster; where another process has one of their cores,
all wait for it, and a single thread is. So now and then a few steps run on another count, 1, 2, 4
and so on, and whichever was faster stays. A decode step has the same bytes with every count.
"""

import time
from collections import deque
from collections.abc import Callable, Hashable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

import torch

BURST = 8  # steps that are compared with as many others
BURST_S = 0.2  # or fewer, if they take so long: a second each where the machine is loaded
GAIN = 0.95  # share of the usual time below which another count replaces the present one
PAUSE = 50.0  # pause before the next trial, in times the time this one lost: trials cost 2%
LONGEST_S = 60.0  # longest such pause, seconds


@dataclass(slots=True)
class StepThreads:
    """The count of threads, and the trials of others."""

    clock: Callable[[], float] = time.perf_counter  # gives seconds
    count: int = 0  # threads that were fastest so far; 0 before the first step
    _kind: Hashable = None  # of the last step: only steps alike are compared
    _times: deque[float] = field(default_factory=lambda: deque(maxlen=BURST))  # with `count`
    _trial: int = 0  # threads that are tried; 0 while none are
    _tried: list[float] = field(default_factory=list)
    _last: int = 0  # threads of the last trial
    _due: float = 0.0  # time of the next trial

    @contextmanager
    def limit(self) -> Iterator[None]:
        """Run what is inside on as many threads as are fastest for steps, of those torch has."""
        most = torch.get_num_threads()
        torch.set_num_threads(self.choose(most))
        try:
            yield
        finally:
            torch.set_num_threads(most)

    def choose(self, most: int) -> int:
        """Threads for the next step, from 1 to `most`."""
        if not 0 < self.count <= most:
            self._keep(most, [])
        if self._trial > most:
            self._trial = 0
        known = len(self._times) == BURST or sum(self._times) >= BURST_S
        if not self._trial and known and self.clock() >= self._due:
            self._trial = self._other(most)
            self._tried.clear()
        return self._trial or self.count

    def note(self, kind: Hashable, seconds: float) -> None:
        """Take down a step that ran on the chosen threads.

        Args:
            kind: equal for steps of the same work.
            seconds: that it took.
        """
        if kind != self._kind:
            self._kind, self._trial = kind, 0
            self._times.clear()
            return
        if not self._trial:
            self._times.append(seconds)
            return
        self._tried.append(seconds)
        spent, steps = sum(self._tried), len(self._tried)
        usual = sum(self._times) / len(self._times)
        if steps < BURST and spent < max(BURST_S, BURST * usual):
            return
        if spent < GAIN * usual * steps:
            self._keep(self._trial, self._tried)
            return
        lost = spent - usual * steps
        self._due = self.clock() + min(LONGEST_S, PAUSE * max(lost, 0.0))
        self._trial = 0

    def _other(self, most: int) -> int:
        """The count to try next, one after the other; 0 where there is no other."""
        counts = [1 << power for power in range((most - 1).bit_length())] + [most]
        others = [count for count in counts if count != self.count]
        above = [count for count in others if count > self._last]
        self._last = (above or others or [0])[0]
        return self._last

    def _keep(self, count: int, times: list[float]) -> None:
        """Go on with a count of threads that has taken these times."""
        self.count, self._trial = count, 0
        self._times.clear()
        self._times.extend(times)
