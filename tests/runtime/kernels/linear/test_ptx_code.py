"""PTX by which kernels on Hopper unpack codes, run line by line, against the weight.

What stands between a lane's words and the products of its warpgroup is plain PTX of a dozen
instructions, written as text. Each is done here as the PTX manual defines it.
"""

import itertools
import re
from collections.abc import Callable, Sequence
from dataclasses import replace

import numpy as np
import pytest
import torch
from torch import Tensor

from lowbit.formats.layout.packing import unpack
from lowbit.runtime.kernels.codec import CODECS
from lowbit.runtime.kernels.linear import gemm
from lowbit.runtime.kernels.linear.tiles import dequantized, tiled
from lowbit.runtime.kernels.ptx import wgmma
from lowbit.runtime.kernels.ptx.wgmma import product_code, widened_code
from lowbit.runtime.weights.linear import PackedLinear
from tests.lanes import in_kernels
from tests.runtime.kernels.emulated_lanes import lanes, threads
from tests.runtime.kernels.emulator import Emulation, Memory, Pointer

MakePacked = Callable[[int, int, int, int], PackedLinear]

LANES = 32


def halves(words: Tensor) -> Tensor:
    """Two BF16 of each word, as float64 [2, lanes]."""
    pair = torch.stack([words & 0xFFFF, words >> 16 & 0xFFFF])
    return (pair << 16).to(torch.int32).view(torch.float32).double()


def words(pair: Tensor) -> Tensor:
    """Two numbers, rounded once to BF16, as a word of each lane."""
    rounded = pair.float().bfloat16().view(torch.int16).long() & 0xFFFF
    return rounded[0] | rounded[1] << 16


def logic(a: Tensor, b: Tensor, c: Tensor, table: int) -> Tensor:
    """`lop3`: bit n of the table is the result for bits a, b and c that make up n."""
    found = torch.zeros_like(a)
    for n in range(8):
        if table >> n & 1:
            match = [x if n >> (2 - i) & 1 else ~x for i, x in enumerate((a, b, c))]
            found |= match[0] & match[1] & match[2]
    return found & 0xFFFFFFFF


def permuted(a: Tensor, b: Tensor, selector: int) -> Tensor:
    """`prmt`: four bytes of two words."""
    both, found = a | b << 32, torch.zeros_like(a)
    for i in range(4):
        found |= (both >> 8 * (selector >> 4 * i & 7) & 0xFF) << 8 * i
    return found


def run(code: str, outputs: int, inputs: Sequence[Tensor]) -> tuple[dict[str, Tensor], list[str]]:
    """Registers at the end, by name, and the statements that are not run: those of products."""
    registers = {f"${outputs + i}": x.long() & 0xFFFFFFFF for i, x in enumerate(inputs)}
    products = re.findall(r"wgmma\.mma_async[^;]*;", code)
    statements = [s.strip() for s in re.sub(r"[{}]", "", code).split(";") if s.strip()]
    for statement in statements:
        name, _, rest = statement.partition(" ")
        if name in (".reg", "setp.ne.b32", "add.s64") or name.startswith("wgmma."):
            continue
        target, *given = rest.replace(" ", "").split(",")
        values = [
            registers[x] if x in registers else torch.full((LANES,), int(x, 0)) for x in given
        ]
        match name:
            case "mov.b32":
                result = values[0]
            case "shr.u32":
                result = values[0] >> values[1]
            case "shl.b32":
                result = values[0] << values[1] & 0xFFFFFFFF
            case "and.b32":
                result = values[0] & values[1]
            case "lop3.b32":
                result = logic(values[0], values[1], values[2], int(given[3], 0))
            case "prmt.b32":
                result = permuted(values[0], values[1], int(given[2], 0))
            case "fma.rn.bf16x2":
                result = words(halves(values[0]) * halves(values[1]) + halves(values[2]))
            case "mul.rn.bf16x2":
                result = words(halves(values[0]) * halves(values[1]))
            case _:
                raise AssertionError(statement)
        registers[target] = result
    return registers, products


