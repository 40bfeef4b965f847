"""The PTX of `gemm_int8`'s turns, run by a program's warps: the reference's bits, no wait in vain.

Copies that the kernel begins between its turns are begun here, as far ahead as there.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import numpy as np
import pytest
import torch
from torch import Tensor

from lowbit.formats.activations import activation_group, grouped_product_ref, quantize_activations
from lowbit.formats.layout.packing import unpack
from lowbit.runtime.kernels.launch.int8 import Int8Launch
from lowbit.runtime.kernels.linear.gemm_int8 import Int8GemmPlan, int8_gemm_plan
from lowbit.runtime.kernels.linear.program import token_blocks
from lowbit.runtime.kernels.linear.quantize import arranged
from lowbit.runtime.kernels.linear.tiles import TILE, TiledLinear, tiled
from lowbit.runtime.kernels.ptx.int8 import steps_code, terms_code
from lowbit.runtime.weights.linear import PackedLinear
from tests.runtime.kernels.linear.test_gemv_int8 import Case
from tests.runtime.kernels.ptx.machine import (
    LANES,
    Code,
    Copy,
    Program,
    Value,
    Warp,
    code_of,
    run_warps,
)

MakePacked = Callable[[int, int, int, int], PackedLinear]
Randn = Callable[..., Tensor]

BUFFER = 1024  # where x lies in shared memory
LANE = np.arange(LANES)


@dataclass(frozen=True, slots=True)
class Unit:
    """A block of 64 rows and tokens, and where its weight and x lie in memory."""

    plan: Int8GemmPlan
    scales_at: int
    x_at: int

    @property
    def each(self) -> int:
        """Steps of a turn."""
        return self.plan.SLICES * self.plan.STEPS

    @property
    def full(self) -> int:
        """The barrier of the first stage, behind two turns of x."""
        return BUFFER + 2 * self.each * self.plan.STAGE

    @property
    def terms(self) -> int:
        """Where a turn's terms lie."""
        return self.full + 1024

    def ring(self, warp: int) -> int:
        """Address of a warp's words."""
        terms = self.each * (128 // self.plan.X.GROUP) * self.plan.X.TOKENS * 256
        return self.terms + terms + warp * self.plan.AHEAD * self.plan.SLOT

    def x(self, turn: int) -> int:
        """Address of a turn's x."""
        return BUFFER + turn % 2 * self.each * self.plan.STAGE

    def words(self, warp: int, number: int) -> list[Copy]:
        """A batch of copies: words and scales of a warp's number-th step; none behind the last."""
        W, X, plan = self.plan.W, self.plan.X, self.plan
        step = number // plan.STEPS * self.each + number % plan.STEPS
        step += warp // 4 % plan.SLICES * plan.STEPS
        if step >= X.STEPS:
            return []
        own, row_words = 128 // W.CODEC.STEP_K, 2 if W.SCALES == "fp32" else 1
        slot, tile = self.ring(warp) + number % plan.AHEAD * plan.SLOT, warp % 4
        batch = []
        for lane in range(LANES):
            for j in range(own):
                at = min(step * own + j, W.STEPS - 1) * W.CODEC.STEP_BYTES + lane * 16
                at += tile * X.STEPS * 256 * W.BITS
                to = slot + lane * 16 + j * 1024
                batch += [Copy(to + half, at + half, 16) for half in (0, 512)]
            for j in range(128 // X.GROUP):
                group = min((step * 128 + j * X.GROUP) // W.G, W.GROUPS - 1)
                row = (tile * W.GROUPS + group) * 8 + lane // 4
                at, to = self.scales_at + row * 4 * row_words, slot + lane * 4 + 1024 * own
                batch += [
                    Copy(to + 128 * (j * row_words + k), at + 4 * k, 4) for k in range(row_words)
                ]
        return batch

    def begin_x(self, program: Program, turn: int) -> None:
        """Bring a turn's x to its place, whose barrier then ends its phase."""
        plan = self.plan
        for j in range(self.each):
            at = self.x_at + (turn * self.each + j) * plan.X.SIZE
            program.copy(Copy(self.x(turn) + j * plan.STAGE, at, plan.X.SIZE))
        program.phases[self.full + 8 * (turn % 2)] ^= 1


def registers(operands: Sequence[Value | int]) -> dict[str, Value]:
    """Operands by their numbers."""
    return {f"${i}": np.zeros(LANES, np.int64) + each for i, each in enumerate(operands)}


def first_token(unit: Unit, number: int) -> int:
    """The first token of a warp's own sums."""
    own = max(unit.plan.X.TOKENS // unit.plan.SLICES, 8)
    return min(number // 4 % unit.plan.SLICES * own, unit.plan.X.TOKENS - own)


def turn_inputs(unit: Unit, number: int, turn: int, sums: list[Value]) -> dict[str, Value]:
    """Registers of a warp before a turn: of `multiply_scaled`, or `leave_scaled` of a slice."""
    plan, columns = unit.plan, unit.plan.X.TOKENS
    slice_ = number // 4 % plan.SLICES
    place = unit.ring(number) + turn * plan.STEPS % plan.AHEAD * plan.SLOT
    x = unit.x(turn)
    before_slice = slice_ * plan.STEPS * (128 // plan.X.GROUP) * columns * 256
    terms = unit.terms + before_slice + number % 4 * 512 + LANE * 16
    slices = plan.SLICES > 1
    given: list[Value | int] = [
        place + LANE * 16, place + LANE * 4, (x + slice_ * plan.STEPS * plan.STAGE) >> 4 | 0x10000,
        terms if slices else x + plan.X.SCALES + LANE % 4 * 8, unit.full + turn % 2 * 8,
        turn // 2 % 2,
    ]  # fmt: skip
    before: list[Value | int] = [0] if slices else [*sums, *[0] * len(sums)]
    return registers([*before, *given])


def sum_inputs(unit: Unit, number: int, turn: int, sums: list[Value]) -> dict[str, Value]:
    """Registers of a warp of a slice behind a turn: of `add_terms`."""
    token = first_token(unit, number)
    terms = unit.terms + number % 4 * 512 + LANE * 16 + token * 256
    scales = unit.x(turn) + unit.plan.X.SCALES + (token + LANE % 4 * 2) * 4
    return registers([*sums, *[0] * len(sums), terms, scales])


def run_turns(unit: Unit, program: Program, code: Code, add: Code | None) -> list[list[Value]]:
    """Sums of each warp."""
    plan = unit.plan
    count = max(plan.X.TOKENS // plan.SLICES, 8) // 2
    warps = [Warp(program) for _ in range(plan.WARPS)]
    sums = [[np.zeros(LANES, np.int64)] * count for _ in warps]
    program.phases = {unit.full: 0, unit.full + 8: 0}
    for number, warp in enumerate(warps):
        warp.batches.extend(unit.words(number, i) for i in range(plan.AHEAD))
    for turn in range(plan.X.STEPS // unit.each):
        unit.begin_x(program, turn)
        for number, warp in enumerate(warps):
            warp.registers = turn_inputs(unit, number, turn, sums[number])
        run_warps(code, warps)
        if add is not None:
            for number, warp in enumerate(warps):
                warp.registers = sum_inputs(unit, number, turn, sums[number])
            run_warps(add, warps)
        sums = [[warp.value(f"${i}") for i in range(count)] for warp in warps]
        for number, warp in enumerate(warps):
            begun = plan.AHEAD + turn * plan.STEPS
            warp.batches.extend(unit.words(number, begun + j) for j in range(plan.STEPS))
    return sums


def product(
    x: Tensor, w: PackedLinear, launch: Int8Launch, change: tuple[str, str] = ("", "")
) -> Tensor:
    """What a program leaves of its block: [tokens, 64] float32.

    change: a text of its PTX, and one that takes its place.
    """
    group = activation_group(w.group_size, w.K)
    q, s = quantize_activations(x, group)
    own = tiled(w, activations="int8")
    assert isinstance(own, TiledLinear)
    X = token_blocks(w.K, group, launch.tokens)
    parts = [own.words, own.scales, arranged(q, s, w.bits, X)]
    memory = [part.contiguous().view(torch.uint8).flatten().numpy() for part in parts]
    plan = int8_gemm_plan(own.constants, X, launch, False, False)
    unit = Unit(plan, len(memory[0]), len(memory[0]) + len(memory[1]))
    program = Program(np.zeros(240 << 10, np.uint8), np.concatenate(memory))
    text = steps_code(launch.tokens, plan)
    assert change[0] in text
    own_tokens = max(launch.tokens // plan.SLICES, 8)
    add = None if plan.SLICES == 1 else code_of(terms_code(own_tokens // 2, launch.tokens, plan))
    sums = run_turns(unit, program, code_of(text.replace(*change)), add)
    y = torch.full((launch.tokens, 64), torch.nan)
    for number, values in enumerate(sums):
        token = first_token(unit, number)
        for i, value in enumerate(values):
            rows = number % 4 * TILE + LANE // 4 + 8 * (i % 4 // 2)
            tokens = token + 8 * (i // 4) + LANE % 4 * 2 + i % 2
            y[tokens, rows] = torch.from_numpy(value.astype(np.uint32)).view(torch.float32)
    return y


LAUNCH = Int8Launch(16, 1, 1, 1, 16, 1, 1, 2)
CASES = [
    (Case(4, 64, 640, 128), LAUNCH),
    (Case(4, 64, 512, 64, torch.float16), replace(LAUNCH, steps=2, chunk=8, sets=2)),
    (Case(8, 64, 512, 512), replace(LAUNCH, chunk=8, sets=2, ahead=3)),
    (Case(4, 64, 384, 32, torch.float32), replace(LAUNCH, sets=2)),
    (Case(8, 64, 512, 128), replace(LAUNCH, slices=2)),
    (Case(4, 64, 1024, 128), replace(LAUNCH, slices=4)),
]


def on_cpu(w: PackedLinear, scales: torch.dtype) -> PackedLinear:
    """The weight with scales of another type."""
    return PackedLinear(w.codes.cpu(), w.scales.cpu().to(scales), w.bits, w.group_size)


@pytest.mark.parametrize(("case", "launch"), CASES, ids=str)
def test_turns_leave_the_bits_of_the_reference(
    case: Case, launch: Int8Launch, make_packed: MakePacked, randn: Randn
) -> None:
    w = on_cpu(make_packed(case.bits, case.N, case.K, case.G), case.scales)
    x = (randn(16, case.K).cpu() * torch.logspace(-1, 1, 16)[:, None]).bfloat16()
    q, s = quantize_activations(x, activation_group(case.G, case.K))
    expected = grouped_product_ref(q, s, unpack(w.codes, w.bits, w.K), w.scales)
    assert torch.equal(product(x, w, launch), expected)


SLIPS: Sequence[tuple[str, str, str]] = (
    ("wgmma.wait_group.sync.aligned 1;", "wgmma.wait_group.sync.aligned 2;", "d0_0"),
    ("cp.async.wait_group 1;", "cp.async.wait_group 2;", "holds nothing"),
    ("@!done bra AGAIN;", "@done bra AGAIN;", "no warp goes on"),
    ("more;", "first;", "not close"),
)


@pytest.mark.parametrize(("statement", "instead", "message"), SLIPS)
def test_a_slip_of_the_code_is_found(
    statement: str, instead: str, message: str, make_packed: MakePacked, randn: Randn
) -> None:
    w = on_cpu(make_packed(4, 64, 640, 128), torch.bfloat16)
    x = randn(16, 640).cpu().bfloat16()
    launch = replace(LAUNCH, chunk=8, sets=2)
    with pytest.raises(AssertionError, match=message):
        torch.testing.assert_close(
            product(x, w, launch), product(x, w, launch, (statement, instead))
        )
