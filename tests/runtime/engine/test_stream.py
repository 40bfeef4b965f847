"""Several requests at a time: lists, threads, tasks, cancelled and abandoned, too little room."""

import asyncio
import threading
from collections.abc import Callable
from itertools import groupby
from pathlib import Path
from typing import Any

import pytest

import lowbit.runtime as lowbit
from lowbit.formats.errors import RequestError
from lowbit.runtime.engine.engine import Engine
from lowbit.runtime.engine.new_runner import new_runner
from lowbit.runtime.engine.prefix_cache import PrefixCache
from lowbit.runtime.engine.request import Request
from lowbit.runtime.engine.stream import answer_all
from lowbit.runtime.state.device_state import CacheSize
from tests.lanes import in_commands
from tests.runtime.dense_embedding import dense_embedding
from tests.short_models import SHORT_VOCABULARY, Shorten

BUNDLED = Path(__file__).parents[3] / "examples" / "models" / "tiny-qwen3"
GREEDY = lowbit.SamplingParams()
HOT = lowbit.SamplingParams(temperature=1.0, top_k=40, seed=11)
PROMPTS = [
    "Once upon a time",
    "The dog",
    "Tell me a long story about a girl who went to the garden and saw a bird there.",
    "Why?",
    "One day Lily",
    "The end",
]
Ids = tuple[int, ...]


@pytest.fixture(scope="module")
def loaded(shorten: Shorten) -> lowbit.Model:
    return lowbit.load(shorten("tiny-qwen3"), device="cpu", context=256, max_sequences=4)


@pytest.fixture
def model(loaded: lowbit.Model) -> lowbit.Model:
    """With nothing in its cache."""
    loaded.engine.forget()
    return loaded


def small(model: lowbit.Model, sequences: int, pages: int) -> Engine:
    size = CacheSize(context=256, sequences=sequences, pages=pages, snapshots=0)
    return Engine(new_runner(model.engine.decoder, SHORT_VOCABULARY, size, model.dtype, "cpu"))


def prompt(number: int, length: int = 20) -> Ids:
    return tuple((number * 31 + 7 * index) % 1000 for index in range(length))


def alone(model: lowbit.Model, request: Request) -> Ids:
    engine = small(model, 1, 8)
    return engine.submit(request).result()


@in_commands("greedy")
@pytest.mark.parametrize("params", [GREEDY, HOT], ids=["greedy", "sampled"])
def test_a_list_is_answered_as_one_by_one(
    model: lowbit.Model, params: lowbit.SamplingParams
) -> None:
    ones = [model.generate(p, raw=True, sampling=params, max_new_tokens=16) for p in PROMPTS]
    model.engine.forget()
    made = model.generate(PROMPTS, raw=True, sampling=params, max_new_tokens=16)
    assert [each.token_ids for each in made] == [each.token_ids for each in ones]
    assert [each.text for each in made] == [each.text for each in ones]
    assert [each.finish_reason for each in made] == [each.finish_reason for each in ones]


def test_a_list_may_hold_conversations_and_stop_strings(model: lowbit.Model) -> None:
    talks: list[list[lowbit.Message]] = [
        [{"role": "user", "content": text}] for text in PROMPTS[:3]
    ]
    options: dict[str, Any] = {"sampling": GREEDY, "max_new_tokens": 30, "stop": ["e"]}
    made = model.generate(talks, **options)
    assert [each.text for each in made] == [model.generate(t, **options).text for t in talks]
    assert all("e" not in each.text for each in made)
    assert len(model.generate(talks[:1], **options)) == 1


def test_a_bad_prompt_of_a_list_is_refused_before_any_runs(model: lowbit.Model) -> None:
    with pytest.raises(RequestError, match="the prompt is empty"):
        model.generate(["Hi", ""], raw=True)
    with pytest.raises(RequestError, match="the context is 256"):
        model.generate(["Hi", "word " * 400], raw=True)
    assert not model.engine.step()


def test_more_requests_than_rows_wait_their_turn(model: lowbit.Model) -> None:
    requests = [Request(prompt(n), HOT, 3 + n) for n in range(9)]
    handles = [model.engine.submit(request) for request in requests]
    first = []
    while not all(handle.ended for handle in handles):
        model.engine.step()
        assert sum(h._sequence.phase == "decoding" for h in handles) <= 4
        for number, handle in enumerate(handles):
            if handle.poll() and number not in first:
                first.append(number)
    assert first == list(range(9))
    assert [h.result() for h in handles] == [alone(model, request) for request in requests]


