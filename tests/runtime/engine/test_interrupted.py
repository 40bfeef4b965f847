"""Requests and logits that are interrupted, cancelled or fail: the others go on."""

from collections import deque
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import pytest
import torch

import lowbit.runtime as lowbit
from lowbit.formats.errors import RequestError
from lowbit.runtime.backends import cpu
from lowbit.runtime.engine import engine as engine_module
from lowbit.runtime.engine.runner import Runner
from lowbit.runtime.engine.sequence import Sequence
from lowbit.runtime.state.device_state import CacheSize
from tests.lanes import in_commands
from tests.runtime.engine.small_engine import (
    CONTEXT,
    INTERRUPTED,
    SMALL,
    assert_all_free,
    new_engine,
)

if TYPE_CHECKING:
    pass

PROMPT = [10, 20, 30, 40, 50, 60]
ONE = CacheSize(context=CONTEXT, sequences=1, pages=4, snapshots=4)


@pytest.fixture(scope="module")
def loaded() -> dict[str, lowbit.Model]:
    return {}


@pytest.fixture(params=["make_model", "make_qwen3_5"])
def model(request: pytest.FixtureRequest, loaded: dict[str, lowbit.Model]) -> lowbit.Model:
    if request.param not in loaded:
        folder = request.getfixturevalue(request.param)().folder
        loaded[request.param] = lowbit.load(folder, device="cpu", dtype=torch.float32)
    return loaded[request.param]


def interrupt(monkeypatch: pytest.MonkeyPatch, handle: lowbit.Handle) -> None:
    """Ctrl-C in the middle of the next step of a request, between two layers."""
    product: Any = cpu.product

    def interrupted(*arguments: Any, **named: Any) -> Any:
        y = product(*arguments, **named)
        if named.get("swiglu"):
            raise KeyboardInterrupt
        return y

    with monkeypatch.context() as patch:
        patch.setattr(cpu, "product", interrupted)
        with pytest.raises(KeyboardInterrupt):
            next(handle)


