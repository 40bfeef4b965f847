"""Memory that can still be allocated, and what processes hold in RAM."""

import ctypes
import os
import sys
from pathlib import Path

import torch

PROCESSES = Path("/proc")
STATM = Path("/proc/self/statm")
MEMINFO = Path("/proc/meminfo")
CGROUP = Path("/sys/fs/cgroup")


def free_bytes(device: str) -> int | None:
    """Bytes that can still be allocated on `cpu` or `cuda`; None if the system does not tell."""
    if device != "cpu":
        return torch.cuda.mem_get_info()[0]
    system = _meminfo_available(MEMINFO)
    container = _cgroup_left(CGROUP)
    known = [size for size in (system, container) if size is not None]
    return min(known) if known else None


def _meminfo_available(path: Path) -> int | None:
    """Value of `MemAvailable` in Linux's meminfo."""
    if not path.exists():
        return None
    for line in path.read_text().splitlines():
        if line.startswith("MemAvailable:"):
            return int(line.split()[1]) * 1024
    return None


def _cgroup_left(root: Path) -> int | None:
    """Bytes left under a container's limit (cgroup v2); reclaimable file pages count as free."""
    limit, used, stat = (root / f"memory.{name}" for name in ("max", "current", "stat"))
    if not (limit.exists() and used.exists() and stat.exists()):
        return None
    if limit.read_text().strip() == "max":
        return None
    counters = dict(line.split() for line in stat.read_text().splitlines())
    reclaimable = int(counters.get("inactive_file", 0)) + int(counters.get("active_file", 0))
    return int(limit.read_text()) - int(used.read_text()) + reclaimable


def resident_bytes() -> int:
    """Resident memory now; where the system does not tell, as on macOS, the most so far."""
    if not STATM.exists():
        return peak_resident_bytes()
    return int(STATM.read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def peak_resident_bytes(process: int | None = None) -> int:
    """Most resident memory that a process has had, pages of mapped files included.

    Linux tells it as `VmHWM`. That of `getrusage`, for systems without /proc, is on Linux at least
    the size of the program that started the process.

    Args:
        process: its number; None for this one.

    Returns:
        Bytes; 0 for another process where the system does not tell.
    """
    status = PROCESSES / str(process or "self") / "status"
    lines = status.read_text().splitlines() if status.exists() else ()
    for line in lines:
        if line.startswith("VmHWM:"):
            return int(line.split()[1]) * 1024
    if process is not None:
        return 0
    import resource  # not above: Windows has none

    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024  # bytes there, KiB elsewhere


def forget_peak() -> bool:
    """Let `peak_resident_bytes` of this process begin anew; False where the system cannot."""
    try:
        (PROCESSES / "self" / "clear_refs").write_text("5")
    except OSError:
        return False
    return True


def give_back() -> None:
    """Give the system the memory that nothing holds any more; only glibc keeps it at all.

    Takes .3 ms for every megabyte, and may hold up threads that allocate meanwhile.
    """
    try:
        trim = ctypes.CDLL(None).malloc_trim
    except (AttributeError, OSError, TypeError):
        return
    trim(0)
