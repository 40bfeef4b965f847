"""Launch sizes of `gemm_int8`, on Hopper, for products of which `stream_int8` has no launch.

They are chosen by the time of a step of 128 k, measured on an H200 (LOG.md). None changes a bit.
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
    steps: int  # of a turn
    chunk: int  # tokens of a product: a multiple of 16
    sets: int  # of integer sums, of which one is multiplied while the other is converted
    programs: int  # beside each other on a multiprocessor
    ahead: int  # turns of words that a lane has in flight
    sharers: int = 1  # programs that divide each unit which not all programs have one of

    @property
    def warps(self) -> int:
        """Warps of a program."""
        return 4 * self.row_groups


@dataclass(frozen=True, slots=True)
class Int8Shared:
    """Shared memory of a program of `gemm_int8`, in bytes."""

    stage: int  # of a step of x
    ring: int  # turns of x
    slot: int  # of a warp's words and scales of a step
    size: int  # of all


# Launches, and nanoseconds that a step of all programs of a multiprocessor takes.
LAUNCHES = (
    (Int8Launch(16, 2, 2, 16, 2, 2, 4), 460),
    (Int8Launch(16, 4, 2, 16, 2, 1, 4), 431),
    (Int8Launch(32, 4, 2, 32, 1, 1, 3), 524),
    (Int8Launch(64, 2, 2, 64, 2, 1, 4), 434),
    (Int8Launch(64, 4, 2, 32, 1, 1, 2), 778),
    (Int8Launch(128, 2, 2, 64, 2, 1, 2), 667),
    (Int8Launch(256, 2, 1, 64, 2, 1, 2), 1183),
)
# The same where a token has one scale.
WHOLE_LAUNCHES = (
    (Int8Launch(16, 2, 2, 16, 2, 2, 4), 420),
    (Int8Launch(16, 4, 2, 16, 2, 1, 4), 410),
    (Int8Launch(32, 4, 2, 32, 2, 1, 2), 470),
    (Int8Launch(64, 2, 2, 64, 2, 1, 4), 310),
    (Int8Launch(64, 4, 2, 64, 1, 1, 2), 560),
    (Int8Launch(128, 2, 2, 128, 2, 1, 2), 450),
    (Int8Launch(256, 2, 1, 64, 2, 1, 2), 780),
)
PADDING = 1.02  # factor on the time of a launch that was cut to fit, with fewer steps in a turn
UNIT_NS, TOKEN_NS = 1500, 17  # beside the steps: of a unit, and of each of its tokens
JOIN_NS, PART_NS = 2500, 10  # of a divided unit, and of each token of each part
COUNTERS = 8  # of a tile: blocks of tokens whose units may be divided
MOST_SHARERS = 8  # of a unit


@cache
def int8_launch(
    bits: int,
    rows: int,
    steps: int,
    group: int,
    fp32_scales: bool,
    tokens: int,
    count: int,
    whole: bool = False,
) -> Int8Launch | None:
    """Choose the launch that ends first by the times above; None where none has room.

    Args:
        bits: of a code.
        rows: of the weight.
        steps: of 128 k.
        group: elements of x that share a scale.
        fp32_scales: of the weight; else they have 16 bits.
        tokens: of x.
        count: multiprocessors.
        whole: a token has one scale, which is not with its codes.
    """

    def fitted(launch: Int8Launch) -> Int8Launch | None:
        for each in (launch.steps, 1):
            if steps % each or steps // each < LEAST_STEPS:
                continue
            for ahead in range(min(launch.ahead, steps // each), 0, -1):
                found = replace(launch, steps=each, ahead=ahead)
                if int8_shared(bits, steps, group, fp32_scales, found, whole) is not None:
                    return found
        return None

    costs = []
    for launch, measured in WHOLE_LAUNCHES if whole else LAUNCHES:
        own = fitted(launch)
        if own is None:
            continue
        step = measured * (1 if own == launch else PADDING)
        blocks = -(-tokens // launch.tokens)
        units = -(-rows // (ROWS * launch.row_groups)) * blocks
        programs = count * launch.programs
        full, divided = divmod(units, programs)
        most = min(programs // divided, MOST_SHARERS) if divided and blocks <= COUNTERS else 1
        turns, unit = steps // own.steps, UNIT_NS + TOKEN_NS * launch.tokens
        for sharers in range(1, min(most, turns) + 1):
            join = JOIN_NS + PART_NS * sharers * launch.tokens if sharers > 1 else 0
            part = -(-turns // sharers) * own.steps * step + unit + join
            cost = full * (steps * step + unit) + (part if divided else 0)
            costs.append((cost, len(costs), replace(own, sharers=sharers)))
    return min(costs)[2] if costs else None


@cache
def int8_shared(
    bits: int, steps: int, group: int, fp32_scales: bool, launch: Int8Launch, whole: bool = False
) -> Int8Shared | None:
    """Shared memory of a program; see `int8_launch`. None where it has no room for two turns."""
    groups = STEP_K // group
    size = launch.tokens * (STEP_K if whole else STEP_K + 4 * groups)
    stage = -(-size // 1024) * 1024
    slot = 256 * bits + 128 * groups * (2 if fp32_scales else 1)
    fixed = launch.warps * launch.ahead * launch.steps * slot + 1024
    turn = launch.steps * stage + 16
    turns = steps // launch.steps
    ring = min((SHARED // launch.programs - 1024 - fixed) // turn, turns, MOST_RING)
    return None if ring < 2 else Int8Shared(stage, ring, slot, fixed + ring * turn)
