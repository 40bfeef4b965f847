"""Connections to clients that take part in time and within bounds; uvicorn sets none of these.

A connection that has no request to answer owes the server headers. A connection whose send buffer
is full owes it reading. What stands between the parts of a body, and behind it, is bounded like a
head. While a request is answered, at most one other is parsed: the rest of what came is held as it
is, and the connection is listened to, as a client that leaves is to be noticed.
"""

import asyncio
import json
import logging
from http import HTTPStatus
from typing import Any, Literal

import httptools
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol, RequestResponseCycle

from lowbit.runtime.serve.errors import ApiError
from lowbit.runtime.serve.limits import MOST_HEAD_BYTES

log = logging.getLogger("lowbit.serve")
PART_BYTES = 16 << 10  # that are parsed at once: bounds what one read adds behind a limit
CONTINUE = b"HTTP/1.1 100 Continue\r\n\r\n"
FIRST_PROBE_S = 0.05
LONGEST_PROBE_S = 5.0


class TimedProtocol(HttpToolsProtocol):
    """Uvicorn's protocol, with limits of time and size on what clients send before an answer."""

    def __init__(self, *args: Any, head_s: float, stalled_s: float, **options: Any) -> None:
        """No connection has been made.

        Args:
            args: of uvicorn's protocol.
            head_s: seconds in which the headers of a request must have come.
            stalled_s: seconds in which a client must take something of what is sent to it.
            options: of uvicorn's protocol.
        """
        super().__init__(*args, **options)
        self._head_s, self._stalled_s = head_s, stalled_s
        self._head_timer: asyncio.TimerHandle | None = None
        self._stalled_timer: asyncio.TimerHandle | None = None
        self._probe_timer: asyncio.TimerHandle | None = None
        self._place: Literal["between", "head", "body"] = "between"  # of the parser
        self._head_bytes = 0  # parsed since the last part of a body, or request
        self._running: RequestResponseCycle | None = None  # the request that is answered
        self._held = bytearray()  # behind a request that waits for its turn
        self._ended = False  # the client sends nothing more; it may still read
        self._given_up = False  # what the client sends now is no request

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """Wait for the first request."""
        super().connection_made(transport)
        self._start_head_timer()

    def connection_lost(self, exc: Exception | None) -> None:
        """Wait for nothing any more, and tell all requests: uvicorn tells the last one."""
        for cycle in (self._running, *(cycle for cycle, _ in self.pipeline)):
            if cycle is not None and not cycle.response_complete:
                cycle.disconnected = True
                cycle.message_event.set()
        super().connection_lost(exc)
        self._held.clear()
        self._stop_head_timer()
        self._stop_stalled_timer()
        self._stop_probing()

    def data_received(self, data: bytes) -> None:
        """Wait for headers from the first byte on that belongs to no running request."""
        if not self._given_up:
            self._held += data
            self._parse()
        if self._answered:
            self._start_head_timer()
        else:
            self._stop_head_timer()

    def eof_received(self) -> bool:  # type: ignore[override]
        """Keep the connection for a complete request that has no answer yet.

        A client that has left answers what it is sent with a reset; one that has only ended its
        half of the connection reads it.
        """
        self._ended = True
        running = self._running
        if running is None or running.response_complete or running.more_body:
            return False
        self._start_probing()
        return True

    def on_message_begin(self) -> None:
        """Note a head."""
        super().on_message_begin()
        self._place = "head"

    def on_header(self, name: bytes, value: bytes) -> None:
        """Keep a header; trailers, which come behind the body, are dropped."""
        if self._place == "head":
            super().on_header(name, value)

    def on_headers_complete(self) -> None:
        """Start the request, unless it asks for another protocol: it is parsed once more then."""
        self._place, self._head_bytes = "body", 0
        if not self.parser.should_upgrade():
            super().on_headers_complete()
        elif self.parser.get_method() == b"CONNECT":
            raise ValueError("the server is no proxy")

    def on_chunk_header(self) -> None:
        """Count anew from the size of a chunk on."""
        self._head_bytes = 0

    def on_body(self, body: bytes) -> None:
        """Count anew from a part of the body on."""
        super().on_body(body)
        self._head_bytes = 0

    def on_message_complete(self) -> None:
        """Note the end of a request."""
        self._place, self._head_bytes = "between", 0
        if not self.parser.should_upgrade():
            super().on_message_complete()

    def on_response_complete(self) -> None:
        """Begin the next request, and wait for the rest of a head that has begun behind it."""
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
        """Wait for the client to read."""
        super().pause_writing()
        self._stalled_timer = self.loop.call_later(self._stalled_s, self.transport.abort)

    def resume_writing(self) -> None:
        """Send on."""
        super().resume_writing()
        self._stop_stalled_timer()

    @property
    def _answered(self) -> bool:
        """True where no request has come that is not answered."""
        return self.cycle is None or self.cycle.response_complete

    def _start_asgi_task(self, cycle: RequestResponseCycle, app: Any) -> None:
        self._running = cycle
        super()._start_asgi_task(cycle, app)

    def _parse(self) -> None:
        """Parse what has come, until a request waits for the one before it."""
        while self._held and not self.pipeline and not self.transport.is_closing():
            self._unset_keepalive_if_required()
            part = bytes(self._held[:PART_BYTES])
            del self._held[:PART_BYTES]
            self._feed(part)
        if not self.pipeline or self.transport.is_closing():
            return
        if len(self._held) > MOST_HEAD_BYTES:  # nobody would see the client leave
            self.flow.pause_reading()
            self._start_probing()
        else:
            self.flow.resume_reading()

    def _feed(self, part: bytes) -> None:
        """Parse some bytes; the connection ends where they are no HTTP, or too much of a head."""
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
        """The head of a request that asks for another protocol, without that wish.

        Clients that try HTTP/2 send their body in HTTP/1.1 all the same, and the parser, which
        stops behind such a head, would drop it.
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
        """Send what every client skips before an answer; one that has left resets the connection.

        Answers that have begun show the same by themselves, and HTTP/1.0 knows no such thing.
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
        """End the connection; with an answer if a part of a request has come."""
        if self._place == "head":
            self._refuse(408, "the headers of the request do not come")
        else:
            self.transport.close()

    def _refuse(self, status: int, message: str) -> None:
        """Answer without the application, and end the connection behind earlier answers."""
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
        self.transport.close()

    def _answer(self, status: int, message: str) -> None:
        body = json.dumps(ApiError(status, message).openai()).encode()
        head = (
            f"HTTP/1.1 {status} {HTTPStatus(status).phrase}\r\ncontent-type: application/json\r\n"
            f"content-length: {len(body)}\r\nconnection: close\r\n\r\n"
        )
        self.transport.write(head.encode() + body)
