"""The queue, clients that leave or read slowly, limits of time, shutdown."""

import resource
import socket
import threading
from contextlib import ExitStack
from functools import partial

import httpx2
import pytest

from lowbit.runtime.engine.engine import Engine
from lowbit.runtime.serve import answers
from lowbit.runtime.serve.server import MOST_FILES, allow_connections
from lowbit.runtime.serve.service import READING
from tests.runtime.serve.conftest import (
    LONG,
    SEQUENCES,
    Running,
    busy,
    raw_request,
    running,
    until,
)


def test_a_client_that_leaves_frees_its_row(server: Running) -> None:
    before = server.service.metrics.finished["abort"]
    for stream in (True, False):
        connection = raw_request(server, {**LONG, "stream": stream})
        until(lambda: busy(server) > 0)
        connection.close()
        until(lambda: busy(server) == 0)
    until(lambda: server.service.engine.open == 0)
    until(lambda: server.service.metrics.finished["abort"] == before + 2)


def test_a_stop_string_frees_the_row_of_the_last_answer(server: Running) -> None:
    body = {**LONG, "stream": False, "stop": ["e"]}
    made = httpx2.post(f"{server.url}/v1/completions", json=body).json()
    assert made["choices"][0]["finish_reason"] == "stop"
    until(lambda: busy(server) == 0, seconds=5.0)


def test_a_slow_reader_holds_up_nobody(server: Running) -> None:
    slow = raw_request(server, {**LONG, "logprobs": 20, "max_tokens": 300})
    until(lambda: busy(server) > 0)
    quick = httpx2.post(
        f"{server.url}/v1/completions", json={**LONG, "stream": False, "max_tokens": 5}
    )
    assert quick.json()["usage"]["completion_tokens"] == 5
    until(lambda: busy(server) == 0)
    data = b""
    while not data.endswith(b"0\r\n\r\n"):
        part = slow.recv(1 << 20)
        assert part, "the server has hung up"
        data += part
    slow.close()
    assert data.count(b'"finish_reason":null') >= 200
    assert b"[DONE]" in data


