"""GPUs that cannot share a model, by name; and settings that are given back."""

import os

import pytest
import torch
from torch import distributed

from lowbit.formats.errors import ResourceError
from lowbit.runtime.backends import symmetric
from lowbit.runtime.backends.symmetric import NO_MULTICAST, check_devices, reach_each_other


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
