"""A child whose jobs an event loop awaits: order, limits, other threads, ends of the child."""

import asyncio
import os
import re
import signal
import subprocess
import sys
from collections.abc import Callable, Coroutine, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from lowbit.formats.errors import ResourceError
from lowbit.formats.text import child_process
from lowbit.formats.text.child_process import (
    MEMORY_BYTES,
    SECONDS,
    SILENT_S,
    Library,
    WorkerError,
    line_of,
    start_child,
)
from lowbit.formats.text.job_queue import JobQueue
from lowbit.formats.text.worker import Worker, blocking
from tests.lanes import in_commands

ENDLESS = "{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}"


def job(source: str, most: int = 10**7) -> dict[str, Any]:
    return {"do": "render", "source": source, "values": {}, "most": most}


def run(
    work: Callable[[JobQueue], Coroutine[Any, Any, None]],
    seconds: float = SECONDS,
    library: Library = "jinja2",
) -> None:
    async def closing() -> None:
        queue = JobQueue(seconds, MEMORY_BYTES, library)
        try:
            await asyncio.wait_for(work(queue), 60)  # a job without an answer would hang
        finally:
            queue.close()

    asyncio.run(closing())


async def kinds(queue: JobQueue, *sources: str) -> list[str]:
    """Results of jobs that are asked for together, or the kinds of their errors."""
    asked = (queue.ask(job(source, 1000)) for source in sources)
    found = await asyncio.gather(*asked, return_exceptions=True)
    return [each.kind if isinstance(each, WorkerError) else str(each) for each in found]


def pid_of(queue: JobQueue) -> int:
    assert queue._child is not None
    return queue._child.process.pid


async def ask_stopped(queue: JobQueue, *sources: str) -> tuple[int, asyncio.Future[list[str]]]:
    """Ask a child that is stopped, so that it has a job at hand; its id, and the `kinds`."""
    child = pid_of(queue)
    os.kill(child, signal.SIGSTOP)
    os.waitid(os.P_PID, child, os.WSTOPPED)
    asked = asyncio.ensure_future(kinds(queue, *sources))
    while len(queue._jobs) < len(sources):
        await asyncio.sleep(0)
    return child, asked


def hurry(queue: JobQueue) -> None:
    """Give the endless jobs a tenth of a second, once another child begins them."""
    for each in queue._jobs:
        if ENDLESS.encode() in each.line:
            each.line = line_of(job(ENDLESS, 1000), 0.1)


def test_jobs_are_answered_in_their_order() -> None:
    async def work(queue: JobQueue) -> None:
        queue.prepare({"do": "compile", "source": "{% if %}"})  # its failure is nobody's
        found = await kinds(queue, "{{ 1 + 1 }}", "{% if %}", "{{ 1 / 0 }}", "{{ 'ab' * 501 }}")
        assert found == ["2", "syntax", "failed", "output"]
        numbers = [str(number) for number in range(200)]
        assert await kinds(queue, *numbers) == numbers

    run(work)


def test_jobs_behind_one_that_ends_the_child_go_to_another() -> None:
    async def work(queue: JobQueue) -> None:
        [first] = await kinds(queue, "first")
        child = pid_of(queue)
        assert await kinds(queue, "a", ENDLESS, "b", ENDLESS, "c") == [
            "a",
            "time",
            "b",
            "time",
            "c",
        ]
        assert first == "first"
        assert pid_of(queue) != child

    run(work, seconds=0.3)


def test_a_child_that_was_killed_between_two_jobs_is_replaced() -> None:
    async def work(queue: JobQueue) -> None:
        assert await kinds(queue, "a") == ["a"]
        os.kill(pid_of(queue), signal.SIGKILL)
        os.waitid(os.P_PID, pid_of(queue), os.WEXITED | os.WNOWAIT)
        assert await kinds(queue, "b") == ["b"]

    run(work)


BEGIN = "import os, resource, signal; resource.setrlimit(resource.RLIMIT_CORE, (0, 0)); "
READY = "print('{}', flush=True); input(); "


