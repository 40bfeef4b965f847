"""The HTTP side of an engine that is slow, or gone."""

import asyncio
import socket
from collections.abc import Awaitable, Callable
from typing import Any, cast

import pytest

from lowbit.formats.errors import LowbitError, ResourceError
from lowbit.runtime.serve.link.channel import Channel
from lowbit.runtime.serve.link.client import EngineClient
from lowbit.runtime.serve.link.messages import (
    Ended,
    FromEngine,
    Settings,
    ToEngine,
    problem_of,
)
from lowbit.runtime.serve.metrics import Metrics
from lowbit.runtime.serve.siblings import Alone
from lowbit.runtime.text.grammar_source import GrammarSource

SOURCE = GrammarSource("a", "the grammar", {})


def run(test: Callable[[EngineClient, Channel[ToEngine]], Awaitable[None]]) -> None:
    """Test a client against a channel that stands for its engine."""

    async def both() -> None:
        ours, theirs = socket.socketpair()
        channel, tokenizer = Channel[FromEngine](ours, FromEngine), cast(Any, None)
        client = EngineClient(channel, tokenizer, Metrics(), Alone().set_open)
        client.start(Settings(1, 1))
        engine = Channel[ToEngine](theirs, ToEngine)
        try:
            await asyncio.wait_for(test(client, engine), 30)
        finally:
            engine.close()
            await client.stop()

    asyncio.run(both())


def test_nothing_waits_for_an_engine_that_has_ended() -> None:
    async def test(client: EngineClient, engine: Channel[ToEngine]) -> None:
        waiting = [asyncio.create_task(client.make_grammar(SOURCE)) for _ in range(2)]
        waiting.append(asyncio.create_task(cast(Any, client.load())))
        await asyncio.sleep(0)
        engine.close()
        for each in waiting:
            with pytest.raises(LowbitError, match="the engine has ended"):
                await each
        assert not client.alive
        for later in (client.make_grammar(SOURCE), client.load()):
            with pytest.raises(LowbitError, match="the engine has ended"):
                await later
        assert not client._grammars
        assert not client._loads

    run(test)


def test_what_waits_for_an_engine_hears_why_it_has_ended() -> None:
    ending = ResourceError("rank 1 ended: signal SIGKILL", hint="load the model again")

    async def test(client: EngineClient, engine: Channel[ToEngine]) -> None:
        waiting = asyncio.create_task(client.make_grammar(SOURCE))
        await asyncio.sleep(0)
        engine.send(Ended(problem_of(ending)))
        engine.close()
        for each in (waiting, client.load()):
            with pytest.raises(ResourceError, match="rank 1 ended: signal SIGKILL") as found:
                await each
            assert found.value.hint == ending.hint

    run(test)
