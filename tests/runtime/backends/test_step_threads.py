"""The count of CPU threads follows the machine, and changes no answer."""

from collections.abc import Callable
from typing import Any

import pytest
import torch

import lowbit.runtime as lowbit
from lowbit.runtime.backends.step_threads import StepThreads
from lowbit.runtime.engine.engine import Engine
from lowbit.runtime.engine.new_runner import new_runner
from lowbit.runtime.engine.runner import Runner
from tests.runtime.engine.small_engine import SMALL, new_engine
from tests.short_models import SHORT_VOCABULARY, Shorten

NAME = "tiny-qwen3"
PROMPT = [10, 20, 30, 40, 50, 60]

# Seconds of a step by the count of threads.
IDLE = {1: 0.012, 2: 0.0087, 4: 0.006, 8: 0.004}
BESIDE_ONE = {1: 0.012, 2: 0.032, 4: 0.05, 8: 0.07}
LOADED = {1: 0.03, 2: 1.0, 4: 1.5, 8: 2.0}
HUMP = {1: 0.012, 2: 0.008, 4: 0.005, 8: 0.009}


class Machine:
    """Time that passes only while steps run."""

    def __init__(self) -> None:
        self.now = 0.0
        self.threads = StepThreads(clock=lambda: self.now)

    def run(self, seconds: float, steps: dict[int, float], most: int = 2) -> float:
        """Steps for some time; their number by that of the best count."""
        end, count = self.now + seconds, 0
        while self.now < end:
            took = steps[self.threads.choose(most)]
            self.now += took
            self.threads.note("alike", took)
            count += 1
        best = min(each for threads, each in steps.items() if threads <= most)
        return count / (seconds / best)


@pytest.mark.parametrize("steps", [IDLE, BESIDE_ONE, LOADED, HUMP])
@pytest.mark.parametrize("most", [1, 2, 6, 8])
def test_steps_are_nearly_as_fast_as_with_the_best_count(
    steps: dict[int, float], most: int
) -> None:
    machine = Machine()
    whole = steps | dict.fromkeys((3, 5, 6), 1.02 * steps[4])
    machine.run(20, whole, most)
    assert machine.run(100, whole, most) > 0.95


def test_the_count_follows_a_machine_that_changes() -> None:
    machine = Machine()
    assert machine.run(10, IDLE) > 0.95
    machine.run(4, BESIDE_ONE)
    assert machine.threads.count == 1
    assert machine.run(20, BESIDE_ONE) > 0.95
    machine.run(60, LOADED)
    assert machine.threads.count == 1
    machine.run(65, IDLE)
    assert machine.threads.count == 2


def test_threads_that_wait_for_each_other_are_left_after_one_step() -> None:
    """The second of two cores is taken from the start: a burst of steps would be seconds."""
    machine = Machine()
    machine.threads.note("alike", LOADED[machine.threads.choose(2)])
    counts = set()
    for _ in range(20):
        count = machine.threads.choose(2)
        counts.add(count)
        machine.threads.note("alike", LOADED[count])
        machine.now += LOADED[count]
    assert counts == {1, 2}
    assert machine.now < 2 * LOADED[2] + 20 * LOADED[1]


def test_steps_of_different_work_are_not_compared() -> None:
    machine = Machine()
    for number in range(200):
        assert machine.threads.choose(2) == 2
        machine.threads.note(number % 2, 0.001)
        machine.now += 0.001


def test_nobody_may_have_more_than_torch_has() -> None:
    machine = Machine()
    machine.run(5, IDLE, 8)
    assert machine.threads.choose(2) == 2
    machine.run(5, IDLE, 2)
    assert machine.threads.choose(1) == 1


def counted(method: Callable[..., Any], seen: list[int]) -> Callable[..., Any]:
    def counting(*arguments: Any) -> Any:
        seen.append(torch.get_num_threads())
        return method(*arguments)

    return counting


def test_every_count_gives_the_same_answer(
    shorten: Shorten, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = lowbit.load(shorten(NAME), device="cpu", context=256)
    params = lowbit.SamplingParams(temperature=1.0, seed=3, logprobs=5)
    seen: list[int] = []
    monkeypatch.setattr(Runner, "decode", counted(Runner.decode, seen))
    torch.set_num_threads(2)  # conftest.py restores it
    answers = []
    for counts in ((1,), (2, 1)):
        engine = Engine(
            new_runner(model.engine.decoder, SHORT_VOCABULARY, SMALL, model.dtype, "cpu")
        )
        turns = iter(counts * 40)
        assert engine.threads is not None
        monkeypatch.setattr(StepThreads, "choose", lambda *_, turns=turns: next(turns))
        seen.clear()
        handle = engine.generate(PROMPT, params, 5)
        answers.append((handle.result(), handle.log_probabilities))
        assert set(seen) == set(counts)
        assert torch.get_num_threads() == 2
    assert answers[0] == answers[1]


def test_the_count_is_restored_behind_a_step_that_fails(
    shorten: Shorten, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = new_engine(lowbit.load(shorten(NAME), device="cpu", dtype=torch.float32, context=256))
    torch.set_num_threads(2)

    def fail(*_: Any) -> None:
        raise IndexError("a bug")

    monkeypatch.setattr(StepThreads, "choose", lambda *_: 1)
    monkeypatch.setattr(Runner, "decode", fail)
    with pytest.raises(IndexError):
        engine.generate(PROMPT, lowbit.SamplingParams(), 8).result()
    assert torch.get_num_threads() == 2
