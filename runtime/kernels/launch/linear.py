"""Launch sizes: literal tables, by the size of what is read.

Measured on an H200 (LOG.md); elsewhere the same but for the cap of registers (`register_cap`) and,
before Hopper, for shared memory asked for beyond the need: no kernel needs more registers or shared
memory than compute capability 8.0 to 12.0 all have.
"""

from dataclasses import dataclass, replace

from lowbit.runtime.state.step import EXACT_TOKENS


@dataclass(frozen=True, slots=True)
class GemvLaunch:
    """Share of one GEMV program.

    Attributes:
        tiles: of 16 rows.
        steps: of each tile that a warp has in flight at a time.
        warps: of a program; those of one tile share its steps.
        early: whether the next kernel may start before this one has its input.
        registers: of a thread at most; None leaves the compiler to spill for occupancy's sake.
        abreast: tiles that warps take beside each other, each with its share of the warps.
        shared: KB of shared memory that a program takes at least. Programs that may start early
            crowd on the multiprocessors that have room first; so fewer of them find room on one.
        rounds: in which a program takes that many tiles one after the other, with the same x.
        split: programs that share a tile, of 17 tokens and more; a kernel joins their sums.
        staged: whether every program turns x into digits, where shared memory has room for them;
            else a kernel before does.
    """

    tiles: int
    steps: int
    warps: int
    early: bool = False
    registers: int | None = None
    abreast: int = 1
    shared: int = 0
    rounds: int = 1
    split: int = 1
    staged: bool = True

    @property
    def parts(self) -> int:
        """Warps that share a tile."""
        return self.warps // self.abreast * self.split


