"""Launch sizes of mixtures of experts: literal tables, by the size of one expert's linear.

They are the same for any number of tokens of a decode step, so that one kernel computes every
token. No figure in them has been measured yet.
"""

from dataclasses import dataclass

from lowbit.runtime.kernels.launch import GemvLaunch, power_of_two


@dataclass(frozen=True, slots=True)
class ExpertsDownLaunch:
    """Share of one program of `experts_down`.

    Attributes:
        tiles: of 16 rows, which have the same digits.
        warps: of a program, at least as many as tiles; each takes one step of an expert at a time.
        early: whether the next kernel may start before this one has its input.
        ahead: whether weights are asked for before it has, by experts chosen from older scores.
        registers: of a thread at most.
        shared: KB of shared memory that a program takes at least; see `GemvLaunch`.
    """

    tiles: int = 1
    warps: int = 8
    early: bool = False
    ahead: bool = True
    registers: int | None = 128
    shared: int = 0


EXPERTS_GATE_UP: dict[tuple[int, int, int], GemvLaunch] = {
    (4, 64, 16): GemvLaunch(2, 4, 4, registers=128),  # Qwen3.5-35B-A3B
    (4, 96, 16): GemvLaunch(2, 4, 4, registers=128),  # Qwen3-30B-A3B
    (8, 64, 32): GemvLaunch(1, 8, 4, registers=128),
    (8, 96, 32): GemvLaunch(1, 8, 4, registers=128),
}
EXPERTS_GATE_UP_DEFAULT = GemvLaunch(1, 4, 4, registers=128)
EXPERTS_DOWN: dict[tuple[int, int, int], ExpertsDownLaunch] = {
    (4, 128, 4): ExpertsDownLaunch(),
    (4, 128, 6): ExpertsDownLaunch(),
    (8, 128, 8): ExpertsDownLaunch(registers=168),
    (8, 128, 12): ExpertsDownLaunch(registers=168),
}
EXPERTS_DOWN_DEFAULT = ExpertsDownLaunch(registers=168)


def experts_gate_up_launch(bits: int, tiles: int, steps: int) -> GemvLaunch:
    """The share of a program of `experts_gate_up`."""
    return EXPERTS_GATE_UP.get((bits, tiles, steps), EXPERTS_GATE_UP_DEFAULT)


def experts_down_launch(bits: int, tiles: int, steps: int) -> ExpertsDownLaunch:
    """The share of a program of `experts_down`."""
    return EXPERTS_DOWN.get((bits, tiles, steps), EXPERTS_DOWN_DEFAULT)


@dataclass(frozen=True, slots=True)
class GemmTiles:
    """Share of one program of a linear of a prompt's experts.

    Attributes:
        tiles: of 16 rows, of a warp.
        warps: of a program.
        passes: of a program, each over as many tiles; copies go on from one to the next.
        steps: of 512 / bits columns that are multiplied between two barriers.
        stages: of so many steps in shared memory, from 2 on: one is multiplied, the others arrive.
        least: tokens of the shortest loop; a block takes the next multiple of them.
        registers: of a thread at most.
    """

    tiles: int = 2
    warps: int = 4
    passes: int = 1
    steps: int = 1
    stages: int = 3
    least: int = 16
    registers: int | None = None


@dataclass(frozen=True, slots=True)
class GemmLaunch:
    """Shares of programs that multiply a prompt's tokens by their experts.

    Attributes:
        rows: tokens of a block, from 16 on, a power of two.
        gate_up: of gate and up.
        down: of down.
    """

    rows: int
    gate_up: GemmTiles = GemmTiles()
    down: GemmTiles = GemmTiles()


MOST_ROWS = 64


def experts_gemm_launch(pairs: int, experts: int) -> GemmLaunch:
    """The share of a program, for so many pairs of tokens and experts."""
    return GemmLaunch(rows=min(MOST_ROWS, max(16, power_of_two(-(-pairs // experts)))))
