"""Connections at the edges of HTTP: slow clients, trailers, upgrades, requests in a row."""

import itertools
import json
import socket
from collections.abc import Iterator
from typing import Any

import pytest

from lowbit.runtime.serve import protocol
from lowbit.runtime.serve.protocol import BODY_PART_BYTES, PART_BYTES, TimedProtocol
from lowbit.runtime.serve.settings import MOST_HEAD_BYTES
from tests.runtime.serve.conftest import LONG, NAME, SHORT, Running, busy, running, until

BODY = json.dumps({"model": NAME, "prompt": "Hi", "max_tokens": 2}).encode()
WHOLE = b"GET /health HTTP/1.1\r\nHost: localhost\r\n\r\n"


def head(**headers: str) -> bytes:
    lines = [f"{name.replace('_', '-')}: {value}" for name, value in headers.items()]
    return "\r\n".join(
        ["POST /v1/completions HTTP/1.1", "Host: localhost", *lines, "", ""]
    ).encode()


def whole(body: dict[str, Any], path: str = "/v1/completions") -> bytes:
    data = json.dumps(body).encode()
    found = head(Content_Length=str(len(data))) + data
    return found.replace(b"/v1/completions", path.encode(), 1)


def connected(server: Running) -> socket.socket:
    return socket.create_connection(("127.0.0.1", server.port), timeout=20)


def answer(connection: socket.socket) -> bytes:
    """Everything until the server closes the connection, by a reset too."""
    data = b""
    try:
        while part := connection.recv(1 << 16):
            data += part
    except ConnectionResetError:
        pass
    return data


