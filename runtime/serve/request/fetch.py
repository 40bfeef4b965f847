"""Images that clients name by their address, fetched from hosts that the server may ask.

A host's name is resolved once, and the connection goes to an address that was checked. A redirect
is checked as the first address was. What a host says of the content's type is not looked at.
"""

import asyncio
import socket
import ssl
import threading
from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from functools import cached_property
from ipaddress import ip_address
from typing import Any, cast
from urllib.parse import urljoin

import httptools

from lowbit.formats.errors import RequestError
from lowbit.formats.fields import shown
from lowbit.runtime.images.data_url import MOST_BYTES
from lowbit.runtime.serve.request.contents import Content, PlacedPart, media_of
from lowbit.runtime.serve.request.hosts import (
    SEND,
    Address,
    AllowedHosts,
    Place,
    Target,
    plain_address,
    target_of,
)
from lowbit.runtime.serve.request.images import address_of, by_age, check_number, refused
from lowbit.runtime.serve.request.places import Asker, Places
from lowbit.runtime.serve.settings import MOST_IMAGE_BODY_BYTES

MOST_REDIRECTS = 5
MOST_HEAD = 64 << 10  # bytes before the content
MOST_PIECES = 1 << 16  # headers, and parts of the content: each is a call on the event loop
TOGETHER = 4  # images of a request that are fetched at a time
TIME_S = 20.0  # from the first look at a name to the last byte, redirects included
# Pause behind an address that has taken TIME_S, for images of earlier turns; else each turn of a
# chat would wait as long
SLOW_S = 300.0
MOST_SLOW = 1024  # such addresses
REQUEST_TIME_S = 60.0  # of all images of a request, with what they wait for places
# For all failures, as the line of text for an image shall be the same in every turn
NOT_FETCHED = "it could not be fetched"
MOVED = (301, 302, 303, 307, 308)


@dataclass(slots=True)
class Budget:
    """Bytes that may still come for the images of a request, all they are sent in included."""

    left: int = MOST_IMAGE_BODY_BYTES

    def take(self, count: int) -> None:
        """Count bytes that have come.

        Raises:
            RequestError: they are too many.
        """
        self.left -= count
        if self.left < 0:
            raise RequestError(
                f"the images that the request names have over {MOST_IMAGE_BODY_BYTES} bytes in all",
                hint="send fewer or smaller ones",
            )


