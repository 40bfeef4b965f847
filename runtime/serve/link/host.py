"""The engine's side of the channels: an event loop that hears what HTTP sides ask for.

Masks of grammars are made here, since each is needed between two steps.
"""

import asyncio
import logging
import os
import sys
import time
from collections.abc import Iterable
from dataclasses import replace

from lowbit.formats.errors import LowbitError, RequestError
from lowbit.formats.machine.system import explained
from lowbit.runtime.engine.model import Model
from lowbit.runtime.engine.request import Request
from lowbit.runtime.engine.stats import load_of
from lowbit.runtime.serve.errors import of_bug
from lowbit.runtime.serve.grammars import GrammarQueue
from lowbit.runtime.serve.link.channel import Channel
from lowbit.runtime.serve.link.files import RemoteFiles
from lowbit.runtime.serve.link.messages import (
    AskLoad,
    Begin,
    Cancel,
    Constraints,
    DropGrammar,
    Ended,
    Facts,
    FileFound,
    GrammarMade,
    Health,
    LoadFound,
    MakeGrammar,
    More,
    Settings,
    Step,
    ToEngine,
    problem_of,
)
from lowbit.runtime.serve.link.stepper import Connection, Running, Stepper
from lowbit.runtime.serve.settings import SWITCH_S
from lowbit.runtime.text.constraint import Constraint
from lowbit.runtime.text.grammar import Grammar
from lowbit.runtime.text.grammar_source import GrammarSource
from lowbit.runtime.text.strict_calls import StrictCalls

log = logging.getLogger("lowbit.serve")
BEAT_S = 1.0  # between two reports of the engine's health
TICK_S = 0.05  # between two looks at it
FLUSH_S = 1.0  # for an HTTP side to take the last message


def facts_of(model: Model) -> Facts:
    """Facts of a model that the HTTP side needs."""
    drafting, options = model.engine.drafting, model.options
    return Facts(
        folder=os.fsencode(model.folder),
        limits=model.engine.limits,
        defaults=model.defaults,
        stop_ids=model.stop_ids,
        sequences=model.cache.sequences,
        activations=options.activations,
        positions=0 if drafting is None else drafting.positions,
        allow_control_tokens=options.allow_control_tokens,
        refuse_late_system=options.refuse_late_system,
        images=None if model.vision is None else model.vision.input,
        load_s=model.load_s,
    )