@in_kernels("32-8", "128-2", "32-3")
@pytest.mark.parametrize("bits", [2, 3, 4, 8])
@pytest.mark.parametrize("G", [32, 128, pytest.param(640, marks=pytest.mark.kernels)])
def test_warps_hold_the_fragments_of_wgmma(make_packed: MakePacked, bits: int, G: int) -> None:
    """A's fragment of 16 k: words of rows g, g + 8, then both again, of 8 k more (PTX manual).

    Two warps load their tiles as `gemm` does. x lies in an order of its own: in every 32 k, lane t
    has chunk t of 8, in two products.
    """
    packed = make_packed(bits, 32, 640, G)
    t = tiled(replace(packed, codes=packed.codes.cpu(), scales=packed.scales.cpu()))
    weight = dequantized(t).bfloat16()
    memory = Memory([t.words, t.scales.view(torch.int32)])
    emulation = Emulation(memory, np.zeros((3, 1, 1, 1), np.int32), (1,))
    emulation.leaves["inline"] = lambda code, kinds, given: memory.load(given[0], 1, False)[0]
    place, load, sources = map(
        emulation.function, (gemm._place_of, gemm._load_step, wgmma._sources)
    )
    warp, lane, *_ = threads(1, 2)
    pointers = (Pointer(memory, x.data_ptr(), torch.int32) for x in (t.words, t.scales))
    zero = lanes(np.int32(0))
    words, scales = place(zero, 1, warp, lane, 2, *pointers, t.constants)
    g, chunk = torch.arange(LANES) // 4, torch.arange(LANES) % 4
    for block, tile in itertools.product(range(10), range(2)):
        step = load(words, scales, zero + block // 2, t.constants)
        inputs = [torch.from_numpy(np.asarray(x)[0, tile]) for x in sources(step, block % 2, bits)]
        registers, _ = run(widened_code(bits, block % 2), 16, inputs)
        for product, half, part in itertools.product(range(4), range(2), range(2)):
            found = halves(registers[f"${4 * product + 2 * part + half}"])
            k = 64 * block + 32 * (product // 2) + 8 * chunk + 4 * (product % 2) + 2 * part
            rows = 16 * tile + g + 8 * half
            assert torch.equal(found, torch.stack([weight[rows, k], weight[rows, k + 1]]).double())


@pytest.mark.parametrize(("bits", "sums"), [(2, 1), (3, 1), (4, 1), (4, 2), (4, 4), (8, 1), (8, 2)])
def test_a_warp_multiplies_codes_in_the_order_of_digits(
    make_packed: MakePacked, bits: int, sums: int
) -> None:
    """A's fragment of 32 k of bytes: words of rows g, g + 8, then both again, of 16 k more.

    sums: of each row of digits.
    """
    w = make_packed(bits, 16, 512, 128)
    t, codes = tiled(w), unpack(w.codes, bits, 512).cpu()
    order = (0, 4, 1, 5, 2, 6, 3, 7) if bits <= 4 else (0, 2, 1, 3, 4, 6, 5, 7)
    step_k, columns = CODECS[bits].STEP_K, 24
    row_k = step_k // CODECS[bits].ROWS // sums
    g, lane = torch.arange(LANES) // 4, torch.arange(LANES) % 4
    for first in range(0, 512, row_k):
        step, inside = divmod(first, step_k)
        each = 4 // CODECS[bits].ROWS // sums  # words of a row
        loads = t.words[0, step].reshape(-1, LANES, 4).cpu()[..., inside // row_k * each :]
        inputs = [load[:, i] for load in loads for i in range(each)] + [torch.zeros(LANES)]
        code = product_code(columns, bits, 0, row_k)
        registers, products = run(code, columns // 2, inputs)
        assert len(products) == row_k // 32
        for q, product in enumerate(products):
            names = re.findall(r"\{([^}]*)\}", product)[1].replace(" ", "").split(",")
            for i, name in enumerate(names):
                found = registers[name][:, None] >> 8 * torch.arange(4) & 0xFF
                k = first + 32 * q + 8 * lane[:, None] + torch.tensor(order[i // 2 * 4 :][:4])
                expected = codes[(g + 8 * (i % 2))[:, None], k].long() << (8 - bits)
                assert torch.equal(found, expected & 0xFF)
