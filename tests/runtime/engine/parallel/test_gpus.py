"""A kernel that waits for a rank goes on once that has ended or stays away; nothing counts then."""

from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from lowbit.runtime.engine.parallel import gpus, members
from lowbit.runtime.engine.parallel.gpus import Watch

WAIT_S = 30.0


@dataclass
class Process:
    code: int | None = None
    looked: list[int] = field(default_factory=list)

    def poll(self) -> int | None:
        self.looked.append(1)
        return self.code


def rank(number: int, process: Process, stopped: bool = False) -> Any:
    return SimpleNamespace(rank=number, process=process, stopped=stopped)


@pytest.fixture(autouse=True)
def _short_looks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gpus, "LOOK_S", 0.001)


def test_one_that_has_ended() -> None:
    aborted = torch.zeros(1, dtype=torch.int32)
    watch = Watch([rank(1, Process()), rank(2, Process(-9))], aborted)
    watch.thread.join(WAIT_S)
    assert watch.aborted
    assert aborted.tolist() == [1]


def test_one_that_stays_away(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gpus, "EXCHANGE_S", -1.0)
    watch = Watch([rank(1, Process())], torch.zeros(1, dtype=torch.int32))
    with watch.waiting():
        watch.thread.join(WAIT_S)
    assert watch.aborted


def test_one_that_is_stopped(monkeypatch: pytest.MonkeyPatch) -> None:
    """It may be, as long as nobody waits for it."""
    monkeypatch.setattr(members, "STOPPED_S", 0.002)
    process = Process()
    watch = Watch([rank(1, process, stopped=True)], torch.zeros(1, dtype=torch.int32))
    while len(process.looked) < 5:
        assert not watch.aborted
    with watch.waiting():
        watch.thread.join(WAIT_S)
    assert watch.aborted


def test_nothing_is_aborted_while_all_is_well() -> None:
    process = Process()
    watch = Watch([rank(1, process)], torch.zeros(1, dtype=torch.int32))
    while not process.looked:
        with watch.waiting():
            pass
    watch.closed.set()
    watch.thread.join(WAIT_S)
    assert not watch.thread.is_alive()
    assert not watch.aborted


def test_processes_of_a_cpu_share_no_memory_of_gpus() -> None:
    setup = SimpleNamespace(devices=())
    assert gpus.meet_gpus(setup, None) is None  # type: ignore[arg-type]
