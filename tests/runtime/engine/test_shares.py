"""Clients that share the rows of an engine: who waits is served in turn, and nobody takes all."""

from pathlib import Path

import pytest
import torch

import lowbit.runtime as lowbit
from lowbit.runtime.engine import scheduler
from lowbit.runtime.engine.engine import Engine
from lowbit.runtime.engine.new_runner import new_runner
from lowbit.runtime.engine.request import Request
from lowbit.runtime.engine.stream import Handle
from lowbit.runtime.state.device_state import CacheSize
from tests.short_models import SHORT_VOCABULARY, Shorten

ROWS = 4
SHORT, LONG = 6, 60  # new tokens
SIZE = CacheSize(context=256, sequences=ROWS, pages=40, snapshots=0)


@pytest.fixture(scope="module")
def folder(shorten: Shorten) -> Path:
    return shorten("tiny-qwen3")


@pytest.fixture(scope="module")
def model(folder: Path) -> lowbit.Model:
    return lowbit.load(folder, device="cpu", dtype=torch.float32, context=256)


@pytest.fixture
def engine(model: lowbit.Model, monkeypatch: pytest.MonkeyPatch) -> Engine:
    monkeypatch.setattr(scheduler, "SHORT", SHORT)
    return Engine(new_runner(model.engine.decoder, SHORT_VOCABULARY, SIZE, torch.float32, "cpu"))


def ask(engine: Engine, client: str, count: int = LONG) -> Handle:
    seed = sum(map(ord, client))
    sampling = lowbit.SamplingParams(0.8, seed=seed)
    return engine.submit(Request((seed, 7, 9), sampling, count, client=client))


def begun(handles: list[Handle]) -> list[bool]:
    return [handle.begun for handle in handles]


def steps(engine: Engine, count: int = ROWS + 2) -> None:
    for _ in range(count):
        engine.step()


def test_the_client_with_the_fewest_rows_is_next(engine: Engine) -> None:
    running = [ask(engine, "a") for _ in range(ROWS - 1)] + [ask(engine, "b")]
    steps(engine)
    assert begun(running) == [True] * ROWS
    waiting = [ask(engine, client) for client in "aabacb"]
    steps(engine)
    assert not any(begun(waiting))
    order = []
    for ends in (0, 1, 3):  # rows of a, a and b
        running[ends].cancel()
        steps(engine)
        order.append([number for number, each in enumerate(waiting) if each.begun])
    assert order == [[4], [0, 4], [0, 2, 4]]  # c has none; of as many the oldest; b has none


def test_without_a_share_one_client_may_have_all_rows(engine: Engine) -> None:
    handles = [ask(engine, "a") for _ in range(ROWS + 1)]
    steps(engine)
    assert begun(handles) == [True] * ROWS + [False]


def test_a_share_leaves_a_row_to_others_and_to_short_answers(engine: Engine) -> None:
    engine.scheduler.share = ROWS - 1
    greedy = [ask(engine, "a") for _ in range(ROWS + 2)]
    steps(engine)
    assert begun(greedy) == [True] * (ROWS - 1) + [False] * 3
    assert len(ask(engine, "a", SHORT).result()) == SHORT
    other = ask(engine, "b")
    steps(engine)
    assert other.begun
    assert begun(greedy) == [True] * (ROWS - 1) + [False] * 3
    greedy[0].cancel()
    steps(engine)
    assert begun(greedy[1:]) == [True] * (ROWS - 1) + [False] * 2
    greedy[4].cancel()  # of those that wait
    other.cancel()
    steps(engine)
    assert not greedy[5].begun
    assert len(greedy[5].result()) == LONG
    assert all(handle.ended or handle.output for handle in greedy[1:4])


def test_requests_that_are_held_back_are_not_looked_at_again(
    engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Until one comes or ends: a step takes no longer for them."""
    engine.scheduler.share = 1
    running, held = ask(engine, "a"), ask(engine, "a")
    steps(engine)
    looks: list[object] = []
    monkeypatch.setattr(scheduler, "Counter", lambda clients: looks.append(clients))
    steps(engine)
    monkeypatch.undo()
    assert looks == []
    running.cancel()
    steps(engine)
    assert held.begun


def test_shares_change_no_token(engine: Engine) -> None:
    count = 2 * SHORT
    alone = {client: ask(engine, client, count).result() for client in "ab"}
    engine.forget()
    engine.scheduler.share = 2
    handles = [(client, ask(engine, client, count)) for client in "aaaababb"]
    for client, handle in handles:
        assert handle.result() == alone[client]


def test_a_request_knows_how_long_it_waited_for_its_row(engine: Engine) -> None:
    running = [ask(engine, "a", 2) for _ in range(ROWS)]
    assert [each.queued_s for each in running] == [None] * ROWS
    engine.step()
    waited, left, gone = ask(engine, "b", 2), ask(engine, "c", 2), ask(engine, "d", 2)
    first = [each.queued_s for each in running]
    assert all(seconds is not None and seconds >= 0 for seconds in first)
    assert waited.queued_s is None
    gone.cancel()
    while engine.step():
        pass
    assert [each.queued_s for each in running] == first
    assert waited.queued_s is not None
    assert left.queued_s is not None
    assert gone.queued_s is None  # cancelled while it waited