class _Reply(asyncio.Protocol):
    """Asks a host and reads its reply; the parser calls its `on_` methods.

    What comes is parsed at once. A stream would be paused where it comes fast, and uvloop loses the
    rest of a paused one whose host ends TLS without saying so.

    Attributes:
        ended: is done once the reply is whole, or is none; with the error of one that may not be.
    """

    def __init__(self, request: bytes, budget: Budget) -> None:
        self.parser = httptools.HttpResponseParser(self)
        self.headers: dict[bytes, bytes] = {}
        self.body = bytearray()
        self.complete = False
        self.ended: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._request, self._budget, self._open = request, budget, False
        self._head = self._pieces = 0

    @property
    def status(self) -> int:
        """Status code, once the head has come."""
        return int(self.parser.get_status_code()) if self._open else 0

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Ask."""
        cast(asyncio.Transport, transport).write(self._request)

    def data_received(self, data: bytes) -> None:
        """Read on."""
        if self.ended.done():
            return
        try:
            self._feed(data)
        except RequestError as error:
            self.ended.set_exception(error)
        else:
            if self.complete or self.status not in (0, 200):
                self.ended.set_result(None)

    def connection_lost(self, error: Exception | None) -> None:
        """Note that no more comes, which is the end of a content that states none."""
        if not self.ended.done():
            sized = {b"content-length", b"transfer-encoding"} & self.headers.keys()
            self.complete = self._open and not sized
            self.ended.set_result(None)

    def _feed(self, data: bytes) -> None:
        self._budget.take(len(data))  # trailers too, which may be as long as a host likes
        if not self._open:
            self._head += len(data)
        try:
            self.parser.feed_data(data)
        except (httptools.HttpParserError, httptools.HttpParserUpgrade) as error:
            inner = error.__context__
            if isinstance(inner, RequestError):
                raise inner from None
            raise RequestError("the image's host does not speak HTTP", SEND) from None
        if not self._open and self._head > MOST_HEAD:
            raise RequestError(f"the image's host sent headers of over {MOST_HEAD} bytes", SEND)

    def on_message_begin(self) -> None:
        """Forget an interim reply.

        Raises:
            RequestError: it is behind the whole reply.
        """
        if self.complete:
            raise RequestError("the image's host sent more than one reply", SEND)
        self.headers.clear()

    def on_header(self, name: bytes, value: bytes) -> None:
        """Note a header; errors as in `on_body`."""
        self._count_piece()
        self.headers[name.lower()] = value.strip()

    def on_headers_complete(self) -> None:
        """Note the end of the head, unless the reply is an interim one."""
        self._open = int(self.parser.get_status_code()) >= 200

    def on_body(self, part: bytes) -> None:
        """Take content; that of anything else than a success is dropped.

        Raises:
            RequestError: it is too long, or comes in too many pieces.
        """
        self._count_piece()
        if self.status != 200:
            return
        if len(self.body) + len(part) > MOST_BYTES:
            raise RequestError(f"the image has over {MOST_BYTES} bytes", "send a smaller one")
        self.body += part

    def _count_piece(self) -> None:
        self._pieces += 1
        if self._pieces > MOST_PIECES:
            raise RequestError(f"the image's host sends over {MOST_PIECES} pieces", SEND)

    def on_message_complete(self) -> None:
        """Note the end."""
        self.complete = self._open


@dataclass(slots=True, eq=False)
class _Visit:
    """A download's place while it asks one host; kept until the system has looked its name up."""

    places: Places
    asker: Asker
    host: str
    _looking_up: asyncio.Future[list[str]] | None = None

    async def look_up(self, place: Place) -> list[str]:
        """Addresses of a host's name.

        The system takes half a minute where its name servers are silent, and nothing can end that.
        An event loop has few threads for it, uvloop four: this one is the visit's own.
        """
        loop = asyncio.get_running_loop()
        self._looking_up = found = loop.create_future()

        def run() -> None:
            try:
                result, error = resolve(place.host, place.port), None
            except Exception as failure:  # OSError, or UnicodeError for names that none can be
                result, error = [], failure
            with suppress(RuntimeError):  # the loop is closed
                loop.call_soon_threadsafe(_settle, found, result, error)

        try:
            # By its name the server does not wait for it at its end, see `end_threads`.
            threading.Thread(target=run, name="look-up", daemon=True).start()
        except RuntimeError as error:  # the system grants none
            found.cancel()
            raise OSError(str(error)) from None
        return await asyncio.shield(found)

    def end(self) -> None:
        """Give the place back, as soon as nothing is done for it any more."""
        looking_up = self._looking_up
        if looking_up is None or looking_up.done():
            self._give_back()
        else:
            looking_up.add_done_callback(self._give_back)

    def _give_back(self, looked_up: "asyncio.Future[list[str]] | None" = None) -> None:
        if looked_up is not None and not looked_up.cancelled():
            looked_up.exception()  # nobody waits for it any more
        self.places.give_back(self.asker, self.host)


def resolve(host: str, port: int) -> list[str]:
    """Addresses of a host's name, by the system."""
    found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)
    return [str(each[4][0]) for each in found]


def _settle(found: asyncio.Future[list[str]], result: list[str], error: Exception | None) -> None:
    if error is None:
        found.set_result(result)
    else:
        found.set_exception(error)


