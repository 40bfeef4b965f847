"""A kernel that waits for a rank goes on once that has ended or stays away; nothing counts then."""

from dataclasses import dataclass, field
from types import SimpleNamespace

import pytest
import torch

from lowbit.runtime.engine.parallel import gpus
from lowbit.runtime.engine.parallel.gpus import Watch

WAIT_S = 30.0


@dataclass
class Process:
    code: int | None = None
    looked: list[int] = field(default_factory=list)

    def poll(self) -> int | None:
        self.looked.append(1)
        return self.code


@pytest.fixture(autouse=True)
def _short_looks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gpus, "LOOK_S", 0.001)


def test_one_that_has_ended() -> None:
    aborted = torch.zeros(1, dtype=torch.int32)
    watch = Watch([Process(), Process(-9)], aborted)
    watch.thread.join(WAIT_S)
    assert watch.aborted
    assert aborted.tolist() == [1]


def test_one_that_stays_away(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gpus, "EXCHANGE_S", -1.0)
    watch = Watch([Process()], torch.zeros(1, dtype=torch.int32))
    with watch.waiting():
        watch.thread.join(WAIT_S)
    assert watch.aborted


def test_nothing_is_aborted_while_all_is_well() -> None:
    process = Process()
    watch = Watch([process], torch.zeros(1, dtype=torch.int32))
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
