"""HTTP responses and events, cut at every byte, and what is none of them."""

import random
from collections.abc import Iterator

import httpx2
import pytest

from lowbit.runtime.lab.http_load.framing import (
    MOST_EVENT_BYTES,
    MOST_HEAD_BYTES,
    EventReader,
    ResponseReader,
    UnansweredError,
)

CHUNKED = b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n"
EVENTS = "".join(
    [
        "\ufeffdata: first\n\n",
        ": keep-alive\n\n",
        "data:second\ndata\ndata:  line\r\n\r\n",
        "event: name\nid: 7\nretry: 10\ndata: {\"a\": 'ü'}\r\r",
        "\n\ndata: [DONE]\n\n",
        "data: cut off",
    ]
).encode()
DATA = [b"first", b"second\n\n line", b"{\"a\": '\xc3\xbc'}", b"[DONE]"]


def pieces(data: bytes, size: int) -> Iterator[bytes]:
    for place in range(0, len(data), size):
        yield data[place : place + size]


def body_of(data: bytes, size: int) -> tuple[bytes, ResponseReader]:
    reader = ResponseReader()
    return b"".join(reader.feed(piece) for piece in pieces(data, size)), reader


@pytest.mark.parametrize("size", [1, 2, 3, 7, 1000])
@pytest.mark.parametrize(
    ("data", "body", "reusable"),
    [
        (b"HTTP/1.1 200 OK\r\nContent-Length: 5\r\n\r\nhello", b"hello", True),
        (b"HTTP/1.1 200 OK\r\ncontent-length:0\r\n\r\n", b"", True),
        (b"HTTP/1.1 204 No Content\r\n\r\n", b"", True),
        (b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\nConnection: close\r\n\r\nhi", b"hi", False),
        (b"HTTP/1.0 200 OK\r\nContent-Length: 2\r\n\r\nhi", b"hi", False),
        (b"HTTP/1.1 100 Continue\r\n\r\nHTTP/1.1 200\r\nContent-Length: 1\r\n\r\nx", b"x", True),
        (CHUNKED + b"3\r\na\r\n\r\n2;name=value\r\nbc\r\n0\r\n\r\n", b"a\r\nbc", True),
        (CHUNKED + b"A \r\n0123456789\r\n0\r\nTrailer: 1\r\n\r\n", b"0123456789", True),
        (b"HTTP/1.1 200 OK\r\nContent-Length: 1\r\n\r\nxHTTP/1.1 200 OK", b"x", False),
    ],
)
def test_whole_responses(data: bytes, body: bytes, reusable: bool, size: int) -> None:
    found, reader = body_of(data, size)
    assert (found, reader.done) == (body, True)
    # The connection is closed when bytes follow a response, with it or later.
    assert reader.reusable == reusable or size == 1
    assert reader.status == (204 if b" 204 " in data else 200)


def test_body_until_the_connection_ends() -> None:
    body, reader = body_of(b"HTTP/1.1 200 OK\r\n\r\nsome text", 4)
    assert (body, reader.done) == (b"some text", False)
    assert reader.ended()
    assert (reader.done, reader.reusable) == (True, False)


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"HTTP/1.1 200 OK\r\nContent-",
        b"HTTP/1.1 200 OK\r\nContent-Length: 5\r\n\r\nhell",
        CHUNKED + b"5\r\nhello\r\n",
        CHUNKED + b"5\r\nhel",
        CHUNKED + b"0\r\n",
    ],
)
def test_end_of_the_connection_before_that_of_the_response(data: bytes) -> None:
    _, reader = body_of(data, 1000)
    assert not reader.ended()


@pytest.mark.parametrize(
    "data",
    [
        b"SSH-2.0-OpenSSH_9.6\r\n",
        b"\x15\x03\x01\x00\x02\x02F",  # an alert of TLS
        b"HTTP/2 200\r\n\r\n",
        b"HTTP/1.1 2x0 OK\r\n\r\n",
        b"HTTP/1.1 200 OK\r\nContent-Length: -1\r\n\r\n",
        b"HTTP/1.1 200 OK\r\nContent-Length: 1_0\r\n\r\n",
        CHUNKED + b"-1\r\n",
        CHUNKED + b"0x5\r\nhello\r\n",
        CHUNKED + b"\r\n",
        CHUNKED + b"1" * 16 + b"\r\n",
        CHUNKED + b"2\r\nabc\r\n",
        CHUNKED + b"1" * (MOST_HEAD_BYTES + 1),
        b"HTTP/1.1 200 OK\r\nX: " + b"x" * MOST_HEAD_BYTES,
    ],
)
@pytest.mark.parametrize("size", [50, 1 << 20])
def test_what_is_no_response(data: bytes, size: int) -> None:
    with pytest.raises(UnansweredError, match="not HTTP"):
        body_of(data, size)


@pytest.mark.parametrize("size", range(1, 12))
def test_events_cut_anywhere(size: int) -> None:
    reader = EventReader()
    assert [event for piece in pieces(EVENTS, size) for event in reader.feed(piece)] == DATA


def test_events_as_another_library_reads_them() -> None:
    """Lines of random fields and ends, against httpx2."""
    draw = random.Random(5)
    parts = ["data: a", "data:b", "data", ":", ": c", "event: d", "id", "", "", "x: y", "data: é "]
    for _ in range(200):
        text = "".join(draw.choice(parts) + draw.choice(["\n", "\r", "\r\n"]) for _ in range(12))
        text += "\n\n"
        headers = {"Content-Type": "text/event-stream"}
        request = httpx2.Request("GET", "http://there")
        response = httpx2.Response(200, content=text.encode(), headers=headers, request=request)
        expected = [event.data.encode() for event in httpx2.EventSource(response)]
        reader = EventReader()
        found = [event for piece in pieces(text.encode(), 3) for event in reader.feed(piece)]
        assert [event for event in found if event] == [event for event in expected if event], text


def test_event_without_an_end() -> None:
    reader = EventReader()
    piece = b"data: " + b"x" * (MOST_EVENT_BYTES // 2)
    assert reader.feed(piece) == reader.feed(b"\n") == []
    with pytest.raises(UnansweredError, match="too long"):
        reader.feed(piece + b"x" * 8)
