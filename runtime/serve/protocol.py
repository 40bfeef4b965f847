"""Connections with limits of time and size, of which uvicorn sets none.

A client that has no request under way must send headers in time, and one whose send buffer is full
must read in time. Bytes between and after the parts of a body are limited like a head. While a
request is answered, at most one other is parsed; further bytes are kept unparsed, and the server
goes on listening, so that it notices a client that leaves. A client that is answered while it is
still sending may send on for a while, or it would see a broken connection and not the answer.
"""

import asyncio
import json
import logging
from collections import deque
from collections.abc import Callable
from functools import partial
from http import HTTPStatus
from typing import Any, Literal

import httptools
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol, RequestResponseCycle

from lowbit.runtime.serve.errors import ApiError
from lowbit.runtime.serve.settings import MOST_DROPPED_BYTES, MOST_HEAD_BYTES

log = logging.getLogger("lowbit.serve")
PART_BYTES = 16 << 10  # parsed at once, so that one read exceeds a limit by no more
BODY_PART_BYTES = 256 << 10  # the same of a body whose length is stated
CONTINUE = b"HTTP/1.1 100 Continue\r\n\r\n"
MOST_STARTS = 8  # requests in one turn of the event loop
FIRST_PROBE_S = 0.05
LONGEST_PROBE_S = 5.0


class LingeringTransport(asyncio.Transport):
    """A connection as uvicorn writes an answer to it; it is closed by a function."""

    def __init__(self, transport: asyncio.Transport, close: Callable[[], None]) -> None:
        """Wrap a transport."""
        super().__init__()
        self._transport, self._close = transport, close

    def write(self, data: bytes | bytearray | memoryview) -> None:
        """Write to the connection."""
        self._transport.write(data)

    def is_closing(self) -> bool:
        """True if the connection is about to end."""
        return self._transport.is_closing()

    def close(self) -> None:
        """Close the connection."""
        self._close()


def send_unchunked(cycle: RequestResponseCycle) -> None:
    """Let an answer without a length end with its connection: HTTP/1.0 knows no chunks."""
    send, sized = cycle.send, False

    async def plain(message: Any) -> None:
        nonlocal sized
        if message["type"] == "http.response.start":
            sized = any(name.lower() == b"content-length" for name, _ in message["headers"])
            if not sized:
                cycle.chunked_encoding, cycle.keep_alive = False, False
        elif not sized:
            cycle.expected_content_length = len(message.get("body", b""))
        await send(message)

    cycle.send = plain  # type: ignore[method-assign]


def has_whole_body(receive: Callable[..., Any]) -> bool:
    """True if the whole body of a request has come: the first call of `receive` returns it."""
    cycle = getattr(receive, "__self__", None)
    return isinstance(cycle, RequestResponseCycle) and not cycle.more_body


class StartQueue:
    """Requests that wait to start, a few in each turn of the event loop.

    When many come together, the first ones reach the engine while the others are still read, and
    answers under way are written in between.
    """

    def __init__(self) -> None:
        """Begin without a request."""
        self._waiting: deque[Callable[[], None]] = deque()

    def add(self, start: Callable[[], None]) -> None:
        """Start a request in its turn."""
        if not self._waiting:
            asyncio.get_running_loop().call_soon(self._turn)
        self._waiting.append(start)

    def _turn(self) -> None:
        for _ in range(min(len(self._waiting), MOST_STARTS)):
            self._waiting.popleft()()
        if self._waiting:
            asyncio.get_running_loop().call_soon(self._turn)