@contextmanager
def children(
    monkeypatch: pytest.MonkeyPatch, *codes: str, ready: bool = True
) -> Iterator[list[int]]:
    """Children that run some code when they get a job, and then usual ones; their ids.

    With `ready` false they run it at once.
    """
    pids: list[int] = []
    left = list(codes)

    def start(library: Library, memory_bytes: int) -> subprocess.Popen[bytes]:
        if left:
            code = BEGIN + (READY if ready else "") + left.pop(0)
            command = [sys.executable, "-I", "-S", "-c", code]
            child = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
        else:
            child = start_child(library, memory_bytes)
        pids.append(child.pid)
        return child

    with monkeypatch.context() as patch:
        patch.setattr(child_process, "start_child", start)
        yield pids


def dying(name: str) -> str:
    default = "" if name == "SIGKILL" else f"signal.signal(signal.{name}, signal.SIG_DFL); "
    return f"{default}os.kill(os.getpid(), signal.{name})"


def ticks_of(pid: int) -> int:
    """Time that a process has computed, in hundredths of a second."""
    return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[11])


OUTSIDE = ("SIGKILL", "SIGTERM", "SIGINT", "SIGHUP", "SIGQUIT")
OWN = ("SIGABRT", "SIGSEGV", "SIGBUS", "SIGILL", "SIGFPE", "SIGXFSZ", "SIGXCPU", "SIGSYS")
TWICE = "the process that runs jinja2 was ended or stopped from outside twice (SIGKILL)"


@in_commands("SIGKILL")
@pytest.mark.parametrize("name", OUTSIDE[:2])
def test_a_job_whose_child_was_killed_is_done_by_another(name: str) -> None:
    async def work(queue: JobQueue) -> None:
        assert await kinds(queue, "a") == ["a"]
        child, asked = await ask_stopped(queue, "b", "c", ENDLESS, "d")
        hurry(queue)
        os.kill(child, signal.Signals[name])
        os.kill(child, signal.SIGCONT)  # which a process that is stopped needs for others to come
        assert await asked == ["b", "c", "time", "d"]

    run(work)


@in_commands("SIGTERM")
@pytest.mark.parametrize("name", OUTSIDE[:2])
def test_a_job_that_runs_is_begun_again(name: str) -> None:
    async def work(queue: JobQueue) -> None:
        first, endless = (asyncio.ensure_future(kinds(queue, each)) for each in ("a", ENDLESS))
        assert await first == ["a"]
        child = pid_of(queue)
        before = ticks_of(child)
        while ticks_of(child) < before + 5:  # it is at work
            await asyncio.sleep(0)
        hurry(queue)
        os.kill(child, signal.Signals[name])
        assert await endless == ["time"]
        assert queue._child is None or pid_of(queue) != child

    run(work)


