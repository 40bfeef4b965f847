"""The answers to one request: deltas on their way from the engine to the client."""

import asyncio
import contextlib
import time
from collections.abc import Awaitable, Callable, Iterator, MutableMapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Protocol

import msgspec
from fastapi import Response
from starlette.requests import Request as HttpRequest

from lowbit.runtime.engine.delta import AnswerToken, Delta, End
from lowbit.runtime.engine.sequence import TokenLogProbabilities
from lowbit.runtime.engine.stream import Answer
from lowbit.runtime.serve.errors import ApiError, ClientLeftError, of_lowbit, timed_out
from lowbit.runtime.serve.logs import Record
from lowbit.runtime.text.answer import Event, Piece, ToolArguments, ToolCallStart
from lowbit.runtime.text.tokenizer import Tokenizer

Send = Callable[[MutableMapping[str, Any]], Awaitable[None]]
PATIENCE_S = 10.0  # without a delta, before a comment is sent
LAST_S = 1.0  # for the error of a request that took too long
HEADERS = (
    (b"content-type", b"text/event-stream; charset=utf-8"),
    (b"cache-control", b"no-cache"),
    (b"x-accel-buffering", b"no"),
)


@dataclass(slots=True, eq=False)
class Answers:
    """The answers to one request; a context manager that cancels those not complete at its end.

    All methods belong to the event loop.
    """

    http: HttpRequest
    record: Record
    timeout_s: float
    log_text: bool = False
    # The answers, which read their tokens as the engine sends them
    each: list[Answer] = field(default_factory=list)
    _deltas: list[Delta] = field(default_factory=list)  # that `take` has not given
    _waiter: asyncio.Future[None] | None = None
    _watcher: asyncio.Task[None] | None = None
    _timer: asyncio.TimerHandle | None = None
    _left: bool = False
    _late: bool = False
    _unfinished: int = 0
    _counted: set[int] = field(default_factory=set)  # answers whose end the record has

    def __enter__(self) -> "Answers":
        """Start to watch the connection and the time."""
        self._unfinished = len(self.each)
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
        for answer in self.each:
            if answer.index not in self._counted:
                self.record.count(answer.summary("length"))
        if self._unfinished:
            self.record.reasons.append("abort")
            self.cancel()

    @property
    def tokenizer(self) -> Tokenizer:
        """Tokenizer of the model."""
        return self.each[0].tokenizer

    @property
    def complete(self) -> bool:
        """True once every answer has ended."""
        return self._unfinished == 0

    @property
    def left_s(self) -> float:
        """Seconds until the time limit."""
        return self.record.started + self.timeout_s - time.perf_counter()

    def cancel(self) -> None:
        """End all answers before the engine's next step."""
        for answer in self.each:
            answer.handle.cancel()

    def put(self, delta: Delta) -> None:
        """Append a delta and wake the task that takes them."""
        self._deltas.append(delta)
        self._wake()

    async def take(self, patience_s: float | None = None) -> Sequence[Delta]:
        """Wait for the next deltas; those that waited for their reader are joined.

        Args:
            patience_s: longest wait, after which there are none; None for at least one delta.

        Raises:
            ClientLeftError: the client has left.
            ApiError: an answer failed, or the request takes too long.
        """
        if not self._deltas and not (self._left or self._late):
            loop = asyncio.get_running_loop()
            self._waiter = loop.create_future()
            timer = None if patience_s is None else loop.call_later(patience_s, self._wake)
            try:
                await self._waiter
            finally:
                self._waiter = None
                if timer is not None:
                    timer.cancel()
        deltas, self._deltas = self._deltas, []
        if self._left:
            raise ClientLeftError
        if self._late:
            raise timed_out(self.timeout_s)
        for delta in deltas:
            if self.log_text:
                self.record.add_text(delta.index, delta.events)
            self._note(delta)
        return deltas if len(deltas) == 1 else joined_deltas(deltas)

    def _wake(self) -> None:
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)

    def _expire(self) -> None:
        self._late = True
        self._wake()

    async def _watch(self) -> None:
        """Cancel everything when the client leaves."""
        await leaving(self.http)
        self._left = True
        self.cancel()

    def _note(self, delta: Delta) -> None:
        record = self.record
        if record.first_token_s is None:
            record.first_token_s = time.perf_counter() - record.started
        if delta.error is not None:
            record.reasons.append("error")
            self._unfinished = 0
            self.cancel()
            raise of_lowbit(delta.error)
        if delta.end is not None:
            self._unfinished -= 1
            self._counted.add(delta.index)
            record.add_end(delta.end)