class TimedProtocol(HttpToolsProtocol):
    """Uvicorn's protocol, with limits of the time and size of requests."""

    def __init__(
        self, *args: Any, head_s: float, stalled_s: float, starts: StartQueue, **options: Any
    ) -> None:
        """Prepare for a connection.

        Args:
            head_s: seconds in which the headers of a request must come.
            stalled_s: seconds in which a client must read some of a full send buffer.
            starts: of all connections.
        """
        super().__init__(*args, **options)
        self._starts = starts
        self._head_s, self._stalled_s = head_s, stalled_s
        self._head_timer: asyncio.TimerHandle | None = None
        self._stalled_timer: asyncio.TimerHandle | None = None
        self._probe_timer: asyncio.TimerHandle | None = None
        self._place: Literal["between", "head", "body"] = "between"  # of the parser
        self._head_bytes = 0  # parsed since the last part of a body, or request
        self._body_left = 0  # bytes of a body that are still to come, as far as they are stated
        self._running: RequestResponseCycle | None = None  # the request that is answered
        self._held = bytearray()  # behind a request that waits for its turn
        self._ended = False  # the client sends nothing more; it may still read
        self._given_up = False  # what the client sends now is no request
        self._dropped = 0  # bytes of the client that nobody reads, behind an answer

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """Wait for the first request."""
        super().connection_made(transport)
        self._start_head_timer()

    def connection_lost(self, exc: Exception | None) -> None:
        """Stop all timers and tell all requests; uvicorn tells only the last one."""
        self._end_requests()
        super().connection_lost(exc)
        self._held.clear()
        self._stop_head_timer()
        self._stop_stalled_timer()
        self._stop_probing()

    def data_received(self, data: bytes) -> None:
        """Parse bytes; start the timer for headers where no request is under way."""
        if self._given_up:
            self._drop(len(data))
            return
        self._held += data
        self._parse()
        if self._answered:
            self._start_head_timer()
        elif not self._given_up:
            self._stop_head_timer()

    def eof_received(self) -> bool:  # type: ignore[override]
        """Keep the connection for a complete request that has no answer yet.

        A client that has left answers further bytes with a reset; one that has only closed its
        half of the connection reads them.
        """
        self._ended = True
        running = self._running
        if running is None or running.response_complete or running.more_body:
            return False
        self._start_probing()
        return True

    def on_message_begin(self) -> None:
        """Note that a head begins."""
        super().on_message_begin()
        self._place = "head"

    def on_header(self, name: bytes, value: bytes) -> None:
        """Keep a header; trailers, which come after the body, are dropped."""
        if self._place == "head":
            super().on_header(name, value)

    def on_headers_complete(self) -> None:
        """Start the request; one that asks for another protocol is parsed once more instead."""
        self._place, self._head_bytes, self._dropped = "body", 0, 0
        stated = dict(self.headers).get(b"content-length", b"")
        self._body_left = int(stated) if stated.isdigit() else 0
        if not self.parser.should_upgrade():
            super().on_headers_complete()
            if self.scope["http_version"] == "1.0":
                send_unchunked(self.cycle)
            self.cycle.transport = LingeringTransport(self.transport, self._close)
        elif self.parser.get_method() == b"CONNECT":
            raise ValueError("the server is no proxy")

    def on_chunk_header(self) -> None:
        """Restart the count at the size of a chunk."""
        self._head_bytes = 0

    def on_body(self, body: bytes) -> None:
        """Restart the count at a part of the body; drop one that comes behind the answer."""
        super().on_body(body)
        self._head_bytes = 0
        self._body_left -= len(body)
        if self.cycle.response_complete:
            self._drop(len(body))

    def on_message_complete(self) -> None:
        """Note that a request ends."""
        self._place, self._head_bytes, self._body_left = "between", 0, 0
        if not self.parser.should_upgrade():
            super().on_message_complete()

    def on_response_complete(self) -> None:
        """Begin the next request, or wait for the rest of a head that has begun."""
        super().on_response_complete()
        if self.transport.is_closing():
            return
        self._parse()
        running = self._running
        if self._ended and (self._answered or (running is not None and running.more_body)):
            self.transport.close()
        elif self._place == "head" and self._answered:
            self._start_head_timer()

    def pause_writing(self) -> None:
        """Start the timer for a client that does not read."""
        super().pause_writing()
        self._stalled_timer = self.loop.call_later(self._stalled_s, self.transport.abort)

    def resume_writing(self) -> None:
        """Stop the timer for a client that does not read."""
        super().resume_writing()
        self._stop_stalled_timer()

    @property
    def _answered(self) -> bool:
        return self.cycle is None or self.cycle.response_complete

    def _start_asgi_task(self, cycle: RequestResponseCycle, app: Any) -> None:
        self._running = cycle
        self._starts.add(partial(super()._start_asgi_task, cycle, app))

    def _parse(self) -> None:
        """Parse the bytes that have come, until a request waits for the one before it."""
        while self._held and not self.pipeline and not self.transport.is_closing():
            self._unset_keepalive_if_required()
            size = max(PART_BYTES, min(self._body_left, BODY_PART_BYTES))
            with memoryview(self._held) as held:
                part = bytes(held[:size])
            del self._held[:size]
            self._feed(part)
        if not self.pipeline or self.transport.is_closing():
            return
        if len(self._held) > MOST_HEAD_BYTES:  # nobody would see the client leave
            self.flow.pause_reading()
            self._start_probing()
        else:
            self.flow.resume_reading()

    def _feed(self, part: bytes) -> None:
        """Parse some bytes; refuse what is no HTTP, and a head that is too long."""
        self._head_bytes += len(part)
        while part:
            try:
                self.parser.feed_data(part)
                break
            except httptools.HttpParserUpgrade as upgrade:
                part = self._plain_head() + part[upgrade.args[0] :]
            except httptools.HttpParserError:
                self._refuse(400, "the request is not valid HTTP")
                return
        if self._head_bytes > MOST_HEAD_BYTES:
            what = "headers have" if self._place == "head" else "trailers of the body have"
            self._refuse(431, f"the {what} more than {MOST_HEAD_BYTES} bytes")

    def _plain_head(self) -> bytes:
        """The head of a request that asks for another protocol, without that header.

        Clients that try HTTP/2 send their body in HTTP/1.1 all the same, and the parser, which
        stops after such a head, would drop it.
        """
        version = self.parser.get_http_version()
        lines = [b"%s %s HTTP/%s" % (self.parser.get_method(), self.url, version.encode())]
        lines += [b"%s: %s" % header for header in self.headers if header[0] != b"upgrade"]
        self.parser = httptools.HttpRequestParser(self)
        self.parser.set_dangerous_leniencies(lenient_data_after_close=True)
        return b"\r\n".join([*lines, b"", b""])

    def _start_probing(self) -> None:
        if self._probe_timer is None:
            self._probe_in(FIRST_PROBE_S)

    def _probe_in(self, seconds: float) -> None:
        self._probe_timer = self.loop.call_later(seconds, self._probe, seconds)

    def _probe(self, seconds: float) -> None:
        """Send `100 Continue`, which every client skips; one that has left resets the connection.

        An answer that has begun shows the same by itself, and HTTP/1.0 has no such status.
        """
        self._probe_timer = None
        running = self._running
        if running is None or running.response_complete or self.transport.is_closing():
            return
        if running.scope["http_version"] == "1.1" and not running.response_started:
            self.transport.write(CONTINUE)
        self._probe_in(min(2 * seconds, LONGEST_PROBE_S))

    def _stop_probing(self) -> None:
        if self._probe_timer is not None:
            self._probe_timer.cancel()
            self._probe_timer = None

    def _start_head_timer(self) -> None:
        if self._head_timer is None:
            self._head_timer = self.loop.call_later(self._head_s, self._head_is_late)

    def _stop_head_timer(self) -> None:
        if self._head_timer is not None:
            self._head_timer.cancel()
            self._head_timer = None

    def _stop_stalled_timer(self) -> None:
        if self._stalled_timer is not None:
            self._stalled_timer.cancel()
            self._stalled_timer = None

    def _head_is_late(self) -> None:
        """End the connection, with an answer if a part of a request has come."""
        if self._place == "head" and not self._given_up:
            self._refuse(408, "the headers of the request do not come")
        self.transport.close()

    def _refuse(self, status: int, message: str) -> None:
        """Answer without the application, and end the connection after earlier answers."""
        if self.transport.is_closing():
            return
        log.info("refused with %d, %s", status, message)
        self._held.clear()
        self._given_up = True
        faulty = self.cycle if self._place == "body" else None
        if self.pipeline and self.pipeline[0][0] is faulty:
            self.pipeline.popleft()
            faulty = None
        last = self.pipeline[0][0] if self.pipeline else self._running
        if last is not None and last is not faulty and not last.response_complete:
            last.keep_alive = False
            return
        if faulty is None or not faulty.response_started:
            self._answer(status, message)
        self._linger()

    def _close(self) -> None:
        """Close the connection behind an answer, once the client has sent its request."""
        if self._place == "between" and not (self._held or self._given_up):
            self.transport.close()
        else:
            self._linger()

    def _linger(self) -> None:
        """Send nothing more, and close the connection when the client does, or soon.

        Bytes that nobody has read at the end would make it a reset, which takes the answer away.
        """
        if self._ended or not self.transport.can_write_eof():
            self.transport.close()
            return
        self._given_up = True
        self._held.clear()
        self._end_requests()
        self.pipeline.clear()
        self.transport.write_eof()
        self.flow.resume_reading()
        self._start_head_timer()

    def _end_requests(self) -> None:
        for cycle in (self._running, *(cycle for cycle, _ in self.pipeline)):
            if cycle is not None and not cycle.response_complete:
                cycle.disconnected = True
                cycle.message_event.set()

    def _drop(self, count: int) -> None:
        """Count bytes that nobody reads, and close the connection when they are too many."""
        self._dropped += count
        if self._dropped > MOST_DROPPED_BYTES:
            self.transport.abort()

    def _answer(self, status: int, message: str) -> None:
        body = json.dumps(ApiError(status, message).openai()).encode()
        head = (
            f"HTTP/1.1 {status} {HTTPStatus(status).phrase}\r\ncontent-type: application/json\r\n"
            f"content-length: {len(body)}\r\nconnection: close\r\n\r\n"
        )
        self.transport.write(head.encode() + body)
