"""HTTP/1.1 responses and server-sent events from bytes, wherever the bytes are cut."""

import re

from lowbit.formats.errors import ResourceError

MOST_HEAD_BYTES = 1 << 16
MOST_EVENT_BYTES = 16 << 20
STATUS = re.compile(rb"HTTP/1\.([01]) ([1-9][0-9]{2})(?: .*)?")
CHUNK = re.compile(rb"([0-9a-fA-F]{1,15})[ \t]*(?:;.*)?")  # its size, and what may follow
DIGITS = re.compile(r"[0-9]{1,18}")
EMPTY = (204, 304)  # statuses without a body
BOM = b"\xef\xbb\xbf"


class UnansweredError(ResourceError):
    """A request that was not answered; a load counts it by its kind.

    Attributes:
        kind: a few words that failures of one sort share, such as `status 429`.
        status: of HTTP; 0 where none came.
        retry_after_s: seconds that the server asks the client to wait.
    """

    def __init__(
        self, kind: str, detail: str = "", status: int = 0, retry_after_s: float = 0.0
    ) -> None:
        """Keep the kind, and what the server or the system said beyond it."""
        super().__init__(f"{kind}: {detail}" if detail else kind)
        self.kind, self.status, self.retry_after_s = kind, status, retry_after_s


class ResponseReader:
    """One response of HTTP/1.1.

    Attributes:
        status: of the response; 0 before its head is there.
        headers: by their names in lower case.
        done: all of it is there.
        reusable: the connection may take another request after it.
    """

    def __init__(self) -> None:
        """Begin before the first byte."""
        self.status = 0
        self.headers: dict[str, str] = {}
        self.done = False
        self.reusable = True
        self._rest = b""
        self._left: int | None = 0  # bytes of the body or the chunk; None until the connection ends
        self._chunked = False
        self._in_chunk = False  # a chunk's bytes or the line end behind them come next
        self._last = False  # the last chunk was there; trailers follow

    def feed(self, data: bytes) -> bytes:
        """Read more bytes.

        Returns:
            The part of the body among them.

        Raises:
            UnansweredError: they are no response of HTTP/1.1.
        """
        self._rest = self._rest + data if self._rest else data
        if not self.status and not self._read_head():
            return b""
        if self._chunked:
            body = self._chunks()
        elif self._left is None:
            body, self._rest = self._rest, b""
        else:
            body, self._rest = self._rest[: self._left], self._rest[self._left :]
            self._left -= len(body)
            self.done = not self._left
        if self.done and self._rest:  # nobody has asked for more
            self.reusable = False
        return body

    def ended(self) -> bool:
        """Take the end of the connection; tell if the response is whole."""
        self.reusable = False
        self.done |= bool(self.status) and not self._chunked and self._left is None
        return self.done

    def _read_head(self) -> bool:
        """Read the head if it is whole; one of a provisional status is passed over."""
        while True:
            head, found, rest = self._rest.partition(b"\r\n\r\n")
            if len(head) > MOST_HEAD_BYTES or not head.startswith(b"HTTP/1."[: len(head)]):
                raise _not_http(head)
            if not found:
                return False
            self._rest = rest
            first, *lines = head.split(b"\r\n")
            match = STATUS.fullmatch(first)
            if match is None:
                raise _not_http(head)
            if not match[2].startswith(b"1"):
                break
        self.status = int(match[2])
        pairs = (line.decode("latin-1").partition(":") for line in lines)
        self.headers = {name.strip().lower(): value.strip() for name, _, value in pairs}
        self._read_length(match[1] == b"0")
        return True

    def _read_length(self, old: bool) -> None:
        """Find out how the body ends.

        old: the version is 1.0, whose connections end with the response.
        """
        connection = self.headers.get("connection", "").lower()
        self.reusable = connection == "keep-alive" if old else connection != "close"
        length = self.headers.get("content-length")
        if self.status in EMPTY:
            self.done = True
        elif self.headers.get("transfer-encoding", "").lower() == "chunked":
            self._chunked = True
        elif length is None:
            self._left, self.reusable = None, False
        elif DIGITS.fullmatch(length) is None:
            raise UnansweredError("not HTTP", f"Content-Length is `{length[:40]}`")
        else:
            self._left = int(length)

    def _chunks(self) -> bytes:
        """Bodies of the chunks, or parts of them, that are there."""
        parts: list[bytes] = []
        rest, place = self._rest, 0
        while not self.done:
            if self._in_chunk and self._left:
                part = rest[place : place + self._left]
                if not part:
                    break
                parts.append(part)
                self._left -= len(part)
                place += len(part)
                continue
            end = rest.find(b"\r\n", place)
            if end < 0:
                if len(rest) - place > MOST_HEAD_BYTES:
                    raise UnansweredError("not HTTP", "the line of a chunk does not end")
                break
            self._chunk_line(rest[place:end])
            place = end + 2
        self._rest = rest[place:]
        return parts[0] if len(parts) == 1 else b"".join(parts)

    def _chunk_line(self, line: bytes) -> None:
        """Take a line between chunks: the end of one, the size of the next, or a trailer."""
        if self._last:
            self.done = not line
        elif self._in_chunk:
            if line:
                raise UnansweredError("not HTTP", "a chunk is longer than its size")
            self._in_chunk = False
        else:
            match = CHUNK.fullmatch(line)
            if match is None:
                raise UnansweredError("not HTTP", f"`{line[:40]!r}` is no size of a chunk")
            self._left = int(match[1], 16)
            self._last = not self._left
            self._in_chunk = bool(self._left)


class EventReader:
    """Data of server-sent events; comments and other fields are passed over."""

    def __init__(self) -> None:
        """Begin before the first byte."""
        self._rest = b""  # the line that has not ended
        self._data: list[bytes] = []  # of the event that has not ended
        self._bytes = 0
        self._after_return = False  # the last byte was a carriage return, which ended a line
        self._first = True

    def feed(self, data: bytes) -> list[bytes]:
        """Data of the events that end in these bytes.

        Raises:
            UnansweredError: an event is too long.
        """
        if self._after_return and data:
            data, self._after_return = data.removeprefix(b"\n"), False
        if b"\r" in data:
            self._after_return = data.endswith(b"\r")
            data = data.replace(b"\r\n", b"\n").replace(b"\r", b"\n")
        *lines, self._rest = (self._rest + data).split(b"\n")
        events = []
        for line in lines:
            if self._first:
                line, self._first = line.removeprefix(BOM), False
            if not line:
                if self._data:
                    events.append(b"\n".join(self._data))
                self._data, self._bytes = [], 0
                continue
            name, _, value = line.partition(b":")
            if name == b"data":
                self._data.append(value.removeprefix(b" "))
                self._bytes += len(value)
        if self._bytes + len(self._rest) > MOST_EVENT_BYTES:
            raise UnansweredError("event too long", f"more than {MOST_EVENT_BYTES} bytes")
        return events


def _not_http(head: bytes) -> UnansweredError:
    return UnansweredError("not HTTP", f"the answer begins with `{head[:40]!r}`")
