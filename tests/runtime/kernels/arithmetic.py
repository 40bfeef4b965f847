"""Arithmetic of emulated and interpreted kernels, with the same bits on every processor.

NumPy leaves matrix products to BLAS, which sums in an order of the processor and of a value's place
in the result; exponentials and logarithms to vector code of the processor or to the C library; and
PyTorch writes NaN in BF16 as the processor does. Here everything is made of what IEEE 754 rounds in
one way: sums, products and quotients of elements, scaling by powers of two, and casts. No sum is
left to NumPy either: its order follows from the shape.
"""

import math
from collections.abc import Callable
from typing import Any

import numpy as np
import torch

Array = np.ndarray[Any, Any]

LOG2_E = 1 / math.log(2)
LN2_HIGH = float.fromhex("0x1.62e42feep-1")  # times a whole number below 2^20 it is exact
LN2_LOW = float.fromhex("0x1.a39ef35793c76p-33")
SQRT_HALF = math.sqrt(0.5)
POWERS = [1 / math.factorial(k) for k in range(14)]  # of e^x, within FP64 up to ln(2) / 2
ODD_SHARES = [1 / (2 * k + 1) for k in range(12)]  # of atanh, within FP64 up to 3 - sqrt(8)


def halved(terms: Array, join: Callable[[Array, Array], Array] = np.add) -> Array:
    """The sum over the first axis: the first half plus the second, until one is left.

    Raises:
        AssertionError: as many terms are no power of two.
    """
    assert len(terms).bit_count() == 1, f"{len(terms)} terms"
    while len(terms) > 1:
        terms = join(terms[: len(terms) // 2], terms[len(terms) // 2 :])
    return np.asarray(terms[0])


def product(a: Array, b: Array) -> Array:
    """a [M, K] @ b [K, N]: the products of K, `halved`."""
    return halved(a.T[:, :, None] * b[:, None])


def exp2(x: Array) -> Array:
    """2 to x, in the dtype of x."""
    wide = np.clip(np.asarray(x, np.float64), -1100, 1100)
    whole = np.rint(wide)
    return _scaled((wide - whole) * math.log(2), whole, x.dtype)


def exp(x: Array) -> Array:
    """e to x, in the dtype of x."""
    wide = np.clip(np.asarray(x, np.float64), -800, 800)
    whole = np.rint(wide * LOG2_E)
    return _scaled(wide - whole * LN2_HIGH - whole * LN2_LOW, whole, x.dtype)


def _scaled(x: Array, whole: Array, dtype: Any) -> Array:
    """e to x [FP64, at most ln(2) / 2] times 2 to `whole`."""
    with np.errstate(all="ignore"):  # of NaN, and of results that are 0 or infinite
        return np.asarray(np.ldexp(_series(POWERS, x), whole.astype(np.int32)).astype(dtype))


def _series(factors: list[float], x: Array) -> Array:
    found = np.full_like(x, factors[-1])
    for factor in factors[-2::-1]:
        found *= x
        found += factor
    return found


def log(x: Array) -> Array:
    """The natural logarithm, in the dtype of x."""
    with np.errstate(all="ignore"):
        part, whole = np.frexp(np.asarray(x, np.float64))
        low = part < SQRT_HALF
        part, whole = np.where(low, 2 * part, part), whole - low
        ratio = (part - 1) / (part + 1)
        fine = 2 * ratio * _series(ODD_SHARES, ratio * ratio)
        found = whole * LN2_HIGH + (whole * LN2_LOW + fine)
        found = np.select([x == 0, x < 0, x == np.inf], [-np.inf, np.nan, np.inf], found)
        return found.astype(x.dtype)


def larger(a: Array, b: Array) -> Array:
    """The larger number of two: of a number and NaN the number, of two zeros the second."""
    return np.where((a > b) | np.isnan(b), a, b)


def smaller(a: Array, b: Array) -> Array:
    """The smaller number of two: of a number and NaN the number, of two zeros the second."""
    return np.where((a < b) | np.isnan(b), a, b)


def bf16_bits(x: Array) -> Array:
    """FP32 rounded to BF16, halves to even, as int16; NaN is that of a GPU."""
    values = np.ascontiguousarray(x, np.float32)
    bits = torch.from_numpy(values).bfloat16().view(torch.int16).numpy()
    if (missing := np.isnan(values)).any():
        bits[missing] = 0x7FFF
    return bits


def nearest(x: Array) -> Array:
    """The nearest int32, halves to even, the last one beyond them, 0 of NaN."""
    wide = np.clip(np.rint(np.asarray(x, np.float64)), -(2**31), 2**31 - 1)
    return np.where(np.isnan(x), 0.0, wide).astype(np.int32)