# (bits, tiles, steps): the linears of real models, as measured in whole decode steps.
GEMV_MEASURED = {
    # Qwen3-0.6B: q, k, v; o; gate and up; down; head
    (4, 256, 8): GemvLaunch(2, 2, 4, registers=128),
    (4, 64, 16): GemvLaunch(1, 4, 4, early=True, registers=168),
    (4, 384, 8): GemvLaunch(2, 2, 4, early=True, registers=168),
    (4, 64, 24): GemvLaunch(1, 6, 4, registers=168),
    (8, 256, 16): GemvLaunch(1, 8, 4, early=True, registers=168, abreast=2),
    (8, 64, 32): GemvLaunch(1, 8, 4, early=True, registers=168),
    (8, 384, 16): GemvLaunch(2, 4, 4),
    (8, 64, 48): GemvLaunch(1, 6, 8, early=True, registers=168),
    (8, 9496, 16): GemvLaunch(1, 2, 8, abreast=2),
    # 1.7B
    (4, 256, 16): GemvLaunch(2, 2, 8, early=True, registers=128),
    (4, 128, 16): GemvLaunch(1, 4, 4, early=True, registers=80, shared=48),
    (4, 768, 16): GemvLaunch(4, 2, 8, registers=128, shared=48),
    (4, 128, 48): GemvLaunch(1, 6, 8, registers=168, shared=48),
    (8, 256, 32): GemvLaunch(1, 8, 4, registers=128),
    (8, 128, 32): GemvLaunch(1, 8, 4, early=True, registers=168),
    (8, 768, 32): GemvLaunch(1, 4, 8, registers=80, abreast=2),
    (8, 128, 96): GemvLaunch(1, 6, 8, early=True, registers=168),
    (8, 9496, 32): GemvLaunch(1, 4, 8, early=True, abreast=2),
    # 4B
    (4, 384, 20): GemvLaunch(1, 5, 8, registers=128, abreast=2),
    (4, 160, 32): GemvLaunch(1, 4, 8, early=True, registers=128, shared=32),
    (4, 1216, 20): GemvLaunch(1, 3, 8, registers=80, abreast=2, shared=16),
    (4, 160, 76): GemvLaunch(1, 5, 8, early=True, registers=128, shared=32),
    (8, 384, 40): GemvLaunch(1, 3, 8),
    (8, 160, 64): GemvLaunch(1, 8, 8, shared=32),
    (8, 1216, 40): GemvLaunch(1, 3, 8, early=True),
    (8, 160, 152): GemvLaunch(1, 5, 8, early=True, registers=128),
    (8, 9496, 40): GemvLaunch(2, 3, 4),
    # 8B
    (4, 384, 32): GemvLaunch(1, 2, 8, early=True, registers=128, shared=32),
    (4, 256, 32): GemvLaunch(1, 2, 8, registers=80),
    (4, 1536, 32): GemvLaunch(1, 4, 4, early=True, registers=128),
    (4, 256, 96): GemvLaunch(1, 6, 8, early=True, registers=128),
    (8, 384, 64): GemvLaunch(1, 3, 8),
    (8, 1536, 64): GemvLaunch(1, 8, 4, registers=168),
    (8, 256, 192): GemvLaunch(1, 6, 8, early=True, registers=128),
    (8, 9496, 64): GemvLaunch(1, 8, 4),
    # Qwen3.5-0.8B: q, k, v, z; q, k, v; gate and up; down; head
    (4, 512, 8): GemvLaunch(1, 4, 4, registers=96, abreast=2),
    (4, 320, 8): GemvLaunch(2, 2, 4, early=True, registers=168),
    (4, 448, 8): GemvLaunch(1, 4, 4, abreast=2, shared=32),
    (4, 64, 28): GemvLaunch(1, 7, 4, early=True, registers=168),
    (8, 512, 16): GemvLaunch(1, 4, 4),
    (8, 320, 16): GemvLaunch(1, 4, 4),
    (8, 448, 16): GemvLaunch(2, 4, 4, early=True),
    (8, 64, 56): GemvLaunch(1, 7, 8, early=True, registers=128),
    (8, 15520, 16): GemvLaunch(1, 1, 8, early=True, registers=80, abreast=2),
    # 2B
    (4, 512, 16): GemvLaunch(2, 2, 8, early=True, registers=128, shared=48),
    (4, 320, 16): GemvLaunch(1, 8, 4, registers=168, abreast=2),
    (8, 512, 32): GemvLaunch(1, 4, 4, early=True, registers=128),
    (8, 320, 32): GemvLaunch(1, 2, 8, registers=168),
    (8, 15520, 32): GemvLaunch(2, 4, 8),
    # 4B
    (4, 768, 20): GemvLaunch(2, 4, 4, registers=168, shared=32),
    (4, 640, 20): GemvLaunch(2, 3, 4, shared=32),
    (4, 1152, 20): GemvLaunch(1, 5, 4, abreast=2, shared=32),
    (4, 160, 72): GemvLaunch(1, 5, 8, early=True, registers=128, shared=48),
    (8, 768, 40): GemvLaunch(2, 3, 8, registers=168),
    (8, 640, 40): GemvLaunch(1, 5, 4, registers=128, shared=32),
    (8, 1152, 40): GemvLaunch(1, 4, 4),
    (8, 160, 144): GemvLaunch(1, 5, 8, early=True, registers=128),
    (8, 15520, 40): GemvLaunch(1, 7, 4, early=True, registers=128, abreast=2),
    # 9B
    (4, 768, 32): GemvLaunch(1, 4, 4),
    (4, 640, 32): GemvLaunch(2, 3, 4, early=True),
    (8, 256, 64): GemvLaunch(1, 8, 4, early=True, registers=168),
    (8, 15520, 64): GemvLaunch(1, 8, 4, registers=168),
    # 35B-A3B: q, k, v; o
    (4, 576, 16): GemvLaunch(1, 2, 8, registers=128, abreast=2),
    (4, 128, 32): GemvLaunch(1, 4, 8, early=True, registers=80),
}
# Unpaired linears as large as a paired one above: looked up first.
GEMV_UNPAIRED = {
    # 35B-A3B: q, k, v, z
    (4, 768, 16): GemvLaunch(1, 4, 4, abreast=2, shared=16),
}
# Of others: at least this many KB of codes, at least this many steps; the first that fits counts.
GEMV_SHARES = (
    (200_000, 48, GemvLaunch(1, 4, 4, registers=128)),
    (40_000, 128, GemvLaunch(1, 4, 8, early=True)),
    (40_000, 48, GemvLaunch(1, 8, 4)),
    (40_000, 24, GemvLaunch(1, 4, 4, early=True, registers=128)),
    (10_000, 64, GemvLaunch(1, 4, 8, early=True)),
    (10_000, 24, GemvLaunch(1, 3, 8)),
    (10_000, 0, GemvLaunch(1, 3, 8, early=True, abreast=2)),
    (0, 33, GemvLaunch(1, 6, 8, early=True)),
    (0, 16, GemvLaunch(1, 2, 8, early=True, registers=80)),
    (0, 0, GemvLaunch(2, 2, 4, registers=128)),
)


