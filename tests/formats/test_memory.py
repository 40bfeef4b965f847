"""Free memory as the system reports it."""

import ctypes
from pathlib import Path

import pytest

from lowbit.formats.machine import memory


def test_the_smaller_of_system_and_container_is_reported(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(memory, "MEMINFO", tmp_path / "meminfo")
    monkeypatch.setattr(memory, "CGROUP", tmp_path)
    assert memory.free_bytes("cpu") is None
    (tmp_path / "meminfo").write_text("MemTotal: 9000 kB\nMemAvailable:  5000 kB\n")
    assert memory.free_bytes("cpu") == 5000 * 1024
    (tmp_path / "memory.max").write_text("3000000\n")
    (tmp_path / "memory.current").write_text("2500000\n")
    (tmp_path / "memory.stat").write_text("anon 5\ninactive_file 1000000\nactive_file 500\n")
    assert memory.free_bytes("cpu") == 3_000_000 - 2_500_000 + 1_000_500
    (tmp_path / "memory.max").write_text("max\n")
    assert memory.free_bytes("cpu") == 5000 * 1024


def test_freed_memory_goes_back_to_the_system_or_stays(monkeypatch: pytest.MonkeyPatch) -> None:
    memory.give_back()
    monkeypatch.setattr(ctypes, "CDLL", lambda _: object())  # without glibc
    memory.give_back()
