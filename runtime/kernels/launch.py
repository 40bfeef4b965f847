"""Launch sizes: one literal table, by bits and shape class.

Chosen from the machine code for sm_90: no spills, two programs or more for each of 132
multiprocessors, several 16-byte loads in flight in each thread.
"""

import math
from dataclasses import dataclass, replace


@dataclass(frozen=True, slots=True)
class GemvLaunch:
    """Tile of one GEMV program.

    Attributes:
        block_n: rows a program computes.
        block_q: quads of packed words (16 bytes) it holds of each row at a time, one a thread.
        num_warps: warps of a program.
    """

    block_n: int
    block_q: int
    num_warps: int


# (bits, at least this many bytes of codes, rows a program); the first that fits counts.
GEMV_ROWS = (
    (4, 1 << 25, 16),
    (4, 1 << 22, 8),
    (4, 0, 4),
    (8, 1 << 22, 8),
    (8, 0, 4),
)
ROWS_OF_TWO_TILES = 8  # where a row takes several tiles, two are held: more would spill
BLOCK_QS = (32, 64, 128)


def gemv_launch(bits: int, N: int, K: int) -> GemvLaunch:
    """The tile for one token times a packed [N, K]."""
    quads = K * bits // 128
    block_n = next(n for b, least, n in GEMV_ROWS if b == bits and N * quads * 16 >= least)
    if quads < BLOCK_QS[0]:
        block_q = _power_of_two(quads)
    else:  # leave the fewest lanes idle at the end of a row; take the largest of equals
        block_q = min(BLOCK_QS, key=lambda size: (-(-quads // size) * size, -size))
    if quads > block_q:
        block_n = min(block_n, ROWS_OF_TWO_TILES)
    return GemvLaunch(block_n, block_q, max(1, block_q // 32))


@dataclass(frozen=True, slots=True)
class GemmLaunch:
    """Tile of one GEMM program: tokens, rows and depth, and how many tiles are in flight."""

    block_m: int
    block_n: int
    block_k: int
    num_warps: int
    num_stages: int


# (up to this many tokens, tile); the first that fits counts.
GEMM_TILES = (
    (16, GemmLaunch(16, 32, 128, 4, 4)),
    (32, GemmLaunch(32, 64, 128, 4, 4)),
    (64, GemmLaunch(64, 64, 128, 4, 3)),
    (512, GemmLaunch(128, 64, 64, 4, 3)),
    (1 << 62, GemmLaunch(256, 64, 64, 8, 3)),
)


def gemm_launch(M: int, group_size: int) -> GemmLaunch:
    """The tile for M tokens; its depth divides the group size."""
    tile = next(tile for most, tile in GEMM_TILES if most >= M)
    return replace(tile, block_k=math.gcd(tile.block_k, group_size))


@dataclass(frozen=True, slots=True)
class AttentionLaunch:
    """Split of the cache for one decoded token.

    Attributes:
        splits: programs for each kv head, a power of two; fixed for a context, so that one CUDA
            graph serves every position.
        block_t: cache rows a program holds at a time.
    """

    splits: int
    block_t: int


ATTENTION_BLOCK_T = 32
ATTENTION_PROGRAMS = 256  # about two on each of 132 multiprocessors


def attention_launch(kv_heads: int, context: int) -> AttentionLaunch:
    """The split of a cache of `context` rows."""
    blocks = -(-context // ATTENTION_BLOCK_T)
    splits = min(_power_of_two(blocks), _power_of_two(max(1, ATTENTION_PROGRAMS // kv_heads)))
    return AttentionLaunch(splits, ATTENTION_BLOCK_T)


JOIN_SUMS = 4096  # FP32 sums a warp holds, 128 registers a thread: more would spill


def join_warps(splits: int, head_dim: int) -> int:
    """Warps of the program that joins the splits of a head."""
    return min(32, max(4, splits * head_dim // JOIN_SUMS))


def _power_of_two(n: int) -> int:
    """The smallest power of two that is not below n."""
    return 1 << (n - 1).bit_length()


@dataclass(frozen=True, slots=True)
class DeltaLaunch:
    """Split of one token's recurrence: columns of the memory a program holds, and its warps."""

    block_v: int
    num_warps: int


DELTA_PROGRAMS = 256  # about two on each of 132 multiprocessors
DELTA_COLUMNS = (32, 16, 8)  # the fewest fill one 32-byte sector


def delta_launch(value_heads: int, value_dim: int) -> DeltaLaunch:
    """The widest split that fills the GPU, or else the narrowest."""
    fits = [n for n in DELTA_COLUMNS if value_dim // n * value_heads >= DELTA_PROGRAMS]
    return DeltaLaunch(min(value_dim, fits[0] if fits else DELTA_COLUMNS[-1]), 4)


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
    return replace(tile, block_k=min(tile.block_k, _power_of_two(K)))
