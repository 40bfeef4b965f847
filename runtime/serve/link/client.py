"""The HTTP side of an engine: its answers, which get their text here, and its health."""

import asyncio
import logging
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from itertools import count, groupby
from typing import Any

from lowbit.formats.errors import LowbitError
from lowbit.runtime.engine.delta import Delta
from lowbit.runtime.engine.request import Request
from lowbit.runtime.engine.sequence import TokenLogProbabilities
from lowbit.runtime.engine.stats import Speculated
from lowbit.runtime.engine.stream import Answer
from lowbit.runtime.serve.answers import Answers
from lowbit.runtime.serve.errors import of_bug
from lowbit.runtime.serve.link.channel import Channel
from lowbit.runtime.serve.link.files import send_file
from lowbit.runtime.serve.link.messages import (
    AskFile,
    AskLoad,
    Begin,
    Cancel,
    Constraints,
    DropGrammar,
    Ended,
    FileFound,
    FromEngine,
    GrammarMade,
    Health,
    LoadFound,
    MakeGrammar,
    More,
    Problem,
    Settings,
    Source,
    Step,
    begin_of,
    picture_of,
)
from lowbit.runtime.serve.metrics import Metrics
from lowbit.runtime.text.grammar_source import GrammarSource
from lowbit.runtime.text.tokenizer import Tokenizer

log = logging.getLogger("lowbit.serve")
# Messages that have come are taken for so long before answers are written: less of it writes every
# token for itself, more of it joins those that came meanwhile.
TURN_S = 0.01
SILENT_S = 120.0  # without a word of the engine, which speaks every second


@dataclass(slots=True, eq=False)
class RemoteHandle:
    """Tokens of an answer that the engine makes in its process; belongs to the event loop."""

    client: "EngineClient"
    number: int
    log_probabilities: list[TokenLogProbabilities] = field(default_factory=list)
    prompt_log_probabilities: tuple[TokenLogProbabilities | None, ...] = ()
    reused: int = 0
    speculation: Speculated | None = None
    over: bool = False  # the engine says no more of it
    cancelled: bool = False  # nobody waits for it any more
    _error: LowbitError | None = None
    _unread: list[int] = field(default_factory=list)

    def take_in(self, tokens: Sequence[int], more: More | None) -> None:
        """Note what a step has brought."""
        self._unread += tokens
        if more is None:
            return
        self.log_probabilities += more.log_probabilities
        self.prompt_log_probabilities = self.prompt_log_probabilities or tuple(more.prompt)
        self.reused = more.reused
        self.speculation = more.speculation
        self.over = more.ended
        self._error = None if more.problem is None else more.problem.error()

    def poll(self) -> list[int]:
        """Tokens that are ready now; raises the error of an answer that has failed."""
        if self._error is not None and not self._unread:
            raise self._error
        tokens, self._unread = self._unread, []
        return tokens

    @property
    def ended(self) -> bool:
        """True once all tokens have been taken; never for an answer that failed."""
        return self.over and not self._unread and self._error is None

    def cancel(self) -> None:
        """End the answer before the engine's next step."""
        self.cancelled = True
        if not self.over:
            self.client.cancel(self.number)


@dataclass(slots=True)
class Waiting:
    """An answer, and the request whose client waits for it."""

    answer: Answer
    handle: RemoteHandle
    asked: Answers


