"""Launch sizes: literal tables, by the size of what is read.

Measured on an H200 (LOG.md); elsewhere the same but for the cap of registers (`register_cap`) and,
before Hopper, for shared memory asked for beyond the need: no kernel needs more registers or shared
memory than compute capability 8.0 to 12.0 all have.
"""

from dataclasses import dataclass, replace


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
    """

    tiles: int
    steps: int
    warps: int
    early: bool = False
    registers: int | None = None
    abreast: int = 1
    shared: int = 0


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
    (4, 512, 8): GemvLaunch(1, 4, 4, abreast=2),
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
# The same for two to eight tokens, whose x takes registers too.
SEVERAL_SHARES = (
    (40_000, 128, GemvLaunch(1, 2, 8, early=True, registers=128)),
    (40_000, 64, GemvLaunch(1, 2, 4, early=True, registers=168)),
    (40_000, 0, GemvLaunch(2, 2, 4, early=True, registers=168)),
    (10_000, 64, GemvLaunch(1, 2, 8, early=True, registers=128)),
    (10_000, 32, GemvLaunch(1, 2, 4, early=True, registers=168)),
    (10_000, 0, GemvLaunch(2, 1, 8, registers=128)),
    (0, 16, GemvLaunch(1, 2, 8, registers=128)),
    (0, 0, GemvLaunch(1, 2, 4, registers=168)),
)
MANY_TOKENS = GemvLaunch(1, 1, 8, registers=255)  # more than one block of eight


def gemv_launch(bits: int, tiles: int, steps: int, tokens: int) -> GemvLaunch:
    """The share of a program, for so many tokens times a weight of tiles by steps."""
    if tokens > 8:
        return MANY_TOKENS
    if tokens == 1 and (bits, tiles, steps) in GEMV_MEASURED:
        return GEMV_MEASURED[bits, tiles, steps]
    shares = GEMV_SHARES if tokens == 1 else SEVERAL_SHARES
    return next(share for size, depth, share in shares if tiles * steps >= size and steps >= depth)


@dataclass(frozen=True, slots=True)
class AttentionLaunch:
    """Split of the cache for one decoded token.

    Attributes:
        splits: of the keys, a program for each kv head and split; a power of two.
        warps: of a program.
        blocks: of 8 keys that a warp takes at a time, 1 or 2.
        parts: of the columns of the values, where the keys are not split: programs of a kv head
            that all take all keys.
        ahead: whether a warp takes its keys in at most two turns and loads those of both at once.
        early: whether the next kernel may start before this one has its input; where the keys are
            split, while they are still read.
    """

    splits: int
    warps: int
    blocks: int
    parts: int = 1
    ahead: bool = False
    early: bool = False

    @property
    def turn(self) -> int:
        """Keys that a program takes at a time."""
        return KEYS * self.blocks * self.warps


KEYS = 8  # of a block
STATIC_SHARED = 48 << 10  # bytes
KEYS_OF_ONE = 256  # up to here programs take all keys of a kv head: two turns of 8 warps
PART = 64  # columns of the values
WIDTH = 2048  # of all query heads; more make the kernels around attention large
SHORT = 1024  # keys
WARPS_EACH = 8  # of splits, at most, on a multiprocessor: wide heads leave no registers for more


def attention_launch(
    kv_heads: int, shared: int, reach: int, head_dim: int, multiprocessors: int
) -> AttentionLaunch:
    """The split of the first `reach` rows, for so many query heads that share a kv head."""
    width = shared * kv_heads * head_dim
    if reach <= KEYS_OF_ONE:
        parts = max(1, head_dim // PART)
        return AttentionLaunch(1, 8, 2, parts, ahead=True, early=width <= WIDTH)
    wide = head_dim > 128
    warps = 8 if wide and join_bytes(shared, head_dim, 8, 1) <= STATIC_SHARED else 4
    one = AttentionLaunch(1, warps, 1 if wide else 2)
    most = max(1, multiprocessors * WARPS_EACH // warps // kv_heads)
    splits = min(power_of_two(-(-reach // one.turn)), 1 << most.bit_length() - 1)
    early = splits > 1 and (wide or width > WIDTH or reach <= SHORT)
    return replace(one, splits=splits, early=early)


def join_bytes(shared: int, head_dim: int, warps: int, parts: int) -> int:
    """Shared memory of an attention program: queries and the new key, then sums of each warp."""
    sums = 4 * -(-head_dim // (64 * parts)) * 128 * -(-shared // 2)
    return (shared + 1) * row_bytes(head_dim) + warps * (64 + sums)


def row_bytes(head_dim: int) -> int:
    """Of a head in shared memory, so far apart that two rows side by side share no bank."""
    return 2 * head_dim + 64


def power_of_two(n: int) -> int:
    """The smallest power of two that is not below n."""
    return 1 << (n - 1).bit_length()


# One token of a gated DeltaNet: from so many programs on, each takes so much shared memory that few
# fit on one multiprocessor; see `GemvLaunch.shared`.
CROWD = 128


@dataclass(frozen=True, slots=True)
class DenseGemvLaunch:
    """Tile of one program of a dense GEMV: rows, depth held at a time, warps."""

    block_n: int
    block_k: int
    num_warps: int


# (at least this many rows, tile); the first that fits counts. A thread reads 16 bytes of each row.
DENSE_GEMV_TILES = (
    (1 << 13, DenseGemvLaunch(8, 512, 2)),
    (1 << 9, DenseGemvLaunch(2, 1024, 4)),
    (0, DenseGemvLaunch(1, 1024, 4)),
)


def dense_gemv_launch(N: int, K: int) -> DenseGemvLaunch:
    """The tile for one token times a dense [N, K]."""
    tile = next(tile for least, tile in DENSE_GEMV_TILES if least <= N)
    return replace(tile, block_k=min(tile.block_k, power_of_two(K)))