def gemv_launch(bits: int, tiles: int, steps: int, tokens: int, paired: bool) -> GemvLaunch:
    """The share of a program, for so many tokens, a power of two, times a weight of tiles by steps.

    As many warps share a tile for any number of tokens: their sums are joined in order.

    Args:
        bits: of a code.
        tiles: of 16 rows.
        steps: of a tile.
        tokens: of a step.
        paired: whether rows are those of gate and up in turn.
    """
    size = (bits, tiles, steps)
    one = (None if paired else GEMV_UNPAIRED.get(size)) or GEMV_MEASURED.get(size)
    if one is None:
        one = next(
            launch
            for size, depth, launch in GEMV_SHARES
            if tiles * steps >= size and steps >= depth
        )
    if tokens == 1:
        return one
    measured = SEVERAL_MEASURED.get((bits, tiles, steps, tokens))
    if measured is not None and measured.parts == one.parts:
        return measured
    return _for_several(one, tiles, steps, tokens, bits)


# For several tokens, as measured in whole decode steps on an H200 (LOG.md).
# (bits, tiles, steps, tokens): where the rule below is not the best.
SEVERAL_MEASURED: dict[tuple[int, int, int, int], GemvLaunch] = {
    # 1.7B
    (4, 256, 16, 2): GemvLaunch(2, 2, 16, early=True, registers=128, abreast=2),
    (4, 256, 16, 4): GemvLaunch(2, 2, 16, early=True, registers=128, abreast=2),
    (4, 256, 16, 8): GemvLaunch(2, 1, 16, early=True, registers=128, abreast=2),
    (4, 256, 16, 16): GemvLaunch(2, 2, 8, early=True, registers=255),
    (4, 128, 16, 4): GemvLaunch(1, 4, 16, early=True, registers=128, abreast=4),
    (4, 128, 16, 8): GemvLaunch(1, 4, 16, early=True, registers=128, abreast=4),
    (4, 128, 16, 16): GemvLaunch(2, 1, 8, early=True, registers=255, abreast=2),
    (4, 768, 16, 2): GemvLaunch(4, 2, 8, registers=128),
    (4, 768, 16, 4): GemvLaunch(2, 2, 8, early=True, registers=255, rounds=3),
    (4, 768, 16, 8): GemvLaunch(2, 2, 8, early=True, registers=255, rounds=3),
    (4, 128, 48, 2): GemvLaunch(1, 6, 8, registers=168),
    (4, 128, 48, 8): GemvLaunch(1, 2, 8, early=True, registers=128),
    (4, 128, 48, 16): GemvLaunch(1, 1, 8, early=True, registers=128),
    # 8B
    (4, 384, 32, 2): GemvLaunch(2, 2, 16, early=True, registers=128, abreast=2),
    (4, 384, 32, 4): GemvLaunch(2, 1, 8, early=True, registers=128),
    (4, 256, 32, 2): GemvLaunch(1, 2, 16, early=True, registers=128, abreast=2),
    (4, 256, 32, 4): GemvLaunch(1, 4, 16, registers=128, abreast=2),
    (4, 256, 32, 8): GemvLaunch(1, 4, 16, early=True, registers=128, abreast=2),
    (4, 256, 32, 16): GemvLaunch(2, 1, 8, early=True, registers=255),
    (4, 1536, 32, 2): GemvLaunch(2, 2, 8, early=True, registers=255, abreast=2, rounds=3),
    (4, 1536, 32, 16): GemvLaunch(2, 2, 8, early=True, registers=255, abreast=2, rounds=3),
    (4, 256, 96, 8): GemvLaunch(1, 2, 8, early=True, registers=128),
    (4, 256, 96, 16): GemvLaunch(1, 1, 8, early=True, registers=128),
    # 35B-A3B
    (4, 128, 32, 8): GemvLaunch(1, 4, 16, early=True, registers=128, abreast=2),
}
MULTIPROCESSORS = 132
LARGE = 4000  # tiles: heads
MOST_ROUNDS = {2: 9, 4: 9, 8: 9, 16: 4, 32: 4}  # whose sums wait in shared memory
MOST_STEPS = {2: 4, 4: 2, 8: 2, 16: 1, 32: 1}
UNIT_K = 256  # elements of x with one unit


