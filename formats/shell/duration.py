"""Durations in words, and the time left of a piece of work."""

import math
from bisect import bisect_right
from collections.abc import Callable
from dataclasses import dataclass, field

MOST_SAMPLES = 1024  # of a timer; every second one is then forgotten


def clock_text(seconds: float) -> str:
    """Duration as a clock shows it: `1:10`, `1:02:05`."""
    whole = math.ceil(seconds)
    hours, minutes = whole // 3600, whole // 60 % 60
    if hours:
        return f"{hours}:{minutes:02d}:{whole % 60:02d}"
    return f"{minutes}:{whole % 60:02d}"


def about(seconds: float) -> str:
    """Estimated duration, rounded to what an estimate is worth: `about 40 s`, `about 1.5 h`."""
    if seconds < 10:
        return "a few seconds"
    if seconds < 95:
        return f"about {10 * round(seconds / 10)} s"
    if seconds < 90 * 60:
        return f"about {round(seconds / 60)} min"
    hours = seconds / 3600
    return f"about {hours:.1f} h" if hours < 10 else f"about {hours:,.0f} h"


@dataclass(slots=True)
class PhaseTimer:
    """Time left of one phase, from the times at which its progress was reported.

    The pace is that of the later half of the work done so far: the first layers of a run that was
    taken up again pass quickly, and the first batches of any run warm up.
    """

    now: Callable[[], float]  # seconds of a clock that never goes back
    # (work done, time) of the reports
    samples: list[tuple[float, float]] = field(default_factory=list)
    total: float = 0.0  # work in all
    pace: float | None = None  # seconds for a unit of work; None as long as it is not known

    def report(self, done: float, total: float) -> None:
        """Take note of the work done by now; less than before begins anew."""
        self.total = total
        if self.samples and done < self.samples[-1][0]:
            self.samples, self.pace = [], None
        if self.samples and done == self.samples[-1][0]:
            return
        at = self.now()
        if self.samples:
            middle = (self.samples[0][0] + done) / 2
            before, since = self.samples[bisect_right(self.samples, (middle, math.inf)) - 1]
            self.pace = (at - since) / (done - before)
        self.samples.append((done, at))
        if len(self.samples) > MOST_SAMPLES:
            self.samples[1:-1] = self.samples[1:-1:2]

    @property
    def share(self) -> float:
        """Share of the work that is done."""
        return self.samples[-1][0] / self.total if self.samples and self.total else 0.0

    def left(self) -> float | None:
        """Seconds until the end; None as long as the pace is not known.

        Between two reports the time that passes is taken off.
        """
        if self.pace is None:
            return None
        done, at = self.samples[-1]
        return max(0.0, (self.total - done) * self.pace - (self.now() - at))