def test_threads_share_the_engine(model: lowbit.Model) -> None:
    requests = [Request(prompt(n), HOT if n % 2 else GREEDY, 5) for n in range(16)]
    expected = [alone(model, request) for request in requests]
    found: dict[int, Ids] = {}
    failed: list[BaseException] = []

    def work(number: int) -> None:
        try:
            for n in (number, number + 8):
                found[n] = tuple(model.engine.submit(requests[n]))
        except BaseException as error:
            failed.append(error)

    threads = [threading.Thread(target=work, args=(number,)) for number in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert not failed
    assert [found[n] for n in range(16)] == expected


def test_one_thread_runs_the_steps(model: lowbit.Model, monkeypatch: pytest.MonkeyPatch) -> None:
    """The first that waits; beside a second one, and for tasks, the engine's own."""
    engine, step, seen = model.engine, Engine._step, list[str]()

    def noted(engine: Engine) -> bool:
        seen.append(threading.current_thread().name)
        return step(engine)

    def threads() -> list[str]:
        found, seen[:] = [name for name, _ in groupby(seen)], []
        return found

    async def task(request: Request) -> Ids:
        return tuple([token async for token in engine.submit(request)])

    monkeypatch.setattr(Engine, "_step", noted)
    here, own = threading.current_thread().name, "lowbit-engine_0"
    requests = [Request(prompt(n), HOT, 8) for n in range(4)]
    expected = [alone(model, request) for request in requests]
    assert threads() == [here]
    first = engine.submit(requests[0])
    begun = next(first)
    second = threading.Thread(target=lambda: engine.submit(requests[1]).result(), name="second")
    second.start()
    second.join(60)
    assert (begun, *first) == expected[0]
    assert threads() == [here, own]
    assert engine.submit(requests[2]).result() == expected[2]
    assert threads() == [here]  # nothing else runs any more
    assert asyncio.run(task(requests[3])) == expected[3]
    assert threads() == [own]


def test_a_thread_that_dies_leaves_the_others_alone(model: lowbit.Model) -> None:
    request = Request(prompt(1), HOT, 30)
    expected = alone(model, request)
    died, begun = [], threading.Barrier(2)

    def die() -> None:
        handle = model.engine.submit(Request(prompt(2), GREEDY, 200))
        next(handle)
        begun.wait(60)
        died.append(handle._sequence)

    thread = threading.Thread(target=die)
    thread.start()
    handle = model.engine.submit(request)
    first = next(handle)
    begun.wait(60)
    thread.join(60)
    assert (first, *handle) == expected
    model.engine.step()
    assert died[0].phase == "ended"
    assert model.engine.scheduler.blocks.rows.free == 4


def test_tasks_share_an_event_loop(model: lowbit.Model) -> None:
    requests = [Request(prompt(n), HOT, 6 + n) for n in range(6)]
    expected = [alone(model, request) for request in requests]
    order: list[int] = []

    async def answer(number: int) -> Ids:
        tokens = []
        async for token in model.engine.submit(requests[number]):
            tokens.append(token)
            order.append(number)
        return tuple(tokens)

    async def everybody() -> list[Ids]:
        return await asyncio.gather(*(answer(number) for number in range(6)))

    assert asyncio.run(everybody()) == expected
    assert len(set(order[: len(order) // 2])) > 1  # nobody waits for the end of another


def test_a_task_sees_the_error_of_its_request(
    model: lowbit.Model, monkeypatch: pytest.MonkeyPatch
) -> None:
    good, bad = Request(prompt(1), GREEDY, 8), Request((999, 5), GREEDY, 8)
    expected = alone(model, good)
    embedding = dense_embedding(model.engine.decoder)
    monkeypatch.setattr(model.engine.decoder.ops, "embed", poisoned(model.engine.decoder.ops, 999))

    async def both() -> tuple[Any, Any]:
        async def tokens(request: Request) -> Ids:
            return tuple([token async for token in model.engine.submit(request)])

        return await asyncio.gather(tokens(good), tokens(bad), return_exceptions=True)

    answer, error = asyncio.run(both())
    assert embedding.isfinite().all()
    assert answer == expected
    assert "NaN or infinite" in str(error)


def poisoned(ops: Any, token: int) -> Callable[..., Any]:
    """An embedding in which one token has no numbers."""
    embed = ops.embed

    def rows(ids: Any, table: Any) -> Any:
        found = embed(ids, table)
        found[ids == token] = float("nan")
        return found

    return rows


def test_a_list_with_a_failing_request_ends_the_others_first(
    model: lowbit.Model, monkeypatch: pytest.MonkeyPatch
) -> None:
    requests: list[Request | lowbit.LowbitError] = [
        model.request(prompt(1), sampling=GREEDY, max_new_tokens=5),
        RequestError("no request"),
        model.request((999,), sampling=GREEDY, max_new_tokens=5),
        model.request(prompt(4), sampling=GREEDY, max_new_tokens=9),
    ]
    monkeypatch.setattr(model.engine.decoder.ops, "embed", poisoned(model.engine.decoder.ops, 999))
    found = dict(answer_all(model.engine, model.tokenizer, requests))
    assert sorted(found) == [0, 1, 2, 3]
    assert found[1] is requests[1]
    assert "NaN or infinite" in str(found[2])
    for number in (0, 3):
        made = found[number]
        assert isinstance(made, lowbit.Generation)
        assert made.token_ids


def test_an_error_behind_tokens_is_not_taken_for_the_end(
    model: lowbit.Model, monkeypatch: pytest.MonkeyPatch
) -> None:
    request = Request(prompt(1), GREEDY, 8)
    expected = alone(model, request)
    handle = model.engine.submit(request)
    model.engine.step()
    monkeypatch.setattr(
        model.engine.decoder.ops, "embed", poisoned(model.engine.decoder.ops, expected[1])
    )
    model.engine.step()
    while model.engine.step():
        pass
    assert handle.poll() == list(expected[:2])
    assert not handle.ended
    with pytest.raises(lowbit.LowbitError, match="NaN or infinite"):
        handle.poll()


def test_a_cancelled_request_ends_and_gives_its_room_back(model: lowbit.Model) -> None:
    engine = small(model, 2, 8)
    first = engine.submit(Request(prompt(1), GREEDY, 100))
    second = engine.submit(Request(prompt(2), GREEDY, 12))
    waiting = engine.submit(Request(prompt(3), GREEDY, 12))
    begun = [next(first), next(first)]
    first.cancel()
    waiting.cancel()
    assert second.result() == alone(model, Request(prompt(2), GREEDY, 12))
    assert list(first.result()[:2]) == begun
    assert len(first.result()) < 100
    assert waiting.result() == ()
    engine.forget()
    assert (engine.scheduler.blocks.rows.free, engine.scheduler.blocks.pages.free) == (2, 9)


def test_an_abandoned_stream_gives_its_room_back(model: lowbit.Model) -> None:
    streams = [model.stream(p, raw=True, sampling=GREEDY) for p in PROMPTS[:4]]
    for stream in streams:
        next(stream)
    assert model.engine.scheduler.blocks.rows.free == 0
    streams[0].close()
    del streams, stream
    model.engine.step()
    assert model.engine.scheduler.blocks.rows.free == 4
    assert len(model.generate("Hi", raw=True, max_new_tokens=4).token_ids) == 4


def test_an_abandoned_task_gives_its_room_back(model: lowbit.Model) -> None:
    async def some() -> int:
        async for token in model.engine.submit(Request(prompt(1), GREEDY, 100)):
            return token
        return -1

    assert asyncio.run(some()) >= 0
    model.engine.step()
    assert model.engine.scheduler.blocks.rows.free == 4


def test_too_small_a_cache_makes_requests_wait_in_order(model: lowbit.Model) -> None:
    engine = small(model, 4, 4)
    requests = [Request(prompt(n), GREEDY, count) for n, count in enumerate((46, 110, 4, 70))]
    handles = [engine.submit(request) for request in requests]  # of 2, 3, 1 and 2 pages
    ends: list[int] = []
    most = 0
    while len(ends) < 4:
        engine.step()
        most = max(most, sum(h._sequence.phase == "decoding" for h in handles))
        for number, handle in enumerate(handles):
            handle.poll()
            if handle.ended and number not in ends:
                ends.append(number)
    # The third would fit beside the first, but waits for the second.
    assert ends == [0, 2, 1, 3]
    assert most == 2
    assert [handle.result() for handle in handles] == [alone(model, r) for r in requests]


def test_the_cache_is_searched_again_only_after_a_change(
    model: lowbit.Model, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = small(model, 4, 4)
    searched: list[int] = []
    find = PrefixCache.find

    def counted(cache: PrefixCache, ids: Ids, *given: Any) -> Any:
        searched.append(ids[0])
        return find(cache, ids, *given)

    monkeypatch.setattr(PrefixCache, "find", counted)
    requests = [Request(prompt(n, 120), GREEDY, 12) for n in range(3)]  # of 3 pages
    handles = [engine.submit(request) for request in requests]
    results = [handle.result() for handle in handles]
    assert searched == [0, 31, 31, 62, 62]  # at once, and when the one before has ended
    assert results == [alone(model, request) for request in requests]


def test_what_never_fits_is_refused_at_once(model: lowbit.Model) -> None:
    engine = small(model, 2, 2)
    with pytest.raises(RequestError, match="may take 192 tokens of the cache, which has 128") as e:
        engine.submit(Request(prompt(1), GREEDY, 150))
    assert e.value.hint == "ask for fewer new tokens or a larger cache"
    assert len(engine.submit(Request(prompt(1), GREEDY, 100)).result()) == 100
    with pytest.raises(RequestError, match="a cache of 100 tokens is smaller than the context"):
        lowbit.load(BUNDLED, device="cpu", context=256, cache_tokens=100)
    with pytest.raises(RequestError, match="`max_sequences` must be at least 1, got 0"):
        lowbit.load(BUNDLED, device="cpu", max_sequences=0)


@pytest.mark.parametrize(
    ("request_", "message"),
    [
        (Request(()), "the prompt is empty"),
        (Request((1,) * 257), "the prompt has 257 tokens, the context is 256"),
        (Request((1, 2), GREEDY, 0), "`max_new_tokens` must be at least 1, got 0"),
        (Request((1, 2), GREEDY, -3), "`max_new_tokens` must be at least 1, got -3"),
        (Request((1, 1024)), "token ids must be between 0 and 1023"),
        (Request((-1,)), "token ids must be between 0 and 1023"),
    ],
)
def test_bad_requests_are_refused_and_the_others_go_on(
    model: lowbit.Model, request_: Request, message: str
) -> None:
    good = Request(prompt(5), HOT, 6)
    handle = model.engine.submit(good)
    first = next(handle)
    with pytest.raises(RequestError, match=message):
        model.engine.submit(request_)
    assert (first, *handle) == alone(model, good)


def test_a_prompt_that_fills_the_context_gets_one_token(model: lowbit.Model) -> None:
    handle = model.engine.submit(Request(prompt(1, 256), GREEDY))
    assert len(handle.result()) == 1
    assert handle.ended
    assert list(handle) == []


def test_a_task_that_waits_does_not_hold_the_others_up(model: lowbit.Model) -> None:
    engine = small(model, 1, 8)
    requests = [Request(prompt(n), HOT, 12) for n in range(3)]
    late: list[int] = []

    async def answer(request: Request) -> Ids:
        handle, tokens = engine.submit(request), []
        async for token in handle:
            tokens.append(token)
            late.append(len(handle._sequence.unread))
        return tuple(tokens)

    async def everybody() -> list[Ids]:
        return await asyncio.gather(*map(answer, requests))

    assert asyncio.run(everybody()) == [alone(model, request) for request in requests]
    # Each of the others may have run a step meanwhile; to begin, as many as its prompt took turns.
    assert max(late) < 2 * len(requests)


def test_a_task_that_stops_waiting_loses_no_token(model: lowbit.Model) -> None:
    request = Request(prompt(1), HOT, 12)

    async def impatient() -> Ids:
        handle, taken = model.engine.submit(request), []
        for _ in range(3):
            task = asyncio.ensure_future(anext(handle))
            await asyncio.sleep(0)
            if not task.cancel():  # it found a token that a step of the task before had left
                taken.append(task.result())
        return (*taken, *[token async for token in handle])

    assert asyncio.run(impatient()) == alone(model, request)
