"""Device functions of experts with x in eight bits: tokens in shared memory times tiles.

    y = centre    y = fma(fp32(isum * s_w), s_x, y) for each group of x    y = y - centre

A token is a row of codes, 32 k after 32 k in the order of the weight's codes (`quantize`), and 16
bytes more: so the fragments of eight tokens lie in different banks. Scales lie behind all rows,
those of all tokens of a product for each group. A warp multiplies a tile by all tokens over the
whole of K. The sum of a group is an exact integer, and the bounds of a row and of a token alone
decide about the centre (`formats.activations`): so a token has the same bits in any company.

Integer sums begin at the bits of 1.5 * 2^23, and so their bits are a float, that much too large.
The product of that number and a scale of 16 bits is exact, and one FMA takes it away again.
"""

from dataclasses import dataclass
from functools import cache

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from lowbit.formats.activations import activation_group
from lowbit.runtime.kernels.linear.products import load_step, raw_scales, tile_addresses
from lowbit.runtime.kernels.linear.program import Packed, blocks_of, wide
from lowbit.runtime.kernels.linear.sums import added_term, centre_of, group_starts
from lowbit.runtime.kernels.linear.unpack import product_codes
from lowbit.runtime.kernels.ptx.memory import load8, load_matrices, load_shared4, load_shared8
from lowbit.runtime.kernels.ptx.mma import as_float, integer_mma, unpacked_scales

PAD = 16  # bytes behind a row


@dataclass(frozen=True, slots=True, eq=False)
class Int8Rows:
    """Places of tokens in shared memory, and a warp's way along K; made once."""

    W: Packed  # weight of an expert, of `wide`: steps hold whole groups
    K: int  # elements of a token
    GROUP: int  # of them that share a scale
    GROUPS: int  # of a row, those past K included
    ROWS: int  # tokens
    TOKENS: int  # of a product: all, a multiple of 8; or one
    ROW: int  # bytes from one token to the next
    WIDTH: int  # of them with codes
    SCALES: int  # bytes before the scales
    GROUP_BOUNDS: int  # bytes before the bounds of groups
    END: int  # bytes of all
    BLOCKS: int  # of 256 elements of a token, whose squares are summed
    AHEAD: int  # steps whose words are on their way, a divisor of those of a row


