"""The image's scripts, and the names that its Dockerfile takes from the tree."""

import os
import re
import subprocess
import sys
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Thread
from typing import Any

import pytest

from lowbit.runtime.cli.main import main

ROOT = Path(__file__).parents[1]
DOCKERFILE = ROOT / "Dockerfile"
START, HEALTHY = (ROOT / "image" / name for name in ("start", "healthy"))
# The archive of sources has no files of the image.
pytestmark = pytest.mark.skipif(not DOCKERFILE.exists(), reason="not in a clone")


def test_names_of_the_dockerfile_exist() -> None:
    text = DOCKERFILE.read_text().replace("\\\n", " ")
    copies = [line.split()[1:-1] for line in re.findall(r"^COPY (?!--from).*$", text, re.MULTILINE)]
    sources = [word for words in copies for word in words if not word.startswith("--")]
    assert sources
    assert [name for name in sources if not (ROOT / name).exists()] == []
    assert set(re.findall(r"lowbit-run (\w+)", text)) <= main.commands.keys()


@pytest.fixture
def start(tmp_path: Path) -> Any:
    """`start(*arguments, **variables)`: the script, with a program that prints what it is given."""
    program = tmp_path / "lowbit-run"
    program.write_text('#!/bin/sh\necho "key=${LOWBIT_API_KEY-none}"\nprintf "<%s>" "$@"\n')
    program.chmod(0o755)

    def run(*arguments: str, **variables: str) -> "subprocess.CompletedProcess[str]":
        env = {"PATH": f"{tmp_path}:{os.environ['PATH']}", **variables}
        return subprocess.run(
            [START, *arguments], env=env, capture_output=True, text=True, check=False
        )

    return run


def test_start_serves_the_model(start: Any) -> None:
    done = start(MODEL="/models/my model")
    assert done.stdout == "key=none\n<serve></models/my model><--host><0.0.0.0><--port><8000>"
    done = start("--context", "4096", MODEL="a/b", HOST="::", PORT="9000", LOWBIT_API_KEY="k")
    served = "<serve><a/b><--host><::><--port><9000><--context><4096>"
    assert done.stdout == f"key=k\n{served}"


def test_start_reads_the_key_from_a_file(start: Any, tmp_path: Path) -> None:
    (tmp_path / "key").write_text("ses ame\n")
    done = start(MODEL="m", LOWBIT_API_KEY_FILE=str(tmp_path / "key"))
    assert done.stdout.startswith("key=ses ame\n")
    done = start(MODEL="m", LOWBIT_API_KEY_FILE=str(tmp_path / "missing"))
    assert done.returncode != 0
    assert done.stdout == "", "it must not serve without its key"


def test_start_runs_another_command(start: Any) -> None:
    assert start("doctor", "--json").stdout == "key=none\n<doctor><--json>"
    assert start("compile", "m", "--arch", "sm_90", MODEL="x").stdout.endswith("<sm_90>")


def test_start_needs_a_model(start: Any) -> None:
    done = start()
    assert (done.returncode, done.stdout) == (2, "")
    assert "MODEL" in done.stderr


@pytest.mark.parametrize(("status", "code"), [(200, 0), (503, 1), (None, 1)])
def test_health(status: int | None, code: int) -> None:
    asked = []

    class Answer(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            asked.append(self.path)
            self.send_response(status or 0)
            self.end_headers()

        def log_message(self, format: str, *args: Any) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Answer)
    Thread(target=server.serve_forever, daemon=True).start()
    port = server.server_address[1]
    if status is None:
        server.shutdown()
        server.server_close()
    env = {**os.environ, "PORT": str(port), "no_proxy": "127.0.0.1"}
    done = subprocess.run([sys.executable, HEALTHY], env=env, capture_output=True, check=False)
    assert done.returncode == code
    assert b"Traceback" not in done.stderr
    if status is not None:
        assert asked == ["/health"]
        server.shutdown()
        server.server_close()
