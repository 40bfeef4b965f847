"""What `kernels.ptx.wgmma` wraps, in NumPy: integer products of a warpgroup, and bulk copies.

A warpgroup's product is that of its warps, 16 rows each. The target of a bulk copy is NaN until the
program waits for its barrier, which must expect as many bytes as are copied.
"""

import itertools
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from tests.runtime.kernels.emulated_lanes import INT, LONG, Lanes, integer_mma, lanes

ROW_AT = 40  # the bit of a descriptor from which the bytes of its rows stand here
BARRIER = 0xA5  # each byte of a barrier in shared memory


@dataclass(slots=True)
class Barrier:
    """Bulk copies of a program that it waits for together."""

    expected: int = 0  # bytes
    copies: list[tuple[int, np.ndarray]] = field(default_factory=list)  # targets, and what comes
    done: bool = False


def codes_of(loads: Any, q: int, bits: int) -> list[Any]:
    """Registers of A in a step's q-th product: codes in the upper bits of their bytes."""
    if bits == 8:
        return [loads[half][2 * q + part] for part in range(2) for half in range(2)]
    if bits == 4:
        words = [loads[half][q] for half in range(2)]
        return [word << 4 & -0x0F0F0F10 for word in words] + [w & -0x0F0F0F10 for w in words]
    if bits == 2:
        return [
            (loads[half][q // 2] >> 4 * (q % 2) + 2 * part & 0x03030303) << 6
            for part in range(2)
            for half in range(2)
        ]
    found = []
    for n, half in itertools.product(range(2 * q % 8, 2 * q % 8 + 2), range(2)):
        words = [load[q // 4 * 2 + half] for load in loads]
        if n < 6:
            code = words[n % 3] >> (5 if n < 3 else 2) & 0x07070707
        else:
            code = (words[n - 6] & 0x03030303) << 1 | words[2] >> n - 6 & 0x01010101
        found.append(code << 5)
    return found


def leaves_of_wgmma(memory: Any, programs: int) -> dict[str, Callable[..., Any]]:
    """By name, in place of the functions of that module."""

    under_way: list[tuple[Any, tuple[Lanes, ...]]] = []  # what stands for sums, and these

    def descriptor(address: Any, row: int) -> Lanes:
        return lanes(np.asarray(address, LONG) >> 4 | row << ROW_AT)

    def multiply_step(
        loads: Any, digits: Any, half: int, columns: int, bits: int, at: int
    ) -> tuple[Lanes, ...]:
        count = row_of(digits) // 32
        codes = [codes_of(loads, half * count + q, bits) for q in range(count)]
        return multiply(codes, digits, columns, at)

    def multiply_group(
        words: Any, digits: Any, columns: int, bits: int, at: int, k: int, waits: bool
    ) -> tuple[Lanes, ...]:
        loads = words[: len(words) // 2], words[len(words) // 2 :]
        codes = [codes_of(loads, q, bits) for q in range(k // 32)]
        sums = multiply(codes, digits, columns, at)
        if waits:
            return sums
        unknown = tuple(lanes(np.full(x.shape, 0x7FC0A5C1, INT)) for x in sums)
        under_way.append((unknown, sums))
        return unknown

    def awaited(sums: Any, still_open: int) -> tuple[Lanes, ...]:
        done = under_way[: len(under_way) - still_open]
        assert done, "nothing is done"
        assert done[0][0] is sums, "other sums"
        return under_way.pop(0)[1]

    def row_of(digits: Any) -> int:
        return int(np.asarray(digits, LONG).flat[0]) >> ROW_AT

    def multiply(codes: Any, digits: Any, columns: int, at: int) -> tuple[Lanes, ...]:
        row_bytes, shape = row_of(digits), np.shape(codes[0][0])
        digits, first_chunk = np.asarray(digits, LONG), at % row_bytes // 16
        at -= at % row_bytes
        base = np.broadcast_to((digits & ((1 << ROW_AT) - 1)) * 16 + at, shape)
        g, t = np.arange(32) // 4, np.arange(32) % 4
        sums: list[Lanes] = []
        for first in range(0, columns, 8):
            row = first + g
            turned = row % 8 if row_bytes == 128 else row // 2 % 4
            d: Any = (lanes(np.zeros(shape, INT)),) * 4
            for q, a in enumerate(codes):
                chunks = [first_chunk + 2 * q + i ^ turned for i in range(2)]
                b = [
                    memory.load(base + row * row_bytes + chunk * 16 + 4 * t, 1, True)
                    for chunk in chunks
                ]
                d = integer_mma(d, a[0], a[1], a[2], a[3], b[0][0], b[1][0])
            sums += d
        return tuple(sums)

    barriers: dict[tuple[int, int], Barrier] = {}  # by program and address

    def each(chosen: Any, *given: Any) -> list[tuple[int, ...]]:
        """The program of each lane that is chosen, and what it is given."""
        own = np.arange(programs)[:, None, None]
        inside, *numbers = np.broadcast_arrays(np.asarray(chosen, bool), own, *given)
        return list(zip(*(x[inside].tolist() for x in numbers), strict=True))

    def init_barriers(address: Any, leader: Any, count: int) -> None:
        for program, first in each(leader, address):
            assert first % 8 == 0
            memory.shared[program, first : first + 8 * count] = BARRIER
            barriers.update({(program, first + 8 * i): Barrier() for i in range(count)})

    def expect_bytes(barrier: Any, leader: Any, size: int) -> None:
        for program, at in each(leader, barrier):
            assert not barriers[program, at].expected, "two arrivals"
            barriers[program, at].expected = size

    def bulk_copy(target: Any, source: Any, barrier: Any, leader: Any, size: int) -> None:
        assert size % 16 == 0
        for program, to, given, at in each(leader, target, source, barrier):
            assert to % 16 == given % 16 == 0, "not aligned to 16 bytes"
            values, start = memory.held(np.array([given]), size, reading=True)
            assert to + size <= memory.shared.shape[1], "behind shared memory"
            memory.shared[program, to : to + size] = 0xFF
            barriers[program, at].copies.append((to, values[start[0] : start[0] + size].copy()))

    def wait_bytes(barrier: Any, wanted: Any) -> None:
        for program, at in set(each(wanted, barrier)):
            here = barriers[program, at]
            assert (memory.shared[program, at : at + 8] == BARRIER).all(), "overwritten"
            assert here.done or here.expected == sum(len(x) for _, x in here.copies) > 0
            for to, values in here.copies if not here.done else ():
                memory.shared[program, to : to + len(values)] = values
            here.done = True

    return {
        "descriptor": descriptor,
        "multiply_step": multiply_step,
        "multiply_group": multiply_group,
        "awaited": awaited,
        "bulk_copy": bulk_copy,
        "init_barriers": init_barriers,
        "expect_bytes": expect_bytes,
        "wait_bytes": wait_bytes,
    }
