"""A socket between two processes that carries messages in both directions.

Measured against ZeroMQ beside an asyncio loop: a round trip of half the time, and a peer that ends
is noticed at once.
"""

import asyncio
import contextlib
import errno
import logging
import os
import socket
import threading
from array import array
from collections import deque
from collections.abc import AsyncGenerator, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Generic, Self, TypeVar
from weakref import finalize

import msgspec

from lowbit.runtime.images.shared import SharedBytes

log = logging.getLogger("lowbit.serve")
LENGTH = 4  # bytes before each message
READ = 1 << 18  # bytes that are read at once
MOST_FILES = 253  # that Linux sends at once
# Keeps files that come from processes that this one starts; macOS lacks it
CLOSE_ON_EXEC: int | None = getattr(socket, "MSG_CMSG_CLOEXEC", None)
FILES_S = 0.001  # until files are sent again
Received = TypeVar("Received")


class SharedSocket:
    """A socket on its way to another process, which alone has it then.

    Attributes:
        descriptor: of the socket, until somebody takes it or nobody holds it any more.
    """

    def __init__(self, descriptor: int) -> None:
        """Take over a descriptor."""
        self.descriptor = descriptor
        self._close = finalize(self, os.close, descriptor)

    @classmethod
    def of(cls, sock: socket.socket) -> Self:
        """Take over a socket."""
        return cls(sock.detach())

    def take(self) -> socket.socket:
        """The socket, which is the caller's now."""
        self._close.detach()
        return socket.socket(fileno=self.descriptor)


Shared = SharedBytes | SharedSocket


@dataclass(slots=True)
class _Part:
    """Bytes that the socket had no room for, and the files that go with the first of them."""

    data: bytearray
    files: Sequence[Shared] = ()


