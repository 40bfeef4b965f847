"""Launch sizes of mixtures of experts: tables (`tables`), by the size of one expert's linear.

A token's bits do not depend on them, but for the warps that share a tile of gate and up, which are
as many for a lone token as for several. Rounds grow with the tokens, so that all programs of a step
find room at once. Those of 4 bits are measured on an H200 (LOG.md).
"""

from dataclasses import dataclass, replace
from functools import cache
from typing import Literal

from lowbit.runtime.kernels.launch.card import power_of_two
from lowbit.runtime.kernels.launch.linear import GemvLaunch
from lowbit.runtime.kernels.launch.tables import rows
from lowbit.runtime.thresholds import EXPERTS_APART, EXPERTS_TOKENS


@dataclass(frozen=True, slots=True)
class ExpertsDownLaunch:
    """Share of one program of `experts_down`."""

    tiles: int = 1  # of 16 rows, which have the same digits
    warps: int = 8  # of a program; each takes one step of an expert at a time
    rounds: int = 1  # in which a program takes that many tiles one after the other
    early: bool = False  # whether the next kernel may start before this one has its input
    # whether weights are asked for before it has, by experts chosen from older scores
    ahead: bool = True
    registers: int | None = 128  # of a thread at most
    shared: int = 0  # KB of shared memory that a program takes at least; see `GemvLaunch`


GATE_UP_DEFAULT = {"tiles": 1, "steps": 4, "warps": 4, "registers": 128}
DOWN_DEFAULT = {"registers": 168}


@cache
def experts_gate_up_launches(bits: int, tiles: int, steps: int) -> tuple[GemvLaunch, GemvLaunch]:
    """Shares of a program of `experts_gate_up`: of a lone token, and of as many as there may be."""
    found = rows("gate_up").get((bits, tiles, steps), (GATE_UP_DEFAULT,) * 2)
    return GemvLaunch(**found[0]), GemvLaunch(**found[1])


def experts_gate_up_launch(bits: int, tiles: int, steps: int, tokens: int) -> GemvLaunch:
    """The share of a program of `experts_gate_up`."""
    lone, several = experts_gate_up_launches(bits, tiles, steps)
    if tokens == 1:
        return lone
    return replace(several, rounds=min(several.rounds, power_of_two(tokens)))


@cache
def experts_down_launches(
    bits: int, tiles: int, steps: int
) -> tuple[ExpertsDownLaunch, ExpertsDownLaunch]:
    """Shares of a program of `experts_down`: of a lone token, and of as many as there may be."""
    found = rows("down").get((bits, tiles, steps), (DOWN_DEFAULT,) * 2)
    return ExpertsDownLaunch(**found[0]), ExpertsDownLaunch(**found[1])


def experts_down_launch(bits: int, tiles: int, steps: int, tokens: int) -> ExpertsDownLaunch:
    """The share of a program of `experts_down`."""
    lone, several = experts_down_launches(bits, tiles, steps)
    if tokens == 1:
        return lone
    return replace(several, rounds=min(several.rounds, power_of_two(tokens) // 2))


def experts_way(tokens: int) -> Literal["lone", "apart", "together", "grouped"]:
    """Reading of experts for so many tokens.

    By one token, by each token for itself, once for several of a step, or once for all of a prompt.
    """
    if tokens > EXPERTS_TOKENS:
        return "grouped"
    if tokens == 1:
        return "lone"
    return "apart" if tokens <= EXPERTS_APART else "together"


GROUP = 4  # tokens for which a program of `experts_together` reads an expert once
TOGETHER_DOWN = GemvLaunch(1, 1, 4, registers=168, rounds=8)


@cache
def together_launches(bits: int, tiles: int, steps: int) -> tuple[GemvLaunch, GemvLaunch]:
    """Shares of a program of `experts_together`: of gate and up, by its linear's size, and of down.

    As many warps share a tile of gate and up as for a lone token.
    """
    lone, _ = experts_gate_up_launches(bits, tiles, steps)
    return replace(lone, tiles=1, steps=4, registers=128, rounds=16), TOGETHER_DOWN


@dataclass(frozen=True, slots=True)
class GemmTiles:
    """Share of one program of a linear of a prompt's experts."""

    tiles: int = 2  # of 16 rows, of a warp
    warps: int = 4  # of a program
    passes: int = 1  # of a program, each over as many tiles; copies go on from one to the next
    # of a tile that are multiplied between two barriers; 1 where so many do not divide a row
    steps: int = 1
    # of so many steps in shared memory, from 2 on: one is multiplied, the others arrive
    stages: int = 3
    least: int = 16  # tokens of the shortest loop; a block takes the next multiple of them
    registers: int | None = None  # of a thread at most


@dataclass(frozen=True, slots=True)
class GemmLaunch:
    """Shares of programs that multiply a prompt's tokens by their experts."""

    rows: int = 64  # tokens of a block, a multiple of 8
    gate_up: GemmTiles = GemmTiles()  # of gate and up
    down: GemmTiles = GemmTiles()  # of down


# For every prompt: blocks of few tokens take a shorter loop of the same kernel, within 4 % of the
# best launch for 65 to 2,048 tokens.
EXPERTS_GEMM = GemmLaunch()


FEW_STEPS = 6  # of a row of down, up to which a lone token takes two tiles at a time


@dataclass(frozen=True, slots=True)
class ExpertsInt8Launch:
    """Share of one program of experts with x in eight bits."""

    warps: int = 4  # of a program; each takes a tile over the whole of K
    rounds: int = 1  # in which a warp takes one tile after the other
    kilobytes: int = 4  # of a tile's words that are on their way
    registers: int | None = 128  # of a thread at most
    tiles: int = 1  # of a round of down for one token, whose warps share slots and tiles


def int8_gate_up_launch(tokens: int) -> ExpertsInt8Launch:
    """The share of a program of `gate_up_int8`: of a lone token, or of one of several."""
    if tokens == 1:
        return ExpertsInt8Launch(kilobytes=8, registers=240)
    return ExpertsInt8Launch(rounds=4, registers=168)


def int8_down_launch(steps: int, slots: int, tokens: int) -> ExpertsInt8Launch:
    """The share of a program of `down_int8`; of several tokens each slot is one warp's.

    Args:
        steps: of a row.
        slots: of a token.
        tokens: 1, or more.
    """
    if tokens == 1:
        return ExpertsInt8Launch(8, registers=208, tiles=2 if steps <= FEW_STEPS else 1)
    return ExpertsInt8Launch(16 if slots > 8 else 8, rounds=8)


# Eights of tokens of the loops, by tokens of a block; two programs of the largest share a Hopper
# multiprocessor's memory.
INT8_LOOPS = {8: (1,), 16: (1, 2), 32: (1, 2, 4), 48: (2, 4, 5, 6)}
INT8_BLOCKS = tuple(INT8_LOOPS)


def int8_block_rows(pairs: int, experts: int) -> int:
    """Tokens for which a program reads an expert once, where they have room: twice the mean.

    Args:
        pairs: of token and expert.
    """
    return next((n for n in INT8_BLOCKS if n * experts >= 2 * pairs), INT8_BLOCKS[-1])


def int8_grouped_launches(rows: int) -> tuple[ExpertsInt8Launch, ExpertsInt8Launch]:
    """Shares of programs for blocks of so many tokens: of gate and up, and of down."""
    if rows <= 16:
        return ExpertsInt8Launch(rounds=2), ExpertsInt8Launch(rounds=8)
    return ExpertsInt8Launch(8, 4, kilobytes=2), ExpertsInt8Launch(8, 8, kilobytes=2)
