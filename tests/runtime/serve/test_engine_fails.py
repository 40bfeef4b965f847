"""Bugs behind the server, one in each place: the request has an error, the log its traceback."""

import asyncio
import os
import re
import signal
import subprocess
import sys
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx2
import pytest

from lowbit.runtime.engine.delta import Delta
from lowbit.runtime.engine.engine import Engine
from lowbit.runtime.engine.model import Model
from lowbit.runtime.engine.results import PlainStep
from lowbit.runtime.engine.runner import Runner
from lowbit.runtime.engine.scheduler import BlockManager
from lowbit.runtime.engine.stream import Answer, Handle
from lowbit.runtime.serve.answers import Answers
from lowbit.runtime.serve.apis.chat import ChatEvents
from lowbit.runtime.serve.link import stepper
from lowbit.runtime.serve.link.client import EngineClient
from lowbit.runtime.serve.link.messages import Begin
from lowbit.runtime.serve.link.stepper import Stepper
from lowbit.runtime.serve.metrics import Metrics
from lowbit.runtime.serve.server import Server
from lowbit.runtime.text.answer import AnswerSplitter
from lowbit.runtime.text.tokenizer import Tokenizer
from tests.lanes import in_commands
from tests.runtime.serve.conftest import BUNDLED, LONG, NAME, Running, raw_request, running, until

ASK = {
    "model": NAME,
    "messages": [{"role": "user", "content": "Once"}],
    "max_tokens": 4,
    "ignore_eos": True,
    "temperature": 0,
}
# A model whose engine hangs in its first step, as the process of the engine loads it.
HANGING = """
import sys
from lowbit.runtime.cli.serve import load_noted
from lowbit.runtime.engine.engine import Engine
def hang(*_):
    print("hangs", file=sys.stderr, flush=True)
    while True:
        pass
def load(*line):
    Engine._step = hang
    return load_noted(*line)
"""
SERVES = """
import sys
import hanging
from lowbit.runtime.cli import serve
serve.load_noted = hanging.load
from lowbit.runtime.cli.main import main
main(sys.argv[1:])
"""


class PanicError(BaseException):
    """As libraries in Rust raise it."""


def bug(*_: Any, **__: Any) -> Any:
    raise IndexError("a bug")


def panic(*_: Any, **__: Any) -> Any:
    raise PanicError("a panic")


def ask(server: Running, **changes: Any) -> httpx2.Response:
    return httpx2.post(f"{server.url}/v1/chat/completions", json={**ASK, **changes}, timeout=30)


def healthy(server: Running) -> bool:
    return bool(httpx2.get(f"{server.url}/health").json()["status"] == "ok")


@in_commands(
    "Engine-*-panic",
    "BlockManager-*-exception",
    "Runner-*-panic",
    "PlainStep-*-exception",
    "Answer-push-exception",
    "AnswerSplitter-*-panic",
    "Metrics-*-exception",
    "Begin-*-panic",
    "Tokenizer-*-exception",
)
@pytest.mark.parametrize("fails", [bug, panic], ids=["exception", "panic"])
@pytest.mark.parametrize(
    ("owner", "method"),
    [
        (Engine, "submit"),
        (Engine, "step"),
        (BlockManager, "open"),
        (Runner, "chunk"),
        (Runner, "decode"),
        (PlainStep, "commit"),
        (Answer, "push"),
        (AnswerSplitter, "push"),
        (Metrics, "count_tokens"),
        (Begin, "requests"),
        (Tokenizer, "encode"),
    ],
    ids=lambda value: value if isinstance(value, str) else value.__name__,
)
def test_a_bug_ends_its_request_alone(
    server: Running,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    owner: Any,
    method: str,
    fails: Callable[..., Any],
) -> None:
    expected = ask(server).json()["choices"]
    with monkeypatch.context() as patch:
        patch.setattr(owner, method, fails)
        failed = ask(server)
    assert failed.status_code == 500
    assert failed.json()["error"]["type"] == "server_error"
    assert f"in {fails.__name__}" in caplog.text  # a traceback
    until(lambda: healthy(server))
    assert ask(server).json()["choices"] == expected
    assert server.service.engine.open == 0


def test_a_step_without_memory_ends_its_requests_with_advice(
    server: Running, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: Any) -> Any:
        raise MemoryError

    expected = ask(server).json()["choices"]
    with monkeypatch.context() as patch:
        patch.setattr(Runner, "decode", full)
        failed = ask(server)
    assert failed.status_code == 500
    assert failed.json()["error"]["message"] == (
        "the memory of this machine is used up; ask for less at once"
    )
    until(lambda: healthy(server))
    assert ask(server).json()["choices"] == expected


