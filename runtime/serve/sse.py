"""Streamed answers: server-sent events, sent while the answers are generated."""

import asyncio
import contextlib
import json
from collections.abc import Awaitable, Callable, MutableMapping, Sequence
from typing import Any, Protocol

from fastapi import Response

from lowbit.runtime.engine.delta import Delta
from lowbit.runtime.serve.answers import Answers
from lowbit.runtime.serve.errors import ApiError, ClientLeftError

Send = Callable[[MutableMapping[str, Any]], Awaitable[None]]
PATIENCE_S = 10.0  # without a delta, before a comment is sent
LAST_S = 1.0  # for the error of a request that took too long
# As `json.dumps` with these options, which makes an encoder for every call.
compact = json.JSONEncoder(ensure_ascii=False, separators=(",", ":")).encode
HEADERS = (
    (b"content-type", b"text/event-stream; charset=utf-8"),
    (b"cache-control", b"no-cache"),
    (b"x-accel-buffering", b"no"),
)


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
        """Prepare the response.

        Args:
            answers: answers to send.
            writer: writes the events of one API.
        """
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
            try:
                async with asyncio.timeout(PATIENCE_S):
                    deltas = await self._answers.take()
                await self._begin(send)
                return deltas
            except TimeoutError:
                await self._begin(send)
                await self._send(send, b": waiting\n\n")

    async def _begin(self, send: Send) -> None:
        """Send the headers, unless they have been sent."""
        if not self._begun:
            self._begun = True
            await send({"type": "http.response.start", "status": 200, "headers": list(HEADERS)})

    async def _send(self, send: Send, data: bytes, more: bool = True) -> None:
        """Send a part of the body; waits while the client does not read."""
        if data or not more:
            await send({"type": "http.response.body", "body": data, "more_body": more})


def event(content: Any, name: str | None = None) -> bytes:
    """Bytes of one event; `name` where the API names its events."""
    head = f"event: {name}\n" if name else ""
    return f"{head}data: {compact(content)}\n\n".encode()
