"""Connections to clients that take part in time; uvicorn waits for their headers without end.

A connection that has no request to answer owes the server headers. A connection whose send buffer
is full owes it reading.
"""

import asyncio
import json
from http import HTTPStatus
from typing import Any

from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from lowbit.runtime.serve.errors import ApiError
from lowbit.runtime.serve.limits import MOST_HEAD_BYTES


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
        self._in_head = False  # some of a request has come, and not all of its headers
        self._head_bytes = 0

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """Wait for the first request."""
        super().connection_made(transport)
        self._start_head_timer()

    def connection_lost(self, exc: Exception | None) -> None:
        """Wait for nothing any more."""
        super().connection_lost(exc)
        self._stop_head_timer()
        self._stop_stalled_timer()

    def data_received(self, data: bytes) -> None:
        """Wait for headers from the first byte on that belongs to no running request."""
        super().data_received(data)
        if self.cycle is not None and not self.cycle.response_complete:
            self._stop_head_timer()
        else:
            self._start_head_timer()
        if self._in_head:
            self._head_bytes += len(data)
            if self._head_bytes > MOST_HEAD_BYTES:
                self._refuse(431, f"the headers have more than {MOST_HEAD_BYTES} bytes")

    def on_message_begin(self) -> None:
        """Count the bytes of a head."""
        super().on_message_begin()
        self._in_head, self._head_bytes = True, 0

    def on_headers_complete(self) -> None:
        """End the count."""
        super().on_headers_complete()
        self._in_head = False

    def on_response_complete(self) -> None:
        """Wait for the rest of a head that has begun behind the request."""
        super().on_response_complete()
        if self._in_head and self.cycle.response_complete:
            self._start_head_timer()

    def pause_writing(self) -> None:
        """Wait for the client to read."""
        super().pause_writing()
        self._stalled_timer = self.loop.call_later(self._stalled_s, self.transport.abort)

    def resume_writing(self) -> None:
        """Send on."""
        super().resume_writing()
        self._stop_stalled_timer()

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
        if self._in_head:
            self._refuse(408, "the headers of the request do not come")
        else:
            self.transport.close()

    def _refuse(self, status: int, message: str) -> None:
        """Answer without the application, and end the connection."""
        if self.transport.is_closing():
            return
        body = json.dumps(ApiError(status, message).openai()).encode()
        head = (
            f"HTTP/1.1 {status} {HTTPStatus(status).phrase}\r\ncontent-type: application/json\r\n"
            f"content-length: {len(body)}\r\nconnection: close\r\n\r\n"
        )
        self.transport.write(head.encode() + body)
        self.transport.close()