def test_a_bug_while_an_answer_is_written_ends_its_request_alone(
    server: Running, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    with monkeypatch.context() as patch:
        patch.setattr(ChatEvents, "write", bug)
        with pytest.raises(httpx2.RemoteProtocolError):
            ask(server, stream=True, max_tokens=500)
    assert "in bug" in caplog.text
    until(lambda: server.service.engine.open == 0)
    assert ask(server).status_code == 200


def test_requests_that_wait_outlive_a_step_that_fails(
    server: Running, monkeypatch: pytest.MonkeyPatch
) -> None:
    begun, go = threading.Event(), threading.Event()
    decode: Any = Runner.decode
    left = [1]

    def fails_once(*arguments: Any) -> Any:
        if left[0]:
            left[0] = 0
            begun.set()
            assert go.wait(30)
            raise IndexError("a bug")
        return decode(*arguments)

    expected = ask(server).json()["choices"]
    monkeypatch.setattr(Runner, "decode", fails_once)
    with ThreadPoolExecutor(2) as pool:
        first = pool.submit(ask, server)
        assert begun.wait(30)
        second = pool.submit(ask, server)
        until(lambda: server.service.engine.open == 2)
        go.set()
        assert first.result().status_code == 500
        assert second.result().json()["choices"] == expected


def test_news_that_cannot_be_handed_out_keep_nobody_elses(
    server: Running, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    put: Any = Answers.put
    broken: list[Answers] = []

    def breaks_for_the_first(answers: Answers, delta: Delta) -> None:
        broken.append(answers)
        if answers is broken[0]:
            bug()
        put(answers, delta)

    expected = ask(server).json()["choices"]
    monkeypatch.setattr(Answers, "put", breaks_for_the_first)
    lost = raw_request(server, LONG)
    until(lambda: bool(broken))
    assert ask(server).json()["choices"] == expected
    lost.close()
    until(lambda: server.service.engine.open == 0)
    assert "in bug" in caplog.text


def test_drafts_that_cannot_be_counted_end_their_request(
    model: Model, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    with running(model) as found:
        monkeypatch.setattr(Handle, "speculation", property(bug))
        assert ask(found).status_code == 500
        assert "in bug" in caplog.text


def test_the_end_of_the_thread_ends_requests_and_server(
    model: Model, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    with running(model) as ending:
        with monkeypatch.context() as patch:
            patch.setattr(Stepper, "_collect", bug)
            failed = ask(ending)
        assert failed.status_code == 500
        assert "the engine has ended" in failed.json()["error"]["message"]
        assert "in bug" in caplog.text
        assert not ending.service.engine.alive
        until(lambda: "the server ends" in caplog.text)


def test_the_end_of_the_engine_is_logged_while_the_server_ends(
    model: Model, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """With the answers that somebody waited for, of two."""
    with running(model) as ending, raw_request(ending, LONG) as leaving:
        until(lambda: ending.service.engine.open == 1)
        url, body = f"{ending.url}/v1/completions", LONG
        with httpx2.stream("POST", url, json=body) as answer:
            lines = answer.iter_lines()
            next(lines)
            ending.service.engine.loop.call_soon_threadsafe(ending.server.drain)
            until(lambda: ending.service.draining)
            monkeypatch.setattr(EngineClient, "_send_cancelled", lambda _: None)
            leaving.close()
            until(lambda: ending.service.active == 1)
            monkeypatch.setattr(Stepper, "_collect", bug)
            assert "the engine has ended; see the log" in "".join(lines)
        until(lambda: "as the engine has; answers that it lost: 1" in caplog.text)


def test_after_the_end_of_the_engine_nothing_hangs(
    model: Model, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Server, "on_tick", lambda *_: asyncio.sleep(0.1, result=False))
    with running(model) as dead:
        until(lambda: dead.host.stepper.alive)  # it is started beside the HTTP side
        dead.host.stepper.stop()
        until(lambda: not dead.service.engine.alive)
        health = httpx2.get(f"{dead.url}/health")
        assert (health.status_code, health.json()["status"]) == (503, "failed")
        assert httpx2.get(f"{dead.url}/metrics").status_code == 503
        for format in (None, {"type": "json_object"}):
            refused = ask(dead, response_format=format)
            assert (refused.status_code, "retry-after" in refused.headers) == (503, True)
        dead.server.should_exit = True
        monkeypatch.undo()


def test_health_fails_while_a_step_hangs(
    server: Running, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    begun, go = threading.Event(), threading.Event()
    step: Any = Engine._step

    def hang(engine: Engine) -> bool:
        begun.set()
        assert go.wait(30)
        found: bool = step(engine)
        return found

    with monkeypatch.context() as patch, ThreadPoolExecutor(1) as pool:
        patch.setattr(Engine, "_step", hang)
        with patch.context() as short:
            short.setattr(stepper, "STALLED_S", 0.01)
            assert healthy(server)  # nobody waits
        asked = pool.submit(ask, server)
        assert begun.wait(30)  # on a busy machine a short limit ends before that
        patch.setattr(stepper, "STALLED_S", 0.01)
        until(lambda: not healthy(server))
        until(lambda: "hangs" in caplog.text)
        assert "in hang" in caplog.text
        refused = ask(server)
        assert (refused.status_code, refused.headers["retry-after"]) == (503, "60")
        go.set()
        assert asked.result().status_code == 200
    until(lambda: healthy(server))


@pytest.mark.commands
def test_two_signals_end_a_server_that_hangs(tmp_path: Path) -> None:
    (tmp_path / "hanging.py").write_text(HANGING)
    line = ("serve", str(BUNDLED), "--port", "0", "--device", "cpu")
    command = [sys.executable, "-c", SERVES, *line]
    body = {"model": BUNDLED.name, "prompt": "Once"}
    path = os.pathsep.join((str(tmp_path), os.environ.get("PYTHONPATH", "")))
    process = subprocess.Popen(
        command, stderr=subprocess.PIPE, text=True, env={**os.environ, "PYTHONPATH": path}
    )
    assert process.stderr is not None
    with process:
        try:
            lines = iter(process.stderr.readline, "")
            url = next(m[0] for line in lines if (m := re.search(r"http://127\S+", line)))
            with ThreadPoolExecutor(1) as pool:
                asked = pool.submit(httpx2.post, f"{url}/v1/completions", json=body)
                assert any("hangs" in line for line in lines)
                process.send_signal(signal.SIGINT)
                assert any("shutting down" in line for line in lines)
                process.send_signal(signal.SIGTERM)
                assert process.wait(20) == -signal.SIGTERM
                assert "Traceback" not in process.stderr.read()
                assert asked.exception() is not None
        finally:
            process.kill()
