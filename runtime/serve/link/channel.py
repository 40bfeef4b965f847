"""A socket between two processes that carries messages in both directions.

Measured against ZeroMQ beside an asyncio loop: a round trip of half the time, and a peer that ends
is noticed at once.
"""

import asyncio
import contextlib
import errno
import os
import socket
import threading
from collections import deque
from collections.abc import AsyncGenerator, Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

import msgspec

from lowbit.runtime.images.shared import SharedBytes

LENGTH = 4  # bytes before each message
READ = 1 << 18  # bytes that are read at once
MOST_FILES = 253  # that Linux sends at once
FLAGS = getattr(socket, "MSG_CMSG_CLOEXEC", 0)  # processes that this one starts get no files
Received = TypeVar("Received")


@dataclass(slots=True)
class _Part:
    """Bytes that the socket had no room for, and the files that go with the first of them."""

    data: bytearray
    files: Sequence[SharedBytes] = ()


class Channel(Generic[Received]):
    """One end of a socket pair; messages that do not fit into the socket wait in order.

    Of `SharedBytes` in a message the other process gets the descriptors.
    """

    def __init__(self, sock: socket.socket, received: object) -> None:
        """Take over a socket.

        Args:
            sock: connected stream socket of this machine.
            received: type of the messages that come, a union.
        """
        sock.setblocking(False)
        self._socket, self._number = sock, sock.fileno()
        self._encode = msgspec.msgpack.Encoder(enc_hook=self._share).encode
        self._decode = msgspec.msgpack.Decoder(received, dec_hook=self._shared).decode
        self._lock = threading.Lock()
        self._files: list[SharedBytes] = []  # of the message that is being encoded
        self._waiting: deque[_Part] = deque()  # what the socket had no room for
        self._read = bytearray()  # the beginning of a message
        self._descriptors: deque[int] = deque()  # that came with messages not yet decoded
        self._loop: asyncio.AbstractEventLoop | None = None
        self._writing: asyncio.Task[None] | None = None

    def send(self, message: object) -> None:
        """Send a message, from any thread, without waiting; nobody hears what a closed end is told.

        It goes straight into the socket: to wake an event loop first would cost a thread's turn.
        """
        with self._lock:
            self._files = []
            content = self._encode(message)
            part = _Part(bytearray(len(content).to_bytes(LENGTH, "little") + content), self._files)
            self._files = []
            if not self._waiting and self._sent(part):
                return
            if not part.files and self._waiting:
                self._waiting[-1].data += part.data
            else:
                self._waiting.append(part)
        if self._loop is not None:
            with contextlib.suppress(RuntimeError):  # the loop is closed
                self._loop.call_soon_threadsafe(self._write_soon)

    async def receive(self) -> AsyncGenerator[Received, None]:
        """The messages that come, until the other end closes or a message is damaged."""
        self._loop = asyncio.get_running_loop()
        self._write_soon()
        while True:
            for message in self._whole():
                yield message
            try:
                part = await self._receive()
            except OSError:
                return
            if not part:
                return
            self._read += part

    def _whole(self) -> Iterator[Received]:
        """The messages that have come whole; whoever stops here may go on later."""
        buffer, first = self._read, 0
        try:
            while (last := _end(buffer, first)) is not None:
                message = self._decode(memoryview(buffer)[first + LENGTH : last])
                first = last
                yield message
        finally:
            del buffer[:first]

    async def flush(self, seconds: float) -> None:
        """Wait until the socket has taken all that was sent, for some seconds at most."""
        self._loop = asyncio.get_running_loop()
        self._write_soon()
        if self._writing is not None:
            await asyncio.wait([self._writing], timeout=seconds)

    def close(self) -> None:
        """Close this end; what the socket has not taken is lost."""
        if self._writing is not None:
            self._writing.cancel()
        with contextlib.suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)
        self._socket.close()
        while self._descriptors:
            os.close(self._descriptors.popleft())

    def _share(self, found: object) -> int:
        """Stand-in of bytes whose file goes beside the message."""
        if not isinstance(found, SharedBytes):
            raise NotImplementedError(f"no message carries {type(found).__name__}")
        self._files.append(found)
        return found.size

    def _shared(self, kind: type, size: Any) -> SharedBytes:
        """Bytes whose file came beside the message, in the order of their stand-ins."""
        if kind is not SharedBytes or not self._descriptors:
            raise NotImplementedError(f"no file came for {kind.__name__}")
        return SharedBytes(self._descriptors.popleft(), size)

    def _sent(self, part: _Part) -> bool:
        """Send what the socket takes at once; True if that is all, or nobody reads any more."""
        try:
            if part.files:
                numbers = [each.descriptor for each in part.files]
                count = socket.send_fds(self._socket, [part.data[:READ]], numbers)
                part.files = ()
            else:
                count = self._socket.send(part.data)
        except BlockingIOError:
            return False
        except OSError as error:
            return error.errno != errno.ETOOMANYREFS  # more files on their way than may be
        del part.data[:count]
        return not part.data

    def _write_soon(self) -> None:
        """Write what waits, on the event loop."""
        if self._waiting and self._writing is None and self._loop is not None:
            self._writing = self._loop.create_task(self._write())

    async def _write(self) -> None:
        loop = asyncio.get_running_loop()
        try:
            while True:
                with self._lock:
                    while self._waiting and self._sent(self._waiting[0]):
                        self._waiting.popleft()
                    if not self._waiting:
                        return
                await self._turn(loop.add_writer, loop.remove_writer)
        finally:
            self._writing = None

    async def _receive(self) -> bytes:
        """Bytes that have come, as soon as there are some; empty at the end. Keeps their files.

        Raises:
            OSError: the connection is broken, or this process may open no more files.
        """
        loop = asyncio.get_running_loop()
        while True:
            try:
                found = socket.recv_fds(self._socket, READ, MOST_FILES, FLAGS)
            except BlockingIOError:
                await self._turn(loop.add_reader, loop.remove_reader)
                continue
            data, descriptors, flags, _ = found
            self._descriptors += descriptors
            if flags & socket.MSG_CTRUNC:
                raise OSError("files of a message were lost")
            return data

    async def _turn(
        self, add: Callable[..., object], remove: Callable[[socket.socket | int], object]
    ) -> None:
        """Wait until the socket has room, or something has come."""
        turn = asyncio.Event()
        add(self._socket, turn.set)
        try:
            await turn.wait()
        finally:
            remove(self._number)


def _end(buffer: bytearray, first: int) -> int | None:
    """End of the message that begins at `first`; None if it has not come whole."""
    if len(buffer) < first + LENGTH:
        return None
    last = first + LENGTH + int.from_bytes(buffer[first : first + LENGTH], "little")
    return last if last <= len(buffer) else None
