"""Errors of the operating system, Python and torch as LowbitErrors."""

import errno
import os
import sys
from pathlib import Path

from lowbit.formats.errors import CheckpointError, LowbitError, RequestError, ResourceError

FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
GONE = "it was there when the command began: put it back, then run the same command again"
FREE_SPACE = "free some space and run the same command again"
NO_MEMORY = (
    "can't allocate memory",
    "not enough memory",
    "bad allocation",
)  # messages of torch on a CPU
GPU_FULL = "OutOfMemoryError"  # torch's class, by name so that torch is not imported here


def check_system() -> None:
    """Refuse Windows, whose Python lacks the calls that files are read, locked and written with.

    Raises:
        ResourceError: naming what works instead.
    """
    if sys.platform == "win32":
        raise ResourceError(
            "lowbit runs on Linux and macOS, not on Windows itself",
            hint="install it in WSL 2 (`wsl --install`), where the converter, the CPU runtime and "
            "NVIDIA GPUs work as on Linux",
        )


def install_hint(extra: str = "") -> str:
    """Advice to install lowbit, with an extra, in the versions that it is tested with."""
    return f"{install_command(extra)} in the clone of lowbit"


def install_command(extra: str = "") -> str:
    """The command of `install_hint`."""
    return "pip install -c constraints.txt " + (f"'.[{extra}]'" if extra else ".")


def explained(error: BaseException, gpu_hint: str | None = None) -> LowbitError | None:
    """The LowbitError for a failure caused by a file, an option or the machine; None for a bug.

    Args:
        gpu_hint: advice if the GPU has run out of memory.
    """
    if isinstance(error, LowbitError):
        return error
    if isinstance(error, OSError):
        # The reader of the output has left, which is no error.
        return None if isinstance(error, BrokenPipeError) else of_system(error)
    if type(error).__name__ == GPU_FULL:
        return ResourceError("the GPU ran out of memory", hint=gpu_hint)
    if isinstance(error, MemoryError) or (
        isinstance(error, RuntimeError) and any(text in str(error) for text in NO_MEMORY)
    ):
        return ResourceError("the memory of this machine is used up", hint="ask for less at once")
    if isinstance(error, ModuleNotFoundError) and _is_foreign(error.name):
        return ResourceError(
            f"`{error.name}` is not installed",
            hint=f"{install_hint()}; lowbit-run doctor names what is missing",
        )
    if isinstance(error, RecursionError):
        return CheckpointError("a file is nested too deeply to be read", hint="--debug shows where")
    if isinstance(error, UnicodeError):
        return RequestError(f"a text cannot be read or written as UTF-8: {error}")
    return None


def _is_foreign(module: str | None) -> bool:
    """Tell if a module is neither this project's nor Python's, so that its absence is no bug."""
    root = (module or "lowbit").partition(".")[0]
    return root != "lowbit" and root not in sys.stdlib_module_names


def of_system(
    error: OSError, path: Path | None = None, full_hint: str = FREE_SPACE
) -> ResourceError:
    """The ResourceError for an OSError: a full disk, or a file that the system refuses.

    Args:
        path: of the file that was to be written, if known.
    """
    full = error.errno in FULL
    reason = f"the disk is full ({error.strerror})" if full else error.strerror or str(error)
    if path is not None:
        reason = f"`{path}` cannot be written: {reason}"
    elif isinstance(error.filename, str | bytes) and not full:  # an int is a file descriptor
        reason = f"`{os.fsdecode(error.filename)}`: {reason}"
    hint = GONE if path is None and error.errno == errno.ENOENT else None
    return ResourceError(reason, hint=full_hint if full else hint)
