"""The engine's side: a thread that runs steps, and an event loop that hears what to do.

Masks of grammars are made here, since each is needed between two steps.
"""

import asyncio
import logging
import os
import sys
import threading
import time
import traceback
from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from queue import Empty, SimpleQueue

from lowbit.formats.errors import LowbitError, RequestError
from lowbit.formats.machine.system import explained
from lowbit.runtime.engine.chance import ChanceWatch
from lowbit.runtime.engine.model import Model
from lowbit.runtime.engine.request import Request
from lowbit.runtime.engine.sequence import TokenLogProbabilities
from lowbit.runtime.engine.stats import load_of
from lowbit.runtime.engine.stream import Handle
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
    Problem,
    Settings,
    Step,
    ToEngine,
    problem_of,
)
from lowbit.runtime.serve.settings import STOP_S, SWITCH_S
from lowbit.runtime.text.constraint import Constraint
from lowbit.runtime.text.grammar import Grammar
from lowbit.runtime.text.grammar_source import GrammarSource
from lowbit.runtime.text.strict_calls import StrictCalls

log = logging.getLogger("lowbit.serve")
IDLE_S = 0.02  # without a request, until memory for later ones is prepared: a client may go on
RETRY_S = 1.0  # until a step is tried again that failed without any request
BEAT_S = 1.0  # between two reports of the engine's health
TICK_S = 0.05  # between two looks at it
FLUSH_S = 1.0  # for an HTTP side to take the last message
STALLED_S = 120.0  # longest time of one step, with the first use of its kernels
STALLED_IN_PROMPT_S = 600.0  # the same while it runs a chunk of a prompt: large models on a CPU


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
        positions=0 if drafting is None else drafting.most,
        allow_control_tokens=options.allow_control_tokens,
        refuse_late_system=options.refuse_late_system,
        images=None if model.vision is None else model.vision.input,
        load_s=model.load_s,
    )


@dataclass(slots=True, eq=False)
class Running:
    """An answer that is being made."""

    number: int  # that its connection calls it by
    id: str  # of the client's request, for the log
    handle: Handle
    connection: "Connection"
    sent: int = 0  # tokens whose log-probabilities have been sent
    told: bool = False  # what is said once, behind the prompt, has been


@dataclass(slots=True, eq=False)
class Connection:
    """An HTTP side, and what it has asked for; belongs to the event loop."""

    channel: Channel[ToEngine]
    files: RemoteFiles  # of pictures
    answers: dict[int, Running] = field(default_factory=dict)
    grammars: dict[int, Grammar] = field(default_factory=dict)
    making: dict[int, asyncio.Task[None]] = field(default_factory=dict)  # grammars

    def close(self) -> None:
        """Forget everything that was asked for."""
        for running in list(self.answers.values()):  # the engine's thread takes some away
            running.handle.cancel()
        for task in self.making.values():
            task.cancel()
        self.answers.clear()
        self.grammars.clear()
        self.files.close()
        self.channel.close()


