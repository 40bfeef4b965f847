"""Launch sizes of linear layers: tables (`tables`) and rules, by the size of the weight.

Measured on an H200 (LOG.md); elsewhere the same but for the cap of registers (`register_cap`) and
for shared memory asked for beyond the need (`spread_bytes`; before Hopper none is): no kernel needs
more registers or shared memory than compute capability 8.0 to 12.0 all have.
"""

from dataclasses import dataclass, replace
from functools import cache
from typing import Literal

from lowbit.runtime.kernels.codec import CODECS, WIDE_CODECS
from lowbit.runtime.kernels.launch.card import MULTIPROCESSORS, power_of_two
from lowbit.runtime.kernels.launch.tables import rows
from lowbit.runtime.thresholds import GEMV_TOKENS, SHORT_TOKENS


@dataclass(frozen=True, slots=True)
class GemvLaunch:
    """Share of one GEMV program."""

    tiles: int  # blocks of 16 rows that a warp multiplies together
    steps: int  # loads of 16 words a row, of each tile, that a warp has in flight at a time
    warps: int  # of a program
    early: bool = False  # let the next kernel start before this one has its input
    # most registers of a thread; None lets the compiler spill for occupancy's sake
    registers: int | None = None
    # groups of warps side by side. Each has tiles of its own, whose steps its warps share.
    warp_groups: int = 1
    # KB of shared memory that a program takes at least on Hopper. Programs that start early crowd
    # on the multiprocessors that have room first; so fewer of them fit on one.
    shared: int = 0
    rounds: int = 1  # times that a group takes tiles, one after the other, with the same x
    # programs that share a tile, each with some of its parts. Of a lone token they share x too, and
    # the last of them joins their sums; of 17 and more a kernel does.
    split: int = 1
    # let every program turn x into digits, if shared memory has room for them; else a kernel before
    # does
    staged: bool = True

    @property
    def parts(self) -> int:
        """Parts into which warps divide the steps of a tile: as many for any number of tokens."""
        return self.each * self.split

    @property
    def each(self) -> int:
        """Parts of a program."""
        return self.warps // self.warp_groups

    def shares(self, bits: int) -> bool:
        """Tell if programs can share a lone token: each takes blocks of 256 columns as a whole."""
        return self.each * CODECS[bits].STEP_K % UNIT_K == 0

    @property
    def program_tiles(self) -> int:
        """Tiles of a program."""
        return self.tiles * self.warp_groups * self.rounds

    def spread_bytes(self, limit: int) -> int:
        """Shared memory that a program takes at least, of which as many fit as on Hopper.

        limit: bytes that a program may take on the GPU, about what a multiprocessor has.
        """
        return (self.shared << 10) * limit // HOPPER_SHARED

    def sums_bytes(self, tokens: int) -> int:
        """Shared memory for the sums of each warp."""
        return self.rounds * self.round_bytes(tokens)

    def round_bytes(self, tokens: int) -> int:
        """Shared memory for the sums of each warp in a round."""
        return self.warps * self.tiles * 64 * tokens


UNIT_K = 256  # elements of x with one unit
MOST_PARTS = 16  # warps of a program that takes a tile of several tokens alone
HOPPER_SHARED = 227 << 10  # bytes that a program may take
Tuned = tuple[tuple[int, GemvLaunch], ...]  # tokens, and their launch as measured on this card


@cache
def measured(section: Literal["one", "unpaired"]) -> dict[tuple[int, int, int], GemvLaunch]:
    """Launches of a lone token as measured in whole decode steps, by bits, tiles and steps.

    `unpaired` has those of linears as large as a paired one of `one`.
    """
    found = rows(section).items()
    return {(bits, t, s): GemvLaunch(**launch) for (bits, t, s), (launch,) in found}


@cache
def several_measured() -> dict[tuple[int, int, int, int], GemvLaunch]:
    """Launches for several tokens where the rule below is not the best, by tokens too."""
    found = rows("several").items()
    return {(bits, t, s, n): GemvLaunch(**launch) for (bits, t, s, n), (launch,) in found}


