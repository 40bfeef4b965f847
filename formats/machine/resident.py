"""Memory that this process holds in RAM."""

import os
import sys
from pathlib import Path

STATM = Path("/proc/self/statm")


def resident_bytes() -> int:
    """Resident memory now; where the system does not tell, as on macOS, the most so far."""
    if not STATM.exists():
        return peak_resident_bytes()
    return int(STATM.read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def peak_resident_bytes() -> int:
    """Most resident memory that the process has had."""
    import resource  # not above: Windows has none

    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024  # bytes there, KiB elsewhere
