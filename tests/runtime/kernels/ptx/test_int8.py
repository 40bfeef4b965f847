"""The PTX of `gemm_int8`'s turns, run by a program's warps: the reference's bits, no wait in vain.

Copies that the kernel begins between its turns are begun here, as far ahead as there.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import numpy as np
import pytest
import torch
from torch import Tensor

from lowbit.formats.activations import (
    activation_group,
    centres,
    grouped_product_ref,
    integer_scales,
    quantize_activations,
    row_bounds,
    squared_norms,
    token_bounds,
    whole_product_ref,
)
from lowbit.formats.layout.packing import unpack
from lowbit.runtime.kernels.launch.int8 import Int8Launch
from lowbit.runtime.kernels.linear.gemm_int8 import Int8GemmPlan, int8_gemm_plan
from lowbit.runtime.kernels.linear.program import token_blocks
from lowbit.runtime.kernels.linear.quantize import arranged
from lowbit.runtime.kernels.linear.tiles import TILE, tiled
from lowbit.runtime.kernels.ptx.int8 import steps_code
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
    def full(self) -> int:
        """The barrier of the first stage, behind two turns of x."""
        return BUFFER + 2 * self.plan.STEPS * self.plan.STAGE

    def ring(self, warp: int) -> int:
        """Address of a warp's words."""
        return self.full + 1024 + warp * self.plan.AHEAD * self.plan.SLOT

    def x(self, turn: int) -> int:
        """Address of a turn's x."""
        return BUFFER + turn % 2 * self.plan.STEPS * self.plan.STAGE

    def words(self, warp: int, step: int) -> list[Copy]:
        """A batch of copies: words and scales of a step; none behind the last."""
        W, X, plan = self.plan.W, self.plan.X, self.plan
        if step >= X.STEPS:
            return []
        own, row_words = 128 // W.CODEC.STEP_K, 2 if W.SCALES == "fp32" else 1
        slot, tile = self.ring(warp) + step % plan.AHEAD * plan.SLOT, warp % 4
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
        for j in range(plan.STEPS):
            at = self.x_at + (turn * plan.STEPS + j) * plan.X.SIZE
            program.copy(Copy(self.x(turn) + j * plan.STAGE, at, plan.X.SIZE))
        program.phases[self.full + 8 * (turn % 2)] ^= 1


def registers(operands: Sequence[Value | int]) -> dict[str, Value]:
    """Operands by their numbers."""
    return {f"${i}": np.zeros(LANES, np.int64) + each for i, each in enumerate(operands)}


def turn_inputs(unit: Unit, number: int, turn: int, sums: list[Value]) -> dict[str, Value]:
    """Registers of a warp before a turn, of `multiply_scaled`."""
    plan = unit.plan
    place = unit.ring(number) + turn * plan.STEPS % plan.AHEAD * plan.SLOT
    x = unit.x(turn)
    given: list[Value | int] = [
        place + LANE * 16, place + LANE * 4, (x >> 4 | 0x10000) + LANE,
        x + plan.X.SCALES + LANE % 4 * 16, unit.full + turn % 2 * 8, turn // 2 % 2,
    ]  # fmt: skip
    return registers([*sums, *[0] * len(sums), *given])


