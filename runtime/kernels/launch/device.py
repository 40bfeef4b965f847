"""The card of a tensor, and launches of kernels, quick from the second on.

Nothing is queried at import.
"""

from functools import cache
from types import ModuleType
from typing import Any

import torch
from torch import Tensor
from triton.runtime import driver

from lowbit.runtime.kernels.launch.card import CPU, Card
from lowbit.runtime.kernels.launch.card import power_of_two as power_of_two

STATIC_SHARED = 48 << 10  # bytes of shared memory that a kernel may declare on every GPU


def programmatic_launch(x: Tensor) -> bool:
    """True if a kernel may start before the one that feeds it ends (Hopper and later).

    Every kernel of a decode step waits for its predecessor before it touches what a kernel of the
    step writes, and none ends before one of its programs has waited; so each wait covers all
    earlier kernels. What earlier steps or the host wrote may be read before the wait: pages,
    positions, block tables, states of linear layers. So two steps of one layer need a kernel
    between them, as every model has.
    """
    return card_of(x).overlaps


def register_cap(x: Tensor, measured: int | None) -> int | None:
    """Most registers of a thread on the tensor's GPU; see `Card.register_cap`."""
    return card_of(x).register_cap(measured)


def hopper_registers(x: Tensor, measured: int | None) -> int | None:
    """Most registers of a thread on Hopper, where they were measured; elsewhere None."""
    return measured if card_of(x).is_hopper else None


def card_of(x: Tensor) -> Card:
    """The tensor's GPU; for a tensor without data the one that Triton's driver stands in for."""
    if x.is_cpu:
        return CPU
    return _card(x.device) if x.is_cuda else driver.active.card


@cache
def _card(device: torch.device) -> Card:
    count = torch.cuda.get_device_properties(device).multi_processor_count
    return Card(torch.cuda.get_device_capability(device), count)


# By all that Triton specializes for: what starts the compiled code, its function and metadata, its
# constants, and what must live as long.
_compiled: dict[tuple[Any, ...], tuple[Any, Any, Any, tuple[Any, ...], Any]] = {}
_hashed: dict[int, Any] = {}  # functions of kernels, by their id, whose callees have keys


def run(kernel: Any, grid: tuple[int, ...], *arguments: Any, **named: Any) -> None:
    """`kernel[grid](*arguments, **named)`, 20 us sooner on the host when it is not the first.

    A prompt launches some hundred kernels one by one, and the GPU waits for them. So what has been
    compiled is started as Triton starts it itself, without what it does for hooks of launches. For
    tensors without data a stand-in for a GPU (`lab.fake_gpu`) compiles the kernel.

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
        if arguments[0].is_meta:
            driver.active.compile(kernel, grid, arguments, named)
            return
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
