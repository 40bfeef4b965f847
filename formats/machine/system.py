"""Errors of the operating system, of Python and of torch in the words of a LowbitError."""

import errno
import os
from pathlib import Path

from lowbit.formats.errors import CheckpointError, LowbitError, RequestError, ResourceError

FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
FREE_SPACE = "free some space and run the same command again"
NO_MEMORY = ("can't allocate memory", "not enough memory", "bad allocation")  # by torch, on a CPU
GPU_FULL = "OutOfMemoryError"  # torch's, named so that this file need not import torch


def explained(error: BaseException, gpu_hint: str | None = None) -> LowbitError | None:
    """The error that a file, an option or the machine has caused; None for a bug.

    Args:
        error: that reached a command.
        gpu_hint: what to do where the GPU has run out of memory.
    """
    if isinstance(error, LowbitError):
        return error
    if isinstance(error, OSError):
        # Whoever read the output has left: that is no error of ours.
        return None if isinstance(error, BrokenPipeError) else of_system(error)
    if type(error).__name__ == GPU_FULL:
        return ResourceError("the GPU ran out of memory", hint=gpu_hint)
    if isinstance(error, MemoryError) or (
        isinstance(error, RuntimeError) and any(text in str(error) for text in NO_MEMORY)
    ):
        return ResourceError("the memory of this machine is used up", hint="ask for less at once")
    if isinstance(error, RecursionError):
        return CheckpointError("a file is nested too deeply to be read", hint="--debug shows where")
    if isinstance(error, UnicodeError):
        return RequestError(f"a text cannot be read or written as UTF-8: {error}")
    return None


def of_system(
    error: OSError, path: Path | None = None, full_hint: str = FREE_SPACE
) -> ResourceError:
    """A full disk, or the file that the system refuses and why.

    Args:
        error: of the system.
        path: of the file that was to be written, where it is known.
        full_hint: what to do about a full disk.
    """
    full = error.errno in FULL
    reason = f"the disk is full ({error.strerror})" if full else error.strerror or str(error)
    if path is not None:
        reason = f"`{path}` cannot be written: {reason}"
    elif isinstance(error.filename, str | bytes) and not full:  # else the number of an open file
        reason = f"`{os.fsdecode(error.filename)}`: {reason}"
    return ResourceError(reason, hint=full_hint if full else None)
