"""A connection to a server: one request after another, every byte timed as it arrives."""

import asyncio
import json
import ssl
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, cast

from lowbit.formats.errors import RequestError
from lowbit.runtime.conversation.address import server_url
from lowbit.runtime.lab.http_load.framing import ResponseReader, UnansweredError

MOST_BODY_BYTES = 16 << 20  # of an answer that is no stream
LIMIT_S = 600.0  # of an answer
CONNECT_S = 10.0
PORTS = {"http": 80, "https": 443}
API = "/v1"
Take = Callable[[bytes, float], None]  # a part of the body, and when it came


@dataclass(frozen=True, slots=True)
class Address:
    """Place of a server, and the headers of every request to it."""

    root: str  # as messages name it, without the API's `/v1`
    host: str
    port: int
    tls: ssl.SSLContext | None
    path: str  # before `/v1`
    headers: str

    def request(self, path: str, body: dict[str, Any] | None = None) -> bytes:
        """A POST of `body` to a path below `/v1`; a GET without one."""
        content = b"" if body is None else json.dumps(body).encode()
        method = "GET" if body is None else "POST"
        head = f"{method} {self.path}{API}{path} HTTP/1.1\r\n{self.headers}"
        return f"{head}Content-Length: {len(content)}\r\n\r\n".encode() + content


def address_of(url: str, key: str | None = None) -> Address:
    """The address of a server.

    Args:
        url: with or without the API's `/v1`.
        key: that requests show.

    Raises:
        RequestError: the URL is none of a server, or the key has characters that no header has.
    """
    given = server_url(url)
    if key is not None and not (key.isascii() and key.isprintable()):
        raise RequestError("the key has characters that no header can have")
    path = given.raw_path.partition(b"?")[0].decode().rstrip("/").removesuffix(API)
    host = given.netloc.decode()
    fields = {"Host": host, "Content-Type": "application/json", "User-Agent": "lowbit-run"}
    if key is not None:
        fields["Authorization"] = f"Bearer {key}"
    return Address(
        root=f"{given.scheme}://{host}{path}",
        host=given.host,
        port=given.port or PORTS[given.scheme],
        tls=ssl.create_default_context() if given.scheme == "https" else None,
        path=path,
        headers="".join(f"{name}: {value}\r\n" for name, value in fields.items()),
    )


@dataclass(frozen=True, slots=True)
class Response:
    """An answer of HTTP."""

    status: int
    headers: dict[str, str]
    body: bytes  # empty where it was taken as it came


class Connection:
    """A connection that is opened for the first request, and again where the server ended it."""

    def __init__(
        self, address: Address, now: Callable[[], float], limit_s: float = LIMIT_S
    ) -> None:
        """Connect later; `now` times what arrives, and no answer may take longer than the limit."""
        self._address, self._now, self._limit_s = address, now, limit_s
        self._wire: _Wire | None = None

    async def ask(self, request: bytes, take: Take | None = None) -> Response:
        """Send a request and wait for the end of its response.

        Args:
            take: gets the body of a response of status 200 as it comes; it may raise
                `UnansweredError`.

        Raises:
            UnansweredError: there was no whole response.
        """
        try:
            async with asyncio.timeout(self._limit_s):
                return await self._ask(request, take)
        except TimeoutError:
            detail = f"no whole answer in {self._limit_s:g} s"
            raise UnansweredError("time limit", detail) from None
        finally:
            if self._wire is not None and not self._wire.idle:
                self.close()

    def close(self) -> None:
        """End the connection; the next request opens another."""
        if self._wire is not None:
            self._wire.close()
        self._wire = None

    async def _ask(self, request: bytes, take: Take | None) -> Response:
        """Ask, and once more where the server had ended an idle connection just before."""
        if self._wire is not None:
            wire = self._wire
            try:
                return await wire.ask(request, take)
            except UnansweredError:
                if not wire.silent:
                    raise
        self._wire = await self._open()
        return await self._wire.ask(request, take)

    async def _open(self) -> "_Wire":
        there, loop = self._address, asyncio.get_running_loop()
        try:
            async with asyncio.timeout(CONNECT_S):
                _, wire = await loop.create_connection(
                    lambda: _Wire(self._now), there.host, there.port, ssl=there.tls
                )
        except (OSError, UnicodeError) as error:  # a host whose name cannot be one
            detail = str(error) or f"not within {CONNECT_S:g} s"
            raise UnansweredError("cannot connect", detail) from None
        return wire


class _Wire(asyncio.Protocol):
    """One connection of TCP.

    Attributes:
        idle: it may take a request.
        silent: nothing has come since the request.
    """

    def __init__(self, now: Callable[[], float]) -> None:
        self.idle, self.silent = False, True
        self._now = now
        self._transport: asyncio.Transport
        self._ended: asyncio.Future[None] | None = None  # of the request under way
        self._lost: UnansweredError | None = None
        self._reader = ResponseReader()
        self._take: Take | None = None
        self._body: list[bytes] = []
        self._body_bytes = 0

    async def ask(self, request: bytes, take: Take | None) -> Response:
        """See `Connection.ask`; it is not idle before, nor after a failure."""
        self._reader, self._take, self._body, self._body_bytes = ResponseReader(), take, [], 0
        self.idle, self.silent = False, True
        if self._lost is not None:
            raise self._lost
        self._ended = asyncio.get_running_loop().create_future()
        self._transport.write(request)
        await self._ended
        self._ended = None
        self.idle = self._reader.reusable
        return Response(self._reader.status, self._reader.headers, b"".join(self._body))

    def close(self) -> None:
        """End the connection at once."""
        self._transport.abort()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Take the connection."""
        self._transport = cast(asyncio.Transport, transport)

    def data_received(self, data: bytes) -> None:
        """Take bytes of the server."""
        at = self._now()
        if self._ended is None or self._ended.done():  # nobody has asked for them
            self.close()
            return
        self.silent = False
        try:
            body = self._reader.feed(data)
            if body:
                self._keep(body, at)
        except UnansweredError as error:
            self._ended.set_exception(error)
            return
        if self._reader.done:
            self._ended.set_result(None)

    def connection_lost(self, exc: Exception | None) -> None:
        """Take the end of the connection."""
        self._lost = UnansweredError("closed early", str(exc or "the server ended the connection"))
        if self._ended is None or self._ended.done():
            return
        if exc is None and self._reader.ended():
            self._ended.set_result(None)
        else:
            self._ended.set_exception(self._lost)

    def _keep(self, body: bytes, at: float) -> None:
        """Hand a part of the body on, or keep it.

        Raises:
            UnansweredError: it is too long, or it is what cannot be taken.
        """
        if self._take is not None and self._reader.status == 200:
            self._take(body, at)
            return
        self._body.append(body)
        self._body_bytes += len(body)
        if self._body_bytes > MOST_BODY_BYTES:
            raise UnansweredError("answer too long", f"more than {MOST_BODY_BYTES} bytes")
