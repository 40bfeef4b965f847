"""The engine's side keeps nothing of answers that are over, and ends with its last connection."""

import asyncio
import contextlib
import socket
from collections.abc import AsyncIterator
from dataclasses import replace
from functools import partial
from queue import SimpleQueue
from types import SimpleNamespace
from typing import Any, cast

import pytest

from lowbit.formats.errors import ResourceError
from lowbit.runtime.backends.exchange import PartedError
from lowbit.runtime.engine.engine import Engine
from lowbit.runtime.engine.model import Model
from lowbit.runtime.serve.link.channel import Channel
from lowbit.runtime.serve.link.files import RemoteFiles
from lowbit.runtime.serve.link.host import EngineHost
from lowbit.runtime.serve.link.messages import (
    AskLoad,
    Begin,
    Cancel,
    Constraints,
    DropGrammar,
    Ended,
    Facts,
    FromEngine,
    GrammarMade,
    Health,
    LoadFound,
    MakeGrammar,
    Problem,
    Settings,
    Source,
    Step,
    ToEngine,
    problem_of,
)
from lowbit.runtime.serve.link.stepper import Connection, Running
from lowbit.runtime.state.sampling_params import SamplingParams
from lowbit.runtime.text.grammar_source import regex_source
from tests.runtime.serve.conftest import LONG, raw_request, running, until


def asking(number: int, count: int = 3, constraints: Constraints | None = None) -> Begin:
    return Begin(
        numbers=[number],
        id=f"id-{number}",
        prompt=[5, 6, 7, number % 50],
        sampling=[SamplingParams(temperature=0.0)],
        count=count,
        stop_ids=frozenset(),
        message_ends=frozenset(),
        prompt_logprobs=None,
        pictures=[],
        images=[],
        client="",
        begin="raw",
        constraints=constraints or Constraints(),
    )


@contextlib.asynccontextmanager
async def open_host(model: Model) -> AsyncIterator[tuple[EngineHost, Channel[Any], Any]]:
    """A host, a channel to it, and the messages that it sends."""
    ours, theirs = socket.socketpair()
    host, here = EngineHost(model), Channel[Any](ours, FromEngine)
    serving = asyncio.create_task(host.serve([Channel[Any](theirs, ToEngine)]))
    messages = here.receive()
    try:
        assert isinstance(await anext(messages), Facts)
        here.send(Settings(4, 10**9))
        yield host, here, messages
    finally:
        here.close()
        assert await asyncio.wait_for(serving, 30)


async def ends(messages: Any, numbers: set[int]) -> dict[int, list[int]]:
    """Tokens of answers, once all of them have ended."""
    found: dict[int, list[int]] = {number: [] for number in numbers}
    left = set(numbers)
    async for message in messages:
        if isinstance(message, Step):
            for number, tokens in zip(message.numbers, message.tokens, strict=True):
                found[number] += tokens
            left -= {more.number for more in message.more if more.ended}
        if not left:
            break
    return found


def test_answers_that_are_over_leave_nothing_behind(model: Model) -> None:
    async def run() -> None:
        async with open_host(model) as (host, here, messages):
            [connection] = host._connections
            for number in range(40):
                here.send(asking(number, count=2 + number % 3))
            here.send(Cancel([3, 4, 1000]))
            found = await ends(messages, set(range(40)))
            for number in set(range(40)) - {3, 4}:
                assert len(found[number]) == 2 + number % 3
            assert not connection.answers

    asyncio.run(run())


def test_memory_is_prepared_while_nobody_asks(
    model: Model, monkeypatch: pytest.MonkeyPatch
) -> None:
    prepared = SimpleQueue[bool]()

    def prepare(_: Engine) -> bool:
        prepared.put(more := prepared.qsize() % 3 < 2)
        return more

    def has_all(count: int) -> bool:
        return prepared.qsize() == count

    monkeypatch.setattr(Engine, "prepare_memory", prepare)

    async def run() -> None:
        async with open_host(model) as (_, here, messages):
            for turn in range(1, 4):
                await asyncio.to_thread(until, partial(has_all, 3 * turn))
                here.send(asking(turn))
                await ends(messages, {turn})

    asyncio.run(run())