# Other linears: at least this many KB of codes, at least this many steps; the first that fits.
GEMV_SHARES = (
    (200_000, 48, GemvLaunch(1, 4, 4, registers=128)),
    (40_000, 128, GemvLaunch(1, 4, 8, early=True)),
    (40_000, 48, GemvLaunch(1, 8, 4)),
    (40_000, 24, GemvLaunch(1, 4, 4, early=True, registers=128)),
    (10_000, 64, GemvLaunch(1, 4, 8, early=True)),
    (10_000, 24, GemvLaunch(1, 3, 8)),
    (10_000, 0, GemvLaunch(1, 3, 8, early=True, warp_groups=2)),
    (0, 33, GemvLaunch(1, 6, 8, early=True)),
    (0, 16, GemvLaunch(1, 2, 8, early=True, registers=80)),
    (0, 0, GemvLaunch(2, 2, 4, registers=128)),
)


def gemv_launch(
    bits: int,
    tiles: int,
    steps: int,
    tokens: int,
    paired: bool,
    tuned: Tuned = (),
    count: int = MULTIPROCESSORS,
) -> GemvLaunch:
    """Look up the share of a program for a power of two of tokens.

    As many warps share a tile for any number of tokens: their sums are joined in order.

    Args:
        paired: whether rows are those of gate and up in turn.
        tuned: launches of this linear that count before those of the tables.
    """
    own = dict(tuned)
    one = own.get(1) or _for_one(bits, tiles, steps, paired)
    if tokens == 1:
        return one if 1 in own else _rounds_on(count, one, tiles)
    for found in (own.get(tokens), several_measured().get((bits, tiles, steps, tokens))):
        if found is not None and found.parts == one.parts:
            return found
    return _for_several(one, tiles, steps, tokens, bits, count)