@dataclass(frozen=True)
class ImageFetcher:
    """Fetches images from allowed hosts, on the event loop and without holding it up."""

    allowed: AllowedHosts
    time_s: float = TIME_S
    request_time_s: float = REQUEST_TIME_S
    places: Places = field(default_factory=Places)
    # Addresses that have taken too long, by the event loop's time at which they may be asked again
    _slow: OrderedDict[str, float] = field(default_factory=OrderedDict)

    @cached_property
    def tls(self) -> ssl.SSLContext:
        """Checks certificates by those that the system trusts."""
        return ssl.create_default_context()

    async def fetch_all(self, contents: Sequence[Content], client: str = "") -> None:
        """Fetch the images that contents name; each part then holds its file, or why it has none.

        Those of the newest turn come first, as they may not be missing.

        Args:
            client: who asks; places of downloads are shared among clients.

        Raises:
            ApiError: one of the newest turn cannot be fetched, by its part, or they are too slow;
                or there are too many in all.
        """
        shown = [each for each in media_of(contents) if each.shows]
        check_number(shown)
        named: dict[str, list[PlacedPart]] = {}
        for each in by_age(shown):
            if (address := address_of(each.part)) is not None:
                named.setdefault(address.strip(), []).append(each)
        budget, asker = Budget(), Asker(client)
        try:
            async with asyncio.timeout(self.request_time_s):
                for newest in (True, False):
                    some = {a: parts for a, parts in named.items() if parts[0].newest == newest}
                    await self._fetch_some(some, budget, asker)
        except TimeoutError:
            words = f"the images of the request took longer than {self.request_time_s:g} s in all"
            for parts in named.values():
                if parts[0].part.fetched is not None:
                    continue
                if parts[0].newest:
                    raise refused(RequestError(words, SEND), parts[0].where) from None
                for each in parts:
                    each.part.fetched = RequestError(NOT_FETCHED)

    async def _fetch_some(
        self, named: Mapping[str, Sequence[PlacedPart]], budget: Budget, asker: Asker
    ) -> None:
        """Fetch images, by their addresses, for the parts that name them.

        Raises:
            ApiError: one of the newest turn cannot be fetched, by the first part that names it.
        """
        together = asyncio.Semaphore(TOGETHER)

        async def fetch(address: str, parts: Sequence[PlacedPart]) -> None:
            async with together:
                content: bytes | RequestError
                try:
                    budget.take(0)  # nobody is asked once the bytes are used up
                    if not parts[0].newest and self._is_slow(address):
                        raise RequestError(NOT_FETCHED)
                    content = await self.fetch(address, budget, asker)
                except RequestError as error:
                    if parts[0].newest:
                        raise refused(error, parts[0].where) from None
                    content = RequestError(NOT_FETCHED)
            for each in parts:
                each.part.fetched = content

        tasks = [asyncio.create_task(fetch(*each)) for each in named.items()]
        try:
            await asyncio.gather(*tasks)
        finally:
            for task in tasks:
                task.cancel()

    async def fetch(
        self, address: str, budget: Budget | None = None, asker: Asker | None = None
    ) -> bytes:
        """Content of an address.

        Args:
            budget: of the request's images; None for one of this image alone.
            asker: the request; None for one of this image alone.

        Raises:
            RequestError: it may not be fetched, cannot be, or is too large or too slow.
        """
        try:
            return await self._follow(address, budget or Budget(), asker or Asker(""))
        except TimeoutError:
            self._note_slow(address)
            raise RequestError(
                f"the image's host took longer than {self.time_s:g} s", SEND
            ) from None
        except ssl.SSLCertVerificationError:
            raise RequestError("the certificate of the image's host is not trusted", SEND) from None
        except OSError:
            raise RequestError("the image's host cannot be reached, or broke off", SEND) from None

    def _is_slow(self, address: str) -> bool:
        return self._slow.get(address, 0.0) > asyncio.get_running_loop().time()

    def _note_slow(self, address: str) -> None:
        self._slow.pop(address, None)
        self._slow[address] = asyncio.get_running_loop().time() + SLOW_S
        if len(self._slow) > MOST_SLOW:
            self._slow.popitem(last=False)

    async def _follow(self, address: str, budget: Budget, asker: Asker) -> bytes:
        target = target_of(address, self.allowed)
        left_s, loop = self.time_s, asyncio.get_running_loop()
        for _ in range(MOST_REDIRECTS + 1):
            visit = _Visit(self.places, asker, target.place.host)
            await self.places.take(asker, visit.host)
            began = loop.time()  # to wait for a place is no time of the host's
            try:
                async with asyncio.timeout(left_s):
                    reply = await self._ask(target, visit, budget)
            finally:
                visit.end()
            left_s -= loop.time() - began
            if reply.status == 200:
                return self._content(reply)
            if reply.status not in MOVED or b"location" not in reply.headers:
                raise RequestError(
                    f"the image's host answered with status {reply.status}, expected 200", SEND
                )
            target = self._moved(target, reply.headers[b"location"].decode("utf-8", "replace"))
        raise RequestError(f"the image's address leads on over {MOST_REDIRECTS} times", SEND)

    def _moved(self, before: Target, location: str) -> Target:
        """The target of a redirect, checked as any address."""
        try:
            moved = urljoin(before.address, location)
        except ValueError:
            raise RequestError("the image's host leads to no address", SEND) from None
        found = target_of(moved, self.allowed)
        if (before.scheme, found.scheme) == ("https", "http"):
            raise RequestError("the image's host leads from https to http", SEND)
        return found

    def _content(self, reply: _Reply) -> bytes:
        if reply.headers.get(b"content-encoding", b"identity").lower() not in (b"", b"identity"):
            raise RequestError("the image's host compresses what nobody asked it to", SEND)
        if not reply.body:
            raise RequestError("the image's host sent nothing", SEND)
        return bytes(reply.body)

    async def _ask(self, target: Target, visit: _Visit, budget: Budget) -> _Reply:
        """The reply of a host to one request."""
        request = (
            f"GET {target.path} HTTP/1.1\r\nHost: {target.host}\r\nUser-Agent: lowbit\r\n"
            "Accept: image/*\r\nAccept-Encoding: identity\r\nConnection: close\r\n\r\n"
        ).encode("ascii")
        transport, reply = await self._connect(target, visit, lambda: _Reply(request, budget))
        try:
            await reply.ended
        finally:
            transport.abort()
        if reply.status in (0, 200) and not reply.complete:
            raise RequestError("the image's host broke off", SEND)
        return reply

    async def _connect(
        self, target: Target, visit: _Visit, make: Callable[[], _Reply]
    ) -> tuple[asyncio.Transport, _Reply]:
        """Connect to an address of a host, which is not resolved again."""
        place, loop = target.place, asyncio.get_running_loop()
        last: OSError | None = None
        tls: dict[str, Any] = {}
        if target.scheme == "https":  # reading the system's certificates takes a while
            tls = {"ssl": await asyncio.to_thread(lambda: self.tls), "server_hostname": place.host}
        for address in await self._addresses(place, visit):
            try:
                return await loop.create_connection(make, str(address), place.port, **tls)
            except ssl.SSLError:
                raise
            except OSError as error:
                last = error
        raise last or OSError("no address")

    async def _addresses(self, place: Place, visit: _Visit) -> list[Address]:
        """Addresses of a host, all of which may be connected to.

        Raises:
            RequestError: one may not, or the host has none.
        """
        try:
            found = await visit.look_up(place)
        except (OSError, UnicodeError):
            raise RequestError(f"the image's host {shown(place.host)} is not known", SEND) from None
        try:
            addresses = list(dict.fromkeys(plain_address(ip_address(each)) for each in found))
        except ValueError:
            addresses = []
        if not addresses or not all(self.allowed.takes(each, place.port) for each in addresses):
            raise RequestError(
                f"the image's host {shown(place.host)} has an address that is not public",
                hint=f"{SEND} --allow-image-urls may name such an address itself, beside the host",
            )
        return addresses