async def leaving(http: HttpRequest) -> None:
    """Wait until the client of a request whose body has been read leaves."""
    while (await http.receive())["type"] != "http.disconnect":
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
    """One whole answer."""

    reasoning: str = ""
    content: str = ""
    calls: list[CollectedCall] = field(default_factory=list)
    tokens: list[AnswerToken] = field(default_factory=list)
    prompt: tuple[TokenLogProbabilities | None, ...] = ()
    end: End = field(default_factory=lambda: End("length"))

    def add(self, delta: Delta) -> None:
        """Append a delta."""
        for each in delta.events:
            if isinstance(each, ToolCallStart):
                self.calls.append(CollectedCall(each.id, each.name))
            elif isinstance(each, ToolArguments):
                self.calls[each.index].arguments += each.fragment
                self.calls[each.index].complete |= each.last
            elif each.reasoning:
                self.reasoning += each.text
            else:
                self.content += each.text
        self.tokens += delta.tokens
        self.prompt = self.prompt or delta.prompt
        if delta.end is not None:
            self.end = delta.end


async def collect(answers: Answers) -> Sequence[Collected]:
    """Wait for all answers to a request; errors as in `Answers.take`."""
    found = [Collected() for _ in answers.each]
    with answers:
        while not answers.complete:
            for delta in await answers.take():
                found[delta.index].add(delta)
    return found


def joined_deltas(deltas: Sequence[Delta]) -> list[Delta]:
    """Join neighbouring deltas of each answer; those with log-probabilities stay as they are."""
    found: list[Delta] = []
    last: dict[int, int] = {}  # place of each answer's last delta
    for delta in deltas:
        place = last.get(delta.index)
        before = None if place is None else found[place]
        if place is None or before is None or before.tokens or before.prompt or delta.tokens:
            last[delta.index] = len(found)
            found.append(delta)
        else:
            found[place] = replace(delta, events=[*before.events, *delta.events])
    return found


def joined(events: Sequence[Event]) -> Iterator[Event]:
    """Join neighbouring pieces of one kind; all other events stay as they are."""
    held: Piece | None = None
    for found in events:
        if held is not None and isinstance(found, Piece) and held.reasoning == found.reasoning:
            held = Piece(held.text + found.text, found.reasoning)
            continue
        if held is not None:
            yield held
        held = found if isinstance(found, Piece) else None
        if held is None:
            yield found
    if held is not None:
        yield held


class EventWriter(Protocol):
    """Turns deltas into the events of one API."""

    def open(self) -> bytes:
        """Events before the first delta."""

    def write(self, deltas: Sequence[Delta]) -> bytes:
        """Events for deltas."""

    def close(self) -> bytes:
        """Events after the last delta."""

    def fail(self, error: ApiError) -> bytes:
        """Events that end the stream early."""


class EventStream(Response):
    """A response that sends events while answers are generated.

    Headers are sent with the first delta, so that a request that fails before gets an error
    status. Where the first delta takes longer than PATIENCE_S, they are sent without it, and
    comments keep the connection alive.
    """

    def __init__(self, answers: Answers, writer: EventWriter) -> None:
        """Prepare to send answers as `writer` writes them."""
        super().__init__(None)
        self._answers, self._writer = answers, writer
        self._begun = False

    async def __call__(self, scope: Any, receive: Any, send: Send) -> None:
        """Send the whole response; stop where the client leaves or does not read in time."""
        with self._answers as answers, contextlib.suppress(ClientLeftError, TimeoutError):
            async with asyncio.timeout(max(0.0, answers.left_s) + LAST_S):
                try:
                    data = await self._all_but_last(answers, send)
                except ApiError as error:
                    if not self._begun:
                        raise
                    answers.record.error = error.message
                    data = self._writer.fail(error)
                await self._send(send, data, more=False)

    async def _all_but_last(self, answers: Answers, send: Send) -> bytes:
        """Send events up to the last delta; returns the events of that one."""
        deltas = await self._first(send)
        data = self._writer.open()
        while True:
            data += self._writer.write(deltas)
            if answers.complete:
                return data + self._writer.close()
            await self._send(send, data)
            deltas, data = await answers.take(), b""

    async def _first(self, send: Send) -> Sequence[Delta]:
        """Wait for the first deltas and send the headers."""
        while True:
            deltas = await self._answers.take(PATIENCE_S)
            await self._begin(send)
            if deltas:
                return deltas
            await self._send(send, b": waiting\n\n")

    async def _begin(self, send: Send) -> None:
        if not self._begun:
            self._begun = True
            await send({"type": "http.response.start", "status": 200, "headers": list(HEADERS)})

    async def _send(self, send: Send, data: bytes, more: bool = True) -> None:
        """Send a part of the body; waits while the client does not read."""
        if data or not more:
            await send({"type": "http.response.body", "body": data, "more_body": more})


def compact(content: Any) -> str:
    """JSON without blanks, in a tenth of the time of Python's own encoder."""
    return msgspec.json.encode(content).decode()


def event(content: Any, name: str | None = None) -> bytes:
    """Bytes of one event; `name` where the API names its events."""
    head = f"event: {name}\n" if name else ""
    return f"{head}data: {compact(content)}\n\n".encode()
