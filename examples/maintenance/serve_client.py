"""A small HTTP client for load on a server: one connection, one request after another."""

import asyncio
import json
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any


@dataclass
class Answer:
    """An answer of the server."""

    status: int = 0  # of HTTP; 0 where the connection ended before
    headers: dict[str, str] = field(default_factory=dict)
    body: bytes = b""  # without the framing
    first_s: float = 0.0  # from the request to the first piece of text of a stream
    whole_s: float = 0.0  # from the request to the end

    @property
    def json(self) -> Any:
        """The body, parsed."""
        return json.loads(self.body)

    @property
    def events(self) -> list[Any]:
        """Contents of the events of a stream, without its end."""
        lines = [line[6:] for line in self.body.split(b"\n") if line.startswith(b"data: ")]
        return [json.loads(line) for line in lines if line != b"[DONE]"]


class Connection:
    """A connection to a server of this machine."""

    def __init__(self, port: int) -> None:
        self._port = port
        self._reader: asyncio.StreamReader | None = None
        self._writer: asyncio.StreamWriter | None = None

    async def post(
        self,
        path: str,
        body: Any,
        piece: bytes = b"",
        leave: Callable[[bytes], bool] = lambda data: False,
        pause_s: float = 0.0,
    ) -> Answer:
        """Send a request and read its answer.

        Args:
            path: of the address.
            body: plain JSON, or bytes as they are; None sends a GET.
            piece: marks the first piece of text in a stream.
            leave: tells, of the data so far, whether to close the connection at once.
            pause_s: between two reads, for a slow reader.
        """
        if self._reader is None or self._writer is None:
            self._reader, self._writer = await asyncio.open_connection("127.0.0.1", self._port)
        raw = (
            body if isinstance(body, bytes) else b"" if body is None else json.dumps(body).encode()
        )
        method = "GET" if body is None else "POST"
        head = f"{method} {path} HTTP/1.1\r\nHost: localhost\r\nContent-Length: {len(raw)}\r\n\r\n"
        started = time.perf_counter()
        self._writer.write(head.encode() + raw)
        answer, data = Answer(), b""
        while not _complete(answer, data):
            new = await self._reader.read(1 << 16)
            if not new:
                self.close()
                return answer
            data += new
            if not answer.first_s and piece and piece in new:
                answer.first_s = time.perf_counter() - started
            if leave(data):
                self.close()
                return answer
            if pause_s:
                await asyncio.sleep(pause_s)
        answer.whole_s = time.perf_counter() - started
        answer.body = _unframed(answer, data)
        if answer.headers.get("connection") == "close":
            self.close()
        return answer

    def close(self) -> None:
        """End the connection; the next request opens another."""
        if self._writer is not None:
            self._writer.close()
        self._reader = self._writer = None


def _complete(answer: Answer, data: bytes) -> bool:
    """Read the head once it is there; True when all of the body is, too."""
    if not answer.status:
        if b"\r\n\r\n" not in data:
            return False
        lines = data[: data.index(b"\r\n\r\n")].decode("latin-1").split("\r\n")
        answer.status = int(lines[0].split()[1])
        pairs = (line.partition(":") for line in lines[1:])
        answer.headers = {name.lower(): value.strip() for name, _, value in pairs}
    if answer.headers.get("transfer-encoding") == "chunked":
        return data.endswith(b"\r\n0\r\n\r\n")
    begin = data.index(b"\r\n\r\n") + 4
    return len(data) - begin >= int(answer.headers.get("content-length", 0))


def _unframed(answer: Answer, data: bytes) -> bytes:
    """The body alone."""
    rest = data[data.index(b"\r\n\r\n") + 4 :]
    if answer.headers.get("transfer-encoding") != "chunked":
        return rest
    parts = []
    while rest:
        size, _, rest = rest.partition(b"\r\n")
        count = int(size, 16)
        parts.append(rest[:count])
        rest = rest[count + 2 :]
    return b"".join(parts)
