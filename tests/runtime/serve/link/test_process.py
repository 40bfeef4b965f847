"""The engine's process: it ends with the server, and the server hears how it ended."""

import asyncio
import os
import re
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import httpx2
import msgspec
import pytest

from lowbit.formats.errors import CheckpointError, LowbitError, ResourceError
from lowbit.runtime.engine.load import load
from lowbit.runtime.engine.model import Model
from lowbit.runtime.serve.link.channel import Channel
from lowbit.runtime.serve.link.host import facts_of
from lowbit.runtime.serve.link.messages import Facts, FromEngine, ToEngine
from lowbit.runtime.serve.link.process import EngineProcess, _serve, start_engine
from lowbit.runtime.serve.served_model import load_prompts
from tests.runtime.serve.conftest import BUNDLED, until

pytestmark = pytest.mark.commands
BODY = {"model": BUNDLED.name, "prompt": "Once", "max_tokens": 3}
# The command, and with an engine that another follows however short it has lived
COMMAND = """
import sys
from lowbit.runtime.cli.main import main
if __name__ == "__main__":
    main(sys.argv[1:])
"""
FOLLOWED = "from lowbit.runtime.serve.link import engines\nengines.SHORT_LIFE_S = 0.0\n" + COMMAND
LONG = {**BODY, "max_tokens": 100, "ignore_eos": True, "stream": True}


def children(pid: int) -> list[int]:
    """Processes of a server that run Python of the engine, whichever thread has started them."""
    tasks = Path(f"/proc/{pid}/task").glob("*/children")
    found = [int(each) for task in tasks for each in task.read_text().split()]
    return [each for each in found if b"spawn_main" in command_of(each)]


def rank_of(engine: int) -> int:
    """The process that shares a model with an engine."""
    tasks = Path(f"/proc/{engine}/task").glob("*/children")
    found = [int(each) for task in tasks for each in task.read_text().split()]
    [rank] = [each for each in found if b"parallel.start" in command_of(each)]
    return rank


def command_of(pid: int) -> bytes:
    """Command line of a process; nothing of one that has ended meanwhile."""
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes()
    except (FileNotFoundError, ProcessLookupError):
        return b""


def runs(pid: int) -> bool:
    try:
        return "\nState:\tZ" not in Path(f"/proc/{pid}/status").read_text()
    except (FileNotFoundError, ProcessLookupError):
        return False


@contextmanager
def served(*options: str, code: str = COMMAND) -> Iterator[tuple[subprocess.Popen[str], str, int]]:
    """A server with its address and the number of its engine's process."""
    command = [sys.executable, "-c", code, "serve", str(BUNDLED), "--port", "0"]
    process = subprocess.Popen(
        [*command, "--device", "cpu", *options], stderr=subprocess.PIPE, text=True
    )
    assert process.stderr is not None
    with process:
        try:
            lines = iter(process.stderr.readline, "")
            url = next(m[0] for line in lines if (m := re.search(r"http://127\S+", line)))
            [engine] = children(process.pid)
            yield process, url, engine
        finally:
            process.kill()


def test_the_end_of_the_engine_ends_requests_and_server() -> None:
    """Also where another one may follow: this one has lived for too short a time."""
    with served("--restart-engine") as (process, url, engine):
        with httpx2.stream("POST", f"{url}/v1/completions", json=LONG, timeout=60) as answer:
            parts = answer.iter_text()
            next(parts)
            os.kill(engine, signal.SIGKILL)
            rest = "".join(parts)
        assert "the engine has ended" in rest
        assert process.wait(30) == 1
        assert process.stderr is not None
        said = process.stderr.read()
        assert "signal SIGKILL" in said
        assert "Traceback" not in said


def test_another_engine_follows_if_it_is_asked_for() -> None:
    line = ("serve", str(BUNDLED), "--port", "0", "--device", "cpu", "--restart-engine")
    process = subprocess.Popen(
        [sys.executable, "-c", FOLLOWED, *line], stderr=subprocess.PIPE, text=True
    )
    assert process.stderr is not None
    with process:
        try:
            lines = iter(process.stderr.readline, "")
            url = next(m[0] for line in lines if (m := re.search(r"http://127\S+", line)))
            before = httpx2.post(f"{url}/v1/completions", json={**BODY, "temperature": 0}).json()
            [engine] = children(process.pid)
            os.kill(engine, signal.SIGKILL)
            assert any("another engine runs" in line for line in lines)
            assert children(process.pid) not in ([engine], [])
            until(lambda: httpx2.get(f"{url}/health").status_code == 200)
            after = httpx2.post(f"{url}/v1/completions", json={**BODY, "temperature": 0}).json()
            assert after["choices"] == before["choices"]
            [engine] = children(process.pid)
            os.kill(engine, signal.SIGKILL)
            until(lambda: children(process.pid) not in ([engine], []))
            [loading] = [each for each in children(process.pid) if each != engine]
            os.kill(loading, signal.SIGSTOP)  # it would take long
            process.send_signal(signal.SIGTERM)
            assert process.wait(30) == 0
            assert not runs(loading)
        finally:
            process.kill()


