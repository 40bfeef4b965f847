"""A process and all that it has started: a server, its engine, its helpers."""

import contextlib
import os
from pathlib import Path


def tree(pid: int) -> list[int]:
    """A process and all that it has started."""
    found = [pid]
    with contextlib.suppress(OSError):
        for task in Path(f"/proc/{pid}/task").iterdir():
            for child in (task / "children").read_text().split():
                found += tree(int(child))
    return found


def memory(pid: int) -> list[float]:
    """Resident memory in MB of a process and of each that it has started."""
    found = []
    for each in tree(pid):
        with contextlib.suppress(OSError):
            pages = int(Path(f"/proc/{each}/statm").read_text().split()[1])
            found.append(pages * os.sysconf("SC_PAGE_SIZE") / 1e6)
    return found


def open_files(pid: int) -> int:
    """Number of open files of a process and of each that it has started."""
    count = 0
    for each in tree(pid):
        with contextlib.suppress(OSError):
            count += len(list(Path(f"/proc/{each}/fd").iterdir()))
    return count
