"""Bugs in a step, from threads and tasks: whoever ran in it hears of it, and the others go on."""

import asyncio
import threading
from collections import deque
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import lowbit.runtime as lowbit
from lowbit.formats.errors import LowbitError
from lowbit.runtime.engine.results import PlainStep
from lowbit.runtime.engine.runner import Runner
from lowbit.runtime.engine.scheduler import BlockManager
from lowbit.runtime.engine.stream import Answer
from lowbit.runtime.state.device_state import CacheSize
from tests.runtime.engine.small_engine import CONTEXT, assert_all_free, new_engine

BUNDLED = Path(__file__).parents[3] / "examples" / "models" / "tiny-qwen3"
PROMPT = [10, 20, 30, 40, 50, 60]
ONE = CacheSize(context=CONTEXT, sequences=1, pages=4, snapshots=0)
GREEDY = lowbit.SamplingParams()


@pytest.fixture(scope="module")
def model() -> lowbit.Model:
    return lowbit.load(BUNDLED, device="cpu", dtype=torch.float32, context=256, max_sequences=4)


def failing(method: Callable[..., Any], times: int = 1) -> Callable[..., Any]:
    """A method with a bug that shows in its first calls, when they have done their work."""
    left = [times]

    def fails(*arguments: Any, **options: Any) -> Any:
        found = method(*arguments, **options)
        if left[0]:
            left[0] -= 1
            raise IndexError("a bug")
        return found

    return fails


@pytest.mark.parametrize(
    ("owner", "method"),
    [(Runner, "decode"), (Runner, "begin"), (Runner, "chunk"), (PlainStep, "commit")],
)
def test_a_bug_in_a_step_ends_those_that_ran_alone(
    model: lowbit.Model, monkeypatch: pytest.MonkeyPatch, owner: type, method: str
) -> None:
    engine = new_engine(model, ONE)
    expected = list(engine.generate(PROMPT, GREEDY, 8))
    engine.forget()
    monkeypatch.setattr(owner, method, failing(getattr(owner, method)))
    first, second = (engine.generate(PROMPT, GREEDY, 8) for _ in range(2))
    with pytest.raises(IndexError, match="a bug"):
        first.result()
    with pytest.raises(LowbitError, match="a step of the engine failed: IndexError"):
        first.result()  # behind the tokens that are there
    assert list(second) == expected
    assert_all_free(engine)


def test_a_request_that_cannot_be_given_room_does_not_fail_for_ever(
    model: lowbit.Model, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = new_engine(model, ONE)
    expected = list(engine.generate(PROMPT, GREEDY, 8))
    engine.forget()
    monkeypatch.setattr(BlockManager, "open", failing(BlockManager.open))
    first, second = (engine.generate(PROMPT, GREEDY, 8) for _ in range(2))
    with pytest.raises(IndexError, match="a bug"):
        engine.step()
    assert list(second) == expected
    with pytest.raises(LowbitError, match="IndexError"):
        first.result()
    assert_all_free(engine)


def test_all_end_where_nothing_can_be_begun_anew(
    model: lowbit.Model, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = new_engine(model, ONE)
    expected = list(engine.generate(PROMPT, GREEDY, 8))
    handles = [engine.generate(PROMPT, GREEDY, 8) for _ in range(3)]
    with monkeypatch.context() as patch:
        patch.setattr(Runner, "chunk", failing(Runner.chunk))
        patch.setattr(Runner, "reset", failing(Runner.reset, 3))
        with pytest.raises(IndexError, match="a bug"):
            handles[0].result()
        for handle in handles:
            with pytest.raises(LowbitError, match="IndexError"):
                handle.result()
        late = engine.generate(PROMPT, GREEDY, 8)
        with pytest.raises(IndexError, match="a bug"):
            next(late)
    assert not engine.scheduler.queued
    assert not engine.scheduler.running
    assert list(engine.generate(PROMPT, GREEDY, 8)) == expected
    assert_all_free(engine)


def test_threads_and_tasks_hear_of_a_bug_in_the_step_of_another(
    model: lowbit.Model, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = new_engine(model)
    monkeypatch.setattr(Runner, "decode", failing(Runner.decode))
    handles = [engine.generate(PROMPT, GREEDY, 8) for _ in range(3)]
    seen: list[BaseException] = []

    def work(handle: lowbit.Handle) -> None:
        try:
            handle.result()
        except Exception as error:
            seen.append(error)

    threads = [threading.Thread(target=work, args=(handle,)) for handle in handles]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert sorted(type(error).__name__ for error in seen) == ["IndexError", *["LowbitError"] * 2]

    monkeypatch.setattr(Runner, "decode", failing(Runner.decode))

    handles = [engine.generate(PROMPT, GREEDY, 8) for _ in range(3)]

    async def tokens(handle: lowbit.Handle) -> list[int]:
        return [token async for token in handle]

    async def everybody() -> list[Any]:
        return await asyncio.gather(*map(tokens, handles), return_exceptions=True)

    found = asyncio.run(everybody())
    assert sorted(type(each).__name__ for each in found) == ["IndexError", *["LowbitError"] * 2]
    assert_all_free(engine)


def test_a_stream_whose_text_fails_gives_its_room_back(
    model: lowbit.Model, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Answer, "push", failing(Answer.push))
    with pytest.raises(IndexError, match="a bug") as kept:
        list(model.stream("Once", raw=True, max_new_tokens=50))
    model.engine.step()
    assert kept.tb
    assert not model.engine.scheduler.running


class Shared(deque[int]):
    """Tokens of which another thread takes one whenever somebody has counted them."""

    def __len__(self) -> int:
        found = super().__len__()
        if found:
            super().popleft()
        return found

    def __bool__(self) -> bool:
        return len(self) > 0


def test_several_threads_may_take_the_tokens_of_one_request(model: lowbit.Model) -> None:
    engine = new_engine(model)
    handle = engine.generate(PROMPT, GREEDY, 6)
    while engine.step():
        pass
    handle._sequence.unread = Shared(handle._sequence.unread)
    assert set(handle.poll()) <= set(handle._sequence.output)
    handle._sequence.unread = Shared(handle._sequence.output)
    assert set(handle) <= set(handle._sequence.output)