def test_a_killed_rank_ends_requests_and_engine_and_another_has_ranks_again() -> None:
    options = ("--tensor-parallel", "2", "--restart-engine")
    with served(*options, code=FOLLOWED) as (process, url, engine):
        asked = {**BODY, "temperature": 0}
        before = httpx2.post(f"{url}/v1/completions", json=asked).json()
        rank = rank_of(engine)
        with httpx2.stream("POST", f"{url}/v1/completions", json=LONG, timeout=60) as answer:
            parts = answer.iter_text()
            next(parts)
            os.kill(rank, signal.SIGKILL)
            rest = "".join(parts)
        ending = f"rank 1 (process {rank}) ended while running steps: signal SIGKILL"
        assert ending in rest
        assert process.stderr is not None
        said = ""
        while "another engine runs" not in said:
            line = process.stderr.readline()
            assert line, said
            said += line
        assert f"{ending}; the engine's process ends, too" in said
        assert "Traceback" not in said
        assert not runs(engine)
        until(lambda: httpx2.get(f"{url}/health").status_code == 200)
        after = httpx2.post(f"{url}/v1/completions", json=asked).json()
        assert after["choices"] == before["choices"]
        [engine] = children(process.pid)
        rank = rank_of(engine)
        process.send_signal(signal.SIGINT)
        assert process.wait(30) == 0
        assert not runs(rank)


def test_the_engine_ends_with_a_server_that_is_killed() -> None:
    with served() as (process, _, engine):
        process.kill()
        process.wait(30)
        until(lambda: not runs(engine))


def test_a_signal_to_the_whole_group_lets_answers_finish() -> None:
    with served() as (process, url, engine):
        with httpx2.stream("POST", f"{url}/v1/completions", json=LONG, timeout=60) as answer:
            parts = answer.iter_text()
            first = next(parts)
            for pid in (engine, process.pid):
                os.kill(pid, signal.SIGINT)
            rest = "".join(parts)
        assert (first + rest).rstrip().endswith("[DONE]")
        assert process.wait(30) == 0
        assert not runs(engine)


def test_an_error_of_loading_is_that_of_the_command(tmp_path: Path) -> None:
    engine = start_engine(partial(load, tmp_path))
    with pytest.raises(CheckpointError, match=re.escape(str(tmp_path))):
        engine.facts()
    assert engine.process.exitcode == 0


def test_an_error_of_loading_has_hint_and_traceback_of_the_engine() -> None:
    class OutOfMemoryError(RuntimeError):
        """As torch names it."""

    def load() -> Model:
        raise OutOfMemoryError("m\udcff")

    ours, theirs = socket.socketpair()
    assert _serve([Channel(theirs, ToEngine)], load)
    engine = EngineProcess(
        cast(Any, SimpleNamespace(join=bool, exitcode=0)), Channel(ours, FromEngine)
    )
    with pytest.raises(ResourceError, match="GPU") as found:
        engine.facts()
    assert found.value.hint == "use a smaller --context"
    assert "in load\n" in found.value.__notes__[0]
    theirs.close()


def test_a_folder_may_have_any_name(tmp_path: Path, model: Model) -> None:
    folder = tmp_path / os.fsdecode(b"\xff")
    folder.symlink_to(model.folder)
    facts = msgspec.structs.replace(facts_of(model), folder=os.fsencode(folder))
    carried = msgspec.msgpack.decode(msgspec.msgpack.encode(facts), type=Facts)
    assert load_prompts(carried).folder == folder


def test_a_bug_of_loading_has_its_traceback_in_the_log(capfd: pytest.CaptureFixture[str]) -> None:
    engine = start_engine(partial(divmod, 1, 0))
    with pytest.raises(LowbitError, match="the model could not be loaded: ZeroDivisionError"):
        engine.facts()
    assert "Traceback" in capfd.readouterr().err


def test_a_process_that_is_killed_while_it_loads_is_named() -> None:
    engine = start_engine(partial(os.kill, 0, 0))  # type: ignore[arg-type]
    engine.process.kill()
    with pytest.raises(ResourceError, match="SIGKILL"):
        engine.facts()


class Interrupting:
    """Is read as the end of a process that Ctrl-C does not spare."""

    def __reduce__(self) -> tuple[object, ...]:
        return signal.raise_signal, (signal.SIGINT,)


def test_an_interrupt_while_the_process_imports_has_no_traceback(
    capfd: pytest.CaptureFixture[str],
) -> None:
    """The server gets it, too, and ends the process."""
    engine = start_engine(Interrupting())  # type: ignore[arg-type]
    with pytest.raises(LowbitError, match="TypeError"):  # None is no function
        engine.facts()
    assert "KeyboardInterrupt" not in capfd.readouterr().err


def test_a_process_that_hangs_is_killed_and_named(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr("lowbit.runtime.serve.link.process.STOP_S", 0.0)
    engine = start_engine(partial(load, BUNDLED, device="cpu"))
    os.kill(engine.process.pid or 0, signal.SIGSTOP)
    assert not engine.stop()
    assert engine.ending == "signal SIGKILL"
    assert "hangs" in caplog.text


def test_a_task_that_no_longer_waits_for_the_model_ends_the_process() -> None:
    async def run() -> None:
        waiting = asyncio.create_task(engine.loaded())
        await asyncio.sleep(0)
        waiting.cancel()
        await asyncio.wait([waiting])
        assert waiting.cancelled()

    engine = start_engine(partial(load, BUNDLED, device="cpu"))
    asyncio.run(run())
    assert engine.ending == "signal SIGKILL"
