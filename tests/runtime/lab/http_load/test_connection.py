"""Connections to a server that keeps them, ends them, or was never there."""

import asyncio
import json
from collections.abc import Awaitable, Callable

import pytest

from lowbit.formats.errors import RequestError
from lowbit.runtime.lab.http_load import connection as connection_module
from lowbit.runtime.lab.http_load.connection import Connection, address_of
from lowbit.runtime.lab.http_load.framing import UnansweredError
from tests.runtime.lab.http_load.conftest import Answer, Asking, Served, serving


def asking(
    answer: Answer, use: Callable[[Connection, Served], Awaitable[None]], limit_s: float = 20.0
) -> None:
    """Use a connection to a server that answers so."""

    async def run() -> None:
        async with serving(answer) as served:
            connection = Connection(address_of(served.url), served.ticks.now, limit_s)
            try:
                await use(connection, served)
            finally:
                connection.close()

    asyncio.run(run())


async def failure(connection: Connection) -> str:
    with pytest.raises(UnansweredError) as found:
        await connection.ask(address_of("there").request("/x"))
    return str(found.value)


GET = address_of("there").request("/models")


async def hello(asked: Asking) -> None:
    await asked.json(b"hello")


def test_requests_share_a_connection() -> None:
    async def use(connection: Connection, served: Served) -> None:
        for _ in range(3):
            response = await connection.ask(GET)
            assert (response.status, response.body) == (200, b"hello")
        assert served.connections == 1

    asking(hello, use)


def test_connection_that_the_server_closes_after_a_response() -> None:
    async def close(asked: Asking) -> None:
        await asked.json(b"hello", extra="Connection: close\r\n")

    async def use(connection: Connection, served: Served) -> None:
        assert [(await connection.ask(GET)).body for _ in range(2)] == [b"hello"] * 2
        assert served.connections == 2

    asking(close, use)


def test_idle_connection_that_the_server_has_ended_is_opened_again() -> None:
    async def once(asked: Asking) -> None:
        if asked.connection == 1 and asked.path.endswith("/again"):
            asked.writer.close()
        else:
            await asked.json(b"hello")

    async def use(connection: Connection, served: Served) -> None:
        await connection.ask(GET)
        assert (await connection.ask(address_of("there").request("/again"))).body == b"hello"
        assert [each.connection for each in served.asked] == [1, 1, 2]

    asking(once, use)


def test_new_connection_that_ends_is_a_failure() -> None:
    async def leave(asked: Asking) -> None:
        asked.writer.close()

    async def use(connection: Connection, served: Served) -> None:
        assert await failure(connection) == "closed early: the server ended the connection"
        assert served.connections == 1

    asking(leave, use)


def test_response_that_is_cut_is_not_asked_for_again() -> None:
    async def cut(asked: Asking) -> None:
        if len(asked.path) == len("/v1/x"):
            await asked.raw(b"HTTP/1.1 200 OK\r\nContent-Length: 9\r\n\r\nhel")
            asked.writer.close()
        else:
            await asked.json(b"hello")

    async def use(connection: Connection, served: Served) -> None:
        await connection.ask(GET)
        assert (await failure(connection)).startswith("closed early")
        assert len(served.asked) == 2

    asking(cut, use)


def test_what_is_not_http_ends_the_connection() -> None:
    async def nonsense(asked: Asking) -> None:
        await asked.raw(b"-ERR unknown command\r\n")

    async def use(connection: Connection, served: Served) -> None:
        for number in (1, 2):
            assert (await failure(connection)).startswith("not HTTP: the answer begins with")
            assert served.connections == number

    asking(nonsense, use)


