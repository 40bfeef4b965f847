"""The child process: limits, end, and an environment without secrets."""

import gc
import os
import select
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO, Any

import pytest

from lowbit.formats.errors import ResourceError
from lowbit.formats.text import child_process
from lowbit.formats.text import worker as module
from lowbit.formats.text.child_process import ChildProcess, Library, WorkerError
from lowbit.formats.text.worker import Worker

ENDLESS = "{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}"


def job(source: str, most: int = 1000) -> dict[str, Any]:
    return {"do": "render", "source": source, "values": {}, "most": most}


def kind_of(worker: Worker, source: str) -> str:
    with pytest.raises(WorkerError) as caught:
        worker.ask(job(source))
    return caught.value.kind


def pid_of(worker: Worker) -> int:
    assert worker._child is not None
    return worker._child.process.pid


def ends(pid: int) -> bool:
    """Wait for the end of a process that may not be a child of this one."""
    try:
        descriptor = os.pidfd_open(pid)
    except ProcessLookupError:
        return True
    try:
        return bool(select.select([descriptor], [], [], 20)[0])
    finally:
        os.close(descriptor)


def test_a_process_serves_many_jobs_and_starts_again_after_a_limit(hasty: Worker) -> None:
    assert hasty.ask(job("{{ 1 + 1 }}")) == "2"
    first = pid_of(hasty)
    assert kind_of(hasty, "{{ 'a' * 10**11 }}") == "memory"
    assert kind_of(hasty, "{% if %}") == "syntax"
    assert kind_of(hasty, "{{ 1 / 0 }}") == "failed"
    assert kind_of(hasty, "{{ 'ab' * 501 }}") == "output"
    assert pid_of(hasty) == first  # none of these ends it
    assert kind_of(hasty, ENDLESS) == "time"
    assert hasty.ask(job("{{ 'a' * 1000 }}")) == "a" * 1000
    assert pid_of(hasty) != first


def test_a_process_that_was_killed_between_two_jobs_is_replaced(worker: Worker) -> None:
    assert worker.ask(job("a")) == "a"
    os.kill(pid_of(worker), signal.SIGKILL)
    assert ends(pid_of(worker))
    assert worker.ask(job("b")) == "b"


