"""Results that steps leave on the host, and the memory that they are written to."""

import gc
import weakref
from collections.abc import Callable, Iterator

import pytest
import torch

from lowbit.runtime import load
from lowbit.runtime.engine.request import Request
from lowbit.runtime.engine.results import PlainStep, Results
from lowbit.runtime.engine.sequence import Sequence
from lowbit.runtime.state.host_rings import new_log_probabilities
from tests.short_models import Shorten


class Event:
    """An event of a device that has done nothing yet."""

    done = False

    def record(self) -> None:
        pass

    def synchronize(self) -> None:
        pass

    def query(self) -> bool:
        return self.done


@pytest.fixture
def events(monkeypatch: pytest.MonkeyPatch) -> Iterator[type[Event]]:
    monkeypatch.setattr(torch.cuda, "Event", Event)
    yield Event
    Event.done = False


def test_memory_of_a_dropped_request_is_held_until_the_device_is_done(
    events: type[Event],
) -> None:
    results = Results(2, on_gpu=False)
    results._on_gpu = True  # pinned memory needs a driver
    scores = new_log_probabilities(1, pinned=False)
    alive = weakref.ref(scores.values)
    results.hold(scores)
    del scores
    results.record()
    gc.collect()
    assert alive() is not None
    events.done = True
    results.record()
    gc.collect()
    assert alive() is None


def test_scores_of_a_cancelled_prompt_are_held_until_the_device_is_done(
    events: type[Event], set_chunk: Callable[[int], None], shorten: Shorten
) -> None:
    set_chunk(64)
    model = load(shorten("tiny-qwen3"), device="cpu", context=256, max_sequences=1)
    engine, results = model.engine, model.engine.runner.results
    results._on_gpu = True
    asked = Request((5,) * 200, max_new_tokens=0, prompt_logprobs=2)
    handle = engine.submit(asked)
    engine.step()
    [running] = engine.scheduler.running
    assert running.phase == "prompt"
    assert running.scores is not None
    alive = weakref.ref(running.scores.values)
    handle.cancel()
    engine.step()
    del running, handle
    engine.forget()
    results.record()
    gc.collect()
    assert not engine.scheduler.running
    assert alive() is not None
    events.done = True
    results.record()
    gc.collect()
    assert alive() is None


def sequence(prompt: int, count: int, stop_ids: frozenset[int] = frozenset()) -> Sequence:
    request = Request(tuple(range(prompt)), stop_ids=stop_ids)
    return Sequence(request, count, seed=0, phase="decoding", row=1)


@pytest.mark.parametrize(
    ("token", "count", "stop_ids", "why"),
    [(7, 2, frozenset(), None), (7, 1, frozenset(), "length"), (7, 2, frozenset({7}), "stop")],
)
def test_tokens_and_the_ends_that_they_make(
    token: int, count: int, stop_ids: frozenset[int], why: str | None
) -> None:
    results, one = Results(2, on_gpu=False), sequence(3, count, stop_ids)
    results.ring[3, 1] = token
    ended = PlainStep([one], results, results.record()).commit()
    assert ended == ([] if why is None else [(one, why)])
    assert one.output == list(one.unread) == [token]
    assert one.phase == "decoding"  # the scheduler ends it


def test_a_sequence_that_has_ended_gets_no_token() -> None:
    results, one = Results(2, on_gpu=False), sequence(3, 5)
    one.phase = "ended"
    assert PlainStep([one], results, None).commit() == []
    assert one.output == []
