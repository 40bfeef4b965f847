"""Emulated and interpreted kernels compute the same bits on every processor.

Oracles are loops over Python's floats, rounded to FP32 by `struct`, and `decimal`: no NumPy.
"""

import ast
import math
import struct
from collections.abc import Callable
from decimal import Decimal, localcontext
from pathlib import Path
from random import Random
from typing import Any

import numpy as np
import pytest
import torch
import triton
import triton.language as tl

from tests.runtime.kernels.arithmetic import (
    Array,
    bf16_bits,
    exp,
    exp2,
    halved,
    larger,
    log,
    nearest,
    product,
    smaller,
)
from tests.runtime.kernels.emulated_lanes import WARPS, lanes, mma

LANES = [(lane // 4, lane % 4) for lane in range(32)]
Rows = list[list[float]]


def rounded(x: float) -> float:
    """The nearest FP32: of a sum or product of two FP32 what every processor gives."""
    return float(struct.unpack("f", struct.pack("f", x))[0])


def tree(terms: list[float]) -> float:
    """The first half plus the second, until one is left."""
    while len(terms) > 1:
        half = len(terms) // 2
        terms = [rounded(terms[i] + terms[half + i]) for i in range(half)]
    return terms[0]


def dotted(row: list[float], column: list[float]) -> float:
    return tree([rounded(x * y) for x, y in zip(row, column, strict=True)])


def hexes(x: Any) -> list[str]:
    """The bits of FP32."""
    return [f"{word:08x}" for word in np.ascontiguousarray(x, np.float32).view(np.uint32).ravel()]


def numbers(random: Random, *shape: int) -> Any:
    """BF16 of either sign and many sizes: their sums round at every step."""
    if shape:
        return [numbers(random, *shape[1:]) for _ in range(shape[0])]
    return random.choice((-1, 1)) * random.randrange(128, 256) * 2.0 ** random.randrange(-16, -3)


def registers(a: Rows, b: Rows) -> list[list[int]]:
    """Registers of 32 lanes: four of a [16, 16] and two of b [16, 8]."""

    def word(low: float, high: float) -> int:
        halves = struct.pack("f", low)[2:] + struct.pack("f", high)[2:]
        return int(struct.unpack("i", halves)[0])

    def of_a(k: int, half: int) -> list[int]:
        at = 8 * k
        return [word(*a[g + 8 * half][at + 2 * t : at + 2 * t + 2]) for g, t in LANES]

    def of_b(k: int) -> list[int]:
        return [word(b[8 * k + 2 * t][g], b[8 * k + 2 * t + 1][g]) for g, t in LANES]

    return [*(of_a(k, half) for k in range(2) for half in range(2)), of_b(0), of_b(1)]


def tile(c: float, a: Rows, b: Rows) -> list[list[str]]:
    """Four registers of c + a @ b: of a lane four products in order, and halves of four lanes."""

    def one(row: list[float], column: list[float]) -> float:
        each = []
        for t in range(4):
            total = 0.0
            for k in (2 * t, 2 * t + 1, 8 + 2 * t, 9 + 2 * t):
                total = rounded(total + rounded(row[k] * column[k]))
            each.append(total)
        return rounded(c + tree(each))

    columns = list(zip(*b, strict=True))
    return [
        hexes([one(a[g + 8 * half], list(columns[2 * t + i])) for g, t in LANES])
        for half in range(2)
        for i in range(2)
    ]


@pytest.mark.parametrize("shape", [(1, 1), (3, 2), (2, WARPS // 2 + 1)], ids=str)
def test_a_tile_of_products_has_the_bits_of_a_loop(shape: tuple[int, int]) -> None:
    """Alone, beside others, and beside more than are taken at once."""
    random = Random(1)
    given = [(numbers(random, 16, 16), numbers(random, 16, 8)) for _ in range(5)]
    wanted = [tile(0.3125, a, b) for a, b in given]
    count = math.prod(shape)
    words = np.array([registers(*given[i % 5]) for i in range(count)], np.int32)
    c = lanes(np.full((*shape, 32), 0.3125, np.float32))
    got = mma([c] * 4, *(lanes(words[:, i].reshape(*shape, 32)) for i in range(6)))
    for at in range(count):
        assert [hexes(np.asarray(x).reshape(-1, 32)[at]) for x in got] == wanted[at % 5], at


def test_equal_rows_have_equal_products() -> None:
    """BLAS may add up the last four of sixteen rows in another order than the first twelve."""
    random = Random(2)
    words = registers([numbers(random, 16)] * 16, numbers(random, 16, 8))
    zero = lanes(np.zeros((1, 1, 32), np.float32))
    got = mma([zero] * 4, *(lanes(np.array(x, np.int32).reshape(1, 1, 32)) for x in words))
    rows = [np.asarray(x).reshape(8, 4) for x in got]
    assert all(hexes(row) == hexes(half[0]) for half in rows for row in half)
    assert [hexes(x) for x in rows[:2]] == [hexes(x) for x in rows[2:]]


@pytest.mark.parametrize(("M", "K", "N"), [(1, 2, 1), (16, 64, 3), (5, 16, 8)])
def test_a_product_has_the_bits_of_a_loop(M: int, K: int, N: int) -> None:
    random = Random(3)
    a, b = numbers(random, M, K), numbers(random, K, N)
    wanted = [dotted(row, list(column)) for row in a for column in zip(*b, strict=True)]
    assert hexes(product(np.array(a, np.float32), np.array(b, np.float32))) == hexes(wanted)


def test_sums_of_halves() -> None:
    random = Random(4)
    terms = numbers(random, 64, 3)
    wanted = [tree(list(column)) for column in zip(*terms, strict=True)]
    assert hexes(halved(np.array(terms, np.float32))) == hexes(wanted)
    assert hexes(halved(np.array(terms, np.float32).T.copy().T)) == hexes(wanted)
    with pytest.raises(AssertionError, match="12 terms"):
        halved(np.zeros(12, np.float32))


def decimal_exp2(x: Decimal) -> Decimal:
    return Decimal(2) ** x


FUNCTIONS = pytest.mark.parametrize(
    ("function", "exact", "low", "high"),
    [
        (exp, Decimal.exp, -103.0, 88.0),
        (exp, Decimal.exp, -1.0, 1.0),
        (exp2, decimal_exp2, -148.0, 127.0),
        (exp2, decimal_exp2, -1.0, 1.0),
        (log, Decimal.ln, 1e-40, 3e38),
        (log, Decimal.ln, 0.4, 2.1),
    ],
)


@FUNCTIONS
def test_functions_are_rounded_once(
    function: Callable[[Array], Array], exact: Callable[[Decimal], Decimal], low: float, high: float
) -> None:
    random = Random(5)
    given = [rounded(random.uniform(low, high)) for _ in range(200)]
    with localcontext(prec=40):
        wanted = [float(exact(Decimal(x))) for x in given]
    assert hexes(function(np.array(given, np.float32))) == hexes([rounded(x) for x in wanted])
    wide = function(np.array(given)).tolist()
    assert all(abs(x - y) <= 2 * math.ulp(y) for x, y in zip(wide, wanted, strict=True))


@pytest.mark.parametrize(
    ("function", "given", "wanted"),
    [
        (exp, 1.0, "402df854"),  # e
        (exp2, 0.5, "3fb504f3"),  # the root of two
        (log, 2.0, "3f317218"),
        (exp, 89.0, "7f800000"),
        (exp, -104.0, "00000000"),
        (exp2, -149.0, "00000001"),
        (exp2, 1e30, "7f800000"),
        (exp, -math.inf, "00000000"),
        (exp2, -math.inf, "00000000"),
        (exp, math.inf, "7f800000"),
        (exp2, -0.0, "3f800000"),
        (log, 0.0, "ff800000"),
        (log, math.inf, "7f800000"),
        (log, 1.0, "00000000"),
    ],
)
def test_ends_of_functions(function: Callable[[Array], Array], given: float, wanted: str) -> None:
    assert hexes(function(np.array([given], np.float32))) == [wanted]


@pytest.mark.parametrize("function", [exp, exp2, log])
def test_functions_keep_nan_and_dtype(function: Callable[[Array], Array]) -> None:
    for dtype in (np.float32, np.float64):
        found = function(np.array([math.nan, 2.0], dtype))
        assert found.dtype == dtype
        assert np.isnan(found).tolist() == [True, False]
    assert np.isnan(log(np.array([-1.0])))


@pytest.mark.parametrize("choose", [larger, smaller])
def test_which_of_two_zeros_does_not_depend_on_the_place(
    choose: Callable[[Array, Array], Array],
) -> None:
    """Vector code takes one of them, and what is left of a row the other."""
    zeros = np.zeros(37, np.float32)
    assert np.signbit(choose(zeros, -zeros)).all()
    assert not np.signbit(choose(-zeros, zeros)).any()


def test_a_number_is_larger_and_smaller_than_nan() -> None:
    a, b = np.array([[math.nan, 1, math.nan, 3], [2, math.nan, math.nan, 4]], np.float32)
    assert np.nan_to_num(larger(a, b), nan=-9).tolist() == [2, 1, -9, 4]
    assert np.nan_to_num(smaller(a, b), nan=-9).tolist() == [2, 1, -9, 3]


def test_bf16_is_rounded_to_even_and_its_nan_is_one() -> None:
    """Vector code writes other bits of NaN than plain code does."""
    words = [0x3F808000, 0x3F818000, 0x3F808001, 0x7F7FFFFF, 0x80000001, 0x7F800000]
    given = np.array([*words, 0x7F800001, 0xFFFFFFFF, 0x7FC00000] * 5, np.uint32).view(np.float32)
    wanted = [0x3F80, 0x3F82, 0x3F81, 0x7F80, 0x8000, 0x7F80, 0x7FFF, 0x7FFF, 0x7FFF]
    assert bf16_bits(given).view(np.uint16).tolist() == wanted * 5


def test_nearest_integers() -> None:
    """Beyond int32 a cast gives what the processor likes."""
    given = [0.5, 1.5, -2.5, 2147483520.0, 3e9, -3e9, math.inf, -math.inf, math.nan]
    wanted = [0, 2, -2, 2147483520, 2**31 - 1, -(2**31), 2**31 - 1, -(2**31), 0]
    assert nearest(np.array(given, np.float32)).tolist() == wanted


@triton.jit  # type: ignore[untyped-decorator]
def _everything_kernel(
    a_ptr: Any, b_ptr: Any, out_ptr: Any, scan_ptr: Any,
    M: tl.constexpr, K: tl.constexpr, N: tl.constexpr,
) -> None:  # fmt: skip
    m, k, n = tl.arange(0, M), tl.arange(0, K), tl.arange(0, N)
    a = tl.load(a_ptr + m[:, None] * K + k[None, :])
    c = tl.dot(a, tl.load(b_ptr + k[:, None] * N + n[None, :]), input_precision="ieee")
    tl.store(out_ptr + m[:, None] * N + n[None, :], c)
    tl.store(out_ptr + M * N + m, tl.sum(a, axis=1))
    tl.store(out_ptr + M * N + M + k, tl.max(a, axis=0))
    tl.store(out_ptr + M * N + M + K, tl.sum(a))
    tl.store(out_ptr + M * N + M + K + 1, tl.exp(tl.min(a)))
    large = (a * 1000).to(tl.int32)
    tl.store(scan_ptr + m[:, None] * K + k[None, :], tl.associative_scan(large, 1, _joined))


@triton.jit  # type: ignore[untyped-decorator]
def _joined(a: Any, b: Any) -> Any:
    return a + b


def test_interpreted_kernels_have_the_bits_of_a_loop(device: str) -> None:
    if device == "cuda":
        pytest.skip("a GPU runs the kernels itself")
    random = Random(6)
    M, K, N = 16, 32, 16
    a, b = numbers(random, M, K), numbers(random, K, N)
    out = torch.full((M * N + M + K + 2,), math.nan)
    scan = torch.zeros(M, K, dtype=torch.int32)
    _everything_kernel[(1,)](torch.tensor(a), torch.tensor(b), out, scan, M, K, N)
    columns = [list(column) for column in zip(*b, strict=True)]
    with localcontext(prec=40):
        last = float(Decimal(min(map(min, a))).exp())
    wanted = [rounded(dotted(row, column) + 0.0) for row in a for column in columns]
    wanted += [tree(row) for row in a]
    wanted += [max(column) for column in zip(*a, strict=True)]
    wanted += [tree([x for row in a for x in row]), rounded(last)]
    assert hexes(out.numpy()) == hexes(wanted)
    for row, found in zip(a, scan.tolist(), strict=True):
        assert found == [sum(int(x * 1000) for x in row[: k + 1]) for k in range(K)]


def test_nothing_is_left_to_what_depends_on_the_processor() -> None:
    functions = "exp exp2 expm1 log log2 log10 log1p sin cos tan tanh power cbrt hypot fmax fmin"
    sums = "sum mean var std dot vdot inner outer matmul einsum tensordot cumsum prod linalg"
    bad, found = {*functions.split(), *sums.split()}, []
    folder = Path(__file__).parent
    names = ("arithmetic", "emulator", "emulated_join", "emulated_lanes", "emulated_wgmma")
    for name in (*names, "interpreter"):
        for node in ast.walk(ast.parse((folder / f"{name}.py").read_text("utf-8"))):
            match node:
                case ast.Attribute(ast.Name("np"), function) if function in bad:
                    found.append(function)
                case ast.BinOp(ast.Name(a), ast.MatMult(), ast.Name(b)):
                    found.append(f"{a} @ {b}")
                case ast.MatMult():
                    found.append("@")
    assert found == ["A @ B", "@"]  # of integers, whose sums are exact