@in_commands("SIGHUP", "SIGQUIT")
@pytest.mark.parametrize("name", OUTSIDE)
def test_every_signal_from_outside_is_no_fault_of_the_job(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def work(queue: JobQueue) -> None:
        assert await kinds(queue, "a", "b") == ["a", "b"]

    with children(monkeypatch, dying(name)) as pids:
        run(work)
        assert len(pids) == 2
    for prelude in (None, job("p")):
        with children(monkeypatch, dying(name)) as pids:
            assert Worker(prelude=prelude).ask(job("a")) == "a"
            assert len(pids) == 2


@in_commands("SIGILL", "SIGFPE", "SIGSYS", "SIGBUS")
@pytest.mark.parametrize("name", [*OWN, "SIGPROF", ""])
def test_an_end_that_limits_explain_is_a_fault_of_the_job(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    kind = "time" if name == "SIGPROF" else "died"

    async def work(queue: JobQueue) -> None:
        assert await kinds(queue, "a", "b") == [kind, "b"]

    with children(monkeypatch, dying(name) if name else "os._exit(0)") as pids:
        run(work)
        assert len(pids) == 2
    with children(monkeypatch, dying(name) if name else "os._exit(0)") as pids:
        with pytest.raises(WorkerError) as caught:
            Worker().ask(job("a"))
        assert (caught.value.kind, len(pids)) == (kind, 1)


def test_a_job_is_done_once_more_and_not_again(monkeypatch: pytest.MonkeyPatch) -> None:
    async def work(queue: JobQueue) -> None:
        assert await kinds(queue, "a", "b", "c") == [TWICE, "b", "c"]
        with pytest.raises(WorkerError, match="division"):
            await queue.ask(job("{{ 1 / 0 }}"))

    with children(monkeypatch, *[dying("SIGKILL")] * 3) as pids:
        run(work)
        assert len(pids) == 4
    with children(monkeypatch, *[dying("SIGKILL")] * 3) as pids:
        worker = Worker()
        with pytest.raises(ResourceError) as caught:
            worker.ask(job("a"))
        assert (str(caught.value), len(pids)) == (TWICE, 2)
        assert worker.ask(job("b")) == "b"
    with children(monkeypatch, dying("SIGKILL"), dying("SIGABRT")), pytest.raises(WorkerError):
        Worker().ask(job("a"))


def test_nobody_waits_for_a_killed_job_that_was_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    async def work(queue: JobQueue) -> None:
        given_up = asyncio.ensure_future(queue.ask(job("a")))
        later = asyncio.ensure_future(queue.ask(job("b")))
        await asyncio.sleep(0)
        given_up.cancel()
        assert await later == "b"

    with children(monkeypatch, dying("SIGKILL")) as pids:
        run(work)
        assert len(pids) == 2


@pytest.mark.parametrize("late_s", [0.0, 2 * SILENT_S])
def test_a_child_that_is_stopped_is_replaced(
    late_s: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its jobs are done by another child, the one that it has at hand, too."""

    async def work(queue: JobQueue) -> None:
        loop = asyncio.get_running_loop()
        time = loop.time
        assert await kinds(queue, "a") == ["a"]
        monkeypatch.setattr(loop, "time", lambda: time() + late_s)  # another job, much later
        child, asked = await ask_stopped(queue, "b", "c")
        before_s = late_s + SECONDS
        monkeypatch.setattr(loop, "time", lambda: time() + before_s)
        for _ in range(3):
            await asyncio.sleep(0)
        assert pid_of(queue) == child
        after_s = before_s + 2 * SILENT_S
        monkeypatch.setattr(loop, "time", lambda: time() + after_s)
        assert await asked == ["b", "c"]
        assert pid_of(queue) != child

    run(work)


def test_time_for_which_a_child_is_stopped_does_not_count() -> None:
    """Its job goes on afterwards, and has the rest of its time."""
    seconds = 0.2

    async def work(queue: JobQueue) -> None:
        loop = asyncio.get_running_loop()
        assert await kinds(queue, "a") == ["a"]
        child = pid_of(queue)
        asked = asyncio.ensure_future(kinds(queue, ENDLESS))
        before = ticks_of(child)
        while ticks_of(child) == before:  # it is at work
            await asyncio.sleep(0)
        os.kill(child, signal.SIGSTOP)
        os.waitid(os.P_PID, child, os.WSTOPPED)
        done, stopped = ticks_of(child), loop.time()
        while loop.time() < stopped + seconds:
            await asyncio.sleep(0)
        os.kill(child, signal.SIGCONT)
        while ticks_of(child) < done + 2:  # a child that has ended computes no more
            assert not asked.done()
            await asyncio.sleep(0)
        assert await asked == ["time"]

    run(work, seconds)


def test_jobs_and_results_may_be_larger_than_a_pipe() -> None:
    text = "äx" * 300_000

    async def work(queue: JobQueue) -> None:
        asked = [queue.ask({**job("{{ text }}" + str(n)), "values": {"text": text}}) for n in "ab"]
        assert await asyncio.gather(*asked) == [text + "a", text + "b"]

    run(work)


def test_nobody_waits_for_a_job_that_was_given_up() -> None:
    async def work(queue: JobQueue) -> None:
        given_up = asyncio.ensure_future(queue.ask(job("a")))
        later = asyncio.ensure_future(queue.ask(job("b")))
        await asyncio.sleep(0)
        given_up.cancel()
        assert await later == "b"

    run(work)


def test_other_threads_ask_too() -> None:
    async def work(queue: JobQueue) -> None:
        loop, ask = asyncio.get_running_loop(), blocking(queue.ask_from_thread)
        with ThreadPoolExecutor(4) as threads:
            asked = [loop.run_in_executor(threads, ask, job(f"{n}")) for n in range(40)]
            assert await asyncio.gather(*asked) == [str(n) for n in range(40)]
            with pytest.raises(WorkerError, match="division"):
                await loop.run_in_executor(threads, ask, job("{{ 1 / 0 }}"))
            with pytest.raises(TypeError):
                await loop.run_in_executor(threads, ask, {"values": object()})

    run(work)


def test_the_end_of_the_queue_ends_all_jobs() -> None:
    async def work(queue: JobQueue) -> None:
        loop, ask = asyncio.get_running_loop(), blocking(queue.ask_from_thread)
        with ThreadPoolExecutor(1) as threads:
            waiting = asyncio.ensure_future(queue.ask(job(ENDLESS)))
            beside = loop.run_in_executor(threads, ask, job("b"))
            while len(queue._jobs) < 2:
                await asyncio.sleep(0)
            child = queue._child
            queue.close()
            for each in (waiting, beside, queue.ask(job("c"))):
                with pytest.raises(ResourceError, match="has been ended"):
                    await each
            with pytest.raises(ResourceError, match="has been ended"):
                await loop.run_in_executor(threads, ask, job("d"))
        assert child is not None
        assert child.process.returncode is not None

    run(work)


def test_a_library_that_cannot_be_imported_is_an_error_of_every_job(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("lowbit.formats.text.child_process.sys.path", [])

    async def work(queue: JobQueue) -> None:
        for found in await kinds(queue, "a", "b"):
            assert found.startswith("the process that runs tokenizers cannot start: ")

    run(work, library="tokenizers")


@in_commands("terminated")
@pytest.mark.parametrize(
    ("codes", "first"),
    [
        ([dying("SIGKILL")], "a"),
        ([dying("SIGTERM")], "a"),
        ([dying("SIGKILL")] * 2, TWICE),
        ([dying("SIGSEGV")], "the process that runs jinja2 cannot start: SIGSEGV"),
        (["os._exit(3)"], "the process that runs jinja2 cannot start: exit code 3"),
    ],
    ids=["killed", "terminated", "killed twice", "crash", "exit"],
)
def test_a_child_that_ends_before_it_is_ready_is_replaced(
    codes: list[str], first: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def work(queue: JobQueue) -> None:
        assert await kinds(queue, "a", "b", "c") == [first, "b", "c"]

    with children(monkeypatch, *codes, ready=False) as pids:
        run(work)
        assert len(pids) == len(codes) + 1
    for prelude in (None, job("p")):
        worker = Worker(prelude=prelude)
        with children(monkeypatch, *codes, ready=False):
            if first == "a":
                assert worker.ask(job("a")) == "a"
            else:
                with pytest.raises(ResourceError, match=re.escape(first)):
                    worker.ask(job("a"))
            assert worker.ask(job("b")) == "b"


def test_a_coroutine_that_waits_is_no_blocking_function() -> None:
    with pytest.raises(RuntimeError, match="sleep waits"):
        blocking(asyncio.sleep)(0.0)


def test_a_copy_of_a_process_that_was_killed_is_no_fault_of_the_job(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The process itself says how the copy that tries a grammar has ended."""
    ends = iter(("SIGKILL", "SIGSEGV", "SIGKILL", "SIGKILL"))
    monkeypatch.setattr(Worker, "_reply", lambda *_: {"error": "died", "message": next(ends)})
    with pytest.raises(WorkerError, match="SIGSEGV") as caught:
        Worker().ask(job("a"))
    assert caught.value.kind == "died"
    with pytest.raises(ResourceError, match="from outside twice"):
        Worker().ask(job("a"))