def _for_several(one: GemvLaunch, tiles: int, steps: int, tokens: int, bits: int) -> GemvLaunch:
    """The share of a program that stages x once for several rounds of tiles."""
    parts, step_k = one.parts, 512 // bits
    most = max(MOST_STEPS[tokens], UNIT_K // (parts * step_k))  # whole units, for a loop
    abreast = max(1, (16 if tiles < LARGE and tokens < 32 else 8) // parts)
    launch = GemvLaunch(
        tiles=1,
        steps=_divisor(-(-steps // parts), most),
        warps=parts * abreast,
        early=one.early if tiles > LARGE or tokens == 32 else True,
        registers=128 if tokens < 32 else 255,
        abreast=abreast,
        staged=tokens < 32,
    )
    if tokens == 32 and parts > 1 and tiles <= LARGE:  # digits are read from L2 by few programs
        rounds = -(-tiles * parts // (8 * MULTIPROCESSORS))
        return replace(launch, warps=8, abreast=8, split=parts, rounds=rounds)
    rounds = min(MOST_ROUNDS[tokens], -(-tiles // (abreast * MULTIPROCESSORS)))
    if rounds == 2 and tokens < 32:  # digits are read once for two tiles
        return replace(launch, tiles=2, steps=max(1, launch.steps // 2))
    return replace(launch, rounds=rounds)


def _divisor(n: int, most: int) -> int:
    """The largest divisor of n up to a bound."""
    return max(d for d in range(1, most + 1) if n % d == 0)


@dataclass(frozen=True, slots=True)
class KeySplit:
    """The order in which the keys before a token are added up; it decides every bit of the result.

    Follows from the sizes of heads alone, so it is the same for a token in any step and on any GPU.
    Up to `whole` keys there are `groups` splits that take turns; more keys are divided into splits
    of whole turns, as few turns as leave no more than `most` splits. In a turn each warp of a split
    takes its blocks, one warp after another. Warps are added up in order, then splits.

    Attributes:
        most: splits of one sequence; a power of two.
        warps: of a split.
        groups: splits up to `whole` keys, 1 or 2.
        blocks: of 8 keys that a warp takes at a time, 1 or 2.
        whole: keys, a multiple of a turn of all groups.
    """

    most: int
    warps: int
    groups: int
    blocks: int
    whole: int

    @property
    def turn(self) -> int:
        """Keys that a split takes at a time."""
        return KEYS * self.blocks * self.warps


@dataclass(frozen=True, slots=True)
class AttentionLaunch:
    """Programs of a decode step's attention; nothing but `keys` changes a bit.

    Attributes:
        keys: the order in which keys are added up.
        splits: for each kv head and token; 1 where a program takes all keys, with the warps of all
            groups.
        parts: of the columns of the values, where the keys are not split: programs of a kv head
            that all take all keys.
        ahead: turns of keys and values that a program loads at first, of `keys.whole` keys at most;
            0 loads each turn during the one before.
        early: whether the next kernel may start before this one has its input; where the keys are
            split, while they are still read.
        registers: of a thread on Hopper; None leaves them to the compiler. With more than 168 two
            programs of four warps fit on a multiprocessor, not three.
    """

    keys: KeySplit
    splits: int
    parts: int = 1
    ahead: int = 0
    early: bool = False
    registers: int | None = None


KEYS = 8  # of a block
STATIC_SHARED = 48 << 10  # bytes
KEYS_OF_ONE = 256  # up to here a program takes all keys of a kv head
UNSPLIT = 1 << 30  # more keys than there are
PART = 64  # columns of the values
WIDTH = 2048  # of all query heads; more make the kernels around attention large
SHORT = 1024  # keys
MOST_SPLITS = 64
MOST_OF_ONE = 16  # tokens of one sequence in a step
REGISTERS = 224  # less makes Triton 3.9 spill
CROWDED = 128  # programs that leave no multiprocessor for more parts
FAST_WHOLE = 1024  # keys of one program where bits need not be those of a token alone


def key_split(kv_heads: int, shared: int, head_dim: int) -> KeySplit:
    """The order of keys for so many query heads that share a kv head."""
    wide = head_dim > 128 and join_bytes(shared, head_dim, 8, 1, MOST_OF_ONE) <= STATIC_SHARED
    most = min(MOST_SPLITS, (128 if wide else 256) // kv_heads)  # on some 130 multiprocessors
    return KeySplit(
        most=1 << max(most, 1).bit_length() - 1,
        warps=8 if wide else 4,
        groups=1 if wide else 2,
        blocks=2,
        whole=KEYS_OF_ONE if most > 1 else UNSPLIT,
    )


def attention_launch(
    kv_heads: int, shared: int, head_dim: int, reach: int, tokens: int
) -> AttentionLaunch:
    """The programs for positions below `reach` of so many tokens.

    More than EXACT_TOKENS are programs enough without splits of their keys, which is faster; from
    KEYS_OF_ONE to FAST_WHOLE keys their bits then differ from those of a token alone.
    """
    keys = key_split(kv_heads, shared, head_dim)
    if tokens > EXACT_TOKENS:
        keys = replace(keys, whole=max(keys.whole, FAST_WHOLE))
    width = shared * kv_heads * head_dim
    if reach <= keys.whole:
        parts = max(1, head_dim // PART)
        warps = keys.warps * keys.groups
        while parts > 1 and tokens * kv_heads * parts > CROWDED:
            if join_bytes(shared, head_dim, warps, parts // 2, MOST_OF_ONE) > STATIC_SHARED:
                break
            parts //= 2
        near = reach <= KEYS_OF_ONE and head_dim // parts <= PART
        ahead = KEYS_OF_ONE // (keys.turn * keys.groups) if near else 0
        return AttentionLaunch(keys, 1, parts, ahead, early=width <= WIDTH)
    splits = min(-(-reach // keys.turn), keys.most)
    early = head_dim > 128 or width > WIDTH or reach <= SHORT
    registers = REGISTERS if tokens == 1 and head_dim == 128 else None
    return AttentionLaunch(keys, splits, early=early, registers=registers)


def join_bytes(shared: int, head_dim: int, warps: int, parts: int, together: int) -> int:
    """Shared memory of an attention program: queries and new keys, then sums of each warp."""
    sums = 4 * -(-head_dim // (64 * parts)) * 128 * -(-shared // 2)
    return (shared + together) * row_bytes(head_dim) + warps * (64 + sums)


def row_bytes(head_dim: int) -> int:
    """Bytes from one head in shared memory to the next, padded so that they share no bank."""
    return 2 * head_dim + 64


def power_of_two(n: int) -> int:
    """The smallest power of two that is not below n."""
    return 1 << (n - 1).bit_length()


# One token of a gated DeltaNet: from so many programs on, each takes so much shared memory that few
# fit on one multiprocessor; see `GemvLaunch.shared`.
CROWD = 128