class Stepper:
    """The thread that runs steps while anybody waits, and sends new tokens after each.

    An exception ends the answers that it concerns with an error, and is logged. Any type is caught:
    panics of libraries in Rust are no `Exception`, and nobody would hear of one in this thread.

    Attributes:
        problem: of the last step; None while steps succeed.
    """

    def __init__(self, model: Model) -> None:
        """Prepare the thread, which `start` starts."""
        self.problem: Problem | None = None
        self._engine, self._crew, self._watch = model.engine, model.crew, ChanceWatch(model.options)
        self._asked: SimpleQueue[Running | None] = SimpleQueue()
        self._running: list[Running] = []
        self._turned: float | None = None  # when the turn began; None while nobody waits
        # Seconds without a request until memory is prepared; None where that is done, or failed
        self._idle_s: float | None = IDLE_S
        self._thread = threading.Thread(target=self._run, name="lowbit-engine", daemon=True)

    def start(self) -> None:
        """Start the thread."""
        self._thread.start()

    def stop(self) -> bool:
        """End the thread after its step, `STOP_S` seconds at most; False if it hangs."""
        self._asked.put(None)
        self._thread.join(STOP_S)
        return not self._thread.is_alive()

    def begin(self, running: Running) -> None:
        """Take up an answer whose request has been submitted, from any thread."""
        if self._turned is None:
            self._turned = time.monotonic()
        self._asked.put(running)

    @property
    def alive(self) -> bool:
        """True while the thread takes answers."""
        return self._thread.is_alive()

    @property
    def stalled(self) -> bool:
        """True if answers have waited for one step too long."""
        limit = STALLED_IN_PROMPT_S if self._engine.in_prompt else STALLED_S
        turned = self._turned
        return turned is not None and time.monotonic() - turned > limit

    def place(self) -> str:
        """The stack of the thread, as a traceback shows it; empty if it has ended."""
        frame = sys._current_frames().get(self._thread.ident or 0)
        return "" if frame is None else "\n" + "".join(traceback.format_stack(frame)).rstrip()

    def _run(self) -> None:
        """Run steps until the end."""
        try:
            while self._admit():
                running = len(self._running)
                self._step()
                self._collect()
                if self.problem is not None and len(self._running) == running:
                    self._fail(self.problem)  # or the same step fails for ever
                if not self._running:
                    self._step()  # gives back what has been cancelled or lost; nobody waits
        except BaseException:
            log.exception("the engine's thread has ended")

    def _admit(self) -> bool:
        """Take new answers; wait for some if there is nothing to do.

        Returns:
            False when the thread is to end.
        """
        while True:
            if not self._running:
                self._turned = None
            try:
                wait_s = self._idle_s if self.problem is None else RETRY_S
                asked = self._asked.get(block=not self._running, timeout=wait_s)
            except Empty:
                if self._running:
                    self._turned = time.monotonic()
                    return True
                if self.problem is None:
                    self._prepare()
                else:
                    self._step()  # which may have come right
                continue
            if asked is None:
                return False
            self._turned, self._idle_s = time.monotonic(), IDLE_S
            self._running.append(asked)
            del asked  # not kept while nobody asks

    def _prepare(self) -> None:
        """Prepare a piece of memory while nobody waits.

        Whoever needs it meets a failure again.
        """
        self._idle_s = None
        try:
            if self._engine.prepare_memory():
                self._idle_s = 0.0
        except BaseException as error:
            if (found := explained(error)) is None:
                log.exception("memory for later prompts could not be prepared")
            else:
                log.warning("memory for later prompts could not be prepared: %s", found)

    def _step(self) -> None:
        """Run a step; the engine ends the requests of a step that fails."""
        try:
            self._engine.step()
            self.problem = None
        except BaseException as error:
            if (self._running or self.problem is None) and not self._parted(error):
                log.exception("a step failed")
            self.problem = problem_of(explained(error) or of_bug(error))

    def _parted(self, error: BaseException) -> bool:
        """True if a process that shares the model has ended, as the host says in a line."""
        crew = self._crew
        return crew is not None and crew.problem is not None and not _of_bug(error)

    def _fail(self, problem: Problem) -> None:
        for each in self._running:
            each.handle.cancel()
            _send(each.connection, [(each, [], More(each.number, ended=True, problem=problem))])
        self._running.clear()

    def _collect(self) -> None:
        """Send what the step has brought, a message for each connection."""
        news: dict[Connection, list[News]] = {}
        left = []
        for each in self._running:
            tokens, more = news_of(each)
            if tokens or more is not None:
                news.setdefault(each.connection, []).append((each, tokens, more))
            if more is None or not more.ended:
                left.append(each)
            elif (doubt := self._watch.count(more.speculation)) is not None:
                log.warning("%s", doubt)
        self._running = left
        for connection, found in news.items():
            _send(connection, found)


News = tuple[Running, list[int], More | None]


def _send(connection: Connection, news: Iterable[News]) -> None:
    step = Step([], [], [])
    for each, tokens, more in news:
        if tokens:
            step.numbers.append(each.number)
            step.tokens.append(tokens)
        if more is not None:
            step.more.append(more)
            if more.ended:
                connection.answers.pop(each.number, None)
    connection.channel.send(step)


def _fail(connection: Connection, message: Begin, number: int, error: BaseException) -> None:
    """Tell an HTTP side that an answer could not be begun."""
    found = explained(error)
    if found is None:
        log.error("request %s failed", message.id, exc_info=error)
        found = of_bug(error)
    more = More(number, ended=True, problem=problem_of(found))
    connection.channel.send(Step([], [], [more]))


def news_of(running: Running) -> tuple[list[int], More | None]:
    """New tokens of an answer, and what else is to be said of it."""
    handle, number = running.handle, running.number
    try:
        tokens = handle.poll()
        ended, speculation = handle.ended, handle.speculation
        if running.told and not ended and speculation is None and not handle.log_probabilities:
            return tokens, None
        if not (tokens or ended):
            return tokens, None
        return tokens, More(
            number,
            handle.reused,
            ended,
            log_probabilities=_new_log_probabilities(running, len(tokens)),
            prompt=[] if running.told else list(handle.prompt_log_probabilities),
            speculation=speculation,
            queued_s=None if running.told else handle.queued_s,
        )
    except LowbitError as error:
        if _of_bug(error):  # such as in a mask
            log.error("request %s: an answer failed", running.id, exc_info=error.__cause__)
        problem = problem_of(error)
        # Its tracebacks hold the sequence, and that the error.
        error.__traceback__ = error.__cause__ = error.__context__ = None
    except BaseException as error:
        log.exception("request %s: an answer could not be read", running.id)
        handle.cancel()
        problem = problem_of(of_bug(error))
    finally:
        running.told = running.told or handle.begun
    return [], More(number, handle.reused, ended=True, problem=problem)


def _of_bug(error: BaseException) -> bool:
    """True if an error was raised because of a bug."""
    return error.__cause__ is not None and explained(error.__cause__) is None


def _new_log_probabilities(running: Running, count: int) -> list[TokenLogProbabilities]:
    """Those of `count` new tokens; none if the request asks for none."""
    found = running.handle.log_probabilities
    if not found:
        return []
    first = running.sent
    running.sent += count
    return list(found[first : running.sent])


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