def test_answer_without_end(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(connection_module, "MOST_BODY_BYTES", 4)

    async def use(connection: Connection, served: Served) -> None:
        assert (await failure(connection)).startswith("answer too long")

    asking(hello, use)


def test_server_that_never_answers() -> None:
    async def wait(asked: Asking) -> None:
        await asyncio.Event().wait()

    async def use(connection: Connection, served: Served) -> None:
        assert await failure(connection) == "time limit: no whole answer in 0.001 s"

    asking(wait, use, limit_s=0.001)


@pytest.mark.parametrize("url", ["http://127.0.0.1:1", "http://" + "x" * 64 + ".invalid:1"])
def test_no_server(url: str) -> None:
    async def ask() -> str:
        return await failure(Connection(address_of(url), lambda: 0.0))

    assert asyncio.run(ask()).startswith("cannot connect: ")


def test_server_without_tls() -> None:
    async def plain(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(b"HTTP/1.1 400 Bad Request\r\n\r\n")
        writer.close()

    async def run() -> str:
        async with await asyncio.start_server(plain, "127.0.0.1", 0) as server:
            port = server.sockets[0].getsockname()[1]
            return await failure(Connection(address_of(f"https://127.0.0.1:{port}"), lambda: 0.0))

    assert asyncio.run(run()).startswith("cannot connect: [SSL")


def test_server_that_takes_no_connection(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its end of TLS never comes."""
    monkeypatch.setattr(connection_module, "CONNECT_S", 0.001)

    async def use(connection: Connection, served: Served) -> None:
        other = Connection(address_of(served.url.replace("http", "https")), served.ticks.now)
        assert await failure(other) == "cannot connect: not within 0.001 s"

    asking(hello, use)


def test_bytes_that_nobody_has_asked_for_end_the_connection() -> None:
    async def more(asked: Asking) -> None:
        await asked.raw(b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\nhi")
        await asked.raw(b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\nno", at=1.0)

    async def use(connection: Connection, served: Served) -> None:
        assert (await connection.ask(GET)).body == b"hi"
        while served.ticks.reads < 2 and served.ticks.at < 1.0:
            await asyncio.sleep(0)
        assert (await connection.ask(GET)).body == b"hi"
        assert served.connections == 2

    asking(more, use)


def test_parts_of_a_body_come_with_their_times() -> None:
    async def stream(asked: Asking) -> None:
        await asked.begin()
        for at in (1.5, 4.0):
            await asked.chunk(b"%.1f" % at, at)
        await asked.raw(b"0\r\n\r\n")

    async def use(connection: Connection, served: Served) -> None:
        taken: list[tuple[bytes, float]] = []
        response = await connection.ask(GET, lambda body, at: taken.append((body, at)))
        assert response.body == b""
        assert taken == [(b"1.5", 1.5), (b"4.0", 4.0)]

    asking(stream, use)


@pytest.mark.parametrize(
    ("url", "root", "line", "host"),
    [
        ("localhost:8000", "http://localhost:8000", "GET /v1/x", "localhost:8000"),
        ("http://there/v1/", "http://there", "GET /v1/x", "there"),
        ("https://there/api/v1", "https://there/api", "GET /api/v1/x", "there"),
        ("http://[::1]:80/?key=1", "http://[::1]", "GET /v1/x", "[::1]"),
        ("http://me:secret@there:1", "http://there:1", "GET /v1/x", "there:1"),
    ],
)
def test_addresses(url: str, root: str, line: str, host: str) -> None:
    address = address_of(url)
    assert address.root == root
    lines = address.request("/x").decode().split("\r\n")
    assert lines[:2] == [f"{line} HTTP/1.1", f"Host: {host}"]
    assert (address.tls is not None) == url.startswith("https")


def test_request_with_a_key_and_a_body() -> None:
    request = address_of("there", "secret").request("/x", {"prompt": "ü"})
    head, _, content = request.partition(b"\r\n\r\n")
    assert json.loads(content) == {"prompt": "ü"}
    assert head.startswith(b"POST /v1/x HTTP/1.1\r\n")
    assert b"\r\nAuthorization: Bearer secret\r\n" in head
    assert head.endswith(b"\r\nContent-Length: %d" % len(content))


@pytest.mark.parametrize("key", ["a\r\nX: y", "schlüssel", "a\0"])
def test_keys_that_no_header_has(key: str) -> None:
    with pytest.raises(RequestError, match="key has characters"):
        address_of("there", key)


@pytest.mark.parametrize("url", ["ftp://there", "http://", "http://x:99999", "http://[::1"])
def test_no_address(url: str) -> None:
    with pytest.raises(RequestError, match="is no address of a server"):
        address_of(url)