class Channel(Generic[Received]):
    """One end of a socket pair; messages that do not fit into the socket wait in order.

    Of `SharedBytes` and `SharedSocket` in a message the other process gets the descriptors.
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
        self._space = socket.CMSG_SPACE(MOST_FILES * array("i").itemsize)
        self._files: list[Shared] = []  # of the message that is being encoded
        self._waiting: deque[_Part] = deque()  # what the socket had no room for
        self._buffer = memoryview(bytearray(READ))  # a new one for each read takes 20 us
        self._read = bytearray()  # the beginning of a message
        self._descriptors: deque[int] = deque()  # that came with messages not yet decoded
        self._loop: asyncio.AbstractEventLoop | None = None
        self._writing: asyncio.Task[None] | None = None

    def send(self, message: object) -> None:
        """Send a message, from any thread, without waiting; nobody hears what a closed end is told.

        It goes straight into the socket: to wake an event loop first would cost a thread's turn.
        """
        with self._lock:
            if self._files:  # of a message that could not be encoded
                self._files = []
            content = self._encode(message)
            data, files = len(content).to_bytes(LENGTH, "little") + content, self._files
            if files:  # a socket is open for its peer as long as anybody holds it
                self._files = []
            sent = 0 if self._waiting else self._sent(data, files)
            if sent == len(data):
                return
            if self._waiting and not files:
                self._waiting[-1].data += data
            else:
                self._waiting.append(_Part(bytearray(data[sent:]), () if sent else files))
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
                del message  # what came with it is not kept until the next one comes
            try:
                count = await self._receive()
            except OSError:
                return
            if not count:
                return
            self._read += self._buffer[:count]

    def _whole(self) -> Iterator[Received]:
        """The messages that have come whole; whoever stops here may go on later."""
        buffer, first = self._read, 0
        try:
            while (last := _end(buffer, first)) is not None:
                message = self._decode(memoryview(buffer)[first + LENGTH : last])
                first = last
                yield message
                del message
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
        """Stand-in of bytes or a socket whose file goes beside the message."""
        if not isinstance(found, Shared):
            raise NotImplementedError(f"no message carries {type(found).__name__}")
        self._files.append(found)
        return found.size if isinstance(found, SharedBytes) else 0

    def _shared(self, kind: type, size: Any) -> Shared:
        """Bytes or a socket whose file came beside the message, in the order of stand-ins."""
        if kind not in (SharedBytes, SharedSocket) or not self._descriptors:
            raise NotImplementedError(f"no file came for {kind.__name__}")
        descriptor = self._descriptors.popleft()
        return SharedBytes(descriptor, size) if kind is SharedBytes else SharedSocket(descriptor)

    def _sent(self, data: bytes | bytearray, files: Sequence[Shared]) -> int:
        """Number of bytes that the socket takes at once; all if nobody reads any more.

        The files go with the first of them.
        """
        try:
            if files:
                return socket.send_fds(self._socket, [data], [each.descriptor for each in files])
            return self._socket.send(data)
        except BlockingIOError:
            return 0
        except OSError as error:  # too many: more files are on their way than the system lets be
            return 0 if error.errno == errno.ETOOMANYREFS else len(data)

    def _write_soon(self) -> None:
        """Write what waits, on the event loop."""
        if self._waiting and self._writing is None and self._loop is not None:
            self._writing = self._loop.create_task(self._write())

    async def _write(self) -> None:
        loop = asyncio.get_running_loop()
        try:
            while True:
                with self._lock:
                    while self._waiting and self._write_part(self._waiting[0]):
                        self._waiting.popleft()
                    if not self._waiting:
                        return
                room = asyncio.Event()
                loop.add_writer(self._socket, room.set)
                try:
                    await room.wait()
                finally:
                    loop.remove_writer(self._number)
                if self._waiting and self._waiting[0].files:
                    # The socket may have room all the while, but the system for no more files.
                    await asyncio.sleep(FILES_S)
        finally:
            self._writing = None

    def _write_part(self, part: _Part) -> bool:
        """Write what the socket takes; True if that is all."""
        if sent := self._sent(part.data, part.files):
            del part.data[:sent]
            part.files = ()
        return not part.data

    async def _receive(self) -> int:
        """Bytes that have come into the buffer, as soon as there are some; 0 at the end.

        Raises:
            OSError: the connection is broken, or this process may open no more files.
        """
        try:
            return self._received()
        except BlockingIOError:
            pass
        loop = asyncio.get_running_loop()
        coming: asyncio.Future[int] = loop.create_future()
        loop.add_reader(self._socket, self._settle, coming)
        try:
            return await coming
        finally:
            loop.remove_reader(self._number)

    def _settle(self, coming: asyncio.Future[int]) -> None:
        """Take what has come for whoever waits; the loop would call again if it were left."""
        if coming.done():
            return
        try:
            coming.set_result(self._received())
        except BlockingIOError:
            return
        except OSError as error:
            coming.set_exception(error)

    def _received(self) -> int:
        """Bytes that have come into the buffer; their files are kept.

        Raises:
            BlockingIOError: nothing has come.
            OSError: see `_receive`.
        """
        count, beside, flags, _ = self._socket.recvmsg_into(
            [self._buffer], self._space, CLOSE_ON_EXEC or 0
        )
        for _, _, raw in beside:
            descriptors = memoryview(raw).cast("i")
            self._descriptors += descriptors
            if CLOSE_ON_EXEC is None:
                for each in descriptors:
                    os.set_inheritable(each, False)
        if flags & socket.MSG_CTRUNC:
            log.error("a channel between processes ends: this one may open no more files")
            raise OSError("files of a message were lost")
        return count


def _end(buffer: bytearray, first: int) -> int | None:
    """End of the message that begins at `first`; None if it has not come whole."""
    if len(buffer) < first + LENGTH:
        return None
    last = first + LENGTH + int.from_bytes(buffer[first : first + LENGTH], "little")
    return last if last <= len(buffer) else None
