"""Processes that end, fail or say nothing end all ranks with one message; none is left."""

import gc
import multiprocessing
import os
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from multiprocessing.connection import Connection
from pathlib import Path
from queue import SimpleQueue
from socket import socketpair
from threading import Event
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from lowbit.formats.errors import LowbitError, ResourceError
from lowbit.formats.kv_cache import FP32_CACHE
from lowbit.runtime.backends.exchange import PartedError
from lowbit.runtime.engine.load_options import LoadOptions
from lowbit.runtime.engine.parallel import crew as crews
from lowbit.runtime.engine.parallel import members as each_member
from lowbit.runtime.engine.parallel.crew import Crew, load_shared, start_crew
from lowbit.runtime.engine.parallel.members import DOING, Member
from lowbit.runtime.engine.parallel.messages import Arrived, Failed, Setup, encoded
from lowbit.runtime.models.shared_decoder import DropPass
from lowbit.runtime.state.device_state import CacheSize
from lowbit.runtime.weights.share import Share

WAITS = "import sys; sys.stdin.read()"
READS = (
    "import sys; from multiprocessing.connection import Connection as C;"
    "c = C(int(sys.argv[1]))\ntry:\n  while c.recv_bytes(): pass\nexcept EOFError: pass"
)
SENDS = (
    "import sys; from multiprocessing.connection import Connection as C;"
    "c = C(int(sys.argv[1])); c.send_bytes(bytes.fromhex(sys.argv[2])); "
)
TASK = DropPass(0)
WAIT_S = 20.0  # at most, where nothing is wrong
SHARD: Any = None  # that no test reads
CACHE = CacheSize(context=64, sequences=2, pages=4, snapshots=0)
SETUP = Setup(Path("gone"), LoadOptions(), Share(0, 2), Path(), torch.float32, CACHE, FP32_CACHE, 1)


class NoExchange:
    share = Share(0, 2)

    def total(self, partial: Tensor) -> Tensor:
        raise PartedError("another rank does not answer")

    def side_by_side(self, part: Tensor, widths: tuple[int, ...]) -> Tensor:
        raise PartedError("another rank does not answer")