class EngineHost:
    """Serves a model to HTTP sides; all methods belong to its event loop."""

    def __init__(self, model: Model) -> None:
        """Prepare to serve; `serve` does."""
        self.model, self.stepper = model, Stepper(model)
        self.grammars = GrammarQueue(model.grammars)
        self._connections: list[Connection] = []
        self._files: list[RemoteFiles] = []

    async def serve(self, channels: Iterable[Channel[ToEngine]]) -> bool:
        """Serve until every HTTP side has closed its channel, or the thread has ended.

        Returns:
            False if the thread hangs, so that the process must be ended.
        """
        switch_s = sys.getswitchinterval()
        sys.setswitchinterval(SWITCH_S)
        self.stepper.start()
        watching = asyncio.create_task(self._watch())
        hearing = [asyncio.create_task(self._hear(each)) for each in channels]
        try:
            both = (watching, asyncio.gather(*hearing, return_exceptions=True))
            await asyncio.wait(both, return_when=asyncio.FIRST_COMPLETED)
            if watching.done() and (problem := watching.result()) is not None:
                await self._part(problem)
        except Exception:
            log.exception("the engine's event loop has failed")
        finally:
            for task in (watching, *hearing):
                task.cancel()
            for connection in self._connections:
                connection.close()
            ended = await asyncio.to_thread(self.stepper.stop)
            if not ended:
                log.error("the engine's thread hangs%s", self.stepper.place())
            self.grammars.stop()
            sys.setswitchinterval(switch_s)
        return ended

    async def _hear(self, channel: Channel[ToEngine]) -> None:
        connection = Connection(channel, RemoteFiles(channel, self._files))
        self._connections.append(connection)
        try:
            connection.channel.send(facts_of(self.model))
            async for message in connection.channel.receive():
                self._obey(connection, message)
                del message  # its files are not kept until the next one comes
        except Exception:
            log.exception("a message of the HTTP side could not be followed")
        finally:
            connection.close()

    def _obey(self, connection: Connection, message: ToEngine) -> None:
        match message:
            case Begin():
                self._begin(connection, message)
            case Cancel():
                for number in message.numbers:
                    if (running := connection.answers.get(number)) is not None:
                        running.handle.cancel()
            case MakeGrammar(number):
                making = asyncio.create_task(self._make(connection, message))
                connection.making[number] = making
                # No part of the task, which may be cancelled before it begins.
                making.add_done_callback(lambda _: connection.making.pop(number, None))
            case DropGrammar(number):
                connection.grammars.pop(number, None)
                if (task := connection.making.get(number)) is not None:
                    task.cancel()
            case FileFound():
                connection.files.settle(message)
            case AskLoad():
                memory = self.grammars.memory
                load = load_of(self.model.engine)
                connection.channel.send(LoadFound(load, memory.used, memory.waiting))
            case Settings():
                self.grammars.memory.total = message.grammar_bytes
                self.model.engine.scheduler.share = message.share

    def _begin(self, connection: Connection, message: Begin) -> None:
        """Submit the requests of a message."""
        try:
            requests = message.requests(self.model.prompts.embedder, connection.files.file)
        except BaseException as error:
            for number in message.numbers:
                _fail(connection, message, number, error)
            return
        for number, request in zip(message.numbers, requests, strict=True):
            self._submit(connection, message, number, request)

    def _submit(
        self, connection: Connection, message: Begin, number: int, request: Request
    ) -> None:
        """Submit a request; its answer fails where the engine refuses it."""
        try:
            request = replace(request, constraint=self._constraint(connection, request, message))
            handle = self.model.engine.submit(request)
        except BaseException as error:  # panics of libraries in Rust are no Exceptions
            _fail(connection, message, number, error)
            return
        running = Running(number, message.id, handle, connection)
        connection.answers[number] = running
        self.stepper.begin(running)

    def _constraint(
        self, connection: Connection, request: Request, message: Begin
    ) -> Constraint | None:
        asked: Constraints = message.constraints
        limit: Grammar | StrictCalls | None = None
        if asked.grammar is not None:
            limit = connection.grammars.get(asked.grammar)
            if limit is None:
                raise RequestError(f"grammar {asked.grammar} is not there")
            if asked.calls is not None:
                limit = StrictCalls(*asked.calls, limit)
        return self.model.constraints.make(request.prompt, request.begin, asked.budget, limit)

    async def _make(self, connection: Connection, message: MakeGrammar) -> None:
        asked, number = message.source, message.number
        problem = None
        try:
            source = GrammarSource(asked.text, asked.what, asked.limits)
            connection.grammars[number] = await self.grammars.make(source)
        except LowbitError as error:
            problem = problem_of(error)
        except asyncio.CancelledError:
            raise
        except BaseException as error:
            log.exception("a grammar could not be made")
            problem = problem_of(of_bug(error))
        connection.channel.send(GrammarMade(number, problem))

    async def _part(self, problem: LowbitError) -> None:
        """Say why the engine ends, before its end is seen."""
        for connection in self._connections:
            connection.channel.send(Ended(problem_of(problem)))
        await asyncio.gather(*(each.channel.flush(FLUSH_S) for each in self._connections))

    async def _watch(self) -> LowbitError | None:
        """Report the engine's health until its thread ends, or another rank of the model.

        Returns:
            The rank's end; None for that of the thread, which the log has.
        """
        told, told_at, crew = Health(), 0.0, self.model.crew
        while self.stepper.alive:
            if crew is not None and (problem := crew.problem) is not None:
                log.error("%s; the engine's process ends, too", problem)
                return problem
            now = Health(self.stepper.stalled, self.stepper.problem)
            if now.stalled and not told.stalled:
                log.error("a step of the engine hangs%s", self.stepper.place())
            elif told.stalled and not now.stalled:
                log.error("the step of the engine has ended")
            if now != told or time.monotonic() - told_at >= BEAT_S:
                told, told_at = now, time.monotonic()
                for connection in self._connections:
                    connection.channel.send(now)
            await asyncio.sleep(TICK_S)
        return None


def _fail(connection: Connection, message: Begin, number: int, error: BaseException) -> None:
    """Tell an HTTP side that an answer could not be begun."""
    found = explained(error)
    if found is None:
        log.error("request %s failed", message.id, exc_info=error)
        found = of_bug(error)
    more = More(number, ended=True, problem=problem_of(found))
    connection.channel.send(Step([], [], [more]))