def run_turns(unit: Unit, program: Program, code: Code, begin: list[list[Value]]) -> None:
    """All turns of each warp, whose sums begin somewhere and are left there."""
    plan = unit.plan
    warps = [Warp(program) for _ in range(plan.WARPS)]
    program.phases = {unit.full: 0, unit.full + 8: 0}
    for number, warp in enumerate(warps):
        warp.batches.extend(unit.words(number, i) for i in range(plan.AHEAD))
    for turn in range(plan.X.STEPS // plan.STEPS):
        unit.begin_x(program, turn)
        for number, warp in enumerate(warps):
            warp.registers = turn_inputs(unit, number, turn, begin[number])
        run_warps(code, warps)
        for number, warp in enumerate(warps):
            begin[number] = [warp.value(f"${i}") for i in range(len(begin[number]))]
            begun = plan.AHEAD + turn * plan.STEPS
            warp.batches.extend(unit.words(number, begun + j) for j in range(plan.STEPS))


def places(tokens: int) -> list[list[tuple[Value, Value]]]:
    """Tokens and rows of the sums of each lane, of four warps."""
    return [
        [
            (
                8 * (i // 4) + LANE % 4 * 2 + i % 2,
                warp * TILE + LANE // 4 + 8 * (i % 4 // 2),
            )
            for i in range(tokens // 2)
        ]
        for warp in range(4)
    ]


def product(
    x: Tensor,
    w: PackedLinear,
    launch: Int8Launch,
    change: tuple[str, str] = ("", ""),
    whole: bool = False,
) -> Tensor:
    """What a program leaves of its block: [tokens, 64] float32.

    change: a text of its PTX, and one that takes its place.
    whole: tokens have one scale, which the result is not times.
    """
    group = activation_group(w.group_size, w.K)
    q, s = quantize_activations(x, w.K if whole else group)
    own = tiled(w, activations="int8", whole=whole)
    X = token_blocks(w.K, group, launch.tokens, sixteens=not whole, whole=whole)
    groups = s.expand(-1, -(-w.K // group))
    parts = [own.words, own.scales, arranged(q, groups, w.bits, X)[..., : X.SIZE]]
    memory = [part.contiguous().view(torch.uint8).flatten().numpy() for part in parts]
    plan = int8_gemm_plan(own.constants, X, launch, False, False)
    unit = Unit(plan, len(memory[0]), len(memory[0]) + len(memory[1]))
    program = Program(np.zeros(240 << 10, np.uint8), np.concatenate(memory))
    text = steps_code(launch.tokens, plan)
    assert change[0] in text
    codes = unpack(w.codes, w.bits, w.K)
    bounds = row_bounds(squared_norms(codes, w.scales), groups.shape[1])
    centre = centres(bounds, token_bounds(q, s, group))
    starts = torch.zeros_like(centre) if whole else centre
    words = starts.view(torch.int32).numpy().astype(np.int64)
    sums = [[words[at] for at in warp] for warp in places(launch.tokens)]
    run_turns(unit, program, code_of(text.replace(*change)), sums)
    y = torch.full((launch.tokens, 64), torch.nan)
    for warp, values in zip(places(launch.tokens), sums, strict=True):
        for at, value in zip(warp, values, strict=True):
            y[at] = torch.from_numpy(value.astype(np.uint32)).view(torch.float32)
    if whole:
        _, units = integer_scales(codes, w.scales, w.bits)
        return y.view(torch.int32).float() * own.constants.CODEC.FACTOR * units
    return y - centre


LAUNCH = Int8Launch(16, 1, 1, 16, 1, 1, 2)
CASES = [
    (Case(4, 64, 640, 128), LAUNCH),
    (Case(4, 64, 512, 64, torch.float16), replace(LAUNCH, tokens=32, steps=2, sets=2)),
    (Case(8, 64, 512, 512), replace(LAUNCH, tokens=32, sets=2, ahead=3)),
    (Case(4, 64, 384, 32, torch.float32), replace(LAUNCH, sets=2)),
    (Case(4, 64, 384, 128), replace(LAUNCH, tokens=48)),
    (Case(8, 64, 256, 64), replace(LAUNCH, tokens=64, chunk=32)),
]


def on_cpu(w: PackedLinear, scales: torch.dtype) -> PackedLinear:
    """The weight with scales of another type."""
    return PackedLinear(w.codes.cpu(), w.scales.cpu().to(scales), w.bits, w.group_size)


@pytest.mark.parametrize(("case", "launch"), CASES[:5], ids=str)
def test_turns_of_tokens_with_one_scale(
    case: Case, launch: Int8Launch, make_packed: MakePacked, randn: Randn
) -> None:
    w = on_cpu(make_packed(case.bits, case.N, case.K, case.G), case.scales)
    x = randn(launch.tokens, case.K).cpu().bfloat16()
    q, _ = quantize_activations(x, case.K)
    one = torch.ones(len(q), 1)
    expected = whole_product_ref(q, one, unpack(w.codes, w.bits, w.K), w.scales, w.bits)
    assert torch.equal(product(x, w, launch, whole=True), expected)


@pytest.mark.parametrize(("case", "launch"), CASES, ids=str)
def test_turns_leave_the_bits_of_the_reference(
    case: Case, launch: Int8Launch, make_packed: MakePacked, randn: Randn
) -> None:
    w = on_cpu(make_packed(case.bits, case.N, case.K, case.G), case.scales)
    sizes = torch.logspace(-1, 1, launch.tokens)[:, None]
    x = (randn(launch.tokens, case.K).cpu() * sizes).bfloat16()
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
    x = randn(32, 640).cpu().bfloat16()
    launch = replace(LAUNCH, tokens=32, sets=2)
    with pytest.raises(AssertionError, match=message):
        torch.testing.assert_close(
            product(x, w, launch), product(x, w, launch, (statement, instead))
        )
