"""Grammars of requests: short ones first, memory that is bounded, and given back at the end."""

import asyncio
import gc
import itertools
import threading
from collections.abc import Awaitable, Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any, cast

import httpx2
import pytest

from lowbit.formats.errors import RequestError
from lowbit.runtime.serve import grammars
from lowbit.runtime.serve.grammars import (
    KEPT_FOR_SMALL,
    SHORT,
    SMALL_BYTES,
    GrammarMemory,
    GrammarQueue,
    Turns,
)
from lowbit.runtime.text.grammar import Grammar, GrammarConstraint, Grammars, Trial
from lowbit.runtime.text.grammar_source import GrammarSource, schema_source
from lowbit.runtime.text.mask_time import GrammarSize, MaskTime
from tests.lanes import in_commands
from tests.runtime.serve.conftest import NAME, Running, busy, raw_request, running, until

LARGE = 4 * SMALL_BYTES
TOTAL = 10 * SMALL_BYTES
SCHEMA = {"type": "array", "items": {"type": "integer"}, "minItems": 90}
FORMAT = {"type": "json_schema", "json_schema": {"name": "x", "schema": SCHEMA}}
BODY: dict[str, Any] = {
    "model": NAME,
    "messages": [{"role": "user", "content": "Count."}],
    "chat_template_kwargs": {"enable_thinking": False},
    "max_tokens": 30,
    "response_format": FORMAT,
}
PATH = "/v1/chat/completions"
TOOL = {
    "type": "function",
    "function": {"name": "f", "strict": True, "parameters": {"type": "object"}},
}


def ask(server: Running, **changes: Any) -> httpx2.Response:
    return httpx2.post(f"{server.url}{PATH}", json={**BODY, **changes}, timeout=60)


class StandIns:
    """Grammars whose text is `NAME BYTES`; work on those in `held` takes until it is let go."""

    def __init__(self, held: tuple[str, ...] = (), slow: tuple[str, ...] = ()) -> None:
        self.begun: list[str] = []
        self.gates = {name: threading.Event() for name in held}
        self._slow = slow

    def tried(self, source: GrammarSource) -> Trial:
        name, size = source.text.split()
        self.begun.append(name)
        if name in self.gates:
            assert self.gates[name].wait(30)
        return Trial(int(size), False)

    def tried_quickly(self, source: GrammarSource) -> Trial | None:
        name, size = source.text.split()
        return None if name in self._slow else Trial(int(size), False)

    def compile(self, source: GrammarSource, trial: Trial) -> Grammar:
        return Grammar(None, 1, None, GrammarSize(trial.bytes))


def source(name: str, size: int = 1, length: int = 0) -> GrammarSource:
    return GrammarSource(f"{name} {size:>{max(1, length)}}", "the grammar", {})


def queue_of(found: StandIns, total: int = TOTAL) -> GrammarQueue:
    queue = GrammarQueue(cast(Grammars, found))
    queue.memory.total = total
    return queue


async def turn() -> None:
    """Let every task that can go on do so."""
    for _ in range(20):
        await asyncio.sleep(0)


async def eventually(true: Callable[[], bool]) -> None:
    while not true():
        await asyncio.sleep(0.001)


def run(test: Callable[[], Awaitable[None]]) -> None:
    asyncio.run(asyncio.wait_for(test(), 30))


def noting(order: list[Any], value: object) -> Callable[[], None]:
    return lambda: order.append(value)


def test_what_is_due_first_goes_first() -> None:
    async def test() -> None:
        turns, gate, order = Turns(1, "test"), threading.Event(), list[float]()
        first = asyncio.create_task(turns.run(lambda: gate.wait(30)))
        await turn()
        others = [
            asyncio.create_task(turns.run(noting(order, each), each))
            for each in (7.0, 3.0, 9.0, 3.5, 0.4)
        ]
        await turn()
        others[2].cancel()
        await turn()
        gate.set()
        await asyncio.gather(first, *others, return_exceptions=True)
        assert order == [0.4, 3.0, 3.5, 7.0]
        assert turns._free == 1
        turns.stop()

    run(test)


