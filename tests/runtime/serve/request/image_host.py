"""A host of images on this machine that sends whatever a test wants."""

import socket
import ssl
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field


def reply(body: bytes, status: str = "200 OK", **headers: str) -> bytes:
    """A whole reply; `content_length=""` leaves that header out."""
    found = {"Content-Length": str(len(body)), "Content-Type": "text/html"}
    found |= {name.replace("_", "-").title(): value for name, value in headers.items()}
    lines = [f"HTTP/1.1 {status}", *(f"{k}: {v}" for k, v in found.items() if v)]
    return "\r\n".join(lines).encode() + b"\r\n\r\n" + body


@dataclass
class ImageHost:
    """Replies by path, of which None never ends; `asked` are the heads of requests."""

    port: int
    address: str = "127.0.0.1"
    replies: dict[str, bytes | None] = field(default_factory=dict)
    asked: list[str] = field(default_factory=list)

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
