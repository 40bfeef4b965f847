"""Values of all lanes of emulated programs, [programs, warps, 32], and the PTX that changes them.


A register is one number of each lane, where PTX packs several values in a word.
"""

from collections.abc import Callable
from typing import Any

import numpy as np
import torch

FLOAT, INT, LONG = np.float32, np.int32, np.int64


class BranchApartError(Exception):
    """Programs take different branches, or loops of different lengths."""

    def __init__(self, branch: np.ndarray):
        super().__init__("programs branch apart")
        self.branch = branch  # [programs], a number for each branch


class Lanes(np.ndarray):
    """Values of every lane."""

    def __bool__(self) -> bool:
        taken = np.asarray(self, bool)
        if taken.all() or not taken.any():
            return bool(taken.all())
        each = taken.reshape(len(taken), -1)
        assert (each == each[:, :1]).all(), "lanes of a program branch apart"
        raise BranchApartError(each[:, 0])

    def __iadd__(self, other: Any) -> Any:  # type: ignore[misc]  # NumPy changes what others name
        return self + other

    def __isub__(self, other: Any) -> Any:  # type: ignore[misc]
        return self - other

    def __imul__(self, other: Any) -> Any:  # type: ignore[misc]
        return self * other

    def to(self, dtype: Any, bitcast: bool = False) -> Any:
        if isinstance(dtype, torch.dtype):
            assert dtype == torch.bfloat16
            rounded = torch.from_numpy(np.ascontiguousarray(self, FLOAT)).bfloat16()
            return lanes(rounded.view(torch.int16).numpy())
        if hasattr(dtype, "at"):
            return dtype.at(self)
        return lanes(self.view(dtype) if bitcast else self.astype(dtype))


def lanes(x: Any) -> Lanes:
    return np.asarray(x).view(Lanes)


def over_warp(x: Lanes, function: Callable[..., Any]) -> Lanes:
    return lanes(np.broadcast_to(function(x, axis=-1, keepdims=True), x.shape).copy())


def from_lane(x: Lanes, lane: Any) -> Lanes:
    values, at = np.broadcast_arrays(x, np.asarray(lane) % 32)
    return lanes(np.take_along_axis(values, at, -1))


def threads(programs: int, warps: int) -> tuple[Lanes, ...]:
    _, warp, lane = (lanes(x.astype(INT)) for x in np.indices((programs, warps, 32)))
    return warp, lane, lanes(np.zeros(lane.shape, INT)), lanes(np.zeros(lane.shape, FLOAT))


def halves(word: Lanes) -> tuple[Lanes, Lanes]:
    """Two BF16 of a word."""
    return lanes((word << 16).view(FLOAT)), lanes((word & -65536).view(FLOAT))


def packed(low: Any, high: Any) -> Lanes:
    """Two FP32 as BF16 in a word."""
    a, b = (lanes(x).to(torch.bfloat16).astype(INT) for x in (low, high))
    return lanes((a & 0xFFFF) | (b << 16))


def pairs(word: Lanes, bits: int) -> tuple[Lanes, ...]:
    """Nibbles in the mantissa of 128.0, as the kernel makes them, less what was added."""
    found = []
    for i in range(4):
        signed = bits == 4 or i % 2 == 1
        biased = (word >> (4 * i) & 0x000F000F) ^ (0x43084308 if signed else 0x43004300)
        low, high = halves(lanes(biased))
        found.append(packed(low - (136 if signed else 128), high - (136 if signed else 128)))
    return tuple(found)


def code_pairs(word: Lanes) -> tuple[Lanes, Lanes]:
    """Signed bytes 0 and 2, then 1 and 3, as pairs of BF16."""
    codes = np.ascontiguousarray(word).view(np.int8).reshape(*word.shape, 4).astype(FLOAT)
    return packed(codes[..., 0], codes[..., 2]), packed(codes[..., 1], codes[..., 3])


def bytes_of(first: Lanes, second: Lanes, selector: int) -> Lanes:
    both = np.stack([first, second], -1).view(np.uint8)
    picked = both[..., [selector >> (4 * i) & 7 for i in range(4)]]
    return lanes(np.ascontiguousarray(picked).view(INT)[..., 0])


def product(
    c: Any, a: Any, b: Any, values: Callable[..., np.ndarray], each: int, dtype: Any = np.float32
) -> Any:
    """C + a @ b; a register holds `each` values of k.

    Lane 4 * g + t holds values of row g of a, and of column g of b, and results of row g.
    """
    outer = np.shape(c[0])[:-1]
    rows = values(a, outer).reshape(*outer, 2, 2, 8, 4, each)  # half of k, half of m, g, t
    columns = values(b, outer).reshape(*outer, 2, 8, 4, each)
    n = len(outer)
    before = tuple(range(n))
    A = rows.transpose(*before, n + 1, n + 2, n, n + 3, n + 4).reshape(*outer, 16, 8 * each)
    B = columns.transpose(*before, n, n + 2, n + 3, n + 1).reshape(*outer, 8 * each, 8)
    D = (A @ B).astype(dtype, copy=False).reshape(*outer, 2, 8, 4, 2)
    halves = [(half, i) for half in range(2) for i in range(2)]
    return tuple(
        lanes(c[at] + D[..., half, :, :, i].reshape(*outer, 32))
        for at, (half, i) in enumerate(halves)
    )


def registers(words: tuple[Any, ...], outer: tuple[int, ...]) -> np.ndarray:
    """Registers of the same kind beside each other, in front of the lanes."""
    found = np.empty((*outer, len(words), 32), INT)
    for i, word in enumerate(words):
        found[..., i, :] = word
    return found


def mma(c: Any, a0: Any, a1: Any, a2: Any, a3: Any, b0: Any, b1: Any) -> Any:
    def values(words: tuple[Any, ...], outer: tuple[int, ...]) -> np.ndarray:
        return np.stack(halves(lanes(registers(words, outer))), -1)

    return product(c, (a0, a1, a2, a3), (b0, b1), values, 2)


def integer_mma(c: Any, a0: Any, a1: Any, a2: Any, a3: Any, b0: Any, b1: Any) -> Any:
    def values(words: tuple[Any, ...], outer: tuple[int, ...]) -> np.ndarray:
        return registers(words, outer).view(np.int8).astype(np.float32)  # sums below 2^24 are exact

    return product(c, (a0, a1, a2, a3), (b0, b1), values, 4, INT)
