"""Launch sizes of `stream_int8`, for steps of a few tokens on Hopper.

Measured on an H200 (LOG.md). None changes a bit.
"""

from dataclasses import dataclass
from functools import cache

from lowbit.runtime.kernels.launch.card import power_of_two
from lowbit.runtime.kernels.launch.int8 import SHARED, STEP_K

LEAST_ROOM, MOST_ROOM = 8, 32  # tokens that a launch has room for, powers of two
FEW_TILES = 3  # of a program: its warps share all of them, and products of 32 tokens gain
WARPS = 8  # of a program, which leaves each thread all the registers there are
# Groups of warps where a program has more tiles, each of which takes two at a time; or one, where
# two leave more spare tiles than one does by this factor.
GROUPS, SPARE = 2, 1.15


@dataclass(frozen=True, slots=True)
class StreamLaunch:
    """Share of a program of `stream_int8`."""

    tokens: int  # that there is room for
    warps: int
    groups: int  # of warps, each with tiles of its own
    tiles: int  # that a warp multiplies together
    rounds: int
    ahead: int  # steps of words that a warp has on their way

    @property
    def parts(self) -> int:
        """Warps that share a tile, whose steps they take in turn."""
        return self.warps // self.groups

    @property
    def program_tiles(self) -> int:
        """Tiles of a program."""
        return self.groups * self.tiles * self.rounds


@dataclass(frozen=True, slots=True)
class StreamShared:
    """Shared memory of a program of `stream_int8`, in bytes."""

    sums: int  # to the sums of a round, or of two in turn; the end of x
    round: int  # of the sums of a round
    full: int  # to the barriers of x
    size: int  # of all


@cache
def stream_launch(
    bits: int, tiles: int, steps: int, group: int, tokens: int, count: int, whole: bool = False
) -> StreamLaunch | None:
    """Look up the share of a program; None where x has no room, or another kernel is as fast.

    Args:
        bits: of a code, 4 or 8.
        tiles: of 16 rows of the weight.
        steps: of 128 k.
        group: elements of x that share a scale.
        tokens: of x.
        count: multiprocessors.
        whole: a token has one scale, which is not with its codes.
    """
    room = max(LEAST_ROOM, power_of_two(tokens))
    each = -(-tiles // count)
    if room > MOST_ROOM or (room == MOST_ROOM and each > FEW_TILES):
        return None
    if each <= FEW_TILES:
        groups, together = 1, each
    else:
        wide = GROUPS * 2 * -(-each // (GROUPS * 2))
        groups, together = GROUPS, 1 if wide > SPARE * (GROUPS * -(-each // GROUPS)) else 2
    rounds = -(-each // (groups * together))
    own = -(-steps // (WARPS // groups))
    ahead = min(_ahead(bits, together, rounds, own), own)
    launch = StreamLaunch(room, WARPS, groups, together, rounds, ahead)
    return launch if stream_shared(steps, group, launch, whole).size <= SHARED else None


def _ahead(bits: int, tiles: int, rounds: int, own: int) -> int:
    """Steps on their way of a warp that has so many of its own: what registers hold."""
    if tiles == 1:
        return 4 if bits == 8 else 8 if own <= 8 else 6
    if tiles == 2 and rounds == 1:
        return 4 if bits == 8 else 6
    if tiles == 2 and bits == 4:
        return 4 if own <= 8 else 3  # with longer rows four spill
    return 2


@cache
def stream_shared(
    steps: int, group: int, launch: StreamLaunch, whole: bool = False
) -> StreamShared:
    """Shared memory of a program; see `stream_launch` for the arguments."""
    x = steps * launch.tokens * (STEP_K if whole else STEP_K + STEP_K // group * 4)
    sums = launch.warps * launch.tiles * launch.tokens * 64
    full = x + min(launch.rounds, 2) * sums
    return StreamShared(x, sums, full, full + -(-steps // launch.parts) * 8)