@pytest.fixture(autouse=True)
def _short_waits(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(crews, "EXCHANGE_S", 0.1)


@pytest.fixture
def member() -> Iterator[Callable[..., Member]]:
    """`member(code, message)` is a process that runs some Python, a message in its arguments."""
    made: list[Member] = []

    def start(code: str, message: object = None) -> Member:
        ours, theirs = socketpair()
        with theirs:
            number = theirs.fileno()
            command = [sys.executable, "-S", "-c", code, str(number), encoded(message).hex()]
            process = subprocess.Popen(command, pass_fds=[number], stdin=subprocess.PIPE)
        made.append(Member(1 + len(made), process, Connection(ours.detach())))
        return made[-1]

    yield start
    for each in made:
        each.process.kill()
        each.process.communicate()


def fails() -> None:
    NoExchange().total(torch.zeros(1))


def test_a_task_is_sent_and_done(member: Callable[..., Member]) -> None:
    crew = Crew([member(READS)], NoExchange(), 1)
    assert crew.run(TASK, lambda: 5) == 5
    assert crew.run(TASK, torch.is_inference_mode_enabled)
    assert crew.problem is None
    crew.close()


def test_a_killed_process_is_named_and_ends_all(member: Callable[..., Member]) -> None:
    first, second = member(WAITS), member(WAITS)
    crew = Crew([first, second], NoExchange(), 1)
    second.process.kill()
    with pytest.raises(
        ResourceError, match=r"rank 2 \(process \d+\) ended while starting: signal SIGKILL"
    ) as found:
        crew.run(TASK, fails)
    assert found.value.hint is not None
    assert crew.problem is not None
    assert first.ending() == "signal SIGKILL"
    with pytest.raises(ResourceError, match=r"rank 2 \(process \d+\) ended"):
        crew.run(TASK, lambda: 5)


def test_what_a_gpu_has_left_behind_a_lost_rank_does_not_count(
    member: Callable[..., Member],
) -> None:
    peers: Any = SimpleNamespace(aborted=torch.zeros(1, dtype=torch.int32))
    lost = member(WAITS)
    crew = Crew([lost], NoExchange(), 1, peers)
    with crew.waiting():
        pass
    lost.process.kill()
    ended = r"rank 1 \(process \d+\) ended while .*: signal SIGKILL"
    with pytest.raises(ResourceError, match=ended), crew.waiting():
        peers.aborted.fill_(1)  # as the watch does
    with pytest.raises(ResourceError, match=ended):
        crew.run(TASK, lambda: 5)
    crew.close()


def test_a_process_that_fails_says_why(member: Callable[..., Member]) -> None:
    failing = member(SENDS, Failed("`model_norm` holds NaN or Inf", "download it again"))
    crew = Crew([member(WAITS), failing], NoExchange(), 1)
    failing.process.wait()
    with pytest.raises(
        ResourceError, match=r"rank 1 \(process \d+\) failed: `model_norm` holds"
    ) as found:
        crew.run(TASK, fails)
    assert found.value.hint == "download it again"


def test_whoever_looks_hears_why_a_process_has_ended(member: Callable[..., Member]) -> None:
    """As the task does, whichever comes first; all others end."""
    failing, other = member(SENDS, Failed("`model_norm` holds NaN")), member(WAITS)
    crew = Crew([other, failing], NoExchange(), 1)
    failing.process.wait()
    assert str(crew.problem) == f"{failing} failed: `model_norm` holds NaN"
    assert other.ending() == "signal SIGKILL"
    with pytest.raises(ResourceError, match="`model_norm` holds NaN"):
        crew.run(TASK, lambda: 5)


def test_whoever_looks_hears_of_the_killed_process_first(member: Callable[..., Member]) -> None:
    """The others end for want of it."""
    ending, killed = member("import sys; sys.exit(1)"), member(WAITS)
    crew = Crew([ending, killed], NoExchange(), 1)
    killed.process.kill()
    for each in crew.members:
        each.process.wait()
    assert str(crew.problem) == f"{killed} ended while starting: signal SIGKILL"


def test_a_process_that_does_not_answer_is_no_hang(
    member: Callable[..., Member], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(crews, "ENDING_S", 0.05)
    hanging = member(WAITS)
    crew = Crew([hanging], NoExchange(), 1)
    with pytest.raises(ResourceError, match="a rank has not answered"):
        crew.run(TASK, fails)
    hanging.process.wait()


def test_an_error_of_the_first_rank_ends_all(member: Callable[..., Member]) -> None:
    crew = Crew([member(WAITS)], NoExchange(), 1)

    def work() -> None:
        raise MemoryError

    with pytest.raises(LowbitError, match="the memory of this machine is used up"):
        crew.run(TASK, work)
    assert crew.members[0].ending() == "signal SIGKILL"


def test_a_bug_of_the_first_rank_ends_all(member: Callable[..., Member]) -> None:
    crew = Crew([member(WAITS)], NoExchange(), 1)
    with pytest.raises(LowbitError, match="a step of rank 0 failed: ZeroDivisionError"):
        crew.run(TASK, lambda: 1 // 0)


def test_one_that_ends_while_it_loads(member: Callable[..., Member]) -> None:
    arrived = f"{SENDS} c.poll(None)"
    crew = Crew([member(arrived, Arrived()), member("import sys; sys.exit(3)")], NoExchange(), 1)
    with pytest.raises(
        ResourceError, match=r"rank 2 \(process \d+\) ended while starting: exit status 3"
    ):
        crew.wait()
    crew.close()


def test_processes_end_with_the_crew(member: Callable[..., Member]) -> None:
    """Each reads its socket, which closes."""
    each = member(READS)
    crew = Crew([each], NoExchange(), 1)
    del crew
    gc.collect()
    assert each.process.poll() == 0


def test_one_that_does_not_end_is_killed(
    member: Callable[..., Member], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(crews, "ENDING_S", 0.05)
    each = member(WAITS)
    Crew([each], NoExchange(), 1).close()
    assert each.process.poll() == -signal.SIGKILL


def test_a_closed_crew_runs_nothing(member: Callable[..., Member]) -> None:
    crew = Crew([member(READS)], NoExchange(), 1)
    crew.close()
    crew.close()
    with pytest.raises(ResourceError, match="the model is closed"):
        crew.run(TASK, lambda: 5)


def test_one_that_is_closed_in_a_task(member: Callable[..., Member]) -> None:
    """Its links are closed under way, which is no lost rank."""
    crew = Crew([member(READS)], NoExchange(), 1)

    def work() -> None:
        crew.close()
        fails()

    with pytest.raises(ResourceError, match="the model is closed"):
        crew.run(TASK, work)


def test_a_fork_cannot_run_it(
    member: Callable[..., Member], monkeypatch: pytest.MonkeyPatch
) -> None:
    """There, the thread that takes tasks is none that runs."""
    crew = Crew([member(READS)], NoExchange(), 1)
    monkeypatch.setattr(crew, "_jobs", SimpleQueue())
    monkeypatch.setattr(crew._worker, "is_alive", lambda: False)
    with pytest.raises(ResourceError, match="a fork of the process"):
        crew.run(TASK, lambda: 5)
    crew.close()


@pytest.mark.filterwarnings("ignore:This process .* is multi-threaded:DeprecationWarning")
def test_a_fork_lets_go_of_it_alone(member: Callable[..., Member]) -> None:
    """However it ends."""
    crew = Crew([member(READS)], NoExchange(), 1)
    fork = multiprocessing.get_context("fork").Process(target=crew.close)
    fork.start()
    fork.join(WAIT_S)
    assert fork.exitcode == 0
    assert crew.run(TASK, lambda: 5) == 5
    assert crew.problem is None
    crew.close()


def test_an_interrupted_end_leaves_no_process(
    member: Callable[..., Member], monkeypatch: pytest.MonkeyPatch
) -> None:
    each = member(WAITS)
    crew = Crew([each], NoExchange(), 1)
    waits = each.process.wait

    def interrupted(timeout: float | None = None) -> int:
        if timeout is not None:
            raise KeyboardInterrupt
        return waits()

    monkeypatch.setattr(each.process, "wait", interrupted)
    with pytest.raises(KeyboardInterrupt):
        crew.close()
    assert each.process.poll() == -signal.SIGKILL


def test_one_that_was_stopped_in_a_step_is_named(
    member: Callable[..., Member], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(crews, "ENDING_S", 0.05)
    first, second = member(WAITS), member(WAITS)
    crew = Crew([first, second], NoExchange(), 1)
    second.process.send_signal(signal.SIGSTOP)
    os.waitid(os.P_PID, second.process.pid, os.WSTOPPED | os.WNOWAIT)
    with pytest.raises(ResourceError, match=r"rank 2 \(process \d+\) was stopped"):
        crew.run(TASK, fails)
    crew.close()


def test_one_that_stays_stopped_in_a_step_ends_all(
    member: Callable[..., Member], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Long before an exchange gives up; the task ends with that process."""
    monkeypatch.setattr(crews, "LOOK_S", 0.01)
    monkeypatch.setattr(each_member, "STOPPED_S", 0.05)
    other, stopped = member(READS), member(READS)
    crew = Crew([other, stopped], NoExchange(), 1)
    stopped.process.send_signal(signal.SIGSTOP)

    def exchange() -> None:
        stopped.process.wait(WAIT_S)
        fails()

    with pytest.raises(ResourceError, match=rf"rank 2 .* was stopped while {DOING[0]}$") as found:
        crew.run(TASK, exchange)
    assert "debugger" in str(found.value.hint)
    assert str(crew.problem) == str(found.value)
    crew.close()


@pytest.fixture
def arrived(monkeypatch: pytest.MonkeyPatch, member: Callable[..., Member]) -> list[Member]:
    """The members that `start_crew` starts: one, which arrives and never meets.

    Nor does it look at its socket: on a busy machine it would end by itself before it is killed.
    """
    started: list[Member] = []

    def start(setup: Setup) -> Member:
        started.append(member(f"{SENDS} {WAITS}", Arrived()))
        return started[-1]

    monkeypatch.setattr(crews, "_start", start)
    return started


def test_a_folder_that_is_removed_while_ranks_meet(
    arrived: list[Member], monkeypatch: pytest.MonkeyPatch
) -> None:
    hangs = Event()

    def meet(share: Share, store: Path, *seconds: float) -> None:
        shutil.rmtree(store.parent)
        hangs.wait(WAIT_S)  # as the store does

    monkeypatch.setattr(crews, "meet", meet)
    with pytest.raises(ResourceError, match="in which processes meet, was removed"):
        start_crew(SETUP)
    hangs.set()
    assert arrived[0].process.poll() == -signal.SIGKILL


def test_one_that_does_not_come_is_named(
    arrived: list[Member], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Both cases: this rank gives up first, or another does."""

    def meet(*_: object) -> None:
        raise PartedError("another rank has not come")

    monkeypatch.setattr(crews, "meet", meet)
    monkeypatch.setattr(crews, "MEET_S", 0.1)
    with pytest.raises(ResourceError, match=r"rank 1 .* has not .* while meeting the others"):
        start_crew(SETUP)
    assert arrived[0].process.poll() == -signal.SIGKILL


def test_a_full_folder_is_named_at_once(
    arrived: list[Member], monkeypatch: pytest.MonkeyPatch
) -> None:
    def meet(*_: object) -> None:
        raise ResourceError("cannot be written")

    monkeypatch.setattr(crews, "meet", meet)
    with pytest.raises(ResourceError, match="cannot be written"):
        start_crew(SETUP)


def test_one_that_ends_while_the_first_rank_reads_its_shard(
    member: Callable[..., Member], monkeypatch: pytest.MonkeyPatch
) -> None:
    """No rank reads to its end before that is said."""
    crew = Crew([member(WAITS)], NoExchange(), 1)
    crew.members[0].process.kill()
    crew.members[0].process.wait()
    read: list[str] = []

    def load(*_: object, progress: Callable[[str], None]) -> None:
        for module in ("first", "second"):
            progress(module)
            read.append(module)

    monkeypatch.setattr(crews, "start_crew", lambda setup: crew)
    monkeypatch.setattr(crews, "load_rank", load)
    with pytest.raises(ResourceError, match=r"rank 1 .* ended while starting: signal SIGKILL"):
        load_shared(SETUP, SHARD)
    assert not read
    assert not crew.close.alive


def test_no_place_to_meet(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "gone"))
    with pytest.raises(ResourceError, match="no temporary folder") as found:
        start_crew(SETUP)
    assert "TMPDIR" in str(found.value.hint)


def test_a_process_that_cannot_be_started(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "executable", "/gone/python")
    with pytest.raises(ResourceError, match="no process of rank 1 could be started"):
        start_crew(SETUP)