def _rounds_on(count: int, launch: GemvLaunch, tiles: int) -> GemvLaunch:
    """A launch of an H200 with as many programs for each multiprocessor of another card."""
    if launch.rounds == 1 or count == MULTIPROCESSORS:
        return launch
    groups = -(-tiles // (launch.tiles * launch.warp_groups))
    each = -(-(-(-groups // launch.rounds) * launch.split) // MULTIPROCESSORS)
    return replace(launch, rounds=-(-groups * launch.split // (each * count)))


def _for_one(bits: int, tiles: int, steps: int, paired: bool) -> GemvLaunch:
    size, codec = (bits, tiles, steps), CODECS[bits]
    if size not in measured("one"):
        like = CODECS[codec.MEASURED_AS]
        size = like.BITS, tiles, steps * codec.STEP_K // like.STEP_K
    one = (None if paired else measured("unpaired").get(size)) or measured("one").get(size)
    if one is None:
        one = next(
            launch
            for words, depth, launch in GEMV_SHARES
            if tiles * steps >= words and steps >= depth
        )
    if codec.LOADS > 2 and one.registers is not None:
        one = replace(one, registers=max(one.registers, 96))
    return one


LARGE = 4000  # tiles: heads
MOST_ROUNDS = {2: 9, 4: 9, 8: 9, 16: 4, 32: 4}  # whose sums wait in shared memory
MOST_STEPS = {2: 4, 4: 2, 8: 2, 16: 1, 32: 1}
MEASURED_K = 12288  # most columns of a linear for which several tokens were measured


def _for_several(
    one: GemvLaunch, tiles: int, steps: int, tokens: int, bits: int, count: int
) -> GemvLaunch:
    """The share of a program that stages x once for several rounds of tiles."""
    parts, step_k = one.parts, CODECS[bits].STEP_K
    most = max(MOST_STEPS[tokens], UNIT_K // (parts * step_k))  # whole units, for a loop
    ahead = _divisor(-(-steps // parts), most)
    if ahead == 1 and steps * step_k > MEASURED_K:  # a prime number of steps
        ahead = min(2, most)
    warp_groups = max(1, (16 if tiles < LARGE and tokens < GEMV_TOKENS else 8) // parts)
    launch = GemvLaunch(
        tiles=1,
        steps=ahead,
        warps=parts * warp_groups,
        early=one.early if tiles > LARGE or tokens == GEMV_TOKENS else True,
        registers=128 if tokens < GEMV_TOKENS else 255,
        warp_groups=warp_groups,
        staged=tokens < GEMV_TOKENS,
    )
    if (
        tokens == GEMV_TOKENS and parts > 1 and tiles <= LARGE
    ):  # digits are read from L2 by few programs
        rounds = -(-tiles * parts // (8 * count))
        return replace(launch, warps=8, warp_groups=8, split=parts, rounds=rounds)
    rounds = min(MOST_ROUNDS[tokens], -(-tiles // (warp_groups * count)))
    if rounds == 2 and tokens < GEMV_TOKENS:  # digits are read once for two tiles
        return replace(launch, tiles=2, steps=max(1, launch.steps // 2))
    return replace(launch, rounds=rounds)


INT8_REGISTERS = 96  # of a thread at least where x has eight bits; with fewer it spills
REGISTERS = 65536  # of a multiprocessor
INT8_WARPS = 16  # of a program of several tokens
INT8_KB = 4  # of words that a warp of these has on their way


def gemv_int8_launch(
    one: GemvLaunch, bits: int, tiles: int, K: int, tokens: int, count: int
) -> GemvLaunch:
    """The share of a program of `gemv_int8`, whose parts change no bit.

    A token's is that of `gemv`. Several tokens are rounded by one program for each multiprocessor,
    with all of its tiles: that takes longer than their products.

    Args:
        one: launch of a lone token of `gemv`.
        tokens: a power of two.
        count: multiprocessors.
    """
    codec = WIDE_CODECS[bits]
    if tokens > 1:
        steps, each = -(-K // codec.STEP_K), -(-tiles // count)
        groups = 2 if each == 2 or each > 3 else 1
        parts = min(INT8_WARPS // groups, 1 << steps.bit_length() - 1)
        groups = min(INT8_WARPS // parts, power_of_two(each))
        ahead = max(1, (INT8_KB << 10) // codec.STEP_BYTES)
        warps, rounds = parts * groups, -(-each // groups)
        return GemvLaunch(
            1, min(ahead, -(-steps // parts)), warps, True, 128, warp_groups=groups, rounds=rounds
        )
    steps = max(1, one.steps * CODECS[bits].STEP_K // codec.STEP_K)
    registers = max(INT8_REGISTERS, one.registers or (128 if one.warps > 4 else 168))
    launch = replace(one, steps=steps, registers=registers)
    if one.split == 1:
        return launch
    rounds = -(-tiles // (one.tiles * count))  # no program shares a tile
    registers = min(registers, REGISTERS // (32 * one.parts))  # of more warps than `one` has
    return replace(
        launch, warps=one.parts, warp_groups=1, rounds=rounds, split=1, registers=registers
    )


def _divisor(n: int, most: int) -> int:
    return max(d for d in range(1, most + 1) if n % d == 0)


@dataclass(frozen=True, slots=True)
class WgmmaLaunch:
    """Share of a program of `wgmma`, which has two warpgroups."""

    # programs that share rows, each with as many of the parts into which `gemv` splits K
    slices: int
    columns: int  # programs beside each other
    ahead: int  # steps that a warp has in flight
    part_steps: int  # steps of a part, a multiple of `ahead`

    def shared_bytes(self, bits: int, parts: int, tokens: int) -> int:
        """Shared memory: digits and units of a slice, a barrier a step, the words in flight."""
        steps = self.part_steps * (parts // self.slices)
        codec = CODECS[bits]
        digits = steps * tokens * (3 * codec.STEP_K + 4 * codec.ROWS)
        ring = WGMMA_WARPS * self.ahead * (codec.STEP_BYTES + 128 * codec.ROWS)
        return 1024 + digits + self.part_steps * 8 + 16 + ring


@cache
def groups_of_step(bits: int, group_size: int) -> int:
    """Sums, each with scales of its own, of a step of `wgmma` or of each half of one: 1, 2 or 4.

    They are those of `gemv`, which knows of a step no more than that scales are shared by as many
    columns as the largest power of two that divides the size of a group.
    """
    codec = CODECS[bits]
    columns = codec.STEP_K // codec.ROWS
    return columns // min(columns, group_size & -group_size)


WGMMA_WARPS = 8
MOST_OWN = 4  # parts of a program
MOST_AHEAD = {16: 4, 32: 4, 64: 2}  # by tokens; more spill
LEAST_DEEP = (4096, 8 << 20)  # columns and bytes of codes from which 9 to 16 tokens gain


@cache
def wgmma_launch(
    bits: int,
    tiles: int,
    steps: int,
    group_size: int,
    tokens: int,
    parts: int,
    count: int = MULTIPROCESSORS,
) -> WgmmaLaunch | None:
    """Look up the share of a program for 9 to 64 tokens on Hopper; None where `gemv` is faster.

    Programs share rows until their digits fit into shared memory; then the fewest steps of a
    program win.

    Args:
        group_size: weights that share a scale, in BF16 or FP16.
        tokens: that there is room for: 16, 32 or 64.
        parts: of a lone token's launch.
    """
    step_k = CODECS[bits].STEP_K
    deep = steps * step_k >= LEAST_DEEP[0] and tiles * steps << 10 >= LEAST_DEEP[1]
    halves = CODECS[bits].ROWS > 1  # each of which must end a group, as in `gemv`
    if halves and group_size % 256 != 128:
        return None
    if tokens == 16 and not deep:
        return None
    each = -(-steps // parts)
    cut = halves or groups_of_step(bits, group_size) > 1  # into several sums a step
    ahead = min(1 if cut and tokens == 64 else MOST_AHEAD[tokens], each)  # more spill
    if not (cut and ahead == 1) and all(each % ahead for ahead in range(2, ahead + 1)):
        each = -(-each // 2) * 2
    ahead = _divisor(each, ahead)
    blocks = -(-tiles // 4)
    found = None
    for slices in (1, 2, 4, 8, 16):
        columns = min(count // slices, blocks)
        launch = WgmmaLaunch(slices, columns, ahead, each)
        if parts % slices or parts // slices > MOST_OWN:
            continue
        if launch.shared_bytes(bits, parts, tokens) > HOPPER_SHARED - 1024:
            continue
        each_column = -(-blocks // columns)
        turns = -(-each_column // 2) * (parts // slices)
        if found is None or turns < found[0]:
            found = turns, launch
    return None if found is None else found[1]


@dataclass(frozen=True, slots=True)
class DenseLaunch:
    """Share of a program that multiplies dense rows; nothing here changes a bit."""

    tokens: int  # that it takes, a power of two
    tiles: int = 1  # of 16 rows


FEW_DENSE_ROWS = 1024  # which leave multiprocessors without a program
DENSE_BLOCK = 16  # tokens of a program of few rows
SMALL_DENSE_PROGRAMS = 256  # some two for each multiprocessor
# For more rows, or more such programs: four times the products with 2.5 times the instructions.
LARGE_DENSE = DenseLaunch(32, 2)


def dense_launch(rows: int, tokens: int) -> DenseLaunch:
    """Look up the share of a program of `dense_gemv` for a power of two of tokens."""
    if tokens <= DENSE_BLOCK:
        return DenseLaunch(tokens)
    programs = -(-rows // 16) * (tokens // DENSE_BLOCK)
    if rows > FEW_DENSE_ROWS or programs > SMALL_DENSE_PROGRAMS:
        return LARGE_DENSE
    return DenseLaunch(DENSE_BLOCK)


# Weights widened at a time: 50 MB. Of a short prompt the host takes longer to launch a product than
# the GPU to multiply it. 8B, 512 tokens, H200: 24 ms with such blocks, 19 with blocks of twice the
# size, 18.7 of four times it.
WIDE_WEIGHTS = 3 << 23


def wide_weights(tokens: int) -> int:
    """Weights that are widened at a time for so many tokens."""
    return WIDE_WEIGHTS * (2 if tokens <= SHORT_TOKENS else 1)


@dataclass(frozen=True, slots=True)
class GemmShare:
    """Share of a program of `gemm`."""

    tokens: int  # of a block
    splits: int = 1  # into which the k of a block is divided, a divisor of its steps


GEMM_COST = {256: 1.0, 192: 0.77, 128: 0.57, 64: 0.44}  # of a block, by its tokens
GEMM_JOIN = 4.5  # steps that a split takes longer, to hand on sums and to add those of others
MOST_SPLITS = 8


@cache
def gemm_share(row_blocks: int, tokens: int, steps: int, count: int = MULTIPROCESSORS) -> GemmShare:
    """The share of a program of `gemm` with which all programs end first.

    Args:
        row_blocks: blocks of rows of the weight.
        steps: of 128 k.
    """

    def cost(share: GemmShare) -> float:
        units = row_blocks * -(-tokens // share.tokens) * share.splits
        join = GEMM_JOIN if share.splits > 1 else 0.0
        return GEMM_COST[share.tokens] * -(-units // count) * (steps / share.splits + join)

    shares = [
        GemmShare(each, splits)
        for each in GEMM_COST
        for splits in range(1, MOST_SPLITS + 1)
        if steps % splits == 0 and steps >= 2 * splits and each // 8 % splits == 0
    ]
    return min(shares, key=cost)