class EngineClient:
    """The engine, as the HTTP side sees it; all methods belong to the event loop.

    Attributes:
        alive: the engine can be heard.
        open: number of answers whose last delta has not been delivered.
        lost: number of answers that clients waited for when the engine ended.
        problem: of the engine's last step; None while steps succeed.
    """

    def __init__(
        self,
        channel: Channel[FromEngine],
        tokenizer: Tokenizer,
        metrics: Metrics,
        on_open: Callable[[int], None],
    ) -> None:
        """Prepare to listen, which `start` begins.

        Args:
            channel: to the engine.
            tokenizer: of its model.
            metrics: are counted here.
            on_open: is told `open` whenever it changes.
        """
        self.alive = True
        self.open = self.lost = 0
        self.problem: Problem | None = None
        self.loop = asyncio.get_running_loop()
        self._channel, self._tokenizer, self._metrics = channel, tokenizer, metrics
        self._on_open = on_open
        self._numbers = count(1)
        self._waiting: dict[int, Waiting] = {}
        self._grammars: dict[int, asyncio.Future[None]] = {}  # that are being made
        self._loads: list[asyncio.Future[LoadFound]] = []
        self._cancelled: list[int] = []  # that the engine has not been told of
        self._stalled = False
        self._ending = Problem("LowbitError", "the engine has ended", "see the log")  # once it has
        self._heard = time.monotonic()
        self._listening: asyncio.Task[None] | None = None

    def start(self, settings: Settings) -> None:
        """Begin to listen."""
        self._channel.send(settings)
        self._listening = asyncio.create_task(self._listen())

    async def stop(self) -> None:
        """Close the channel; answers that are not complete are lost."""
        self._channel.close()
        if self._listening is not None:
            self._listening.cancel()
            await asyncio.wait([self._listening])

    @property
    def stalled(self) -> bool:
        """True if answers have waited for one step too long."""
        silent = time.monotonic() - self._heard > SILENT_S
        return self._stalled or (self.open > 0 and silent)

    def begin(self, asked: Answers, requests: Sequence[Request], constraints: Constraints) -> None:
        """Ask for an answer to each request, which has been checked; they join `asked`."""
        begun: list[Begin] = []
        numbers = [next(self._numbers) for _ in requests]
        for _, group in groupby(zip(numbers, requests, strict=True), _same_prompt):
            own, same = zip(*group, strict=True)
            begun.append(begin_of(own, asked.record.id, same, constraints))
        for index, (number, request) in enumerate(zip(numbers, requests, strict=True)):
            handle = RemoteHandle(self, number)
            answer = Answer(request, self._tokenizer, handle, index)
            asked.each.append(answer)
            self._waiting[number] = Waiting(answer, handle, asked)
        self._count(len(requests))
        for message in begun:
            self._channel.send(message)

    def cancel(self, number: int) -> None:
        """End an answer before the engine's next step; all of a turn of the loop in one message."""
        if not self._cancelled:
            self.loop.call_soon(self._send_cancelled)
        self._cancelled.append(number)

    async def make_grammar(self, source: GrammarSource) -> int:
        """Number of a grammar that the engine has made, for `Constraints`; see `drop_grammar`.

        Raises:
            LowbitError: it cannot be used, takes more memory than all may, or the engine has ended.
        """
        if not self.alive:
            raise self._ending.error()
        number = next(self._numbers)
        made: asyncio.Future[None] = self.loop.create_future()
        self._grammars[number] = made
        asked = Source(source.text, source.what, dict(source.limits))
        self._channel.send(MakeGrammar(number, asked))
        try:
            await made
        except BaseException:
            self.drop_grammar(number)
            raise
        finally:
            del self._grammars[number]
        return number

    def drop_grammar(self, number: int) -> None:
        """Forget a grammar; answers that have begun go on to follow it."""
        self._channel.send(DropGrammar(number))

    async def load(self) -> LoadFound:
        """Load of the engine.

        Raises:
            LowbitError: it has ended.
        """
        if not self.alive:
            raise self._ending.error()
        found: asyncio.Future[LoadFound] = self.loop.create_future()
        self._loads.append(found)
        self._channel.send(AskLoad())
        return await found

    async def _listen(self) -> None:
        turn = time.monotonic()
        try:
            async for message in self._channel.receive():
                self._note(message)
                self._heard = time.monotonic()
                if self._heard - turn > TURN_S:
                    await asyncio.sleep(0)
                    turn = time.monotonic()
        except Exception:
            log.exception("a message of the engine could not be read")
        finally:
            self._end()

    def _note(self, message: FromEngine) -> None:
        match message:
            case Step():
                more = {each.number: each for each in message.more}
                for number, tokens in zip(message.numbers, message.tokens, strict=True):
                    self._deliver(number, tokens, more.pop(number, None))
                for number, each in more.items():
                    self._deliver(number, (), each)
            case Health():
                self._stalled, self.problem = message.stalled, message.problem
            case GrammarMade(number, problem):
                made = self._grammars.get(number)
                if made is not None and not made.done():
                    if problem is None:
                        made.set_result(None)
                    else:
                        made.set_exception(problem.error())
            case LoadFound():
                found = self._loads.pop(0)
                if not found.done():
                    found.set_result(message)
            case AskFile(number, digest):
                self._send_file(number, digest)
            case Ended(problem):
                self._ending = problem

    def _send_file(self, number: int, digest: bytes) -> None:
        """Send the file of a picture that an answer shows, by a thread: it may be base64."""
        own = self._waiting.get(number)
        # An answer that has ended since may have left its picture to others that show it, too.
        shows = self._waiting.values() if own is None else (own,)
        spans = (span for each in shows for span in each.answer.request.images)
        picture = next((picture_of(each) for each in spans if each.digest == digest), None)
        if picture is not None:
            with suppress(RuntimeError):  # no thread can be started: the engine asks again
                self.loop.run_in_executor(None, send_file, self._channel, picture)
                return
        self._channel.send(FileFound(digest))

    def _deliver(self, number: int, tokens: Sequence[int], more: More | None) -> None:
        """Give an answer's news to the task that waits for it."""
        waiting = self._waiting.get(number)
        if waiting is None:
            return  # its last delta has been delivered: a stop string ended it, or a bug
        waiting.handle.take_in(tokens, more)
        if more is not None and more.queued_s is not None:
            self._metrics.queued.observe(more.queued_s)
            for span in waiting.answer.request.images:  # the engine has read them
                picture_of(span).take_pixels()
        delta = self._delta_of(waiting)
        if delta is None:
            return
        if delta.last:
            del self._waiting[number]
            self._count(-1)
        try:
            waiting.asked.put(delta)
        except Exception:
            log.exception("news of an answer were lost")
            waiting.asked.cancel()

    def _count(self, change: int) -> None:
        self.open += change
        self._on_open(self.open)

    def _delta_of(self, waiting: Waiting) -> Delta | None:
        """The delta of an answer, if there is one; its tokens are counted."""
        answer, metrics = waiting.answer, self._metrics
        try:
            before, last_at = answer.count, answer.last_at
            delta = answer.poll()
            if answer.count != before:
                metrics.count_tokens(answer, waiting.asked.record.started, before, last_at)
            if delta is not None and delta.last:
                found = answer.handle.speculation
                if found is not None:
                    metrics.count_drafts(found)
            return delta
        except BaseException as error:  # panics of libraries in Rust are no Exceptions
            log.exception("request %s: an answer could not be made", waiting.asked.record.id)
            answer.handle.cancel()
            return Delta(answer.index, error=of_bug(error))

    def _send_cancelled(self) -> None:
        numbers, self._cancelled = self._cancelled, []
        self._channel.send(Cancel(numbers))

    def _end(self) -> None:
        """Fail everything that waits for the engine."""
        self.alive = False
        self.lost = sum(not each.handle.cancelled for each in self._waiting.values())
        for number, waiting in list(self._waiting.items()):
            last = More(number, waiting.handle.reused, ended=True, problem=self._ending)
            self._deliver(number, (), last)
        futures: list[asyncio.Future[Any]] = [*self._grammars.values(), *self._loads]
        for each in futures:
            if not each.done():
                each.set_exception(self._ending.error())
        self._loads.clear()


def _same_prompt(numbered: tuple[int, Request]) -> tuple[int, int]:
    """Key of answers to one prompt, which share its objects."""
    request = numbered[1]
    return id(request.prompt), id(request.images)
