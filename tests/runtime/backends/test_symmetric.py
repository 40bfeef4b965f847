"""GPUs that cannot share a model, by name; and settings that are given back."""

import os
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from itertools import count
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import distributed

from lowbit.formats.errors import ResourceError
from lowbit.runtime.backends import symmetric
from lowbit.runtime.backends.symmetric import (
    LOOPBACK,
    NO_MULTICAST,
    CountedFromZero,
    check_devices,
    reach_each_other,
)
from lowbit.runtime.weights.share import Share


@pytest.fixture(autouse=True)
def _two_gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda each: (9, 0))
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda each: f"card {each}")
    monkeypatch.setattr(torch.cuda, "can_device_access_peer", lambda one, other: True)


def test_those_that_can() -> None:
    check_devices((0, 1))
    check_devices((0, 0))  # which has a peer in itself


def test_too_few() -> None:
    with pytest.raises(ResourceError, match="4 processes need as many GPUs, up to number 3; 2 are"):
        check_devices((0, 1, 2, 3))


def test_different_kinds(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda each: (9 - each, 0))
    with pytest.raises(ResourceError, match=r"different kinds .* yet: card 0, card 1") as found:
        check_devices((0, 1))
    assert "CUDA_VISIBLE_DEVICES" in str(found.value.hint)


def test_those_that_reach_each_other(monkeypatch: pytest.MonkeyPatch) -> None:
    assert reach_each_other((0, 1))
    monkeypatch.setattr(torch.cuda, "can_device_access_peer", lambda one, other: one < other)
    check_devices((0, 1))
    assert not reach_each_other((0, 1))  # both have to
    assert reach_each_other((0, 0))


def test_a_process_with_a_group_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(distributed, "is_initialized", lambda: True)
    with pytest.raises(ResourceError, match=r"a process group of `torch\.distributed`"):
        symmetric.open_peers(None, (0, 1), None, 1.0, 4096)  # type: ignore[arg-type]


def test_settings_are_given_back(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(NO_MULTICAST, "0")
    monkeypatch.delenv("LOWBIT_TEST", raising=False)
    with symmetric._settings({NO_MULTICAST: "1", "LOWBIT_TEST": "1"}):
        assert os.environ[NO_MULTICAST] == os.environ["LOWBIT_TEST"] == "1"
    assert os.environ[NO_MULTICAST] == "0"
    assert "LOWBIT_TEST" not in os.environ


def file_store(path: Path) -> Any:
    store = distributed.FileStore(str(path), 2)  # type: ignore[attr-defined]
    store.set_timeout(timedelta(seconds=30))
    return store


def test_a_process_that_has_loaded_models_exchanges_buffers_with_a_new_one(tmp_path: Path) -> None:
    """PyTorch has numbered five exchanges of the one and none of the other."""
    payload = bytes(range(256))
    stores = [CountedFromZero(file_store(tmp_path / "store")), file_store(tmp_path / "store")]

    def exchange(rank: int) -> list[list[bytes]]:
        store: Any = distributed.PrefixStore("0", stores[rank])  # type: ignore[attr-defined]
        found = []
        for number in range(5 * (1 - rank), 5 * (1 - rank) + 4, 2):
            keys = [f"CUDASymmetricMemory/{number}/{each}" for each in range(2)]
            store.set(keys[rank], payload[rank:])
            found.append([bytes(each) for each in store.multi_get(keys)])
            store.barrier(f"CUDASymmetricMemory/{number + 1}", 2)
        return found

    with ThreadPoolExecutor(2) as threads:
        found = list(threads.map(exchange, range(2)))
    assert found == [[[payload, payload[1:]]] * 2] * 2


def test_other_keys_of_a_store_stay(tmp_path: Path) -> None:
    store = CountedFromZero(file_store(tmp_path / "store"))
    store.set("7/CUDASymmetricMemory/7/1", b"")
    store.set("rank/7", b"seven")
    assert store.add("count/7", 3) == 3
    other = file_store(tmp_path / "store")
    assert other.get("rank/7") == b"seven"
    assert other.check(["count/7", "7/CUDASymmetricMemory/0/1"])
    assert not store.check(["7/CUDASymmetricMemory/8/1"])


def test_the_first_group_of_a_process_needs_no_other_numbers(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(symmetric, "JOINED", count())
    monkeypatch.setenv(LOOPBACK, "lo")
    kinds = []
    for number in range(2):
        with symmetric._joined(Share(0, 1), tmp_path / str(number), 30.0) as store:
            kinds.append(type(store))
            assert distributed.is_initialized()
        assert not distributed.is_initialized()
    assert kinds == [distributed.FileStore, CountedFromZero]  # type: ignore[attr-defined]
