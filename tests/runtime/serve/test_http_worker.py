"""Several HTTP processes before one engine: real ones, whose ends are those of users' machines."""

import json
import os
import re
import select
import signal
import socket
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from threading import Thread
from typing import Any

import httpx2
import pytest

from tests.runtime.serve.conftest import BUNDLED, until

pytestmark = pytest.mark.commands
COMMAND = """
import sys
from lowbit.runtime.serve.link import engines
engines.SHORT_LIFE_S = float(sys.argv.pop(1))
from lowbit.runtime.cli.main import main
if __name__ == "__main__":
    main(sys.argv[1:])
"""
WORKERS = 2
QUEUE = 3
ASK: dict[str, Any] = {
    "model": BUNDLED.name,
    "prompt": "Once",
    "max_tokens": 3,
    "ignore_eos": True,
    "temperature": 0,
}
LONG = {**ASK, "max_tokens": 400, "stream": True}


def children(pid: int) -> list[int]:
    """Processes of Python that a process has started, in the order of their starts."""
    found: list[int] = []
    for task in Path(f"/proc/{pid}/task").glob("*/children"):
        found += map(int, task.read_text().split())
    return sorted(each for each in found if b"spawn_main" in command_of(each))


def command_of(pid: int) -> bytes:
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes()
    except (FileNotFoundError, ProcessLookupError):
        return b""


@dataclass
class Served:
    """A server of real processes; `said` grows while it runs."""

    process: subprocess.Popen[str]
    said: list[str] = field(default_factory=list)

    @property
    def text(self) -> str:
        return "".join(self.said)

    @property
    def url(self) -> str:
        found = re.search(r"http://127\S+", self.text)
        assert found is not None, self.text
        return found[0]

    @property
    def engine(self) -> int:
        return children(self.process.pid)[0]

    @property
    def workers(self) -> list[int]:
        return children(self.process.pid)[1:]

    def ended(self, code: int) -> None:
        """The server ends with a code, and nothing of it stays."""
        left = children(self.process.pid)
        assert self.process.wait(30) == code, self.text
        until(lambda: not any(map(command_of, left)))
        assert "Traceback" not in self.text


@contextmanager
def served(*options: str, short_life: float = 30.0, workers: int = WORKERS) -> Iterator[Served]:
    line = ("serve", str(BUNDLED), "--port", "0", "--device", "cpu", "--sequences", "2")
    more = ("--http-workers", str(workers), "--queue", str(QUEUE), *options)
    process = subprocess.Popen(
        [sys.executable, "-c", COMMAND, str(short_life), *line, *more],
        stderr=subprocess.PIPE,
        text=True,
    )
    found = Served(process)

    def read() -> None:
        assert process.stderr is not None
        for each in process.stderr:
            found.said.append(each)

    with process:
        reader = Thread(target=read)
        reader.start()
        try:
            until(lambda: "http://" in found.text or process.poll() is not None, 60)
            assert len(found.workers) == (workers if workers > 1 else 0), found.text
            yield found
        finally:
            process.kill()
            reader.join()


def metric(client: httpx2.Client, name: str) -> float:
    """The sum of a metric's values."""
    lines = client.get("/metrics").text.splitlines()
    return sum(float(each.split()[-1]) for each in lines if each.startswith(name))


@contextmanager
def connected(server: Served, count: int = WORKERS) -> Iterator[list[httpx2.Client]]:
    """Clients that keep a connection each, so that every process has as many of them."""
    with ExitStack() as stack:
        clients = [
            stack.enter_context(httpx2.Client(base_url=server.url, timeout=60))
            for _ in range(count)
        ]
        for each in clients:
            assert each.get("/health").json()["status"] == "ok"
        yield clients


@contextmanager
def streams(clients: list[httpx2.Client]) -> Iterator[list[Iterator[str]]]:
    """Parts of a long answer for each client, behind the first, which has come."""
    with ExitStack() as stack:
        found = []
        for each in clients:
            answer = stack.enter_context(each.stream("POST", "/v1/completions", json=LONG))
            assert answer.status_code == 200
            parts = answer.iter_text()
            next(parts)
            found.append(parts)
        yield found


def test_they_are_one_server() -> None:
    with served() as server, connected(server) as clients:
        second = clients[1]
        answers = [each.post("/v1/completions", json=ASK).json() for each in clients]
        assert answers[0]["choices"] == answers[1]["choices"]
        assert answers[0]["id"] != answers[1]["id"]
        models = [each.get("/v1/models").json() for each in clients]
        assert models[0] == models[1]
        for each in clients:
            assert metric(each, "vllm:generation_tokens_total") == 6
            assert metric(each, "vllm:e2e_request_latency_seconds_count") == 2
            assert metric(each, 'lowbit:http_responses_total{path="/v1/completions"') == 2
        check_queue(server)
        with connected(server, 1) as [leaving], streams([leaving]):
            until(lambda: metric(second, "vllm:num_requests_running") == 1)
            leaving.close()
            until(lambda: metric(second, "vllm:num_requests_running") == 0)
        with streams(clients) as both, connected(server) as others:
            server.process.send_signal(signal.SIGTERM)
            until(lambda: server.text.count("shutting down") == WORKERS)
            for each in others:
                health = each.get("/health")
                assert (health.status_code, health.json()["status"]) == (503, "draining")
            assert all("".join(parts).rstrip().endswith("[DONE]") for parts in both)
        server.ended(0)
        lines = re.findall(r"^[\d:]+ POST /v1/completions (\d+)", server.text, re.MULTILINE)
        assert Counter(lines) == {"200": 2 + 1 + 2, "429": 2 + QUEUE, "499": 2 + QUEUE}