HEAD_S = 0.05
CHUNKED = head(Transfer_Encoding="chunked")
MANY = b"a: b\r\n" * (MOST_HEAD_BYTES // 6 + 4000)
ENDLESS = b"a: " + b"b" * (MOST_HEAD_BYTES + 20_000)


@pytest.mark.parametrize("trailers", [MANY, ENDLESS], ids=["many", "endless"])
def test_trailers_are_bounded(server: Running, trailers: bytes) -> None:
    with connected(server) as connection:
        connection.sendall(CHUNKED + b"2\r\n{}\r\n0\r\n" + trailers)
        assert answer(connection).startswith(b"HTTP/1.1 431")


@pytest.mark.parametrize("trailers", [MANY, ENDLESS], ids=["many", "endless"])
def test_trailers_are_bounded_behind_an_answer(server: Running, trailers: bytes) -> None:
    with running(server.model, api_key="sesame") as locked, connected(locked) as connection:
        connection.sendall(CHUNKED + b"0\r\n")
        assert connection.recv(4096).startswith(b"HTTP/1.1 401")
        connection.sendall(trailers)
        assert b"HTTP/1.1" not in answer(connection)


PART = bytes(1 << 20)
COUNT = 40  # parts; more than the buffers of both ends hold
LENGTH = f"Content-Length: {COUNT * len(PART)}"
LOST = f"POST /nowhere HTTP/1.{{}}\r\nHost: localhost\r\n{LENGTH}\r\n{{}}\r\n"
EARLY = {  # what is sent first, and then again and again; the answer
    "a declared length": (head(Content_Length=str(COUNT * len(PART))), PART, 413),
    "chunks": (CHUNKED, b"%x\r\n%s\r\n" % (len(PART), PART), 413),
    "HTTP/1.0": (LOST.format(0, "").encode(), PART, 404),
    "the last request": (LOST.format(1, "Connection: close\r\n").encode(), PART, 404),
    "an endless head": (WHOLE[:-2] + b"a: ", PART.replace(b"\0", b"b"), 431),
    "no HTTP": (b"\0", PART, 400),
}


@pytest.mark.parametrize(("begin", "part", "status"), EARLY.values(), ids=EARLY)
def test_an_early_answer_reaches_a_client_that_sends_on(
    server: Running, begin: bytes, part: bytes, status: int
) -> None:
    """It reads when it has sent all, as most clients do; then the connection ends in order."""
    with connected(server) as connection:
        connection.sendall(begin)
        for _ in range(COUNT):
            connection.sendall(part)
        data = b""
        while found := connection.recv(1 << 16):
            data += found
    first, _, content = data.partition(b"\r\n\r\n")
    assert first.startswith(b"HTTP/1.1 %d " % status)
    assert json.loads(content)["error"]["message"]


@pytest.mark.parametrize("path", [b"/v1/completions", b"/nowhere"])
def test_what_comes_behind_an_answer_is_bounded(
    server: Running, path: bytes, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(protocol, "MOST_DROPPED_BYTES", 4 << 20)
    request = b"POST %s HTTP/1.1\r\nHost: localhost\r\nContent-Length: %d\r\n\r\n"
    with connected(server) as connection:
        connection.sendall(request % (path, 1 << 60))
        parts = map(connection.sendall, itertools.repeat(PART))
        with pytest.raises((BrokenPipeError, ConnectionResetError)):
            list(parts)


@pytest.mark.parametrize(
    ("sent", "status"),
    [
        (head(Content_Length=str(1 << 60)), 413),
        (CHUNKED + b"1\r\n{\r\nno size\r\n", 400),
        (CHUNKED + b"2\r\n{}\r\n0\r\n" + MANY, 431),
        (b"\0", 400),
    ],
    ids=["body", "chunk", "trailers", "garbage"],
)
def test_a_client_that_keeps_its_answer_waiting_is_left(
    hasty: Running, sent: bytes, status: int
) -> None:
    """By the server, in the time for headers; the request ends with its answer."""
    connections = hasty.server.server_state.connections
    with connected(hasty) as silent:
        silent.sendall(sent)
        assert answer(silent).startswith(b"HTTP/1.1 %d " % status)
        until(lambda: not connections)
        assert hasty.service.active == 0


def test_few_trailers_are_taken_and_no_headers(server: Running) -> None:
    with connected(server) as connection:
        connection.sendall(CHUNKED + b"%x\r\n%s\r\n0\r\nHost: evil\r\n\r\n" % (len(BODY), BODY))
        connection.sendall(WHOLE)
        connection.shutdown(socket.SHUT_WR)
        assert answer(connection).count(b"HTTP/1.1 200 OK") == 2


@pytest.mark.parametrize("protocol", ["h2c", "websocket"])
def test_wishes_for_another_protocol_are_ignored(server: Running, protocol: str) -> None:
    wish = {"Connection": "Upgrade, HTTP2-Settings", "Upgrade": protocol, "HTTP2_Settings": "AAE"}
    with connected(server) as connection:
        connection.sendall(head(**wish, Content_Length=str(len(BODY))))
        connection.sendall(BODY + WHOLE)
        connection.shutdown(socket.SHUT_WR)
        data = answer(connection)
    assert data.count(b"HTTP/1.1 200 OK") == 2
    assert b'"text_completion"' in data


def test_no_proxy(server: Running) -> None:
    with connected(server) as connection:
        connection.sendall(b"CONNECT localhost:80 HTTP/1.1\r\nHost: localhost\r\n\r\n")
        assert answer(connection).startswith(b"HTTP/1.1 400")


@pytest.mark.parametrize("stream", [True, False])
def test_a_client_that_ends_its_half_gets_its_answer(server: Running, stream: bool) -> None:
    with connected(server) as connection:
        connection.sendall(whole({**LONG, "max_tokens": 80, "stream": stream}))
        connection.shutdown(socket.SHUT_WR)
        data = answer(connection)
    assert b"HTTP/1.1 200 OK" in data
    assert b'"finish_reason":"length"' in data


def test_half_a_request_is_none(server: Running) -> None:
    with connected(server) as connection:
        connection.sendall(head(Content_Length="100") + b"{")
        connection.shutdown(socket.SHUT_WR)
        assert answer(connection) == b""
    until(lambda: server.service.active == 0)


@pytest.mark.parametrize("behind", [WHOLE, WHOLE * 9000], ids=["one", "many"])
@pytest.mark.parametrize("stream", [True, False])
def test_a_client_that_leaves_behind_another_request(
    server: Running, stream: bool, behind: bytes
) -> None:
    connection = connected(server)
    connection.sendall(whole({**LONG, "stream": stream}))
    until(lambda: busy(server) == 1)
    connection.sendall(behind)
    before = server.service.metrics.finished["abort"]
    connection.close()
    until(lambda: busy(server) == 0)
    until(lambda: server.service.metrics.finished["abort"] == before + 1)


def test_requests_in_a_row_are_answered_in_order(server: Running) -> None:
    count = 2000  # more than is held while the first is answered
    with connected(server) as connection:
        connection.sendall(whole({**LONG, "stream": False, "max_tokens": 20}) + WHOLE * count)
        connection.shutdown(socket.SHUT_WR)
        data = answer(connection)
    assert data.count(b"HTTP/1.1 200 OK") == 1 + count
    assert data.index(b"text_completion") < data.index(b'"status":"ok"')


def test_garbage_behind_a_request_waits_for_its_answer(server: Running) -> None:
    with connected(server) as connection:
        connection.sendall(whole({**LONG, "max_tokens": 20}) + b"\x00nonsense\r\n\r\n")
        data = answer(connection)
    assert b"[DONE]" in data
    assert b"HTTP/1.1 400" not in data


@pytest.fixture(scope="module")
def hasty(server: Running) -> Iterator[Running]:
    with running(server.model, head_timeout_s=HEAD_S, request_timeout_s=0.3) as found:
        yield found


@pytest.mark.parametrize("sent", [b"P", b"POST /v1/chat/completions HTTP/1.1\r\nHost: local"])
def test_headers_that_do_not_come(hasty: Running, sent: bytes) -> None:
    with socket.create_connection(("127.0.0.1", hasty.port), timeout=20) as slow:
        slow.sendall(sent)
        head, _, content = answer(slow).partition(b"\r\n\r\n")
    assert head.startswith(b"HTTP/1.1 408 Request Timeout")
    assert "headers" in json.loads(content)["error"]["message"]


@pytest.mark.parametrize("sent", [b"", b"\r\n"])
def test_a_connection_without_a_request(hasty: Running, sent: bytes) -> None:
    with socket.create_connection(("127.0.0.1", hasty.port), timeout=20) as silent:
        silent.sendall(sent)
        assert answer(silent) == b""


def test_later_requests_have_the_same_limit(hasty: Running) -> None:
    with socket.create_connection(("127.0.0.1", hasty.port), timeout=20) as slow:
        slow.sendall(WHOLE + WHOLE + WHOLE[:-2])
        data = answer(slow)
    assert data.count(b"HTTP/1.1 200 OK") == 2
    assert b"HTTP/1.1 408 Request Timeout" in data


def test_headers_that_do_not_end(server: Running) -> None:
    with socket.create_connection(("127.0.0.1", server.port), timeout=20) as endless:
        endless.sendall(WHOLE[:-2] + b"a: " + b"b" * MOST_HEAD_BYTES)
        assert answer(endless).startswith(b"HTTP/1.1 431")


def test_a_client_that_takes_nothing(hasty: Running) -> None:
    connections = hasty.server.server_state.connections
    with socket.socket() as deaf:
        deaf.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        deaf.connect(("127.0.0.1", hasty.port))
        deaf.sendall(b"GET /openapi.json HTTP/1.1\r\nHost: localhost\r\n\r\n" * 400)
        until(lambda: len(connections) == 1)
        until(lambda: not connections)
    until(lambda: hasty.service.active == 0)


def test_a_long_body_is_parsed_in_few_parts(
    server: Running, monkeypatch: pytest.MonkeyPatch
) -> None:
    """No part goes beyond it: what is behind has the limits of a head, wherever reads end."""
    sizes: list[int] = []
    feed = TimedProtocol._feed

    def noted(self: TimedProtocol, part: bytes) -> None:
        sizes.append(len(part))
        feed(self, part)

    monkeypatch.setattr(TimedProtocol, "_feed", noted)
    body = SHORT["/v1/chat/completions"] | {"messages": [{"role": "user", "content": "Hi"}]}
    long = whole(body | {"user": "a" * (2 << 20)}, "/v1/chat/completions")
    with connected(server) as connection:
        connection.sendall(long + head()[:-2] + ENDLESS)
        found = answer(connection)
    assert found.count(b"HTTP/1.1 200 OK") == 1
    large = [each for each in sizes if each > PART_BYTES]
    assert sum(large) > (2 << 20) - (300 << 10)
    assert max(large) <= BODY_PART_BYTES
    assert sum(sizes[sizes.index(large[-1]) + 1 :]) <= MOST_HEAD_BYTES + 2 * PART_BYTES
