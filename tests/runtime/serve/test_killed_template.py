"""A process for chat templates that is killed while it renders one, and the client's answer."""

import os
import signal
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor

import httpx2
import pytest

from lowbit.formats.text import child_process
from tests.lanes import in_commands
from tests.runtime.serve.conftest import PATHS, Running, post, turns, until


def dying(*_: object) -> subprocess.Popen[bytes]:
    """A process that is killed when it gets a job."""
    code = "import os; print('{}', flush=True); input(); os.kill(os.getpid(), 9)"
    pipe = subprocess.PIPE
    return subprocess.Popen([sys.executable, "-c", code], stdin=pipe, stdout=pipe)


def ask(server: Running, path: str) -> httpx2.Response:
    field = "input" if path.endswith("responses") else "messages"
    return post(server, path, **{field: turns(("user", "Hi"))})


@in_commands("/v1/messages-2", "/v1/responses-2", "/v1/chat/completions-1")
@pytest.mark.parametrize("kills", [1, 2])
@pytest.mark.parametrize("path", PATHS)
def test_the_client_of_a_killed_process_is_answered(
    server: Running, path: str, kills: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By the next process; if that is killed as well, by an error of the server's."""
    assert ask(server, path).status_code == 200
    queue = server.service.templates
    child = queue._child
    assert child is not None
    if kills == 2:
        monkeypatch.setattr(child_process, "start_child", dying)
    os.kill(child.process.pid, signal.SIGSTOP)
    with ThreadPoolExecutor(1) as client:
        asked = client.submit(ask, server, path)
        until(lambda: len(queue._jobs) == 1)
        os.kill(child.process.pid, signal.SIGKILL)
        found = asked.result(60)
    monkeypatch.undo()
    if kills == 1:
        assert found.status_code == 200
        return
    assert found.status_code == 500
    error = found.json()["error"]
    assert "was ended or stopped from outside twice (SIGKILL)" in error["message"]
    assert error["type"] == ("api_error" if path.endswith("messages") else "server_error")
    assert ask(server, path).status_code == 200
