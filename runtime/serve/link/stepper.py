"""The thread that runs the engine's steps, and what it sends to the HTTP sides after each."""

import asyncio
import logging
import sys
import threading
import time
import traceback
from collections.abc import Iterable
from dataclasses import dataclass, field
from queue import Empty, SimpleQueue

from lowbit.formats.errors import LowbitError
from lowbit.formats.machine.system import explained
from lowbit.runtime.engine.chance import ChanceWatch
from lowbit.runtime.engine.model import Model
from lowbit.runtime.engine.sequence import TokenLogProbabilities
from lowbit.runtime.engine.stream import Handle
from lowbit.runtime.serve.errors import of_bug
from lowbit.runtime.serve.link.channel import Channel
from lowbit.runtime.serve.link.files import RemoteFiles
from lowbit.runtime.serve.link.messages import More, Problem, Step, ToEngine, problem_of
from lowbit.runtime.serve.settings import STOP_S
from lowbit.runtime.text.grammar import Grammar

log = logging.getLogger("lowbit.serve")
IDLE_S = 0.02  # without a request, until memory for later ones is prepared: a client may go on
RETRY_S = 1.0  # until a step is tried again that failed without any request
STALLED_S = 120.0  # longest time of one step, with the first use of its kernels
STALLED_IN_PROMPT_S = 600.0  # the same while it runs a chunk of a prompt: large models on a CPU


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
