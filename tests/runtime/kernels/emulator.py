"""Gluon kernels run in NumPy: what they compute, without a GPU.

A kernel's Python code runs as it is written, on arrays [programs, warps, 32] of what every lane
holds. Where programs that run together branch apart, those of each branch run again from their
beginning. Only what stands for one PTX instruction is done here by hand (the functions of `ptx`
wrap no more than that). All lanes do one operation before any does the next, so barriers have
nothing to do, and races between lanes are not seen; numbers are rounded as `arithmetic` says.
Memory is checked: an address that no tensor given to the kernel holds is an error. Shared memory
begins as NaN, and the target of a copy is NaN until the kernel has waited for the copy.
"""

import re
import types
from collections.abc import Callable, Iterable, Sequence
from functools import cache
from threading import Condition
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from tests.runtime.kernels.arithmetic import exp, exp2, nearest
from tests.runtime.kernels.emulated_lanes import (
    FLOAT,
    INT,
    LONG,
    BranchApartError,
    Lanes,
    bytes_of,
    dot4,
    from_lane,
    halves,
    integer_mma,
    lanes,
    mma,
    over_warp,
    packed,
    pairs,
    rounded_bytes,
    threads,
    turned,
)
from tests.runtime.kernels.emulated_peers import PeerMemory, leaves_of_peers
from tests.runtime.kernels.emulated_wgmma import leaves_of_wgmma

TOGETHER = 256  # programs
ANYTHING = 0x7FC0A5C1  # in registers that a load leaves alone


class Kind:
    """Of what a pointer points to."""

    def __init__(self, dtype: torch.dtype):
        self.element_ty = {torch.float32: FLOAT, torch.int32: INT}.get(dtype, dtype)


class Pointer:
    """An address, or one for every lane."""

    def __init__(self, memory: "Memory", address: Any, dtype: torch.dtype):
        self.memory, self.address, self.kind = memory, lanes(address), dtype
        self.dtype = Kind(dtype)

    def __add__(self, offset: Any) -> "Pointer":
        step = self.kind.itemsize * np.asarray(offset, LONG)
        return Pointer(self.memory, self.address + step, self.kind)

    def to(self, dtype: Any, bitcast: bool) -> Lanes:
        assert dtype is LONG
        assert bitcast
        return self.address


class PointerTo:
    """Type of pointers to int32 or int16."""

    def __init__(self, memory: "Memory", element: Any = INT):
        self.memory = memory
        self.kind = torch.int32 if element is INT else torch.int16

    def at(self, address: Lanes) -> Pointer:
        """The integer as a pointer."""
        return Pointer(self.memory, address, self.kind)


