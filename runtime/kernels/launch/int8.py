"""Launch sizes of `gemm_int8`, for nine tokens and more on Hopper.

They are chosen by the time of a step of 128 k, measured on an H100 (LOG.md). None changes a bit.
"""

from dataclasses import dataclass, replace
from functools import cache

STEP_K = 128  # columns of a step
ROWS = 64  # of a warpgroup
SHARED = 226 << 10  # bytes of shared memory that programs of a multiprocessor may fill
LEAST_STEPS = 2  # of a weight: x passes through a ring of two turns at least
MOST_RING = 8


@dataclass(frozen=True, slots=True)
class Int8Launch:
    """Share of a program of `gemm_int8`."""

    tokens: int  # of a block
    row_groups: int  # warpgroups side by side, 64 rows each
    slices: int  # warpgroups that share rows and tokens, and take steps in turn
    steps: int  # of a warpgroup's turn
    chunk: int  # tokens of a product
    sets: int  # of integer sums, of which one is multiplied while the other is converted
    programs: int  # beside each other on a multiprocessor
    ahead: int  # turns of words that a lane has in flight

    @property
    def warps(self) -> int:
        """Warps of a program."""
        return 4 * self.row_groups * self.slices

    @property
    def turn_steps(self) -> int:
        """Steps of a program's turn."""
        return self.slices * self.steps


@dataclass(frozen=True, slots=True)
class Int8Shared:
    """Shared memory of a program of `gemm_int8`, in bytes."""

    stage: int  # of a step of x
    ring: int  # turns of x
    slot: int  # of a warp's words and scales of a step
    size: int  # of all


# Launches, and nanoseconds that a step of all programs of a multiprocessor takes.
LAUNCHES = (
    (Int8Launch(16, 1, 4, 1, 16, 1, 1, 4), 186),
    (Int8Launch(16, 2, 1, 2, 16, 2, 2, 4), 245),
    (Int8Launch(16, 4, 1, 2, 16, 2, 1, 4), 387),
    (Int8Launch(32, 1, 4, 1, 32, 1, 1, 4), 232),
    (Int8Launch(32, 4, 1, 2, 32, 1, 1, 3), 484),
    (Int8Launch(64, 1, 2, 1, 64, 1, 1, 3), 378),
    (Int8Launch(64, 2, 1, 2, 64, 2, 1, 4), 390),
    (Int8Launch(64, 4, 1, 2, 32, 1, 1, 2), 742),
    (Int8Launch(128, 2, 1, 2, 64, 2, 1, 2), 657),
    (Int8Launch(256, 2, 1, 1, 64, 2, 1, 2), 1220),
)
PADDING = 1.02  # factor on the time of a launch that was cut to fit, with fewer steps in a turn


@cache
def int8_launch(
    bits: int, rows: int, steps: int, group: int, fp32_scales: bool, tokens: int, count: int
) -> Int8Launch | None:
    """Choose the launch that ends first by the times of LAUNCHES; None where none has room.

    Args:
        bits: of a code.
        rows: of the weight.
        steps: of 128 k.
        group: elements of x that share a scale.
        fp32_scales: of the weight; else they have 16 bits.
        tokens: of x.
        count: multiprocessors.
    """

    def fitted(launch: Int8Launch) -> Int8Launch | None:
        for slices in (launch.slices, 2, 1):
            for each in (launch.steps, 1):
                turn = slices * each
                if slices > launch.slices or steps % turn or steps // turn < LEAST_STEPS:
                    continue
                for ahead in range(min(launch.ahead, steps // turn), 0, -1):
                    found = replace(launch, slices=slices, steps=each, ahead=ahead)
                    if int8_shared(bits, steps, group, fp32_scales, found) is not None:
                        return found
        return None

    def cost(launch: Int8Launch, measured: float) -> float:
        units = -(-rows // (ROWS * launch.row_groups)) * -(-tokens // launch.tokens)
        return -(-units // (count * launch.programs)) * (steps * measured + 3000)

    found = ((fitted(launch), measured, launch) for launch, measured in LAUNCHES)
    costs = [
        (cost(own, measured * (1 if own == launch else PADDING)), i, own)
        for i, (own, measured, launch) in enumerate(found)
        if own is not None
    ]
    return min(costs)[2] if costs else None


@cache
def int8_shared(
    bits: int, steps: int, group: int, fp32_scales: bool, launch: Int8Launch
) -> Int8Shared | None:
    """Shared memory of a program; see `int8_launch`. None where it has no room for two turns."""
    groups = STEP_K // group
    size = launch.tokens * (STEP_K + 4 * groups)
    stage = -(-size // 1024) * 1024
    slot = 256 * bits + 128 * groups * (2 if fp32_scales else 1)
    fixed = launch.warps * launch.ahead * launch.steps * slot + 1024
    if launch.slices > 1:  # terms of two turns
        fixed += 2 * launch.row_groups * 4 * ROWS * launch.tokens * groups * launch.turn_steps
    turn = launch.turn_steps * stage + 16
    turns = steps // launch.turn_steps
    ring = min((SHARED // launch.programs - 1024 - fixed) // turn, turns, MOST_RING)
    return None if ring < 2 else Int8Shared(stage, ring, slot, fixed + ring * turn)