def test_memory_that_cannot_be_prepared_ends_no_answer(
    model: Model, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def fail(_: Engine) -> bool:
        raise RuntimeError("CUDA error: out of memory")

    monkeypatch.setattr(Engine, "prepare_memory", fail)

    async def run() -> None:
        async with open_host(model) as (_, here, messages):
            await asyncio.to_thread(until, lambda: "could not be prepared" in caplog.text)
            here.send(asking(1))
            found = await ends(messages, {1})
            assert len(found[1]) == 3

    asyncio.run(run())


def lost(cause: Exception) -> ResourceError:
    """The error of a step that has ended all processes, as a crew raises it."""
    error = ResourceError("rank 1 (process 7) ended while running steps: signal SIGKILL")
    error.__cause__ = cause
    return error


async def end_of(model: Model, crew: Any) -> AsyncIterator[Channel[Any]]:
    """A channel to a host, then the end of that."""
    ours, theirs = socket.socketpair()
    host = EngineHost(replace(model, crew=cast("Any", crew)))
    serving = asyncio.create_task(host.serve([Channel[Any](theirs, ToEngine)]))
    here = Channel[Any](ours, FromEngine)
    assert not serving.done()
    yield here
    assert await asyncio.wait_for(serving, 30)
    assert not host.stepper.alive
    here.close()


def test_it_ends_with_a_process_that_shares_the_model(
    model: Model, caplog: pytest.LogCaptureFixture
) -> None:
    crew, ending = SimpleNamespace(problem=None), lost(PartedError("no answer"))

    async def run() -> None:
        async for here in end_of(model, crew):
            messages = here.receive()
            assert isinstance(await anext(messages), Facts)
            crew.problem = ending
            *_, last = [each async for each in messages]
            assert last == Ended(problem_of(ending))

    asyncio.run(run())
    [record] = caplog.records
    assert record.getMessage() == f"{ending}; the engine's process ends, too"


def test_it_ends_if_it_can_no_longer_be_watched(
    model: Model, caplog: pytest.LogCaptureFixture
) -> None:
    class Broken:
        @property
        def problem(self) -> None:
            raise IndexError("a bug")

    async def run() -> None:
        async for here in end_of(model, Broken()):
            assert not [each async for each in here.receive() if isinstance(each, Ended)]

    asyncio.run(run())
    assert "IndexError: a bug" in caplog.text


def test_its_last_word_reaches_an_http_side_that_is_busy(
    model: Model, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The socket is full when the rank's end is found."""
    crew, ending = SimpleNamespace(problem=None), lost(PartedError("no answer"))
    filled = asyncio.Event()
    part: Any = EngineHost._part

    async def fill(host: EngineHost, problem: Any) -> None:
        [connection] = host._connections
        while not connection.channel._waiting:
            connection.channel.send(Health())
        filled.set()
        await part(host, problem)

    monkeypatch.setattr(EngineHost, "_part", fill)

    async def run() -> None:
        async for here in end_of(model, crew):
            crew.problem = ending
            await filled.wait()
            *_, last = [each async for each in here.receive()]
            assert last == Ended(problem_of(ending))

    asyncio.run(run())


@pytest.mark.parametrize(
    "cause", [PartedError("no answer"), ZeroDivisionError()], ids=["killed", "bug"]
)
def test_a_step_that_ends_all_processes_has_a_traceback_if_it_is_a_bug(
    model: Model, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, cause: Any
) -> None:
    crew = SimpleNamespace(problem=None)

    def step(engine: Engine) -> bool:
        crew.problem = lost(cause)
        raise crew.problem

    monkeypatch.setattr(Engine, "step", step)

    async def run() -> None:
        async for here in end_of(model, crew):
            messages = here.receive()
            assert isinstance(await anext(messages), Facts)
            here.send(Settings(4, 10**9))
            here.send(asking(1))
            said = [each async for each in messages]
            steps = [each for each in said if isinstance(each, Step)]
            problems = [each.more[0].problem for each in steps]
            assert problems in ([], [problem_of(crew.problem)])  # the end may come before
            assert said[-1] == Ended(problem_of(crew.problem))

    asyncio.run(run())
    assert ("Traceback" in caplog.text) == isinstance(cause, ZeroDivisionError)
    assert "rank 1 (process 7) ended" in caplog.text
    monkeypatch.undo()
    model.engine.step()  # forgets the request


def test_a_grammar_lives_until_it_is_dropped_and_followed_to_the_end(model: Model) -> None:
    source = regex_source("[ab]{4}")
    asked = Source(source.text, source.what, dict(source.limits))

    async def run() -> None:
        async with open_host(model) as (host, here, messages):
            [connection] = host._connections
            here.send(MakeGrammar(1, asked))
            here.send(MakeGrammar(2, Source("start: (", "the grammar", {})))
            made = {}
            async for message in messages:
                if isinstance(message, GrammarMade):
                    made[message.number] = message.problem
                if len(made) == 2:
                    break
            assert made[1] is None
            assert made[2] is not None
            assert made[2].kind == "RequestError"
            here.send(asking(7, 9, Constraints(grammar=1)))
            here.send(DropGrammar(1))
            here.send(DropGrammar(99))
            tokens = (await ends(messages, {7}))[7]
            text = model.tokenizer.decode(tokens)
            assert set(text) <= {"a", "b"}
            assert not connection.grammars
            assert not connection.making

    asyncio.run(run())


def test_what_cannot_begin_ends_alone(model: Model) -> None:
    """A grammar that is not there, and a request that no engine takes."""

    async def run() -> None:
        async with open_host(model) as (_, here, messages):
            here.send(asking(1, constraints=Constraints(grammar=5)))
            here.send(asking(2, constraints=Constraints(budget=-1)))
            here.send(asking(3))
            problems: dict[int, Problem | None] = {}
            async for message in messages:
                if isinstance(message, Step):
                    problems |= {e.number: e.problem for e in message.more if e.ended}
                if len(problems) == 3:
                    break
            assert problems[3] is None
            assert problems[1] is not None
            assert problems[2] is not None
            assert "grammar 5" in problems[1].message
            assert "max_thinking_tokens" in problems[2].message

    asyncio.run(run())


def test_the_load_is_that_of_the_engine(model: Model) -> None:
    async def run() -> LoadFound:
        async with open_host(model) as (_, here, messages):
            here.send(AskLoad())
            async for message in messages:
                if isinstance(message, LoadFound):
                    return message
            raise AssertionError

    found = asyncio.run(run())
    assert found.load.pages > 0
    assert (found.load.running, found.grammar_bytes, found.grammars_waiting) == (0, 0, 0)


def test_a_damaged_message_ends_its_connection_with_a_word(
    model: Model, caplog: pytest.LogCaptureFixture
) -> None:
    async def run() -> None:
        async with open_host(model) as (_, here, messages):
            here.send({"no": "message"})
            assert [each async for each in messages if isinstance(each, Step)] == []

    asyncio.run(run())
    assert "could not be followed" in caplog.text


def connected() -> tuple[Connection, socket.socket]:
    ours, theirs = socket.socketpair()
    channel = Channel[ToEngine](ours, ToEngine)
    return Connection(channel, RemoteFiles(channel)), theirs


def test_a_grammar_is_forgotten_before_it_was_begun(model: Model) -> None:
    """Both messages come at once where the client leaves at once."""
    connection, other = connected()

    async def run() -> None:
        host = EngineHost(model)
        for number in range(3):
            source = Source('start: "a"', "the grammar", {})
            host._obey(connection, MakeGrammar(number, source))
            host._obey(connection, DropGrammar(number))
        await asyncio.wait(list(connection.making.values()))
        await asyncio.sleep(0)
        host.grammars.stop()

    asyncio.run(run())
    assert not connection.making
    assert not connection.grammars
    connection.close()
    other.close()


def test_an_answer_may_end_while_its_connection_is_closed() -> None:
    connection, other = connected()

    class Ending:
        def cancel(self) -> None:
            connection.answers.clear()  # as the engine's thread does at any time

    handle = cast(Any, Ending())
    for number in range(3):
        connection.answers[number] = Running(number, "", handle, connection)
    connection.close()
    other.close()


def test_nothing_is_left_of_clients_that_leave(model: Model) -> None:
    """At any moment: while a grammar is made, before the first token, or behind the last."""
    changes: list[dict[str, Any]] = [
        {},
        {"max_tokens": 1},
        {"guided_regex": "[a-z]{99}", "n": 2},
        {"response_format": {"type": "json_object"}},
        {"guided_grammar": "start: nonsense("},
        {"stop": ["e"], "logprobs": 2, "stream": False},
    ]
    with running(model, queue=64) as server:
        held: list[socket.socket] = []
        for number in range(96):
            until(lambda: server.service.active < 32)
            held.append(raw_request(server, LONG | changes[number % len(changes)]))
            if len(held) > number % 8:
                held.pop(0).close()
        for each in held:
            each.close()
        client, [connection] = server.service.engine, server.host._connections
        until(lambda: not server.service.active)
        until(lambda: not (client._waiting or client._grammars or client.open))
        until(lambda: not (connection.answers or connection.grammars or connection.making))
        until(lambda: not server.host.stepper._running)