@cache
def int8_rows(W: Packed, rows: int, tokens: int, kilobytes: int) -> Int8Rows:
    """Places for some rows of tokens; kilobytes: most of a tile that are on their way."""
    W = wide(W)
    group, loads = activation_group(W.G, W.K), 2 * kilobytes
    divisors = (n for n in range(1, W.STEPS + 1) if W.STEPS % n == 0)
    ahead = max(n for n in divisors if n == 1 or n * W.CODEC.LOADS <= loads)
    width = W.STEPS * W.CODEC.STEP_K
    scales, groups = rows * (width + PAD), width // group
    bounds = scales + -(-rows * groups // 4) * 16
    end = bounds + -(-rows * groups // 4) * 16
    return Int8Rows(
        W, W.K, group, groups, rows, tokens, width + PAD, width, scales, bounds, end,
        blocks_of(W.K), ahead,
    )  # fmt: skip


@gluon.jit
def expert_tile(weights, first, tiles, tile, lane, zero, W: gl.constexpr):
    """Addresses of a tile of an expert, whose first tile is given; of its last one past the end.

    weights: pointers to the words, scales and bounds of all experts.

    Returns those of `tile_addresses`, then that of the bounds of the lane's rows.
    """
    words_ptr, scales_ptr, bounds_ptr = weights
    number, end = first + tile, first + tiles
    words, scales = tile_addresses(words_ptr, scales_ptr, number, end, zero, lane, 1, W)
    at = gl.minimum(number, end - 1).to(gl.int64) * 64 + lane // 4 * 8
    return words, scales, bounds_ptr.to(gl.int64, bitcast=True) + at


@gluon.jit
def load_tile(at, zero, B: gl.constexpr):
    """Words and raw scales of a tile's first steps, and the bounds of the lane's two rows.

    at: of `expert_tile`.
    """
    words, raw = _load_steps(at, zero, B)
    bounds = load8(at[2])
    return words, raw, (as_float(bounds[0]), as_float(bounds[1]))


@gluon.jit
def _load_steps(at, first, B: gl.constexpr):
    """Words and raw scales of a tile's next steps, from the one numbered `first` on."""
    W: gl.constexpr = B.W
    SCALES: gl.constexpr = W.SCALES
    STEP_K: gl.constexpr = W.CODEC.STEP_K
    STEP_BYTES: gl.constexpr = W.CODEC.STEP_BYTES
    AHEAD: gl.constexpr = B.AHEAD
    GROUP_BYTES: gl.constexpr = 64 if SCALES == "fp32" else 32
    words_at = at[0][0] + first * STEP_BYTES
    scales_at = at[1][0]
    words = ()
    for c in gl.static_range(AHEAD):
        words = words + (load_step(words_at, c * STEP_BYTES, W),)
    raw = ()
    for i in gl.static_range(AHEAD * STEP_K // B.GROUP):
        if AHEAD * STEP_K % W.G == 0 and W.K % (AHEAD * STEP_K) == 0:
            here = scales_at + first * STEP_K // W.G * GROUP_BYTES
            raw = raw + (raw_scales(here, i * B.GROUP // W.G * GROUP_BYTES, SCALES),)
        else:
            group = gl.minimum((first * STEP_K + i * B.GROUP) // W.G, W.GROUPS - 1)
            raw = raw + (raw_scales(scales_at + group * GROUP_BYTES, 0, SCALES),)
    return words, raw


@gluon.jit
def codes_address(buffer, row, lane, B: gl.constexpr):
    """Address of what a lane loads of the first 64 k: of eight tokens, or always of one row."""
    if B.TOKENS > 1:
        row = lane % 8
    return buffer + row * B.ROW + lane // 8 * 16


@gluon.jit
def scales_address(buffer, row, lane, B: gl.constexpr):
    """Address of the first scale of a lane's tokens, 2 * t and 2 * t + 1, or of one row."""
    if B.TOKENS > 1:
        at = lane % 4 * 8
    else:
        at = row * (B.GROUPS * 4)
    return buffer + B.SCALES + at


@gluon.jit
def multiply_tile(
    loaded, at, next_at, x, zero, NB: gl.constexpr, NEXT: gl.constexpr, B: gl.constexpr
):  # fmt: skip
    """Results of a tile for NB times 8 tokens, and what has been loaded of the next tile.

    loaded: of `load_tile`.
    x: `codes_address`, `scales_address`, and the token's bound where a product has one token; else
        the address of the bounds of a lane's first two tokens.
    NEXT: whether there is a next tile.

    Returns for every 8 tokens four: rows g of tokens 2 * t and 2 * t + 1, and rows g + 8 of both.
    """
    CHUNKS: gl.constexpr = B.W.STEPS // B.AHEAD
    CODES: gl.constexpr = B.WIDTH // CHUNKS
    SCALES: gl.constexpr = B.GROUPS // CHUNKS * B.TOKENS * 4
    codes_at, scales_at, tokens = x
    words, raw, rows = loaded
    steps = words, raw
    acc = ()
    for nb in gl.static_range(NB):
        acc = acc + (_centres(rows, tokens, nb, B),)
    if CHUNKS > 1:
        for chunk in range(0, CHUNKS - 1):
            following = _load_steps(at, (chunk + 1) * B.AHEAD, B)
            acc = _multiply_steps(
                acc, steps, codes_at + chunk * CODES, scales_at + chunk * SCALES, zero, NB, B
            )
            steps = following
    if NEXT:
        loaded = load_tile(next_at, zero, B)
    acc = _multiply_steps(
        acc, steps, codes_at + (CHUNKS - 1) * CODES, scales_at + (CHUNKS - 1) * SCALES, zero, NB, B
    )
    out = ()
    for nb in gl.static_range(NB):
        # Once more, so that no centres stay in registers.
        centres = _centres(rows, tokens, nb, B)
        y = ()
        for i in gl.static_range(4):
            y = y + (acc[nb][i] - centres[i],)
        out = out + (y,)
    return out, loaded


@gluon.jit
def _centres(rows, tokens, nb: gl.constexpr, B: gl.constexpr):
    """Starts of the sums of 8 tokens, of the lane's two rows and two tokens."""
    if B.TOKENS > 1:
        pair = load_shared8(tokens, nb * 32)
        first = as_float(pair[0])
        second = as_float(pair[1])
    else:
        first = tokens
        second = tokens
    return (
        centre_of(rows[0], first), centre_of(rows[0], second),
        centre_of(rows[1], first), centre_of(rows[1], second),
    )  # fmt: skip


@gluon.jit
def _multiply_steps(
    acc, loaded, codes_at, scales_at, zero, NB: gl.constexpr, B: gl.constexpr
):  # fmt: skip
    AHEAD: gl.constexpr = B.AHEAD
    for c in gl.static_range(AHEAD):
        acc = _multiply_step(acc, loaded, codes_at, scales_at, zero, c, NB, B)
    return acc


@gluon.jit
def _multiply_step(
    acc, loaded, codes_at, scales_at, zero, c: gl.constexpr, NB: gl.constexpr, B: gl.constexpr
):  # fmt: skip
    """Add the groups of one step, the c-th of those that are loaded."""
    words, raw = loaded
    CODEC: gl.constexpr = B.W.CODEC  # Triton 3.6 takes no record from a record as an argument
    SCALES: gl.constexpr = B.W.SCALES
    TOKENS: gl.constexpr = B.TOKENS
    PRODUCTS: gl.constexpr = B.W.CODEC.PRODUCTS
    EACH: gl.constexpr = B.GROUP // 32  # products of a group
    GROUPS: gl.constexpr = PRODUCTS // EACH
    codes = ()
    for n in gl.static_range(PRODUCTS):
        codes = codes + (product_codes(words[c], n, CODEC),)
    factors = ()
    for group in gl.static_range(GROUPS):
        low, high = unpacked_scales(raw[c * GROUPS + group], SCALES)
        factors = factors + ((low * B.W.CODEC.FACTOR, high * B.W.CODEC.FACTOR),)
    new = ()
    for nb in gl.static_range(NB):
        b = ()
        for pair in gl.static_range(PRODUCTS // 2):
            b = b + load_matrices(codes_at, nb * 8 * B.ROW + (c * PRODUCTS + 2 * pair) * 32)
        y = acc[nb]
        for group in gl.static_range(GROUPS):
            d = group_starts(zero, SCALES)
            for n in gl.static_range(group * EACH, (group + 1) * EACH):
                a = codes[n]
                d = integer_mma(d, a[0], a[1], a[2], a[3], b[2 * n], b[2 * n + 1])
            s = _token_scales(scales_at, ((c * GROUPS + group) * TOKENS + nb * 8) * 4, TOKENS)
            y = _add_group(y, d, factors[group], s, SCALES)
        new = new + (y,)
    return new


@gluon.jit
def _token_scales(address, OFFSET: gl.constexpr, TOKENS: gl.constexpr):
    """Scales of a lane's two tokens in a group."""
    if TOKENS > 1:
        pair = load_shared8(address, OFFSET)
        first = as_float(pair[0])
        second = as_float(pair[1])
    else:
        first = load_shared4(address, OFFSET)
        second = first
    return first, second


@gluon.jit
def _add_group(y, d, factors, s, SCALES: gl.constexpr):
    """Four results with one more group: `fma(fp32(isum * s_w), s_x, y)`."""
    out = ()
    for i in gl.static_range(4):
        out = out + (added_term(y[i], d[i], factors[i // 2], s[i % 2], SCALES),)
    return out
