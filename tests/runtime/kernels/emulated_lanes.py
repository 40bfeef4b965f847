"""Values of all lanes of emulated programs, [programs, warps, 32], and the PTX that changes them.


A register is one number of each lane, where PTX packs several values in a word.
"""

from collections.abc import Callable
from typing import Any

import numpy as np
import torch

from tests.runtime.kernels.arithmetic import bf16_bits, halved, nearest

FLOAT, INT, LONG = np.float32, np.int32, np.int64
WARPS = 256  # whose products stay in the cache


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
            return lanes(bf16_bits(self))
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
    both = np.empty((*np.broadcast_shapes(np.shape(low), np.shape(high)), 2), FLOAT)
    both[..., 0], both[..., 1] = low, high
    return lanes(bf16_bits(both).view(INT)[..., 0])


def pairs(word: Lanes, all_signed: bool) -> tuple[Lanes, ...]:
    """Nibbles in the mantissa of 128.0, as the kernel makes them, less what was added."""
    found = []
    for i in range(4):
        signed = all_signed or i % 2 == 1
        biased = (word >> (4 * i) & 0x000F000F) ^ (0x43084308 if signed else 0x43004300)
        low, high = halves(lanes(biased))
        found.append(packed(low - (136 if signed else 128), high - (136 if signed else 128)))
    return tuple(found)


def bytes_of(first: Lanes, second: Lanes, selector: int) -> Lanes:
    both = np.stack([first, second], -1).view(np.uint8)
    picked = both[..., [selector >> (4 * i) & 7 for i in range(4)]]
    return lanes(np.ascontiguousarray(picked).view(INT)[..., 0])


def dot4(first: Lanes, second: Lanes) -> Lanes:
    """The sum of the products of four signed bytes."""
    a, b = (np.ascontiguousarray(x)[..., None].view(np.int8).astype(INT) for x in (first, second))
    products = a * b
    pairs = products[..., :2] + products[..., 2:]
    return lanes(pairs[..., 0] + pairs[..., 1])


def registers(words: tuple[Any, ...], outer: tuple[int, ...]) -> np.ndarray:
    """Registers of the same kind beside each other, in front of the lanes."""
    found = np.empty((*outer, len(words), 32), INT)
    for i, word in enumerate(words):
        found[..., i, :] = word
    return found


def rounded_bytes(*given: Any) -> Lanes:
    """Products with the last one, rounded as they are to FP32, then to bytes."""
    rounded = [nearest((x * given[-1]).astype(FLOAT)).astype(np.int8) for x in given[:-1]]
    return lanes(np.ascontiguousarray(np.stack(rounded, -1)).view(INT)[..., 0])


def turned(word: Lanes) -> Lanes:
    """The transpose of an 8 x 8 matrix of 16 bits: two of row g in lane 4 * g + t."""
    rows = np.ascontiguousarray(word).view(np.int16).reshape(-1, 8, 8)
    return lanes(np.ascontiguousarray(rows.transpose(0, 2, 1)).view(INT).reshape(word.shape))


def mma(c: Any, a0: Any, a1: Any, a2: Any, a3: Any, b0: Any, b1: Any) -> Any:
    """C + a @ b of BF16.

    Lane 4 * g + t holds values of row g of a, and of column g of b, and results of row g.
    """
    outer = np.shape(c[0])[:-1]
    words = registers((a0, a1, a2, a3, b0, b1), outer).reshape(-1, 6, 8, 4)
    parts = [mma_sums(words[i : i + WARPS]) for i in range(0, len(words), WARPS)]
    D = np.concatenate(parts, axis=-1)
    return tuple(
        lanes(c[2 * half + i] + D[half, :, i::2].reshape(32, -1).T.reshape(*outer, 32))
        for half in range(2)
        for i in range(2)
    )


def mma_sums(words: np.ndarray) -> np.ndarray:
    """Products of [warps, register, g, t]: of a lane in the order of registers, lanes `halved`.

    Returns:
        [half of the rows, row, column, warps], rows that are long, unlike those of a tile.
    """
    words = np.ascontiguousarray(words.transpose(3, 1, 2, 0))
    low_high = (words << 16).view(FLOAT), (words & -65536).view(FLOAT)
    sums, term = np.zeros((2, 4, 2, 8, 8, words.shape[-1]), FLOAT)
    for k in range(2):
        for values in low_high:
            rows, columns = values[:, 2 * k : 2 * k + 2, :, None], values[:, 4 + k, None, None]
            sums += np.multiply(rows, columns, out=term)
    return halved(sums)


def integer_mma(c: Any, a0: Any, a1: Any, a2: Any, a3: Any, b0: Any, b1: Any) -> Any:
    """C + a @ b of signed bytes, four in a register; lanes as in `mma`."""
    outer = np.shape(c[0])[:-1]
    codes = registers((a0, a1, a2, a3, b0, b1), outer).view(np.int8).astype(FLOAT)
    codes = codes.reshape(-1, 3, 2, 8, 16)  # halves of k and b, half of m or k, g, t and place
    A = codes[:, :2].transpose(0, 2, 3, 1, 4).reshape(*outer, 16, 32)
    B = codes[:, 2].transpose(0, 1, 3, 2).reshape(*outer, 32, 8)
    D = (A @ B).astype(INT).reshape(*outer, 2, 8, 4, 2)  # below 2^24 sums are exact in any order
    return tuple(
        lanes(c[2 * half + i] + D[..., half, :, :, i].reshape(*outer, 32))
        for half in range(2)
        for i in range(2)
    )
