"""Durations in words, and the time left on a clock that the tests move."""

import re
from collections.abc import Callable

import pytest

from lowbit.formats.shell import tables
from lowbit.formats.shell.duration import MOST_SAMPLES, PhaseTimer, about, clock_text


class Clock:
    """A clock that is moved by hand."""

    def __init__(self) -> None:
        self.time = 100.0

    def __call__(self) -> float:
        return self.time


@pytest.mark.parametrize(
    ("seconds", "clock", "words"),
    [
        (3, "0:03", "a few seconds"),
        (70, "1:10", "about 70 s"),
        (100, "1:40", "about 2 min"),
        (3599.2, "1:00:00", "about 60 min"),
        (2 * 3600 + 125, "2:02:05", "about 2.0 h"),
        (50 * 3600, "50:00:00", "about 50 h"),
    ],
)
def test_words(seconds: float, clock: str, words: str) -> None:
    assert (clock_text(seconds), about(seconds)) == (clock, words)


def uneven(number: int) -> float:
    """Seconds of a layer's pass, half more on every other one."""
    return 10.0 + 5 * (number % 2)


def warm(number: int) -> float:
    """Seconds of a layer's pass, five times as many on the first."""
    return 50.0 if number == 0 else 10.0


@pytest.mark.parametrize("seconds", [uneven, warm])
def test_time_left_is_right_within_a_quarter_after_a_tenth(
    seconds: Callable[[int], float],
) -> None:
    layers = 40
    clock = Clock()
    timer = PhaseTimer(clock)
    end = clock.time + sum(map(seconds, range(layers)))
    timer.report(0, layers)
    assert timer.left() is None
    for number in range(layers):
        clock.time += seconds(number)
        timer.report(number + 1, layers)
        left = timer.left()
        assert left is not None
        if number + 1 >= layers / 10 and number + 1 < layers:
            assert left == pytest.approx(end - clock.time, rel=0.25)
    assert timer.left() == 0.0


def test_a_run_taken_up_again_forgets_the_layers_that_only_passed() -> None:
    clock = Clock()
    timer = PhaseTimer(clock)
    for number in range(41):
        timer.report(number, 40)
        clock.time += 0.1 if number < 10 else 10.0
        if 20 <= number < 40:
            left = timer.left()
            assert left is not None
            assert left == pytest.approx((40 - number) * 10.0 - 10, rel=0.25, abs=5)


def test_time_passes_between_two_reports() -> None:
    clock = Clock()
    timer = PhaseTimer(clock)
    timer.report(0, 10)
    clock.time += 60
    timer.report(1, 10)
    clock.time += 40
    assert timer.left() == 9 * 60 - 40
    clock.time += 6000
    assert timer.left() == 0.0


def test_a_phase_that_begins_anew() -> None:
    clock = Clock()
    timer = PhaseTimer(clock)
    timer.report(0, 10)
    clock.time += 1
    timer.report(10, 10)
    timer.report(0, 10)
    assert timer.left() is None
    assert timer.share == 0.0


def test_reports_without_number_take_no_memory() -> None:
    clock = Clock()
    timer = PhaseTimer(clock)
    for number in range(20_000):
        timer.report(number, 40_000)
        clock.time += 0.01
    assert len(timer.samples) <= MOST_SAMPLES
    left = timer.left()
    assert left == pytest.approx(200, rel=0.01)


def test_a_pipe_gets_a_line_a_minute(capsys: pytest.CaptureFixture[str]) -> None:
    clock = Clock()
    with tables.progress_bars({"work": "working"}, now=clock) as show:
        for number in range(37):
            show("work", number, 36)
            clock.time += 10
    lines = capsys.readouterr().err.splitlines()
    assert lines[0] == "working: 17%, 5:00 left"
    assert len(lines) == 5  # none at the end, where no work is left
    assert all(re.fullmatch(r"working: \d+%, \d:\d\d left", line) for line in lines)


def test_no_lines_where_nothing_is_to_be_shown(capsys: pytest.CaptureFixture[str]) -> None:
    clock = Clock()
    with tables.progress_bars({"work": "working"}, quiet=True, now=clock) as show:
        for number in range(37):
            show("work", number, 36)
            clock.time += 10
    assert capsys.readouterr().err == ""
