"""The image's files, as far as they can be looked at without building it, and its scripts."""

import json
import os
import re
import shlex
import subprocess
import sys
from dataclasses import dataclass
from fnmatch import fnmatch
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Thread
from typing import Any

import pytest
import yaml

from lowbit.runtime.cli.main import main

ROOT = Path(__file__).parents[1]
DOCKERFILE = ROOT / "Dockerfile"
START, HEALTHY, STEPS = (ROOT / "image" / name for name in ("start", "healthy", "steps"))
KNOWN = {
    *("FROM", "RUN", "COPY", "ENV", "USER", "WORKDIR", "VOLUME", "EXPOSE", "HEALTHCHECK"),
    *("STOPSIGNAL", "ENTRYPOINT", "ARG"),
}

# The archive of sources has no files of the image.
pytestmark = pytest.mark.skipif(not DOCKERFILE.exists(), reason="not in a clone")


@dataclass(frozen=True)
class Stage:
    """A stage of the Dockerfile: its base, and its instructions with their arguments."""

    base: str
    steps: list[tuple[str, str]]

    def all(self, instruction: str) -> list[str]:
        return [rest for name, rest in self.steps if name == instruction]

    def env(self) -> dict[str, str]:
        pairs = [word.partition("=") for rest in self.all("ENV") for word in shlex.split(rest)]
        return {name: value for name, _, value in pairs}


def stages() -> dict[str, Stage]:
    """By name; the last has none."""
    text = re.sub(r"^\s*#.*\n", "", DOCKERFILE.read_text(), flags=re.MULTILINE)
    found: dict[str, Stage] = {}
    for line in text.replace("\\\n", " ").splitlines():
        if not line.strip():
            continue
        name, _, rest = line.strip().partition(" ")
        assert name in KNOWN, line
        if name == "FROM":
            base, _, own = rest.partition(" AS ")
            current = found[own or "last"] = Stage(base, [])
        else:
            current.steps.append((name, rest.strip()))
    return found


def ignored(name: str) -> bool:
    """Tell if .dockerignore leaves out a file at the top; its last line that fits decides."""
    answer = False
    for line in (ROOT / ".dockerignore").read_text().splitlines():
        if line and not line.startswith("#") and fnmatch(name, line.removeprefix("!")):
            answer = not line.startswith("!")
    return answer


def test_stages_build_on_each_other() -> None:
    found = stages()
    assert list(found) == ["built", "runtime", "compiled", "last"]
    assert found["built"].base == found["runtime"].base, "an environment moves between them"
    assert (found["compiled"].base, found["last"].base) == ("runtime", "runtime")
    assert re.fullmatch(r"python:3\.1[1-4]-slim-\w+", found["runtime"].base)


def test_what_is_copied_is_there() -> None:
    for stage in stages().values():
        for copy in stage.all("COPY"):
            words = [word for word in copy.split() if not word.startswith("--")]
            if "--from=built" not in copy:
                for source in words[:-1]:
                    assert (ROOT / source).exists(), source
                    assert source == "." or not ignored(source.split("/")[0]), source


def test_the_wheel_can_be_built_of_what_is_sent() -> None:
    needed = {"convert", "formats", "runtime", "pyproject.toml", "README.md", "LICENSE", "NOTICE"}
    assert not [name for name in (*needed, "constraints.txt", "image") if ignored(name)]
    sent = {path.name for path in ROOT.iterdir() if not ignored(path.name)}
    assert sent <= needed | {"constraints.txt", "image", "MANIFEST.in"}


def test_runs_without_root_and_without_a_compiler() -> None:
    runtime = stages()["runtime"]
    assert runtime.all("USER") == ["lowbit"]
    assert "apt-get" not in " ".join(runtime.all("RUN"))
    [entry] = runtime.all("ENTRYPOINT")
    [health] = runtime.all("HEALTHCHECK")
    scripts = [*json.loads(entry), *json.loads(health.partition("CMD ")[2])]
    for script in (*scripts, "/opt/image/steps"):
        path = ROOT / "image" / Path(script).name
        assert os.access(path, os.X_OK), path
        assert str(path.relative_to(ROOT)) in " ".join(runtime.all("COPY"))


def test_kernels_are_looked_for_where_they_were_made() -> None:
    built, runtime = stages()["built"].env(), stages()["runtime"].env()
    for name in ("TRITON_CACHE_DIR", "TRITON_LIBCUDA_PATH"):
        assert built[name] == runtime[name]
    copies = " ".join(stages()["runtime"].all("COPY"))
    place = runtime["TRITON_CACHE_DIR"]
    assert f"--chown=lowbit:lowbit {place} {place}" in copies


def test_commands_of_the_dockerfile_exist() -> None:
    for stage in stages().values():
        for run in stage.all("RUN"):
            for command in re.findall(r"lowbit-run (\w+)", run):
                assert command in main.commands


def test_compose_names_what_it_declares() -> None:
    content: dict[str, Any] = yaml.safe_load((ROOT / "compose.yaml").read_text())
    [service] = content["services"].values()
    assert service["build"]["target"] in stages()
    assert set(service["secrets"]) == set(content["secrets"])
    named = {volume.split(":")[0] for volume in service["volumes"]}
    assert {name for name in named if not name.startswith(".")} == set(content["volumes"])
    env = stages()["runtime"].env()
    places = {volume.split(":")[1] for volume in service["volumes"]}
    assert {env["TRITON_CACHE_DIR"], env["HF_HOME"], "/models"} == places
    assert all(port.startswith("127.0.0.1:") for port in service["ports"])
    assert service["environment"]["LOWBIT_API_KEY_FILE"] == "/run/secrets/api-key"
    # What `start` and the server read.
    script = START.read_text()
    assert all(f"${{{name}:-" in script for name in service["environment"])


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


def test_scripts_are_shell_that_parses() -> None:
    for script in (START, STEPS, ROOT / ".ci" / "install-check"):
        shell = script.read_text().splitlines()[0].rpartition("/")[2].split()[-1]
        subprocess.run([shell, "-n", script], check=True)
    done = subprocess.run([STEPS], capture_output=True, text=True, check=False)
    assert done.returncode == 2
    assert "image/steps install DEST" in done.stderr


def test_the_helper_is_made_without_a_driver(tmp_path: Path) -> None:
    """And found again without a compiler."""
    env = {
        **os.environ,
        "TRITON_CACHE_DIR": str(tmp_path / "kernels"),
        "TRITON_LIBCUDA_PATH": str(tmp_path / "libcuda"),
    }
    prefix = tmp_path / "env" / "bin"
    prefix.mkdir(parents=True)
    (prefix / "python").symlink_to(sys.executable)
    env["PYTHONPATH"] = os.pathsep.join(path for path in sys.path if path)
    command = [str(STEPS), "helper", str(tmp_path / "env")]
    made = subprocess.run(command, env=env, capture_output=True, text=True, check=True).stdout
    assert Path(made.strip()).name.startswith("cuda_utils")
    assert list((tmp_path / "libcuda").iterdir()) == []
    code = STEPS.read_text().partition("<<'PYTHON'\n")[2].partition("PYTHON\n")[0]
    again = subprocess.run(
        [sys.executable, "-c", code],
        env={**env, "CC": "/no/compiler"},
        capture_output=True,
        text=True,
        check=True,
    )
    assert again.stdout == made
