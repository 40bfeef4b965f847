"""A process that ends with the one that started it."""

import ctypes
import os
import signal
import sys

DIE_WITH_PARENT = 1  # prctl's PR_SET_PDEATHSIG


def end_with_parent(parent: int | None) -> bool:
    """Let Linux kill this process when the thread that started it ends; elsewhere nothing.

    Args:
        parent: process that started it; None where that is not known.

    Returns:
        False where it has ended meanwhile.
    """
    if sys.platform != "linux":
        return True
    ctypes.CDLL(None).prctl(DIE_WITH_PARENT, signal.SIGKILL)
    return parent is None or parent == os.getppid()
