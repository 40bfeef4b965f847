"""Limits of a tensor's device, and launches of kernels, quick from the second on.

Nothing is queried at import.
"""

from functools import cache
from types import ModuleType
from typing import Any

import torch
from torch import Tensor
from triton.runtime import driver

from lowbit.runtime.kernels.launch.linear import MULTIPROCESSORS

STATIC_SHARED = 48 << 10  # bytes of shared memory that a kernel may declare on every GPU
OLDER_REGISTERS = 168  # of a thread, where a launch names none
TIGHT = 80  # registers of a thread


def programmatic_launch(x: Tensor) -> bool:
    """True if a kernel may start before the one that feeds it ends (Hopper and later).

    Every kernel of a decode step waits for its predecessor before it touches what a kernel of the
    step writes, and none ends before one of its programs has waited; so each wait covers all
    earlier kernels. What earlier steps or the host wrote may be read before the wait: pages,
    positions, block tables, states of linear layers. So two steps of one layer need a kernel
    between them, as every model has.
    """
    return capability(x) >= (9, 0)


def register_cap(x: Tensor, measured: int | None) -> int | None:
    """Most registers of a thread, given the best on Hopper; None leaves them to the compiler.

    After Hopper the compiler spills more often with a cap.
    """
    if capability(x) >= (10, 0):
        return None
    return measured if capability(x) >= (9, 0) else older_cap(measured)


def older_cap(measured: int | None) -> int | None:
    """Most registers of a thread before Hopper.

    There the compiler spills more often without a cap, but where Hopper's is tight: it takes fewer
    registers by itself then.
    """
    return None if measured is not None and measured <= TIGHT else measured or OLDER_REGISTERS


def hopper_registers(x: Tensor, measured: int | None) -> int | None:
    """Most registers of a thread on Hopper, where they were measured; elsewhere None."""
    return measured if capability(x)[0] == 9 else None


def capability(x: Tensor) -> tuple[int, int]:
    """Compute capability of the tensor's GPU, or of the one that it stands for; (0, 0) on a CPU."""
    return (0, 0) if x.is_cpu else _capability(x.device)


def shared_limit(x: Tensor) -> int:
    """Bytes of shared memory that a program may take on the tensor's GPU."""
    found = capability(x)
    if found in ((8, 6), (8, 9)) or found >= (12, 0):
        return 99 << 10
    return (163 if found < (9, 0) else 227) << 10


def multiprocessors(x: Tensor) -> int:
    """Multiprocessors of the tensor's GPU, or of the one that it stands for; H200's on a CPU."""
    return MULTIPROCESSORS if x.is_cpu else _multiprocessors(x.device)


def power_of_two(n: int) -> int:
    """Round n up to a power of two: kernels are compiled for these counts."""
    return 1 << (n - 1).bit_length()


@cache
def _capability(device: torch.device) -> tuple[int, int]:
    return torch.cuda.get_device_capability(device)


@cache
def _multiprocessors(device: torch.device) -> int:
    return torch.cuda.get_device_properties(device).multi_processor_count


# By all that Triton specializes for: what starts the compiled code, its function and metadata, its
# constants, and what must live as long.
_compiled: dict[tuple[Any, ...], tuple[Any, Any, Any, tuple[Any, ...], Any]] = {}
_hashed: dict[int, Any] = {}  # functions of kernels, by their id, whose callees have keys


def run(kernel: Any, grid: tuple[int, ...], *arguments: Any, **named: Any) -> None:
    """`kernel[grid](*arguments, **named)`, 20 us sooner on the host when it is not the first.

    A prompt launches some hundred kernels one by one, and the GPU waits for them. So what has been
    compiled is started as Triton starts it itself, without what it does for hooks of launches.

    Args:
        kernel: a function of `triton.jit` or `gluon.jit`.
        grid: programs, at most three numbers.
        arguments: all that are no constants, in order; the first is a tensor, and all tensors are
            on the current device, or page-locked.
        named: constants, all of them, and options.
    """
    device = arguments[0].get_device()
    kinds = [id(kernel), device, *named, *named.values()]  # flat: tuples in it would cost more
    for argument in arguments:
        if type(argument) is Tensor:
            kinds.append(argument.dtype)
            kinds.append(argument.data_ptr() % 16 == 0)
        else:
            kinds.append(_kind(argument))
    key = tuple(kinds)
    found = _compiled.get(key)
    if found is None:
        hash_callees_first(kernel)
        code = kernel[grid](*arguments, **named)
        if hasattr(code, "packed_metadata"):  # not where a kernel is interpreted
            values = tuple(named[name] for name in kernel.arg_names[len(arguments) :])
            about = code.function, code.packed_metadata
            _compiled[key] = code.run, *about, values, (kernel, code)
        return
    start, function, metadata, values, _ = found
    stream = driver.active.get_current_stream(device)
    x, y, z = (*grid, 1, 1)[:3]
    start(x, y, z, stream, function, metadata, None, None, None, *arguments, *values)


def hash_callees_first(kernel: Any) -> None:
    """Give a kernel the key that it has in every process.

    Triton 3.6 counts the constants of what a kernel calls only if that was hashed before. So the
    key would depend on what a process has launched so far, and what is compiled not be found.
    """
    if not hasattr(type(kernel), "cache_key") or id(kernel) in _hashed:
        return
    _hashed[id(kernel)] = kernel
    names = kernel.fn.__code__.co_names  # globals, and attributes of modules among them
    for value in map(kernel.fn.__globals__.get, names):
        members = [value]
        if isinstance(value, ModuleType):
            members = [getattr(value, name, None) for name in names]
        for member in members:
            hash_callees_first(member)
    _ = kernel.cache_key  # which Triton keeps


def _kind(argument: Any) -> Any:
    """Part of the key of a compiled kernel that an argument adds; never equal to a dtype."""
    if isinstance(argument, int):
        if -(2**31) <= argument < 2**31:
            return 1 if argument == 1 else 16 if argument % 16 == 0 else 0
        return -16 if argument % 16 == 0 else -1
    if isinstance(argument, Tensor):  # a subclass
        return argument.dtype, argument.data_ptr() % 16 == 0
    return type(argument)
