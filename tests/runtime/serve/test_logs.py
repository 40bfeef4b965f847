"""The log: lines that say why, speeds that are ones, and a pipe that nobody reads."""

import logging
import os
import re
import threading
from collections.abc import Callable, Iterator
from contextlib import suppress

import httpx2
import pytest
from hypothesis import given
from hypothesis import strategies as st

from lowbit.runtime.engine.delta import End
from lowbit.runtime.engine.stream import Handle
from lowbit.runtime.serve.logs import (
    ATOMIC_BYTES,
    MOST_ERROR_CHARACTERS,
    MOST_WAITING_BYTES,
    Line,
    Record,
    ThreadedHandler,
    end_of_piece,
)
from tests.runtime.serve.conftest import LONG, NAME, Running, running, until


@pytest.fixture
def logger() -> Iterator[logging.Logger]:
    found = logging.Logger("test")
    yield found
    found.handlers.clear()


def test_a_pipe_that_nobody_reads_stops_nobody(logger: logging.Logger) -> None:
    reader, writer = os.pipe()
    handler = ThreadedHandler(writer)
    handler.setFormatter(Line())
    logger.addHandler(handler)
    line = "x" * 1000
    count = 2 * MOST_WAITING_BYTES // len(line)

    def log() -> None:
        for _ in range(count):
            logger.info(line)

    busy = threading.Thread(target=log, daemon=True)
    busy.start()
    busy.join(20)
    assert not busy.is_alive()
    found = bytearray()
    # The handler's thread notes what it has written only when it runs again: until then there may
    # be nothing left to read, and the read must not wait for more.
    os.set_blocking(reader, False)

    def read(enough: Callable[[], bool]) -> bool:
        with suppress(BlockingIOError):
            found.extend(os.read(reader, 1 << 16))
        return enough()

    until(lambda: read(lambda: handler._bytes <= MOST_WAITING_BYTES // 2))
    logger.info("the last")
    until(lambda: read(lambda: found.endswith(b"the last\n")))
    *lines, _ = found.splitlines()
    dropped = [int(each.split()[0]) for each in lines if b"dropped" in each]
    assert sum(dropped) > count // 4
    assert b"dropped" in lines[-1]
    assert sum(each.endswith(line.encode()) for each in lines) == count - sum(dropped)
    handler.flush()
    os.close(reader)
    logger.info("nobody")
    until(lambda: not handler._bytes)
    os.close(writer)


@given(st.lists(st.binary(max_size=3 * ATOMIC_BYTES), max_size=20))
def test_lines_of_processes_are_not_mixed(texts: list[bytes]) -> None:
    """A pipe takes a piece at once, unless it is a line that is too long for any."""
    lines = b"".join(each.replace(b"\n", b"") + b"\n" for each in texts)
    first = 0
    while first < len(lines):
        last = end_of_piece(lines, first)
        piece = lines[first:last]
        assert piece.endswith(b"\n")
        assert len(piece) <= ATOMIC_BYTES or piece.count(b"\n") == 1
        first = last


def test_speeds_count_tokens_behind_the_first_step() -> None:
    record = Record(started=100.0, prompt_tokens=1)
    record.first_token_s = 2.0  # the text came with the last token
    record.add_end(End("stop", new_tokens=11, first_tokens=1, first_at=100.5, last_at=101.5))
    assert "first token 500.0 ms, 10 tok/s" in record.line("POST", "/", 200)
    whole = Record(started=100.0, prompt_tokens=1)
    whole.add_end(End("stop", new_tokens=3, first_tokens=3, first_at=100.5, last_at=100.500001))
    assert "tok/s" not in whole.line("POST", "/", 200)


def test_refusals_are_logged_with_their_reason(
    server: Running, caplog: pytest.LogCaptureFixture
) -> None:
    url = f"{server.url}/v1/completions"
    with caplog.at_level(logging.INFO, "lowbit.serve"):
        httpx2.post(url, json={"model": NAME, "prompt": "Hi", "format": 1})
        httpx2.post(url, json={"model": "y\n" * 5000, "prompt": "Hi"})
        httpx2.get(f"{server.url}/nowhere")
        httpx2.get(url, headers={"Host": "evil.example"})
        until(lambda: len(caplog.messages) == 4)
    form, model, nowhere, host = caplog.messages
    assert form.endswith("`format` is not supported")
    assert len(model) < MOST_ERROR_CHARACTERS + 100
    assert "\n" not in Line().format(caplog.records[1])
    assert "Not Found" in nowhere
    assert "`evil.example`" in host


def test_prompts_are_logged_if_asked_for(server: Running, caplog: pytest.LogCaptureFixture) -> None:
    body = {**LONG, "max_tokens": 3, "stream": False}
    with running(server.model, log_prompts=True) as open_log, caplog.at_level("INFO"):
        text = httpx2.post(f"{open_log.url}/v1/completions", json=body).json()["choices"][0]["text"]
        until(lambda: "answer 0" in caplog.text)
    assert "prompt: Once upon a time" in caplog.text
    assert f"answer 0: {text}" in caplog.text


def test_a_request_has_one_id_in_header_and_log(
    server: Running, caplog: pytest.LogCaptureFixture
) -> None:
    body = {"model": NAME, "prompt": "Hi", "max_tokens": 1}
    url = f"{server.url}/v1/completions"
    with caplog.at_level(logging.INFO, "lowbit.serve"):
        chosen = httpx2.post(url, json=body, headers={"x-request-id": "mine-7"})
        own = httpx2.post(url, json=body)
        odd = httpx2.post(url, json=body, headers={"x-request-id": "a b, forged\tline"})
        until(lambda: len(caplog.messages) == 3)
    assert chosen.headers["x-request-id"] == "mine-7"
    for answer, line in zip((chosen, own, odd), caplog.messages, strict=True):
        assert f"id {answer.headers['x-request-id']}" in line
    assert len({answer.headers["x-request-id"] for answer in (chosen, own, odd)}) == 3
    assert "forged" not in odd.headers["x-request-id"]


def test_a_bug_in_the_engine_is_logged_with_the_id(
    server: Running, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def bug(*_: object) -> None:
        raise IndexError("a bug")

    monkeypatch.setattr(Handle, "poll", bug)
    body = {"model": NAME, "prompt": "Hi", "max_tokens": 1}
    url = f"{server.url}/v1/completions"
    failed = httpx2.post(url, json=body, headers={"x-request-id": "mine-8"})
    assert failed.status_code == 500
    assert "request mine-8: an answer could not be read" in caplog.text


def test_an_answer_that_is_given_up_has_its_tokens_in_the_log(
    server: Running, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.INFO, "lowbit.serve"):
        with httpx2.stream("POST", f"{server.url}/v1/completions", json=LONG) as stream:
            events = [line for line, _ in zip(stream.iter_lines(), range(24), strict=False) if line]
        until(lambda: "abort" in caplog.text)
    [line] = [line for line in caplog.messages if "abort" in line]
    found = re.search(r"prompt \d+(?: \(\d+ cached\))?, new (\d+), first token .* tok/s", line)
    assert found is not None, line
    assert len(events) <= int(found[1]) < LONG["max_tokens"]
