"""The load that an engine reports, and the number of requests that may wait."""

import random
from collections.abc import Callable, Iterator
from pathlib import Path
from threading import Thread

import pytest
import torch

import lowbit.runtime as lowbit
from lowbit.formats.errors import QueueFullError, RequestError
from lowbit.runtime.engine.engine import Engine
from lowbit.runtime.engine.new_runner import new_runner
from lowbit.runtime.engine.request import Request
from lowbit.runtime.engine.sequence import Sequence
from lowbit.runtime.engine.stats import Load, load_of
from lowbit.runtime.state.device_state import CacheSize

BUNDLED = Path(__file__).parents[3] / "examples" / "models" / "tiny-qwen3"
GREEDY = lowbit.SamplingParams()


@pytest.fixture(scope="module")
def model() -> lowbit.Model:
    return lowbit.load(BUNDLED, device="cpu", dtype=torch.float32, context=256)


def new_engine(model: lowbit.Model, most_waiting: int | None = None) -> Engine:
    size = CacheSize(256, 2, 12, 4)
    runner = new_runner(model.engine.decoder, 4096, size, torch.float32, "cpu")
    return Engine(runner, most_waiting)


def request(number: int, length: int = 70, count: int = 5) -> Request:
    draw = random.Random(number)
    ids = tuple(draw.randrange(4000) for _ in range(length))
    return Request(ids, GREEDY, count, message_ends=frozenset({ids[63], ids[-1]}))


class Watched(list[Sequence]):
    """A list whose reader is slow: something happens before it is read, or behind."""

    def __init__(self, happen: Callable[[], None], before: bool) -> None:
        super().__init__()
        self.happen, self.before = happen, before

    def __iter__(self) -> Iterator[Sequence]:
        if self.before:
            self.happen()
        found = list(super().__iter__())
        if not self.before:
            self.happen()
        return iter(found)


@pytest.mark.parametrize("before", [False, True])
def test_a_sequence_counts_once_while_its_first_token_is_chosen(
    model: lowbit.Model, before: bool
) -> None:
    """Whoever asks reads from another thread what the step changes."""
    engine = new_engine(model)
    scheduler = engine.scheduler
    handle = engine.submit(request(1))
    sequence = handle._sequence
    scheduler.admit()
    scheduler.take_up(scheduler.next_prompt())
    steps = [lambda: scheduler.begin_decoding(sequence)]
    scheduler.decoding = Watched(lambda: steps.pop()() if steps else None, before)
    assert scheduler.running == (sequence,)
    assert not steps
    assert scheduler.running == (sequence,)


def test_the_load_follows_requests(model: lowbit.Model) -> None:
    engine = new_engine(model)
    assert load_of(engine) == Load(0, 0, 0, 0, 12, 0, 0, 0)
    handles = [engine.submit(request(n)) for n in range(3)]
    assert load_of(engine) == Load(0, 3, 0, 0, 12, 0, 0, 0)
    engine.step()
    assert load_of(engine) == Load(2, 1, 4, 0, 12, 2, 0, 0)
    for handle in handles:
        handle.result()
    assert load_of(engine) == Load(0, 0, 0, 6, 12, 3, 0, 0)
    again = engine.submit(request(1))
    again.result()
    assert again.reused >= 64
    assert load_of(engine) == Load(0, 0, 0, 6, 12, 4, 1, again.reused)
    engine.forget()
    assert load_of(engine) == Load(0, 0, 0, 0, 12, 4, 1, again.reused)


def test_the_load_does_not_wait_for_a_step(model: lowbit.Model) -> None:
    """Nor does a new request."""
    engine = new_engine(model)
    found: list[Load] = []

    def ask() -> None:
        handle = engine.submit(request(0))
        found.append(load_of(engine))
        handle.cancel()

    with engine._lock:  # as while a step runs
        thread = Thread(target=ask)
        thread.start()
        thread.join(60)
    assert [load.waiting for load in found] == [1]


def test_one_request_more_than_may_wait_is_refused(model: lowbit.Model) -> None:
    engine = new_engine(model, most_waiting=1)
    handles = [engine.submit(request(n)) for n in range(3)]
    for steps in range(2):
        with pytest.raises(QueueFullError, match="3 requests run or wait, and no more than 2 run"):
            engine.submit(request(9))
        if not steps:
            engine.step()
    assert len(handles[0].result()) == 5
    handles.append(engine.submit(request(3)))
    assert [len(handle.result()) for handle in handles] == [5] * 4


def test_none_may_wait(model: lowbit.Model) -> None:
    engine = new_engine(model, most_waiting=0)
    handles = [engine.submit(request(n)) for n in range(2)]
    with pytest.raises(QueueFullError):
        engine.submit(request(2))
    handles[0].cancel()
    assert len(handles[1].result()) == 5
    engine.submit(request(2))


def test_who_has_left_fills_no_queue(model: lowbit.Model) -> None:
    engine = new_engine(model, most_waiting=1)
    handles = [engine.submit(request(n)) for n in range(3)]
    next(handles[0])
    for handle in handles:
        handle.cancel()
    later = [engine.submit(request(n)) for n in range(3)]
    with pytest.raises(QueueFullError, match="3 requests run or wait"):
        engine.submit(request(3))
    assert [len(handle.result()) for handle in later] == [5] * 3


def test_a_list_of_prompts_does_not_fill_the_queue() -> None:
    model = lowbit.load(
        BUNDLED, device="cpu", dtype=torch.float32, context=64, max_sequences=2, max_waiting=0
    )
    greedy = lowbit.SamplingParams()  # a drawn token may end an answer
    made = model.generate(list("abcde"), raw=True, max_new_tokens=3, sampling=greedy)
    assert [each.finish_reason for each in made] == ["length"] * 5
    stops = [made[0].text[-1]]  # a stop string cancels what the engine would go on with
    made = model.generate(list("aaa"), raw=True, max_new_tokens=9, sampling=greedy, stop=stops)
    assert [each.finish_reason for each in made] == ["stop"] * 3
    with pytest.raises(RequestError, match="`max_waiting` must be at least 0, got -1"):
        lowbit.load(BUNDLED, device="cpu", max_waiting=-1)