class Memory:
    """Tensors given to a kernel, and the shared memory of a program."""

    def __init__(
        self,
        tensors: list[Tensor],
        frozen: bool = False,
        pushed: Condition | None = None,
        late: Sequence[Tensor] = (),
    ):
        self.pushed = pushed  # told of every push to a peer
        self.late = [x.data_ptr() for x in late]
        self.awaited = self.late.copy()  # which the program may not touch yet
        self.tensors = [(x.data_ptr(), memory_of(x)) for x in tensors]
        self.before = [(at, x.clone()) for at, x in self.tensors] if frozen else self.tensors
        self.shared = np.zeros((0, 0), np.uint8)  # [programs, bytes]

    def held(
        self, address: np.ndarray, size: int, reading: bool = False
    ) -> tuple[np.ndarray, np.ndarray]:
        """The bytes of a tensor, and where those of each lane begin."""
        for start, values in self.before if reading else self.tensors:
            if start <= address.flat[0] < start + len(values):
                at = address - start
                assert (at >= 0).all(), "before the tensor"
                assert (at + size <= len(values)).all(), "behind the tensor"
                assert start not in self.awaited, "before the programmatic wait"
                return values.numpy(), at
        raise AssertionError("an address of no tensor")

    def apart(self, address: np.ndarray) -> list[np.ndarray]:
        """Which lanes' addresses lie in the same tensor."""
        low, high = address.min(), address.max()
        if any(start <= low and high < start + len(x) for start, x in self.tensors):
            return [np.ones(address.shape, bool)]
        found = [(address >= start) & (address < start + len(x)) for start, x in self.tensors]
        if not np.any(found, axis=0).all():
            self.held(address, 1)  # which says what is wrong
        return [inside for inside in found if inside.any()]

    def place(
        self, address: Any, size: int, shared: bool, reading: bool = False
    ) -> tuple[np.ndarray, np.ndarray]:
        """The bytes that hold an address of each lane, and where."""
        if not shared:
            values, at = self.held(address, size, reading)
        else:
            programs, length = self.shared.shape
            assert (address >= 0).all()
            assert (address + size <= length).all(), "behind shared memory"
            values = self.shared.reshape(-1)
            at = address + np.arange(programs)[:, None, None] * length
        assert (at % size == 0).all(), "not aligned"
        return values, at

    def load(self, address: Any, words: int, shared: bool) -> tuple[Lanes, ...]:
        address = np.asarray(address)
        if not shared and len(apart := self.apart(address)) > 1:  # warps that read other tensors
            parts = [
                self.load(np.where(own, address, address[own][0]), words, False) for own in apart
            ]
            return tuple(lanes(np.select(apart, [part[i] for part in parts])) for i in range(words))
        values, at = self.place(address, 4 * words, shared, reading=True)
        size = 4 * words
        found = values[: len(values) // size * size].view(INT).reshape(-1, words)[at // size]
        return tuple(lanes(found[..., i]) for i in range(words))

    def store(self, address: Any, words: tuple[Any, ...], inside: Any, shared: bool) -> None:
        inside = np.broadcast_to(np.asarray(inside, bool), np.shape(words[0]))
        if not inside.any():
            return
        address = np.broadcast_to(np.asarray(address), inside.shape)
        safe = np.where(inside, address, address[inside][0])
        values, at = self.place(safe, 4 * len(words), shared)
        stacked = np.stack([np.asarray(word)[inside].view(INT) for word in words], -1)
        values.view(INT)[at[inside][:, None] // 4 + np.arange(len(words))] = stacked


def memory_of(x: Tensor) -> Tensor:
    """Bytes of a tensor, those between its rows included."""
    if x.is_contiguous() or not x.is_cpu:
        return x.contiguous().flatten().view(torch.uint8)
    whole = torch.empty(0, dtype=torch.uint8).set_(x.untyped_storage())
    first = x.data_ptr() - whole.data_ptr()
    between = sum(stride * (n - 1) for stride, n in zip(x.stride(), x.shape, strict=True))
    return whole[first : first + (1 + between) * x.itemsize]


def run_kernel(
    kernel: Any,
    grid: tuple[int, ...],
    *arguments: Any,
    frozen: bool = False,
    peers: PeerMemory | None = None,
    late: Sequence[Tensor] = (),
    **named: Any,
) -> None:
    """Run a kernel in place of `device.run`, many programs together.

    Args:
        kernel: a function of `gluon.jit`.
        grid: programs.
        arguments: see `device.run`.
        frozen: no program sees what the kernel has stored in global memory, as if all ran at once.
        peers: memory of other ranks, whose kernels run in threads of their own.
        late: tensors that no program may touch before it waits for the kernels before this one.
        named: see `device.run`.
    """
    tensors = [x for x in arguments if isinstance(x, Tensor)]
    if peers is not None:
        tensors = [x for x in tensors if x.data_ptr() != peers.own] + peers.buffers
    memory = Memory(tensors, frozen, None if peers is None else peers.pushed, late)
    given = [
        Pointer(memory, x.data_ptr(), x.dtype)
        if isinstance(x, Tensor)
        else (lanes(INT(x)) if isinstance(x, int) else x)
        for x in arguments
    ]
    constants = [named[name] for name in kernel.arg_names[len(arguments) :]]
    numbers = np.indices((*grid, 1, 1)[:3]).reshape(3, -1, 1, 1).astype(INT)
    groups = [numbers[:, n : n + TOGETHER] for n in range(0, numbers.shape[1], TOGETHER)]
    with np.errstate(all="ignore"):
        while groups:
            programs = groups.pop()
            try:
                Emulation(memory, programs, grid).function(kernel)(*given, *constants)
            except BranchApartError as found:
                groups += [programs[:, found.branch == n] for n in np.unique(found.branch)]


def even_range(*bounds: Any) -> Iterable[Any]:
    """`range` of as many numbers in all programs that run together, which may begin apart."""
    each = [np.asarray(bound, INT) for bound in bounds]
    if all((bound == bound.flat[0]).all() for bound in each):
        return (lanes(INT(n)) for n in range(*(int(bound.flat[0]) for bound in each)))
    given = (INT(0), *each) if len(each) == 1 else each
    start, stop, step = np.broadcast_arrays(*(*given, INT(1))[:3])
    assert (step > 0).all()
    count = np.maximum(-((start - stop) // step), 0)
    of_programs = count.reshape(len(count), -1)
    assert (of_programs == of_programs[:, :1]).all(), "lanes of a program loop apart"
    if (count != count.flat[0]).any():
        raise BranchApartError(of_programs[:, 0])
    return (lanes(start + n * step) for n in range(int(count.flat[0])))


class Copies:
    """Copies to shared memory that have begun, in the batches in which a kernel waits for them."""

    def __init__(self, memory: Memory):
        self.memory = memory
        self.batches: list[list[tuple[Any, tuple[Any, ...]]]] = [[]]  # the last one is open

    def begin(self, target: Any, words: tuple[Any, ...]) -> None:
        """Add a copy to the open batch; its target holds NaN until `wait` reaches that batch."""
        missing = np.full(np.shape(words[0]), -1, INT)
        self.memory.store(target, (missing,) * len(words), True, True)
        self.batches[-1].append((target, words))

    def commit(self) -> None:
        """End the open batch."""
        self.batches.append([])

    def wait(self, pending: int) -> None:
        """Complete all committed batches but the last `pending` ones."""
        while len(self.batches) - 1 > pending:
            for target, words in self.batches.pop(0):
                self.memory.store(target, words, True, True)


class Emulation:
    """Kernels and device functions as plain Python functions."""

    def __init__(self, memory: Memory, programs: np.ndarray, grid: tuple[int, ...]):
        self.made = dict[int, Callable[..., Any]]()
        self.memory, memory.awaited = memory, memory.late.copy()
        self.language = language(memory, programs, grid)
        self.leaves = leaves(memory, programs.shape[1])

    def function(self, jitted: Any) -> Callable[..., Any]:
        fn = jitted.fn
        if fn.__name__ in self.leaves and ".kernels.ptx." in fn.__module__:
            return self.leaves[fn.__name__]
        if id(fn) not in self.made:
            scope = dict[str, Any](range=even_range)
            made = types.FunctionType(fn.__code__, scope, fn.__name__, fn.__defaults__)
            self.made[id(fn)] = made
            given = fn.__globals__
            scope |= {n: self.value(n, given[n]) for n in names_in(fn.__code__) if n in given}
        return self.made[id(fn)]

    def value(self, name: str, x: Any) -> Any:
        if name == "gl":
            return self.language
        if name in ("gdc_wait", "gdc_launch_dependents"):
            return self.memory.awaited.clear if name == "gdc_wait" else lambda: None
        if type(x).__name__ == "GluonJITFunction":
            return self.function(x)
        return x.value if type(x).__name__ == "constexpr" else x


@cache
def names_in(code: types.CodeType) -> frozenset[str]:
    """Names that a function's code may look up in its module."""
    inner = (names_in(x) for x in code.co_consts if isinstance(x, types.CodeType))
    return frozenset(code.co_names).union(*inner)


def language(memory: Memory, programs: np.ndarray, grid: tuple[int, ...]) -> Any:
    """Of `triton.experimental.gluon.language` what the kernels use."""

    def load(pointer: Pointer, mask: Any = None, other: Any = 0) -> Lanes:
        size = pointer.kind.itemsize
        inside = np.broadcast_to(True if mask is None else mask, pointer.address.shape)
        if not inside.any():
            return lanes(
                np.full(inside.shape, other, INT if pointer.kind == torch.int32 else FLOAT)
            )
        safe = np.where(inside, pointer.address, pointer.address.flat[np.argmax(inside)])
        values, at = memory.held(safe, size, reading=True)
        found = torch.from_numpy(values[at[..., None] + np.arange(size)].copy())
        floats = found.view(pointer.kind)[..., 0]
        as_numpy = (floats.float() if floats.is_floating_point() else floats).numpy()
        return lanes(np.where(inside, as_numpy, as_numpy.dtype.type(other)))

    def store(pointer: Pointer, value: Any, mask: Any) -> None:
        value = lanes(value)
        shape = np.broadcast_shapes(pointer.address.shape, value.shape)
        address = np.broadcast_to(pointer.address, shape)
        inside = np.broadcast_to(np.asarray(mask, bool), shape)
        if not inside.any():
            return
        address, wide = np.asarray(address)[inside], np.broadcast_to(value, shape)[inside]
        for own in memory.apart(address):  # warps that write other tensors
            values, at = memory.held(address[own], pointer.kind.itemsize)
            bytes_ = np.ascontiguousarray(wide[own])[:, None].view(np.uint8)
            values[at[:, None] + np.arange(pointer.kind.itemsize)] = bytes_

    def where(condition: Any, a: Any, b: Any) -> Lanes:
        out = np.where(condition, a, b)
        if isinstance(a, int) and isinstance(b, int):
            out = out.astype(INT)
        return lanes(out.astype(FLOAT) if out.dtype == np.float64 else out)

    return types.SimpleNamespace(
        constexpr=lambda x: x,
        float32=FLOAT,
        float16=np.float16,
        int16=np.int16,
        int32=INT,
        int64=LONG,
        static_range=range,
        static_assert=lambda holds: None if holds else pytest.fail("a static assertion"),
        program_id=lambda axis: lanes(programs[axis]),
        num_programs=lambda axis: INT(grid[axis]),
        pointer_type=lambda kind: PointerTo(memory, kind),
        cdiv=lambda a, b: lanes((a + b - 1) // b),
        where=where,
        minimum=lambda a, b: lanes(np.minimum(a, b)),
        maximum=lambda a, b: lanes(np.maximum(a, b)),
        exp=lambda x: lanes(exp(x)),
        exp2=lambda x: lanes(exp2(x)),
        rsqrt=lambda x: lanes(FLOAT(1) / np.sqrt(x)),
        fma=fma,
        load=load,
        store=store,
    )


def fma(a: Any, b: Any, c: Any) -> Lanes:
    """FP32 `a * b + c`, rounded once but for some in a billion."""
    return lanes((np.asarray(a, np.float64) * b + c).astype(FLOAT))


def leaves(memory: Memory, programs: int) -> dict[str, Callable[..., Any]]:
    """One PTX instruction each, or some that make one thing."""

    def loads(words: int, shared: bool) -> Callable[..., Any]:
        def load(address: Any, OFFSET: int = 0) -> Any:
            found = memory.load(address + OFFSET, words, shared)
            return found if words > 1 else found[0]

        return load

    def stores(shared: bool) -> Callable[..., None]:
        def store(address: Any, words: Any, inside: Any) -> None:
            parts = words if isinstance(words, tuple) else (words,)
            memory.store(address, parts, inside, shared)

        return store

    copies = Copies(memory)

    def copying(words: int) -> Callable[..., None]:
        def copy(target: Any, source: Any, OFFSET: int = 0, AT: int = 0) -> None:
            copies.begin(target + AT, memory.load(source + OFFSET, words, False))

        return copy

    def copy16_or_zeros(
        target: Any, source: Any, inside: Any, AT: int = 0, OFFSET: int = 0
    ) -> None:
        found = memory.load(source + OFFSET, 4, False)
        copies.begin(target + AT, tuple(np.where(inside, x, INT(0)) for x in found))

    def stream_if(words: int, other: int = 0) -> Callable[..., Any]:
        def stream(address: Any, wanted: Any) -> Any:
            wanted = np.broadcast_to(wanted, np.shape(address))
            if not wanted.any():
                return (lanes(np.full(wanted.shape, other, INT)),) * words
            safe = np.where(wanted, address, np.asarray(address)[wanted][0])
            found = memory.load(lanes(safe), words, False)
            return tuple(lanes(np.where(wanted, x, INT(other))) for x in found)

        return stream

    def store_shared2(address: Any, word: Any, inside: Any) -> None:
        inside = np.broadcast_to(np.asarray(inside, bool), np.shape(word))
        if inside.any():
            address = np.broadcast_to(np.asarray(address), inside.shape)
            safe = np.where(inside, address, address[inside][0])
            values, at = memory.place(safe, 2, True)
            values.view(np.int16)[at[inside] // 2] = np.asarray(word)[inside].astype(np.int16)

    def count_warp(address: Any, last: int, inside: Any) -> Lanes:
        address, inside = np.broadcast_arrays(address, np.asarray(inside, bool))
        before = np.zeros(address.shape, INT)
        for program, warp in np.argwhere(inside.all(-1)):  # which count one after the other
            values, at = memory.place(address[program, warp, :1], 4, False)
            counter = values.view(INT)
            before[program, warp] = counter[at // 4]
            counter[at // 4] = 0 if counter[at // 4] >= last else counter[at // 4] + 1
        return lanes(before)

    def load_matrices(address: Any, OFFSET: int = 0) -> tuple[Lanes, ...]:
        words = np.stack(memory.load(address + OFFSET, 4, True), -1)  # of every row
        matrices = words.reshape(*words.shape[:-2], 4, 32)
        return tuple(lanes(np.ascontiguousarray(matrices[..., i, :])) for i in range(4))

    def load_shared16_if(address: Any, wanted: Any, OFFSET: int = 0) -> tuple[Lanes, ...]:
        words = loads(4, True)(address, OFFSET)
        return tuple(lanes(np.where(wanted, word, INT(ANYTHING))) for word in words)

    def shared_buffer(declared: str) -> Lanes:
        size = re.search(r"staged\[(\d+)\]", declared)
        assert size is not None
        memory.shared = np.full((programs, -(-int(size[1]) // 16) * 16), 0xFF, np.uint8)
        return lanes(INT(0))

    def large_shared_buffer(never: Any, size: int, warps: int) -> Lanes:
        return shared_buffer(f"staged[{size}]")

    named = {"load16": 4, "stream16": 4, "reload16": 4, "load8": 2, "load4": 1, "load4_l2": 1}
    named["stream8"] = 2
    found = {name: loads(words, False) for name, words in named.items()}
    found |= {"load_shared8": loads(2, True), "load_shared16": loads(4, True)}
    found |= {f"store_shared{size}": stores(True) for size in (4, 8, 16)}
    found |= {f"store{size}": stores(False) for size in (8, 16)}
    found |= {
        "load_shared4": lambda *at: loads(1, True)(*at).view(FLOAT),
        "shared_buffer": shared_buffer,
        "large_shared_buffer": large_shared_buffer,
        "barrier": lambda: None,
        "warp_barrier": lambda: None,
        "count_warp": count_warp,
        "copy16": copying(4),
        "copy16_or_zeros": copy16_or_zeros,
        "copy4": copying(1),
        "commit_copies": copies.commit,
        "wait_copies": copies.wait,
        "recomputed": lambda x: x,
        "threads": lambda warps: threads(programs, warps),
        "load_matrices": load_matrices,
        "load_shared16_if": load_shared16_if,
        "turned": turned,
        "mma": mma,
        "integer_mma": integer_mma,
        "pairs": pairs,
        "times": lambda a, b: packed(*(x * y for x, y in zip(halves(a), halves(b), strict=True))),
        "times_plus": lambda a, b, c: packed(
            *(
                x * y + z
                for x, y, z in zip(
                    *(halves(lanes(np.asarray(v, INT))) for v in (a, b, c)), strict=True
                )
            )
        ),
        "bf16_pair": packed,
        "larger": lambda a, b: packed(
            *(np.maximum(x, y) for x, y in zip(halves(a), halves(b), strict=True))
        ),
        "across": lambda x, distance: lanes(x[..., np.arange(32) ^ distance]),
        "from_lane": from_lane,
        "from_row": lambda x, lane: lanes(x[..., np.arange(32) // 4 * 4 + lane]),
        "stream16_if": stream_if(4),
        "stream8_if": stream_if(2),
        "stream8_or_any": stream_if(2, ANYTHING),
        "stream16_or_any": stream_if(4, ANYTHING),
        "store_shared2": store_shared2,
        "multiplied": lambda a, b, c: a * b + c,  # modulo 2^32
        "quotient": lambda x, y: lanes((x / y).astype(FLOAT)),
        "dot4": dot4,
        "total": lambda x: over_warp(x, np.add.reduce).astype(INT),  # modulo 2^32
        "nearest": lambda x: lanes(nearest(x)),
        "rounded_bytes": rounded_bytes,
        "largest": lambda x: over_warp(x.view(np.uint32), np.max).view(INT),
        "largest_signed": lambda x: over_warp(x, np.max),
        "least": lambda x: over_warp(x, np.min),
        "bytes_of": bytes_of,
    }
    return found | leaves_of_wgmma(memory, programs) | leaves_of_peers(memory)
