"""What `kernels.ptx.wgmma` wraps, in NumPy: integer products of a warpgroup, and bulk copies.

A warpgroup's product is that of its warps, 16 rows each. Copies arrive at once.
"""

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
    found = []
    for part in range(2):
        slot = 2 * (q % 2) + part
        for half in range(2):
            code = loads[half][q // 2] >> 2 * slot & 0x03030303
            code = code << 6
            if bits == 3:
                code = code | (loads[2][q // 2] >> (slot + 4 * half) & 0x01010101) << 5
            found.append(code)
    return found


def leaves_of_wgmma(memory: Any, programs: int) -> dict[str, Callable[..., Any]]:
    """By name, in place of the functions of that module."""

    def descriptor(address: Any, row: int) -> Lanes:
        return lanes(np.asarray(address, LONG) >> 4 | row << ROW_AT)

    def multiply_step(
        loads: Any, digits: Any, half: int, columns: int, bits: int, at: int
    ) -> tuple[Lanes, ...]:
        digits = np.asarray(digits, LONG)
        row_bytes = int(digits.flat[0]) >> ROW_AT
        shape = np.shape(loads[0][0])
        base = np.broadcast_to((digits & ((1 << ROW_AT) - 1)) * 16 + at, shape)
        g, t = np.arange(32) // 4, np.arange(32) % 4
        sums: list[Lanes] = []
        for first in range(0, columns, 8):
            row = first + g
            turned = row % 8 if row_bytes == 128 else row // 2 % 4
            d: Any = (lanes(np.zeros(shape, INT)),) * 4
            for q in range(row_bytes // 32):
                b = [
                    memory.load(base + row * row_bytes + (2 * q + i ^ turned) * 16 + 4 * t, 1, True)
                    for i in range(2)
                ]
                a = codes_of(loads, half * (row_bytes // 32) + q, bits)
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
        "bulk_copy": bulk_copy,
        "init_barriers": lambda *given: None,
        "expect_bytes": lambda *given: None,
        "wait_bytes": lambda *given: None,
    }
