"""Clients that send drop by drop, or take nothing: none holds a connection for ever."""

import asyncio
import json
import socket
from collections.abc import Iterator

import pytest
from fastapi import Request

from lowbit.runtime.serve import body
from lowbit.runtime.serve.body import PendingBodies
from lowbit.runtime.serve.errors import ApiError
from lowbit.runtime.serve.settings import MOST_HEAD_BYTES
from tests.runtime.serve.conftest import Running, running, until

HEAD_S = 0.05
WHOLE = b"GET /health HTTP/1.1\r\nHost: localhost\r\n\r\n"


@pytest.fixture(scope="module")
def hasty(server: Running) -> Iterator[Running]:
    with running(server.model, head_timeout_s=HEAD_S, request_timeout_s=0.3) as found:
        yield found


def answer(connection: socket.socket) -> bytes:
    """Everything until the server closes the connection."""
    data = b""
    while part := connection.recv(1 << 16):
        data += part
    return data


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


def test_a_body_byte_by_byte(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(body, "BODY_TIMEOUT_S", 0.01)
    monkeypatch.setattr(body, "LEAST_BODY_RATE", 1 << 30)

    async def receive() -> dict[str, object]:
        await asyncio.sleep(0)
        return {"type": "http.request", "body": b" ", "more_body": True}

    request = Request({"type": "http", "headers": []}, receive)
    with pytest.raises(ApiError, match="does not come") as error:
        asyncio.run(body._read(request, PendingBodies(1)))
    assert error.value.status == 408