def test_garbage_and_chunked_bodies(server: Running) -> None:
    with socket.create_connection(("127.0.0.1", server.port), timeout=60) as garbage:
        garbage.sendall(b"\x00\xff nonsense\r\n\r\n")
        assert garbage.recv(100).startswith(b"HTTP/1.1 400")
    with socket.create_connection(("127.0.0.1", server.port), timeout=60) as chunked:
        chunked.sendall(b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\n")
        chunked.sendall(b"Transfer-Encoding: chunked\r\n\r\n")
        part = b"%x\r\n%s\r\n" % (1 << 20, b" " * (1 << 20))
        answer = b""
        try:
            for _ in range(40):
                chunked.sendall(part)
            answer = chunked.recv(4096)
        except (BrokenPipeError, ConnectionResetError):
            answer = answer or b"HTTP/1.1 413"  # refused and closed while it was being sent
        assert answer.startswith(b"HTTP/1.1 413")
    with socket.create_connection(("127.0.0.1", server.port), timeout=60) as cut:
        cut.sendall(
            b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Length: 100\r\n\r\n{"
        )
    found = httpx2.get(f"{server.url}/health").json()
    assert (found["status"], found["activations"]) == ("ok", "exact")


def test_a_full_queue_says_when_to_come_again(server: Running) -> None:
    with running(server.model, queue=0) as small:
        held = [raw_request(small, LONG) for _ in range(SEQUENCES)]
        until(lambda: small.service.engine.open == SEQUENCES)
        found = httpx2.post(f"{small.url}/v1/completions", json=LONG)
        assert found.status_code == 429
        assert int(found.headers["retry-after"]) >= 1
        assert found.json()["error"]["code"] == "queue_full"
        for connection in held:
            connection.close()
        until(lambda: small.service.engine.open == 0)  # a message later than in the engine
        refused = httpx2.post(f"{small.url}/v1/completions", json={**LONG, "n": 8})
        assert refused.status_code == 400


def test_begun_bodies_give_way_to_others(server: Running) -> None:
    head = b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Length: 9\r\n\r\n"
    with running(server.model, queue=0) as small:
        crowd = [
            socket.create_connection(("127.0.0.1", small.port), timeout=60)
            for _ in range(READING + 8)
        ]
        for connection in crowd:
            connection.sendall(head)
        responses = small.service.metrics.responses
        until(lambda: responses["/v1/completions", 408] == 8)
        assert len(small.service.pending) == READING
        body = {**LONG, "max_tokens": 1, "stream": False}
        for _ in range(3):  # whole bodies take nobody's place
            with raw_request(small, body) as connection:
                assert connection.recv(100).startswith(b"HTTP/1.1 200")
        assert responses["/v1/completions", 408] == 8
        assert crowd[0].recv(100).startswith(b"HTTP/1.1 408")
        small.service.active += 100
        refused = httpx2.post(f"{small.url}/v1/completions", json=body)
        assert (refused.status_code, "retry-after" in refused.headers) == (429, True)
        small.service.active -= 100
        for connection in crowd:
            connection.close()
        until(lambda: small.service.active == 0)


def test_many_connections_are_allowed() -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    low = min(soft, hard, 1024) if hard != resource.RLIM_INFINITY else 1024
    try:
        resource.setrlimit(resource.RLIMIT_NOFILE, (low, hard))
        allow_connections()
        assert resource.getrlimit(resource.RLIMIT_NOFILE)[0] == (
            MOST_FILES if hard == resource.RLIM_INFINITY else min(hard, MOST_FILES)
        )
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


def test_requests_have_an_end(server: Running) -> None:
    with running(server.model, request_timeout_s=0.15) as brief:
        url = f"{brief.url}/v1/completions"
        whole = httpx2.post(url, json={**LONG, "stream": False})
        assert (whole.status_code, whole.json()["error"]["type"]) == (504, "timeout_error")

        def is_cut() -> bool:
            streamed = httpx2.post(url, json=LONG)
            if streamed.status_code == 504:  # a busy machine had no token by then
                return False
            assert '"timeout_error"' in streamed.text.split("data: ")[-2]
            return True

        until(is_cut)
        until(lambda: busy(brief) == 0)


def test_a_long_wait_is_kept_alive(server: Running, monkeypatch: pytest.MonkeyPatch) -> None:
    may, step = threading.Event(), Engine._step

    def late(engine: Engine) -> bool:
        assert may.wait(30)
        return step(engine)

    monkeypatch.setattr(answers, "PATIENCE_S", 0.001)
    monkeypatch.setattr(Engine, "_step", late)
    url, body = f"{server.url}/v1/completions", {**LONG, "max_tokens": 3}
    with httpx2.stream("POST", url, json=body, timeout=60) as stream:
        parts = stream.iter_text()
        assert next(parts).startswith(": waiting\n\n")
        may.set()
        assert "".join(parts).endswith("data: [DONE]\n\n")


def test_running_requests_finish_and_new_ones_do_not_begin(server: Running) -> None:
    with running(server.model) as ending, httpx2.Client(base_url=ending.url) as client:
        client.get("/health")  # a connection that outlives the listener
        body = {**LONG, "max_tokens": 250}
        with httpx2.stream("POST", f"{ending.url}/v1/completions", json=body) as answer:
            lines = answer.iter_lines()
            next(lines)
            ending.service.engine.loop.call_soon_threadsafe(ending.server.drain)
            until(lambda: ending.service.draining)
            found = client.post("/v1/completions", json=LONG)
            assert (found.status_code, found.headers["retry-after"]) == (503, "5")
            assert client.get("/health").status_code == 503
            assert [line for line in lines if line][-1] == "data: [DONE]"
        until(lambda: not ending.service.engine.alive)


def test_requests_that_have_not_come_whole_hold_up_no_end(
    server: Running, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Nor do connections without a request; a body that begins later is no other."""
    may, step = threading.Event(), Engine._step

    def late(engine: Engine) -> bool:
        assert may.wait(60)
        return step(engine)

    head = b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Length: 9\r\n\r\n"
    with running(server.model) as ending, ExitStack() as stack:

        def connect(sent: bytes) -> socket.socket:
            address = ("127.0.0.1", ending.port)
            found = stack.enter_context(socket.create_connection(address, timeout=60))
            found.sendall(sent)
            return found

        url, body = f"{ending.url}/v1/completions", {**LONG, "max_tokens": 20}
        with httpx2.stream("POST", url, json=body, timeout=60) as answer:
            lines = answer.iter_lines()
            next(lines)
            monkeypatch.setattr(Engine, "_step", late)
            begun, idle, half = connect(head + b"{"), connect(b""), connect(head[:-2])
            until(lambda: len(ending.service.pending) == 1)
            ending.service.engine.loop.call_soon_threadsafe(ending.server.drain)
            until(lambda: "requests that still run: 1" in caplog.text)
            for each in (begun, connect(head), connect(head + b"{")):
                found = b"".join(iter(partial(each.recv, 1 << 16), b""))
                assert found.startswith(b"HTTP/1.1 503")
                assert b"\r\nconnection: close\r\n" in found
            may.set()
            assert [line for line in lines if line][-1] == "data: [DONE]"
        until(lambda: not ending.service.engine.alive)
        assert (idle.recv(1), half.recv(1)) == (b"", b"")
