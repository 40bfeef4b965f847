"""Clients beside a greedy one: rows are left to them, and the queue that it fills is not full."""

from typing import Any

import httpx2
import pytest

from lowbit.runtime.serve.auth import MOST_ADDRESS, client_of
from lowbit.runtime.serve.settings import ServeSettings
from tests.runtime.serve.conftest import (
    LONG,
    SEQUENCES,
    Running,
    busy,
    raw_request,
    running,
    until,
)

OTHER = {"X-Forwarded-For": "203.0.113.7"}  # as by a proxy on this machine
SHORT: dict[str, Any] = {**LONG, "max_tokens": 3, "stream": False}


def ask(server: Running, body: dict[str, Any], headers: dict[str, str]) -> httpx2.Response:
    return httpx2.post(f"{server.url}/v1/completions", json=body, headers=headers, timeout=60)


@pytest.mark.parametrize("headers", [{}, OTHER], ids=["same", "other"])
def test_a_short_answer_passes_long_streams(server: Running, headers: dict[str, str]) -> None:
    held = [raw_request(server, LONG) for _ in range(SEQUENCES + 2)]
    try:
        until(lambda: busy(server) == SEQUENCES + 2)
        made = ask(server, SHORT, headers).json()
        assert made["usage"]["completion_tokens"] == 3
        assert busy(server) == SEQUENCES + 2  # none has ended
    finally:
        for connection in held:
            connection.close()
        until(lambda: busy(server) == 0)


def test_another_client_begins_while_one_has_its_share(server: Running) -> None:
    held = [raw_request(server, LONG) for _ in range(SEQUENCES)]
    try:
        until(lambda: busy(server) == SEQUENCES)
        url, body = f"{server.url}/v1/completions", {**LONG, "max_tokens": 800}
        with httpx2.stream("POST", url, json=body, headers=OTHER) as answer:
            assert next(answer.iter_lines()).startswith("data: ")
            assert busy(server) == SEQUENCES + 1
    finally:
        for connection in held:
            connection.close()
        until(lambda: busy(server) == 0)


def test_one_client_may_be_given_all_rows(server: Running) -> None:
    with running(server.model, client_sequences=SEQUENCES) as found:
        held = [raw_request(found, LONG) for _ in range(SEQUENCES)]
        scheduler = found.model.engine.scheduler
        until(lambda: len(scheduler.running) == SEQUENCES)
        for connection in held:
            connection.close()
        until(lambda: busy(found) == 0)
    server.model.engine.scheduler.share = server.service.settings.client_share(SEQUENCES)


def test_the_queue_that_one_client_fills_is_open_to_another(server: Running) -> None:
    with running(server.model, queue=0) as small:
        held = [raw_request(small, LONG) for _ in range(SEQUENCES)]
        until(lambda: small.service.engine.open == SEQUENCES)
        assert ask(small, SHORT, {}).status_code == 429
        assert ask(small, SHORT, OTHER).status_code == 200
        small.service.clients["203.0.113.7"] += 1
        assert ask(small, SHORT, OTHER).status_code == 429  # it has another one
        small.service.clients["203.0.113.7"] -= 1
        small.service.active += 32
        assert ask(small, SHORT, {}).status_code == 429
        assert ask(small, SHORT, OTHER).status_code == 200
        small.service.active -= 32
        for connection in held:
            connection.close()
        until(lambda: small.service.active == 0)
        assert not +small.service.clients


@pytest.mark.parametrize(
    ("host", "client"),
    [
        ("192.0.2.9", "192.0.2.9"),
        ("::ffff:192.0.2.9", "192.0.2.9"),
        ("2001:db8:1:2:3:4:5:6", "2001:0db8:0001:0002"),
        ("2001:db8:1:2::9", "2001:0db8:0001:0002"),
        ("a proxy's nonsense", "a proxy's nonsense"),
        ("x" * 60_000, "x" * MOST_ADDRESS),  # no more of it is kept
        (None, ""),
    ],
    ids=lambda given: str(given)[:MOST_ADDRESS],
)
def test_a_client_is_an_address(host: str | None, client: str) -> None:
    assert client_of({"client": None if host is None else (host, 5)}) == client


@pytest.mark.parametrize(
    ("asked", "rows", "share"),
    [(None, 1, 1), (None, 3, 3), (None, 4, 3), (None, 64, 63), (5, 64, 5), (64, 64, 64)],
)
def test_share_of_a_client(asked: int | None, rows: int, share: int) -> None:
    assert ServeSettings(("m",), client_sequences=asked).client_share(rows) == share
