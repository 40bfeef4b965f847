"""The processor of this machine: its cores, and who made it."""

import os
import platform
from pathlib import Path

INTEL = "GenuineIntel"
CPUINFO = Path("/proc/cpuinfo")


def core_count() -> int:
    """Processor cores that this process may use."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def is_intel() -> bool:
    """True for a processor of Intel's; false where that cannot be told."""
    try:
        with CPUINFO.open(encoding="utf-8", errors="replace") as file:
            lines = (line.partition(":") for line in file)
            return any(key.strip() == "vendor_id" and INTEL in value for key, _, value in lines)
    except OSError:  # no Linux
        return INTEL in platform.processor()
