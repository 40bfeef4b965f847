"""A host of images on this machine that sends whatever a test wants."""

import asyncio
import socket
import ssl
import threading
import time
from collections.abc import Callable, Coroutine, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from typing import Any, TypeVar

LEAP_S = 20.0
PATIENCE_S = 60.0  # at most, until something happens
T = TypeVar("T")


def reply(body: bytes, status: str = "200 OK", **headers: str) -> bytes:
    """A whole reply; `content_length=""` leaves that header out."""
    found = {"Content-Length": str(len(body)), "Content-Type": "text/html"}
    found |= {name.replace("_", "-").title(): value for name, value in headers.items()}
    lines = [f"HTTP/1.1 {status}", *(f"{k}: {v}" for k, v in found.items() if v)]
    return "\r\n".join(lines).encode() + b"\r\n\r\n" + body


@dataclass
class ImageHost:
    """Replies by path, of which None never ends; `asked` are the heads of requests.

    `endless` counts requests that got a reply without an end.
    """

    port: int
    address: str = "127.0.0.1"
    replies: dict[str, bytes | None] = field(default_factory=dict)
    asked: list[str] = field(default_factory=list)
    endless: int = 0

    def url(self, path: str, host: str | None = None, scheme: str = "http") -> str:
        return f"{scheme}://{host or self.address}:{self.port}{path}"

    @property
    def paths(self) -> list[str]:
        return [head.split(" ")[1] for head in self.asked]


@contextmanager
def image_host(
    tls: ssl.SSLContext | None = None, address: str = "127.0.0.1"
) -> Iterator[ImageHost]:
    """Serve on a free port until the end of the block."""
    with socket.socket() as listening:
        listening.bind((address, 0))
        listening.listen()
        host, over = ImageHost(listening.getsockname()[1], address), threading.Event()

        def answer(connection: socket.socket) -> None:
            with suppress(OSError), connection:
                connection.settimeout(10)
                wrapped = tls.wrap_socket(connection, server_side=True) if tls else connection
                with wrapped:
                    head = b""
                    while b"\r\n\r\n" not in head:
                        head += (part := wrapped.recv(4096))
                        if not part or not head.startswith(b"GET"):
                            return
                    host.asked.append(head.decode())
                    sent = host.replies.get(host.paths[-1], reply(b"", "404 Not Found"))
                    if sent is None:
                        host.endless += 1
                        wrapped.sendall(b"HTTP/1.1 200 OK\r\nContent-Length: 9\r\n\r\nabc")
                        over.wait(10)
                    else:
                        wrapped.sendall(sent)

        def listen() -> None:
            with suppress(OSError):
                while True:
                    connection, _ = listening.accept()
                    threading.Thread(target=answer, args=(connection,), daemon=True).start()

        threading.Thread(target=listen, daemon=True).start()
        try:
            yield host
        finally:
            over.set()
            with suppress(OSError):
                listening.shutdown(socket.SHUT_RDWR)


def run_with_leaps(host: ImageHost, work: Coroutine[Any, Any, T]) -> T:
    """The result of some work, for which LEAP_S pass whenever the host sends a reply without end.

    So limits of time that a slow machine keeps are passed at once. What the host sends wakes the
    event loop, which then looks at its clock.
    """

    async def leaping() -> T:
        loop = asyncio.get_running_loop()
        clock = loop.time
        loop.time = lambda: clock() + LEAP_S * host.endless  # type: ignore[method-assign]
        return await work

    return asyncio.run(leaping())


async def eventually(true: Callable[[], object]) -> None:
    deadline = time.monotonic() + PATIENCE_S
    while not true():
        assert time.monotonic() < deadline
        await asyncio.sleep(0.001)
