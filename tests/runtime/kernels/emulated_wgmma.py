"""What `kernels.ptx.wgmma` wraps, in NumPy: integer products of a warpgroup, and bulk copies.

A warpgroup's product is that of its warps, 16 rows each. Copies arrive at once.
"""

import itertools
from collections.abc import Callable
from typing import Any

import numpy as np

from tests.runtime.kernels.emulated_lanes import INT, LONG, Lanes, integer_mma, lanes

ROW_AT = 40  # the bit of a descriptor from which the bytes of its rows stand here


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

    def bulk_copy(target: Any, source: Any, barrier: Any, leader: Any, size: int) -> None:
        chosen = np.broadcast_to(np.asarray(leader, bool), (programs, *np.shape(leader)[1:]))
        to, given = (np.broadcast_to(x, chosen.shape) for x in (target, source))
        for at in np.argwhere(chosen):
            values, start = memory.held(given[tuple(at)].reshape(1), size, reading=True)
            begin = int(to[tuple(at)])
            memory.shared[at[0], begin : begin + size] = values[start[0] : start[0] + size]

    return {
        "descriptor": descriptor,
        "multiply_step": multiply_step,
        "multiply_group": multiply_group,
        "awaited": awaited,
        "bulk_copy": bulk_copy,
        "init_barriers": lambda *given: None,
        "expect_bytes": lambda *given: None,
        "wait_bytes": lambda *given: None,
    }
