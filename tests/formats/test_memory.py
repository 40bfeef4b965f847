"""Free memory as the system reports it."""

import ctypes
import mmap
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


def test_a_peak_is_what_linux_tells_of_a_process(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Not that of `getrusage`, which begins with the size of whoever started the process."""
    for process, size in (("self", 5), ("42", 7)):
        (tmp_path / process).mkdir()
        (tmp_path / process / "status").write_text(f"VmPeak:\t 90 kB\nVmHWM:\t {size} kB\n")
    monkeypatch.setattr(memory, "PROCESSES", tmp_path)
    assert memory.peak_resident_bytes() == 5 * 1024
    assert memory.peak_resident_bytes(42) == 7 * 1024
    assert memory.peak_resident_bytes(43) == 0
    assert memory.forget_peak()
    assert (tmp_path / "self" / "clear_refs").read_text() == "5"
    monkeypatch.setattr(memory, "PROCESSES", tmp_path / "nowhere")
    assert memory.peak_resident_bytes() > 1 << 20
    assert not memory.forget_peak()


def test_pages_of_mapped_files_count_in_a_peak(tmp_path: Path) -> None:
    size = 64 << 20
    (tmp_path / "file").write_bytes(bytes(size))
    memory.forget_peak()
    before = memory.resident_bytes()
    with (
        (tmp_path / "file").open("rb") as file,
        mmap.mmap(file.fileno(), 0, prot=mmap.PROT_READ) as mapped,
    ):
        assert not any(mapped[::4096])
    assert memory.peak_resident_bytes() > before + size // 2
    assert memory.resident_bytes() < before + size // 2


def test_freed_memory_goes_back_to_the_system_or_stays(monkeypatch: pytest.MonkeyPatch) -> None:
    memory.give_back()
    monkeypatch.setattr(ctypes, "CDLL", lambda _: object())  # without glibc
    memory.give_back()
