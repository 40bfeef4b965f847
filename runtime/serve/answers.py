"""The answers to one request, from the engine's deltas to what an endpoint writes."""

import asyncio
import time
from collections.abc import Sequence
from dataclasses import dataclass, field

from fastapi import Request

from lowbit.runtime.engine.delta import AnswerToken, Delta, End
from lowbit.runtime.engine.sequence import TokenLogProbabilities
from lowbit.runtime.serve.errors import ClientLeftError, of_lowbit, timed_out
from lowbit.runtime.serve.logs import Record
from lowbit.runtime.serve.worker import Job, Mailbox
from lowbit.runtime.text.answer import ToolArguments, ToolCallStart


@dataclass(slots=True)
class Answers:
    """The answers to one request; a context manager that cancels those not complete at its end.

    Attributes:
        request: request to answer.
        jobs: one for each answer.
        mailbox: queue of their deltas.
        record: facts for the log.
        timeout_s: time limit of the request.
        log_text: keep the text of the answers for the log.
    """

    request: Request
    jobs: Sequence[Job]
    mailbox: Mailbox
    record: Record
    timeout_s: float
    log_text: bool = False
    _watcher: asyncio.Task[None] | None = None
    _timer: asyncio.TimerHandle | None = None
    _left: bool = False
    _late: bool = False
    _unfinished: int = 0

    def __enter__(self) -> "Answers":
        """Start to watch the connection and the time."""
        self._unfinished = len(self.jobs)
        self._watcher = asyncio.create_task(self._watch())
        loop = asyncio.get_running_loop()
        # One for the whole request: a timer costs as much as a token.
        self._timer = loop.call_later(max(0.0, self.left_s), self._expire)
        return self

    def __exit__(self, *_: object) -> None:
        """Cancel the answers that are not complete."""
        if self._watcher is not None:
            self._watcher.cancel()
            self._watcher = None  # it holds these answers, and with them their grammar
        if self._timer is not None:
            self._timer.cancel()
        if self._unfinished:
            self.record.reasons.append("abort")
            for job in self.jobs:
                job.cancel()

    @property
    def complete(self) -> bool:
        """True once every answer has ended."""
        return self._unfinished == 0

    @property
    def left_s(self) -> float:
        """Seconds until the time limit."""
        return self.record.started + self.timeout_s - time.perf_counter()

    async def take(self) -> Sequence[Delta]:
        """Wait for the next deltas, at least one.

        Raises:
            ClientLeftError: the client has left.
            ApiError: an answer failed, or the request takes too long.
        """
        deltas = await self.mailbox.take()
        if self._left:
            raise ClientLeftError
        if self._late:
            raise timed_out(self.timeout_s)
        for delta in deltas:
            if self.log_text:
                self.record.add_text(delta.index, delta.events)
            self._note(delta)
        return deltas

    def _expire(self) -> None:
        """End the request at its time limit."""
        self._late = True
        self.mailbox.wake()

    async def _watch(self) -> None:
        """Cancel everything when the client leaves."""
        await leaving(self.request)
        self._left = True
        for job in self.jobs:
            job.cancel()

    def _note(self, delta: Delta) -> None:
        record = self.record
        if record.first_token_s is None:
            record.first_token_s = time.perf_counter() - record.started
        if delta.error is not None:
            record.reasons.append("error")
            self._unfinished = 0
            for job in self.jobs:
                job.cancel()
            raise of_lowbit(delta.error)
        if delta.end is not None:
            self._unfinished -= 1
            record.add_end(delta.end)


async def leaving(request: Request) -> None:
    """Wait until the client of a request whose body has been read leaves."""
    while (await request.receive())["type"] != "http.disconnect":
        pass


@dataclass(slots=True)
class CollectedCall:
    """A call of a tool; `complete` unless the answer ended inside it."""

    id: str
    name: str
    arguments: str = ""
    complete: bool = False


@dataclass(slots=True)
class Collected:
    """One whole answer.

    Attributes:
        reasoning: text of the reasoning.
        content: text of the answer.
        calls: calls of tools.
        tokens: tokens with log-probabilities, where the request asks for them.
        prompt: log-probabilities of the prompt's tokens, where the request asks for them.
        end: the last delta's `end`, once the answer is complete.
    """

    reasoning: str = ""
    content: str = ""
    calls: list[CollectedCall] = field(default_factory=list)
    tokens: list[AnswerToken] = field(default_factory=list)
    prompt: tuple[TokenLogProbabilities | None, ...] = ()
    end: End = field(default_factory=lambda: End("length"))

    def add(self, delta: Delta) -> None:
        """Append a delta."""
        for event in delta.events:
            if isinstance(event, ToolCallStart):
                self.calls.append(CollectedCall(event.id, event.name))
            elif isinstance(event, ToolArguments):
                self.calls[event.index].arguments += event.fragment
                self.calls[event.index].complete |= event.last
            elif event.reasoning:
                self.reasoning += event.text
            else:
                self.content += event.text
        self.tokens += delta.tokens
        self.prompt = self.prompt or delta.prompt
        if delta.end is not None:
            self.end = delta.end


async def collect(answers: Answers) -> Sequence[Collected]:
    """Wait for all answers to a request; errors as in `Answers.take`."""
    found = [Collected() for _ in answers.jobs]
    with answers:
        while not answers.complete:
            for delta in await answers.take():
                found[delta.index].add(delta)
    return found
