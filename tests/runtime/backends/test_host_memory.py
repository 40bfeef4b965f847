"""Memory that processes share without a file, and what is said where it cannot be had."""

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from threading import Barrier
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from lowbit.formats.errors import ResourceError
from lowbit.runtime.backends import host_memory
from lowbit.runtime.backends.host_memory import Locked
from lowbit.runtime.weights.share import Share

pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="runs there as ranks do")
WAIT_S = 20.0


class Meeting:
    """Ranks as threads, which wait for each other."""

    def __init__(self, ranks: int) -> None:
        self.barrier = Barrier(ranks)

    def of(self, share: Share) -> Any:
        def total(partial: Tensor) -> Tensor:
            self.barrier.wait(WAIT_S)
            return partial

        return SimpleNamespace(share=share, total=total)


def open_files() -> set[str]:
    """Numbers of the files of this process."""
    return {path.name for path in Path("/proc/self/fd").iterdir()}


def driver(code: int, locked: list[int]) -> Any:
    """In place of CUDA's runtime."""

    def register(address: int, size: int, flags: int) -> int:
        locked.append(address)
        return code

    return SimpleNamespace(cudaHostRegister=register, cudaHostUnregister=locked.remove)


def test_all_ranks_see_the_same_bytes(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    locked: list[int] = []
    monkeypatch.setattr(torch.cuda, "cudart", lambda: driver(0, locked))
    monkeypatch.setattr(host_memory, "new_peers", lambda *given: SimpleNamespace(given=given))
    before, meeting = open_files(), Meeting(3)

    def work(rank: int) -> tuple[list[int], list[int], Locked]:
        found = host_memory.open_peers(meeting.of(Share(rank, 3)), (0, 1, 2), tmp_path / "at", 4096)
        share, own, addresses, device, values, lock = found.given  # type: ignore[attr-defined]
        assert (share.rank, device.index, values) == (rank, rank, 4096)
        own[:2] = torch.tensor([rank, 7])
        meeting.barrier.wait(WAIT_S)
        each = lock.memory.view(3, -1)
        assert [row.data_ptr() for row in each] == addresses
        return each[:, :3].flatten().tolist(), addresses, lock

    with ThreadPoolExecutor(3) as threads:
        found = list(threads.map(work, range(3)))
    assert [values for values, _, _ in found] == [[0, 7, 0, 1, 7, 0, 2, 7, 0]] * 3
    assert sorted(locked) == sorted(addresses[0] for _, addresses, _ in found)
    del found
    assert locked == []
    assert open_files() == before


def test_memory_that_cannot_be_locked(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "cudart", lambda: driver(2, []))
    with pytest.raises(ResourceError, match=r"8 MB of the host's memory .* CUDA error 2"):
        host_memory.Locked(torch.zeros(10**6, dtype=torch.int64))


def test_the_first_rank_is_gone(tmp_path: Path) -> None:
    (tmp_path / "at").write_text("/proc/0/fd/0")
    lone = SimpleNamespace(share=Share(1, 2), total=lambda partial: partial)
    with pytest.raises(ResourceError, match=r"cannot share 4 MB of the host's memory: .*No such"):
        host_memory.shared(lone, tmp_path / "at", 1 << 22)
