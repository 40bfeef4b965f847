"""Device functions of `mma_int8` and `stream_int8`: steps of 128 k by x as `quantize` leaves it.

A lane's sums of a tile are the fragments of `integer_mma` for 8 tokens after the other: rows g and
g + 8 of tokens 2 t and 2 t + 1.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from lowbit.runtime.kernels.linear.program import STEP_K
from lowbit.runtime.kernels.linear.sums import (
    added_term,
    centre_of,
    group_starts,
    row_numbers,
)
from lowbit.runtime.kernels.linear.unpack import product_codes
from lowbit.runtime.kernels.ptx.memory import load_matrices, load_shared8
from lowbit.runtime.kernels.ptx.mma import as_float, integer_mma, unpacked_scales


@gluon.jit
def numbers_of_rows(rows_ptr, first_tile, tiles, lane, COUNT: gl.constexpr):
    """Bounds or units of the lane's rows of COUNT tiles; past the last one those of that."""
    found = ()
    for r in gl.static_range(COUNT):
        found = found + (row_numbers(rows_ptr, gl.minimum(first_tile + r, tiles - 1), lane),)
    return found


@gluon.jit
def centres_of_tiles(rows, tokens, FACTOR: gl.constexpr):
    """Starts of a warp's sums of some tiles.

    rows: of `numbers_of_rows`. tokens: bounds of the lane's two of each 8 tokens. FACTOR: of the
    `Codec`.
    """
    found = ()
    for r in gl.static_range(len(rows)):
        for nt in gl.static_range(len(tokens)):
            for i in gl.static_range(4):
                found = found + (centre_of(rows[r][i // 2] * (1 / FACTOR), tokens[nt][i % 2]),)
    return found


@gluon.jit
def integer_starts(lane, COUNT: gl.constexpr):
    """Starts of COUNT sums with integer scales."""
    found = ()
    for _i in gl.static_range(COUNT):
        found = found + (lane * 0,)
    return found


@gluon.jit
def multiply_step(
    acc, loaded, x, first_token, lane, TOKENS: gl.constexpr, W: gl.constexpr, X: gl.constexpr
):  # fmt: skip
    """Sums with a step of 128 k of some tiles: of each those of 8 tokens after the other.

    acc: the sums before. loaded: of each tile words of the step, and raw scales of the groups of x.
    x: address of the block's step in shared memory. first_token: of TOKENS of the block.
    """
    words, raw = loaded
    CODEC: gl.constexpr = W.CODEC
    SCALES: gl.constexpr = W.SCALES
    TILES: gl.constexpr = len(words)
    GROUPS: gl.constexpr = STEP_K // X.GROUP
    GROUP_Q: gl.constexpr = X.GROUP // 32
    NT: gl.constexpr = TOKENS // 8
    codes = ()
    for r in gl.static_range(TILES):
        for q in gl.static_range(4):
            codes = codes + (product_codes(words[r], q, CODEC),)
    # A matrix is 8 tokens and 16 bytes of each, whose addresses are those of 8 lanes.
    row = x + (first_token + lane % 8) * STEP_K
    first = row + ((lane // 8) ^ (lane % 8)) * 16
    second = row + ((lane // 8 + 4) ^ (lane % 8)) * 16
    scales_at = x + X.SCALES + (first_token + lane % 4 * 2) * 4
    zero = lane * 0
    added = ()
    for nt in gl.static_range(NT):
        columns = load_matrices(first, nt * 8 * STEP_K) + load_matrices(second, nt * 8 * STEP_K)
        found = ()
        for group in gl.static_range(GROUPS):
            pair = (zero, zero)
            if not X.WHOLE:
                pair = load_shared8(scales_at, (group * X.TOKENS + nt * 8) * 4)
            for r in gl.static_range(TILES):
                d = group_starts(zero, SCALES)
                for i in gl.static_range(GROUP_Q):
                    a = codes[r * 4 + group * GROUP_Q + i]
                    b0 = columns[2 * (group * GROUP_Q + i)]
                    b1 = columns[2 * (group * GROUP_Q + i) + 1]
                    d = integer_mma(d, a[0], a[1], a[2], a[3], b0, b1)
                scale = unpacked_scales(raw[r * GROUPS + group], SCALES)
                for i in gl.static_range(4):
                    if group == 0:
                        before = acc[(r * NT + nt) * 4 + i]
                    else:
                        before = found[((group - 1) * TILES + r) * 4 + i]
                    token = as_float(pair[i % 2])
                    found = found + (added_term(before, d[i], scale[i // 2], token, SCALES),)
        for i in gl.static_range(4 * TILES):
            added = added + (found[(GROUPS - 1) * TILES * 4 + i],)
    sums = ()
    for r in gl.static_range(TILES):
        for nt in gl.static_range(NT):
            for i in gl.static_range(4):
                sums = sums + (added[(nt * TILES + r) * 4 + i],)
    return sums