def test_a_long_grammar_is_not_overtaken_for_ever(monkeypatch: pytest.MonkeyPatch) -> None:
    """The clock goes on a second with each; the first three shorter ones pass."""
    clock = itertools.count()
    monkeypatch.setattr(grammars, "monotonic", lambda: float(next(clock)))
    monkeypatch.setattr(grammars, "core_count", lambda: 2)

    async def test() -> None:
        found = StandIns(held=("first",))
        queue, begun = queue_of(found), SHORT + 1
        tasks = [asyncio.create_task(queue.make(source("first", 1, begun)))]
        await eventually(lambda: found.begun == ["first"])
        long = begun + 3 * grammars.OVERTAKEN_A_S + 99
        monkeypatch.setattr(grammars, "COSTLY", 0)
        for number, length in enumerate((long, *6 * (begun,))):
            tasks.append(asyncio.create_task(queue.make(source(f"n{number}", 1, length))))
            await turn()
        found.gates["first"].set()
        await asyncio.gather(*tasks)
        assert found.begun == ["first", "n1", "n2", "n3", "n0", "n4", "n5", "n6"]
        queue.stop()

    run(test)


def test_work_that_fails_or_is_left_gives_its_thread_back() -> None:
    async def test() -> None:
        turns, gate = Turns(1, "test"), threading.Event()
        with pytest.raises(ZeroDivisionError):
            await turns.run(lambda: 1 // 0)
        begun = threading.Event()

        def work() -> bool:
            begun.set()
            return gate.wait(30)

        left = asyncio.create_task(turns.run(work))
        await eventually(begun.is_set)
        left.cancel()
        behind = asyncio.create_task(turns.run(lambda: 5))
        await turn()
        assert not behind.done()  # the thread goes on
        gate.set()
        assert await behind == 5
        turns.stop()

    run(test)


def test_a_short_grammar_is_made_beside_long_and_costly_ones(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(grammars, "core_count", lambda: 4)

    async def test() -> None:
        found = StandIns(held=("long", "costly"), slow=("costly",))
        queue = queue_of(found)
        slow = [
            asyncio.create_task(queue.make(source("long", 5, SHORT))),
            asyncio.create_task(queue.make(source("costly", 5))),
        ]
        await eventually(lambda: len(found.begun) == 2)
        waits = asyncio.create_task(queue.make(source("other", 5, SHORT)))
        assert (await queue.make(source("short", 7))).size.bytes == 7
        assert found.begun == ["long", "costly"]
        for gate in found.gates.values():
            gate.set()
        assert [made.size.bytes for made in await asyncio.gather(*slow, waits)] == [5, 5, 5]
        queue.stop()

    run(test)


def test_what_does_not_fit_waits_until_others_are_given_back() -> None:
    """Small ones pass large ones, which keep their order."""

    async def test() -> None:
        queue, order = queue_of(StandIns()), list[str]()

        async def make(name: str, size: float) -> Grammar:
            made = await queue.make(source(name, int(size * SMALL_BYTES)))
            order.append(name)
            return made

        held = [await make("a", 3), await make("b", 3)]
        behind = [asyncio.create_task(make("c", 4)), asyncio.create_task(make("d", 1.5))]
        await eventually(lambda: queue.memory.waiting == 2)
        small = await make("e", 1)
        assert queue.memory.used == 7 * SMALL_BYTES
        del held[0]
        made = await behind[0]
        assert queue.memory.waiting == 1
        del held, small
        await behind[1]
        assert order == ["a", "b", "e", "c", "d"]
        assert made.size.bytes == 4 * SMALL_BYTES
        queue.stop()

    run(test)


def test_memory_is_counted_from_before_the_compilation(monkeypatch: pytest.MonkeyPatch) -> None:
    """One that fails or is left counts no longer."""

    async def test() -> None:
        memory, seen = GrammarMemory(TOTAL), list[int]()

        async def hold(size: int, fails: bool) -> None:
            async with memory.promise(size):
                seen.append(memory.used)
                if fails:
                    raise ZeroDivisionError

        with pytest.raises(ZeroDivisionError):
            await hold(LARGE, True)
        assert (seen, memory.used, memory.idle) == ([LARGE], 0, True)
        async with memory.promise(2 * LARGE):
            waits = asyncio.create_task(hold(LARGE, False))
            behind = asyncio.create_task(hold(LARGE // 2, False))
            await turn()
            assert memory.waiting == 2
            waits.cancel()
            await turn()
            assert memory.waiting == 1
        await behind
        assert seen == [LARGE, LARGE // 2]
        async with memory.promise(2 * LARGE):
            waits = asyncio.create_task(hold(LARGE, False))
            await turn()
        waits.cancel()  # it has been let in, and does not know yet
        await turn()
        assert (memory.used, memory.idle) == (0, True)

    run(test)


def test_a_part_is_for_small_grammars_alone() -> None:
    """Memory that masks add to others keeps out large ones alone."""

    async def test() -> None:
        queue = queue_of(StandIns())
        memory, large = queue.memory, TOTAL - TOTAL // KEPT_FOR_SMALL
        grown = await queue.make(source("a", large))
        grown.size.note(60.0)
        assert memory.used > TOTAL
        waits = asyncio.create_task(queue.make(source("b", SMALL_BYTES + 1)))
        assert (await queue.make(source("c", SMALL_BYTES))).size.bytes == SMALL_BYTES
        assert memory.waiting == 1
        del grown
        await waits
        with pytest.raises(RequestError, match="takes"):
            await queue.make(source("d", large + 1))
        queue.stop()

    run(test)


def test_a_grammar_larger_than_all_memory_is_refused() -> None:
    async def test() -> None:
        queue = queue_of(StandIns())
        with pytest.raises(RequestError, match=r"takes 20\.0 MB, more than the 8\.8 MB") as caught:
            await queue.make(source("a", 2 * TOTAL))
        assert "--grammar-memory" in str(caught.value.hint)
        queue.stop()

    run(test)


def test_the_system_gets_what_grammars_gave_up(monkeypatch: pytest.MonkeyPatch) -> None:
    """Much of it while others live, all of it after the last one."""
    given: list[int] = []
    monkeypatch.setattr(grammars, "give_back", lambda: given.append(1))
    monkeypatch.setattr(grammars, "QUIET_S", 0.0)
    monkeypatch.setattr(grammars, "LOOSE_BYTES", LARGE)

    async def test() -> None:
        queue = queue_of(StandIns())
        small, large = await queue.make(source("a")), await queue.make(source("b", LARGE))
        await turn()
        assert given == []
        del large
        await eventually(lambda: len(given) == 1)
        await eventually(lambda: queue._giving is None)
        assert queue.memory.used == small.size.bytes == 1
        del small
        await eventually(lambda: len(given) == 2)
        queue.stop()

    run(test)


def test_masks_add_to_a_grammar_by_their_time() -> None:
    size = GrammarSize(1000)
    size.note(0.0001)
    assert size.bytes == 1000
    size.note(0.0102)
    assert 1_200_000 < size.bytes < 1_300_000
    for _ in range(100):
        size.note(0.5)
    assert size.bytes == 48_001_000


@pytest.fixture
def quiet(server: Running) -> Iterator[Running]:
    """No other grammar lives, and nothing but the end of references frees one."""
    gc.collect()
    until(lambda: server.host.grammars.memory.idle)
    gc.freeze()  # no need to look through all of it before the next test
    gc.disable()
    yield server
    gc.enable()


@in_commands("stream", "call", "whole")
@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"stream": True},
        {"n": 3},
        {"tools": [TOOL]},
        {"tools": [TOOL], "response_format": None, "tool_choice": "required"},
        {"tools": [TOOL], "response_format": None},
        {"response_format": None, "guided_regex": "[a-z]{3}"},
        {"chat_template_kwargs": {}, "thinking_budget": 3},
        {"response_format": None, "guided_grammar": 'start: "a"{1,3} /[b-z]{40}/'},
    ],
    ids=("whole", "stream", "n", "either", "call", "strict", "regex", "thinking", "grammar"),
)
def test_a_grammar_is_given_back_with_its_answer(quiet: Running, changes: dict[str, Any]) -> None:
    memory = quiet.host.grammars.memory
    lived: list[int] = []
    follow = GrammarMemory.follow

    def following(self: GrammarMemory, *arguments: Any) -> None:
        follow(self, *arguments)
        lived.append(self.used)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(GrammarMemory, "follow", following)
        assert ask(quiet, **changes).status_code == 200
    assert len(lived) == 1
    assert lived[0] > 10_000
    until(lambda: memory.idle)


def test_a_grammar_of_an_answer_that_fails_is_given_back(
    quiet: Running, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fails(self: GrammarConstraint, token: int) -> None:
        raise RequestError("no more")

    for error in (fails, lambda *_: 1 // 0):
        with monkeypatch.context() as patch:
            patch.setattr(GrammarConstraint, "accept", error)
            assert ask(quiet).status_code == 400
        until(lambda: quiet.host.grammars.memory.idle)


def test_a_grammar_of_a_client_that_leaves_is_given_back(quiet: Running) -> None:
    for stream in (True, False):
        connection = raw_request(quiet, {**BODY, "max_tokens": 900, "stream": stream}, PATH)
        until(lambda: busy(quiet) > 0)
        connection.close()
        until(lambda: quiet.host.grammars.memory.idle)


@pytest.mark.parametrize("leaves", [False, True])
def test_a_request_waits_for_the_memory_of_its_grammar(server: Running, leaves: bool) -> None:
    """Until the answer before it ends, its own client leaves, or its time is up."""
    size = server.model.grammars.tried(schema_source(SCHEMA)).bytes
    wide = {"type": "object", "properties": {f"p{n}": {"enum": [n]} for n in range(400)}}
    format = {"type": "json_schema", "json_schema": {"name": "x", "schema": wide}}
    with (
        pytest.MonkeyPatch.context() as patch,
        ThreadPoolExecutor(2) as pool,
    ):
        patch.setattr(grammars, "SMALL_BYTES", 0)
        with running(server.model, grammar_bytes=size * 3 // 2, request_timeout_s=30.0) as small:
            memory = small.host.grammars.memory
            held = raw_request(small, {**BODY, "max_tokens": 900, "stream": True}, PATH)
            until(lambda: busy(small) == 1)
            if leaves:
                waiting = raw_request(small, BODY, PATH)
                until(lambda: memory.waiting == 1)
                waiting.close()
                until(lambda: memory.waiting == 0)
            else:
                asked = pool.submit(ask, small)
                until(lambda: memory.waiting == 1)
                text = httpx2.get(f"{small.url}/metrics").text
                assert "lowbit:num_grammars_waiting 1.0\n" in text
                free = ask(small, response_format=None, max_tokens=1)
                assert free.status_code == 200
                held.close()
                assert asked.result().status_code == 200
            held.close()
            refused = ask(small, response_format=format)
            assert refused.status_code == 400
            assert "--grammar-memory" in refused.json()["error"]["message"]
            assert refused.json()["error"]["param"] == "response_format.json_schema.schema"
            until(lambda: memory.idle)


def test_a_request_that_waits_for_memory_has_an_end(server: Running) -> None:
    size = server.model.grammars.tried(schema_source(SCHEMA)).bytes
    with running(server.model, grammar_bytes=size, request_timeout_s=0.2) as brief:
        memory = brief.host.grammars.memory
        memory._promised = size  # as by another one
        late = ask(brief)
        assert (late.status_code, late.json()["error"]["type"]) == (504, "timeout_error")
        until(lambda: memory.waiting == 0)


def test_a_bad_schema_beside_tools_is_named_alone(server: Running) -> None:
    schema = {"type": "object", "properties": {"x": {"type": "string", "pattern": "("}}}
    named = {"type": "json_schema", "json_schema": {"name": "x", "schema": schema}}
    refused = ask(server, response_format=named, tools=[TOOL])
    assert refused.status_code == 400
    assert refused.json()["error"]["message"].startswith("the JSON schema cannot be used")


def test_growth_is_shared_by_all_answers_of_a_grammar() -> None:
    size = GrammarSize(5)
    for _ in range(2):
        before = size.bytes
        MaskTime(None, size).mask(lambda: sum(range(400_000)))
        assert size.bytes > before