def test_logits_after_an_interrupted_step_know_that_it_was(
    model: lowbit.Model, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = new_engine(model)
    expected = list(engine.generate(PROMPT, lowbit.SamplingParams(), 8))
    engine.forget()
    handle = engine.generate(PROMPT, lowbit.SamplingParams(), 8)
    begun = [next(handle), next(handle)]
    interrupt(monkeypatch, handle)
    engine.logits([1, 2, 3])
    with pytest.raises(RequestError, match=INTERRUPTED):
        next(handle)
    longer = engine.generate([*PROMPT, *begun], lowbit.SamplingParams(), 6)
    assert list(longer) == expected[2:]
    assert longer.reused == 0
    del handle
    assert_all_free(engine)


def test_what_was_cancelled_leaves_room_for_logits(model: lowbit.Model) -> None:
    engine = new_engine(model, ONE)
    handle = engine.generate(PROMPT, lowbit.SamplingParams(), 8)
    next(handle)
    handle.cancel()
    assert engine.logits(PROMPT).shape == (len(PROMPT), 272)


def test_logits_wait_for_who_runs(model: lowbit.Model) -> None:
    engine = new_engine(model, ONE)
    first, second = (engine.generate(PROMPT, lowbit.SamplingParams(), 8) for _ in range(2))
    tokens = [next(first)]
    assert engine.logits(PROMPT).shape == (len(PROMPT), 272)
    assert [*tokens, *first] == list(second)


@pytest.mark.parametrize("place", ["logits", "each_layer"])
def test_logits_that_fail_end_no_request(
    model: lowbit.Model, monkeypatch: pytest.MonkeyPatch, place: str
) -> None:
    engine = new_engine(model)
    expected = list(engine.generate(PROMPT, lowbit.SamplingParams(), 8))
    engine.forget()
    handle = engine.generate(PROMPT, lowbit.SamplingParams(), 8)
    tokens = [next(handle)]

    def fail(*_: Any) -> None:
        raise MemoryError("too many logits")

    with monkeypatch.context() as patch:
        patch.setattr(type(engine.decoder), place, fail)
        with pytest.raises(MemoryError, match="too many logits"):
            engine.logits([1, 2, 3])
    assert [*tokens, *handle] == expected
    assert engine.logits([1, 2, 3]).shape == (3, 272)
    assert_all_free(engine)


class Watched(Sequence):
    """Ends only once it is known why."""

    def __setattr__(self, name: str, value: Any) -> None:
        if (name, value) == ("phase", "ended"):
            assert self.error is not None or self.finish is not None
        super().__setattr__(name, value)


@in_commands("make_model")
def test_who_looks_at_a_request_that_ends_sees_why(
    model: lowbit.Model, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(engine_module, "Sequence", Watched)
    engine = new_engine(model)
    assert len(engine.generate(PROMPT, lowbit.SamplingParams(), 8).result()) == 8
    handle = engine.generate(PROMPT, lowbit.SamplingParams(), 8)
    interrupt(monkeypatch, handle)
    with pytest.raises(RequestError, match=INTERRUPTED):
        next(handle)


def test_what_was_cancelled_is_forgotten_too(
    model: lowbit.Model, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = new_engine(model)
    handle = engine.generate(PROMPT, lowbit.SamplingParams(), 8)
    begun = [next(handle), next(handle)]
    del handle
    engine.forget()
    assert engine.scheduler.blocks.pages.free == SMALL.pages + 1
    assert engine.scheduler.blocks.rows.free == SMALL.sequences
    again = engine.generate([*PROMPT, *begun], lowbit.SamplingParams(), 2)
    list(again)
    assert again.reused == 0
    interrupt(monkeypatch, engine.generate(PROMPT, lowbit.SamplingParams(), 8))
    engine.forget()
    assert engine.scheduler.blocks.pages.free == SMALL.pages + 1


class Interrupted(deque[Sequence]):
    """A queue with Ctrl-C as one leaves, or when it has left."""

    at: str

    def popleft(self) -> Sequence:
        left = self[0]
        self._take(super().popleft)
        return left

    def remove(self, sequence: Sequence) -> None:
        self._take(lambda: super(Interrupted, self).remove(sequence))

    def _take(self, take: Callable[[], object]) -> None:
        if self.at == "left":
            take()
        raise KeyboardInterrupt


@pytest.mark.parametrize("queue", ["_arrived", "waiting"])
@pytest.mark.parametrize("at", ["leaves", "left"])
def test_a_request_interrupted_between_queues_is_not_lost(
    model: lowbit.Model, queue: str, at: str
) -> None:
    engine = new_engine(model)
    expected = list(engine.generate(PROMPT, lowbit.SamplingParams(), 8))
    engine.forget()
    handles = [engine.generate(PROMPT, lowbit.SamplingParams(), 8) for _ in range(2)]
    interrupted = Interrupted(getattr(engine.scheduler, queue))
    interrupted.at = at
    setattr(engine.scheduler, queue, interrupted)
    with pytest.raises(KeyboardInterrupt):
        engine.step()
    setattr(engine.scheduler, queue, deque(interrupted))
    if (queue, at) == ("waiting", "left"):  # it had begun
        with pytest.raises(RequestError, match=INTERRUPTED):
            handles.pop(0).result()
    assert [list(handle) for handle in handles] == [expected] * len(handles)
    assert not engine.scheduler.queued
    assert_all_free(engine)


def test_a_request_interrupted_as_it_is_given_room_still_runs(
    model: lowbit.Model, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = new_engine(model)
    expected = list(engine.generate(PROMPT, lowbit.SamplingParams(), 8))
    engine.forget()

    def interrupted(*_: Any) -> None:
        raise KeyboardInterrupt

    handles = [engine.generate(PROMPT, lowbit.SamplingParams(), 8) for _ in range(2)]
    with monkeypatch.context() as patch:
        patch.setattr(Runner, "_open", interrupted)
        with pytest.raises(KeyboardInterrupt):
            next(handles[0])
    handles[1].cancel()
    assert list(handles[0]) == expected
    assert list(handles[1]) == []
    assert_all_free(engine)
    handle = engine.generate(PROMPT, lowbit.SamplingParams(), 8)
    with monkeypatch.context() as patch:
        patch.setattr(Runner, "_open", interrupted)
        with pytest.raises(KeyboardInterrupt):
            next(handle)
    handle.cancel()
    assert list(handle) == []
    assert_all_free(engine)
