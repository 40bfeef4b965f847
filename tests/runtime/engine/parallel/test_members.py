"""Waits for other ranks end, and say which one they waited for and what it did."""

import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from multiprocessing.connection import Connection
from pathlib import Path
from socket import socketpair
from types import SimpleNamespace
from typing import Any

import pytest

from lowbit.formats.errors import ResourceError
from lowbit.runtime.engine.parallel import members as each_member
from lowbit.runtime.engine.parallel.members import Member, Stops, look, wait_for
from lowbit.runtime.engine.parallel.messages import (
    Arrived,
    Failed,
    Met,
    Reading,
    Ready,
    encoded,
)

WAITS = [sys.executable, "-S", "-c", "import sys; sys.stdin.read()"]
LONG_S = 60.0


class Rank:
    """A process that waits, and a socket through which the test speaks for it."""

    def __init__(self, rank: int) -> None:
        ours, theirs = (Connection(end.detach()) for end in socketpair())
        self.process = subprocess.Popen(WAITS, stdin=subprocess.PIPE)
        self.link, self.member = theirs, Member(rank, self.process, ours)

    def says(self, *messages: object) -> None:
        for message in messages:
            self.link.send_bytes(encoded(message))

    def stop(self) -> None:
        self.process.send_signal(signal.SIGSTOP)
        os.waitid(os.P_PID, self.process.pid, os.WSTOPPED | os.WNOWAIT)

    def end(self) -> None:
        self.process.kill()
        self.process.wait()
        self.link.close()


@pytest.fixture
def rank() -> Iterator[Callable[[], Rank]]:
    made: list[Rank] = []

    def start() -> Rank:
        made.append(Rank(1 + len(made)))
        return made[-1]

    yield start
    for each in made:
        each.end()
        each.process.communicate()
        each.member.link.close()


def error_of(*ranks: Rank, message: type = Ready, patience_s: float = LONG_S) -> str:
    with pytest.raises(ResourceError) as found:
        wait_for([each.member for each in ranks], message, patience_s)
    assert found.value.hint
    return str(found.value)


def test_all_come_to_a_stage(rank: Callable[[], Rank]) -> None:
    first, second = rank(), rank()
    first.says(Arrived(), Met(), Reading("model.layers.0.mlp"))
    second.says(Arrived(), Met(), Ready())
    wait_for([first.member, second.member], Met, LONG_S)
    look([first.member])
    assert first.member.doing == "loading its shard, after `model.layers.0.mlp`"
    first.says(Ready())
    wait_for([first.member, second.member], Ready, LONG_S)
    assert first.member.doing == "running steps"


def test_a_member_may_be_stopped_for_a_while(monkeypatch: pytest.MonkeyPatch) -> None:
    """Looks count, each with its time; whoever goes on begins anew."""
    monkeypatch.setattr(each_member, "STOPPED_S", 3.0)
    each: Any = [SimpleNamespace(rank=1, stopped=False), SimpleNamespace(rank=2, stopped=False)]
    stops, found = Stops(), []
    for stopped in (True, True, False, True, True, True):
        each[1].stopped = stopped
        found.append(stops.find(each, 1.0))
    assert found == [None] * 5 + [each[1]]


@pytest.mark.parametrize(
    ("said", "doing"),
    [
        ((), "starting"),
        ((Arrived(),), "meeting the others"),
        ((Arrived(), Met()), "loading its shard"),
        ((Arrived(), Met(), Reading("x")), "loading its shard, after `x`"),
    ],
    ids=["starts", "meets", "loads", "reads"],
)
def test_one_that_is_stopped_is_named_at_every_stage(
    rank: Callable[[], Rank],
    monkeypatch: pytest.MonkeyPatch,
    said: tuple[object, ...],
    doing: str,
) -> None:
    monkeypatch.setattr(each_member, "STOPPED_S", 0.1)
    first, second = rank(), rank()
    first.says(Arrived(), Met(), Ready())
    second.says(*said)
    second.stop()
    assert error_of(first, second) == f"rank 2 (process {second.process.pid}) was stopped " + (
        f"while {doing}"
    )


def test_one_that_goes_on_is_waited_for(
    rank: Callable[[], Rank], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(each_member, "STOPPED_S", LONG_S)
    only, looks = rank(), iter(range(3))
    only.stop()

    def goes_on() -> bool:
        if next(looks) == 1:
            only.process.send_signal(signal.SIGCONT)
            only.says(Arrived())
        return only.member.stage == 1

    wait_for([only.member], Arrived, LONG_S, goes_on)


def test_one_that_runs_and_says_nothing_is_named(rank: Callable[[], Rank]) -> None:
    first, second = rank(), rank()
    first.says(Arrived(), Met(), Ready())
    second.says(Arrived(), Met())
    problem = error_of(first, second, patience_s=0.1)
    assert problem.startswith(f"rank 2 (process {second.process.pid}) has not answered for 0 s")
    assert problem.endswith("while loading its shard")


def test_one_that_ends_is_found_while_another_is_waited_for(rank: Callable[[], Rank]) -> None:
    """Whatever stage it has come to."""
    first, second = rank(), rank()
    second.says(Arrived(), Met(), Ready())
    second.end()
    pid = second.process.pid
    assert error_of(first, second) == (
        f"rank 2 (process {pid}) ended while running steps: signal SIGKILL"
    )


def test_one_that_fails_says_why(rank: Callable[[], Rank]) -> None:
    only = rank()
    only.says(Arrived(), Met(), Failed("`norm` holds NaN or Inf", "download it again"))
    pid = only.process.pid
    assert error_of(only) == f"rank 1 (process {pid}) failed: `norm` holds NaN or Inf"


def test_a_message_out_of_turn_ends_the_wait(
    rank: Callable[[], Rank], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(each_member, "ENDING_S", 0.01)
    only = rank()
    only.says(Ready())
    assert "ended while starting" in error_of(only)


def test_the_other_thing_may_fail(rank: Callable[[], Rank], tmp_path: Path) -> None:
    def gone() -> bool:
        raise ResourceError(f"`{tmp_path}` was removed")

    with pytest.raises(ResourceError, match="was removed"):
        wait_for([rank().member], Met, LONG_S, gone)


def test_a_process_of_somebody_else_is_not_stopped(rank: Callable[[], Rank]) -> None:
    """As a fork of the first rank sees it."""
    only = rank()
    only.end()
    assert not only.member.stopped