def check_client(server: Served, clients: list[httpx2.Client]) -> None:
    """One address is one client, whichever process it asks: it has half of the two rows."""
    with streams(clients[:1]), ThreadPoolExecutor(1) as pool:
        asked = pool.submit(clients[1].post, "/v1/completions", json={**LONG, "stream": False})
        with connected(server, 1) as [client]:
            until(lambda: metric(client, "vllm:num_requests_waiting") == 1)
            assert metric(client, "vllm:num_requests_running") == 1
        clients[0].close()
        assert asked.result().status_code == 200


def check_queue(server: Served) -> None:
    """Twice as many as the server takes come at once: each process has places for one half."""
    room = 2 + QUEUE
    body = json.dumps({**LONG, "stream": False, "max_tokens": 900}).encode()
    head = (
        f"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Length: {len(body)}\r\n\r\n"
    )
    port = int(server.url.rpartition(":")[2])
    with ExitStack() as stack:
        asked = [
            stack.enter_context(socket.create_connection(("127.0.0.1", port)))
            for _ in range(2 * room)
        ]
        for each in asked:
            each.sendall(head.encode() + body)
        refused: list[bytes] = []
        waiting = set(asked)
        while len(refused) < room:
            ready, _, _ = select.select(list(waiting), [], [], 30)
            assert ready, server.text
            for each in ready:
                waiting.discard(each)
                refused.append(each.recv(4096))
        assert all(each.startswith(b"HTTP/1.1 429") for each in refused)
        assert all(b"retry-after: " in each for each in refused)
    with connected(server, 1) as [client]:
        until(lambda: metric(client, "vllm:num_requests_waiting") == 0)
        until(lambda: metric(client, "vllm:num_requests_running") == 0)


def test_ctrl_c_spares_the_others_and_a_second_one_ends_all() -> None:
    """It comes to all processes of a terminal."""
    with served() as server, connected(server) as clients, streams(clients) as both:
        for pid in (server.process.pid, server.engine, *server.workers):
            os.kill(pid, signal.SIGINT)
        until(lambda: server.text.count("shutting down") == WORKERS)
        for parts in both:
            next(parts)
        server.process.send_signal(signal.SIGINT)
        server.ended(-signal.SIGINT)
        for parts in both:
            with pytest.raises(httpx2.RemoteProtocolError):
                "".join(parts)


def test_a_killed_http_process_ends_the_server_behind_answers_of_others() -> None:
    with served() as server, connected(server, 2 * WORKERS) as clients:
        with streams(clients[:2]) as both:
            os.kill(server.workers[0], signal.SIGKILL)
            broken = "an HTTP process has ended: signal SIGKILL; the server ends, too"
            until(lambda: broken in server.text)
            lost = 0
            for each in clients[2:]:
                try:
                    assert each.get("/health").json()["status"] == "draining"
                except httpx2.TransportError:
                    lost += 1
            with pytest.raises(httpx2.RemoteProtocolError):
                "".join(both[0])
            assert "".join(both[1]).rstrip().endswith("[DONE]")
            assert lost <= 1
        server.ended(1)


def test_the_end_of_the_engine_ends_requests_and_server() -> None:
    """Also where another one may follow: this one has lived for too short a time."""
    with served("--restart-engine") as server, connected(server) as clients:
        with streams(clients) as both:
            os.kill(server.engine, signal.SIGKILL)
            assert all("the engine has ended" in "".join(parts) for parts in both)
        server.ended(1)
        assert "the engine's process has ended: signal SIGKILL" in server.text


@pytest.mark.parametrize("workers", [1, WORKERS])
def test_answers_that_the_engine_loses_behind_a_signal_are_a_failure(workers: int) -> None:
    with served(workers=workers) as server, connected(server, 1) as clients:
        with streams(clients) as [parts]:
            os.kill(server.engine, signal.SIGSTOP)
            server.process.send_signal(signal.SIGTERM)
            until(lambda: server.text.count("shutting down") == workers)
            os.kill(server.engine, signal.SIGKILL)
            assert "the engine has ended" in "".join(parts)
        server.ended(1)
        assert "the server ends, as the engine has; answers that it lost: 1" in server.text
        assert "the engine's process has ended: signal SIGKILL" in server.text


def test_another_engine_follows_for_all_of_them() -> None:
    options = ("--restart-engine", "--client-sequences", "1")
    with served(*options, short_life=0.0) as server, connected(server) as clients:
        before = [each.post("/v1/completions", json=ASK).json()["choices"] for each in clients]
        os.kill(server.engine, signal.SIGKILL)
        until(lambda: "another engine runs" in server.text)
        for each in clients:
            until(lambda each=each: each.get("/health").status_code == 200)  # type: ignore[misc]
        after = [each.post("/v1/completions", json=ASK).json()["choices"] for each in clients]
        assert after == before
        assert server.text.count("another engine runs") == 1
        assert all(metric(each, "vllm:generation_tokens_total") == 12 for each in clients)
        check_client(server, clients)
        server.process.send_signal(signal.SIGTERM)
        server.ended(0)