def test_a_process_that_is_killed_as_it_starts_is_replaced(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its prelude finds its end, and the job goes to the next one, which is kept."""
    started = []

    def start(library: Library, memory_bytes: int) -> ChildProcess:
        child = ChildProcess(library, memory_bytes)
        started.append(child)
        if len(started) == 1:
            os.kill(child.process.pid, signal.SIGKILL)
            assert ends(child.process.pid)
        return child

    monkeypatch.setattr(module, "ChildProcess", start)
    worker = Worker(prelude=job("a"))
    assert worker.ask(job("b")) == "b"
    assert worker.ask(job("c")) == "c"
    assert len(started) == 2


def test_an_interrupt_leaves_no_reply_behind(
    worker: Worker, monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupted(*_: object) -> dict[str, Any]:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(Worker, "_receive", interrupted)
        with pytest.raises(KeyboardInterrupt):
            worker.ask(job("old"))
    assert worker.ask(job("new")) == "new"


def test_a_submitted_job_does_not_delay_or_lose_replies(hasty: Worker) -> None:
    hasty.submit({"do": "compile", "source": "{% if %}"})
    hasty.submit({"do": "compile", "source": "a"})
    assert hasty.ask(job("a")) == "a"
    hasty.submit(job(ENDLESS))
    with pytest.raises(WorkerError) as caught:
        hasty.ask(job("a"))
    assert caught.value.kind == "time"
    assert hasty.ask(job("a")) == "a"


def test_the_process_ends_with_its_worker() -> None:
    worker = Worker()
    worker.ask(job("a"))
    pid = pid_of(worker)
    del worker
    gc.collect()
    assert ends(pid)


@pytest.mark.parametrize("begin", ["submit", "ask"])
def test_an_interrupt_leaves_no_half_line_behind(
    begin: str, worker: Worker, monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupted(self: Worker, line: bytes) -> None:
        assert self._child is not None
        self._child.input.write(line[:9])
        self._child.input.flush()
        raise KeyboardInterrupt

    assert worker.ask(job("old")) == "old"
    with monkeypatch.context() as patch:
        patch.setattr(Worker, "_send", interrupted)
        with pytest.raises(KeyboardInterrupt):
            getattr(worker, begin)(job("old"))
    assert worker.ask(job("new")) == "new"


@pytest.mark.parametrize("source", ["a", ENDLESS], ids=["idle", "busy"])
def test_the_process_ends_when_its_parent_is_killed(source: str) -> None:
    code = (
        "from lowbit.formats.text.worker import Worker\n"
        "worker = Worker(seconds=1.0)\n"
        f"worker.submit({job(source)!r})\n"
        "print(worker._child.process.pid, flush=True)\n"
        "input()\n"
    )
    pipe = subprocess.PIPE
    with subprocess.Popen([sys.executable, "-c", code], stdin=pipe, stdout=pipe) as parent:
        assert parent.stdout is not None
        pid = int(parent.stdout.readline())
        parent.kill()
    assert ends(pid)


def test_a_system_that_starts_no_process_is_an_error_with_advice(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(sys, "executable", str(tmp_path / "none"))
    with pytest.raises(ResourceError, match="no process can be started: No such file") as caught:
        Worker().ask(job("a"))
    assert "ulimit" in (caught.value.hint or "")


def test_the_process_inherits_no_secrets(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_TOKEN", "hf_secret")
    monkeypatch.setenv("TZ", "Asia/Tokyo")
    worker = Worker()
    worker.ask(job("a"))
    process = Path("/proc") / str(pid_of(worker))
    names = {entry.split(b"=")[0] for entry in (process / "environ").read_bytes().split(b"\0")}
    assert b"TZ" in names
    assert names <= {b"", b"TZ", b"LANG", b"LC_ALL", b"LC_CTYPE", b"LC_TIME"} | {
        b"LD_LIBRARY_PATH",
        b"DYLD_LIBRARY_PATH",
        b"TOKENIZERS_PARALLELISM",
    }
    assert (process / "cwd").resolve() == Path("/")
    limits = (process / "limits").read_text()
    assert f"Max address space         {worker.memory_bytes}" in limits
    assert "Max file size             0" in limits


@contextmanager
def hurried(stopped: int, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Do not wait for a process that is silent."""
    real = child_process.wait_for
    pipes = {Path(f"/proc/{stopped}/fd/{number}").stat().st_ino for number in (0, 1)}

    def wait_for(pipe: IO[bytes], event: int, seconds: float) -> None:
        assert seconds > child_process.SILENT_S
        hurry = os.fstat(pipe.fileno()).st_ino in pipes
        real(pipe, event, 0.0 if hurry else seconds)

    with monkeypatch.context() as patch:
        patch.setattr(child_process, "wait_for", wait_for)
        yield


def stop(pid: int) -> None:
    os.kill(pid, signal.SIGSTOP)
    os.waitid(os.P_PID, pid, os.WSTOPPED)


@pytest.mark.parametrize("length", [1, 1 << 20], ids=["short", "longer than a pipe"])
def test_a_process_that_is_stopped_is_replaced(
    length: int, worker: Worker, monkeypatch: pytest.MonkeyPatch
) -> None:
    text = "a" * length
    asked = {**job("{{ text }}", length), "values": {"text": text}}
    for begun in (False, True):
        assert worker.ask(job("a")) == "a"
        first = pid_of(worker)
        stop(first)
        with hurried(first, monkeypatch):
            if begun:
                worker.submit(asked)
            assert worker.ask(asked) == text
        assert ends(first)


def test_a_process_that_is_stopped_twice_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    started = []

    def start(library: Library, memory_bytes: int) -> ChildProcess:
        child = ChildProcess(library, memory_bytes)
        stop(child.process.pid)
        started.append(child.process.pid)
        return child

    monkeypatch.setattr(module, "ChildProcess", start)
    monkeypatch.setattr(module, "SILENT_S", -5.0)
    worker = Worker(seconds=5.0)
    with pytest.raises(ResourceError, match=r"ended or stopped from outside twice \(no answer\)"):
        worker.ask(job("a"))
    assert len(started) == 2
    assert all(map(ends, started))


def test_jobs_must_be_json(worker: Worker) -> None:
    with pytest.raises(TypeError, match="not JSON serializable"):
        worker.ask({**job("a"), "values": {"messages": {1, 2}}})
    assert worker.ask(job("a")) == "a"
