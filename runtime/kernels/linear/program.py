"""Records of constants for kernels of packed weights: the weight, and x as digits.

Kernels read the fields as numbers (`W.K`). Derived numbers are fields too: Triton finds compiled
kernels by the text of their constants, which must change when a formula here does. A cached
function makes each record once, so records are compared by identity, which is quick.
"""

from dataclasses import dataclass, replace
from functools import cache

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from lowbit.formats.activations import activation_group
from lowbit.runtime.kernels.codec import CODECS, WIDE_CODECS, Codec
from lowbit.runtime.kernels.launch import int8
from lowbit.runtime.kernels.launch.linear import GemvLaunch

BLOCK_K = gl.constexpr(256)  # columns that share a unit: a warp makes them digits at a time
STEP_K = gl.constexpr(int8.STEP_K)  # columns of x in eight bits that lie side by side for `wgmma`
SQUARES_BYTES = gl.constexpr(32)  # of a block: one sum of squares for each row of a diagonal


@dataclass(frozen=True, slots=True, eq=False)
class Packed:
    """A packed weight, but for its number of rows."""

    K: int  # columns
    G: int  # columns that share a scale
    BITS: int  # of a code
    CODEC: Codec  # of its codes
    SCALES: str  # `bf16`, `fp16`, `fp32` or `int16`
    STEPS: int  # of a row; see `Codec`
    GROUPS: int  # of a row
    WHOLE: bool  # whether x has one scale a token, so scales are integers


@cache
def packed(K: int, G: int, bits: int, scales: str) -> Packed:
    """Constants of a weight with K columns in groups of G."""
    codec = CODECS[bits]
    return Packed(K, G, bits, codec, scales, -(-K // codec.STEP_K), -(-K // G), scales == "int16")


@cache
def wide(W: Packed) -> Packed:
    """Constants for products with x in eight bits: a step holds whole groups of x.

    A scale for a whole row is one for columns past K too.
    """
    codec = WIDE_CODECS[W.BITS]
    G = W.G if W.G < W.K else -(-W.K // 256) * 256
    return replace(W, G=G, CODEC=codec, STEPS=-(-W.K // codec.STEP_K), GROUPS=-(-W.K // G))


@dataclass(frozen=True, slots=True, eq=False)
class Digits:
    """Places of x as digits: bytes from one thing to the next."""

    K: int  # elements of a token
    TOKENS: int  # that there is room for, a power of two
    # whether they lie in a program's shared memory, one token after another; else in global memory,
    # where every 64 columns of all planes and tokens lie side by side
    STAGED: bool
    NEXT: int  # to the next 64 columns of a plane
    PLANE: int  # to a token's next plane
    TOKEN: int  # to the next token
    UNITS: int  # to the units, for each block those of all tokens
    BLOCKS: int  # of 256 elements of a token
    SQUARES: int  # to the sums of squares of all blocks, where staged; the end of the units
    FACTORS: int  # to the factors of the norm
    # bytes of a row in wgmma's swizzle, where they lie so (`wgmma`): for a step of up to 128
    # columns, or each half of one of 256, the rows of 3 planes times all tokens, and units for
    # every such row, not every block; else 0
    ROW: int = 0
    STEPS: int = 0  # of such rows; those past K have units of zero
    SHARERS: int = 1  # programs that share a lone token's blocks, where it is staged
    RUN: int = 1  # blocks next to each other of which each of them takes one run after another


@dataclass(frozen=True, slots=True, eq=False)
class Blocks:
    """Places of x in eight bits in global memory: sizes and offsets in bytes.

    For each step of 128 columns every block of TOKENS tokens has SIZE bytes; then come the factors
    of all rows and their bounds (`quantize`). Rows are padded to whole blocks, columns to whole
    steps.
    """

    K: int  # elements of a token
    GROUP: int  # of them that share a scale: 128, 64 or 32
    TOKENS: int  # of a block: a multiple of 8
    STEPS: int  # of 128 columns
    SCALES: int  # to a step's scales, for each of its groups those of all tokens
    SIZE: int  # of a block's step
    BLOCKS: int  # of 256 elements of a token, whose squares are summed
    BOUNDS: int  # of a row, the largest of which counts: programs that each take some of its blocks
    # Scales of 16 tokens lie as a row of four lanes reads them: for lane t those of tokens 2 t,
    # 2 t + 1, 2 t + 8 and 2 t + 9 side by side.
    SIXTEENS: bool
    # One scale a token, times its norm's factor in the place of that; blocks have no scales, and
    # no bounds are left.
    WHOLE: bool


@cache
def token_blocks(
    K: int, group: int, tokens: int, bounds: int = 1, sixteens: bool = False, whole: bool = False
) -> Blocks:
    """Places of x in eight bits for blocks of so many tokens; group: of `activation_group`.

    bounds: programs that share a row; one where it is normed. sixteens, whole: see
    `Blocks`.

    Raises:
        ValueError: sixteens of another number of tokens.
    """
    if sixteens and tokens % 16:
        raise ValueError(f"{tokens} tokens are not whole sixteens")
    scales, steps = tokens * STEP_K.value, -(-K // STEP_K.value)
    size = scales if whole else scales + STEP_K.value // group * tokens * 4
    return Blocks(K, group, tokens, steps, scales, size, blocks_of(K), bounds, sixteens, whole)


@dataclass(frozen=True, slots=True, eq=False)
class Codes:
    """Places of x in eight bits in the shared memory of a program: offsets in bytes."""

    K: int  # elements of a token
    GROUP: int  # of them that share a scale: 128, 64 or 32
    TOKENS: int  # that there is room for, a power of two
    TOKEN: int  # to the next token
    GROUPS: int  # of a token
    SCALES: int  # to the scales, for each group those of all tokens
    # to the squares of groups, by `codes_of`, likewise; of a lone token to the bounds of its groups
    GROUP_SQUARES: int
    BLOCKS: int  # of 256 elements of a token, whose squares are summed
    SQUARES: int  # to the sums of squares of all blocks; the end of the squares of groups
    FACTORS: int  # to the factors of the norm
    BOUNDS: int  # to the bounds of several tokens
    END: int  # of all that there is


@cache
def staged_codes(K: int, group: int, tokens: int, normed: bool) -> Codes:
    """Places of codes, scales, where normed squares and factors, and several tokens' bounds.

    Tokens begin in other banks than their neighbours. A step may go on behind its token: what it
    finds there meets codes of zero.
    """
    token, groups, blocks = -(-K // 128) * 128 + 64, -(-K // group), blocks_of(K)
    scales = tokens * token
    group_squares = scales + -(-groups * tokens // 4) * 16
    squares = group_squares + -(-groups * tokens // 4) * 16
    factors = squares + tokens * blocks * SQUARES_BYTES.value
    bounds = factors + -(-tokens // 4) * 16 if normed else squares
    end = bounds + -(-tokens // 4) * 16 if tokens > 1 else bounds
    places = scales, group_squares, blocks, squares, factors, bounds, end
    return Codes(K, group, tokens, token, groups, *places)


def int8_places(W: Packed, tokens: int, normed: bool) -> Codes:
    """Places of x for a product of a weight whose inputs are rounded to eight bits."""
    return staged_codes(W.K, activation_group(W.G, W.K), tokens, normed)


def int8_bytes(W: Packed, launch: GemvLaunch, tokens: int, normed: bool) -> int:
    """Shared memory of a program for x, and for the sums of a round of tiles, or of two in turn."""
    X = int8_places(W, tokens, normed)
    return X.END + min(launch.rounds, 2) * launch.round_bytes(tokens)


@cache
def staged_digits(K: int, tokens: int = 1, sharers: int = 1, run: int = 1) -> Digits:
    """Digits in the shared memory of a program, all or its share of them.

    Planes are 64 bytes apart, so that the next one begins in other banks. A step may go on behind
    its plane: what it finds there meets codes of zero.
    """
    blocks = blocks_of(K) if sharers == 1 else -(-blocks_of(K) // (run * sharers)) * run
    plane = -(-(K if sharers == 1 else blocks * 256) // 128) * 128 + 64
    units = tokens * 3 * plane
    squares = units + -(-blocks * tokens // 4) * 16
    factors = squares + tokens * blocks * SQUARES_BYTES.value
    return Digits(
        K, tokens, True, 64, plane, 3 * plane, units, blocks, squares, factors, 0, 0, sharers, run
    )


@cache
def global_digits(K: int, bits: int, tokens: int) -> Digits:
    """Digits in global memory, as the kernel `digits` leaves them, and room for whole steps."""
    blocks = blocks_of(K)
    step = max(128, CODECS[bits].STEP_K)
    units = -(-K // step) * step * 3 * tokens
    factors = units + blocks * tokens * 4
    return Digits(K, tokens, False, 192 * tokens, 64 * tokens, 64, units, blocks, factors, factors)


@cache
def swizzled_digits(K: int, bits: int, tokens: int, steps: int) -> Digits:
    """Digits in global memory, as programs of `wgmma` copy them into their shared memory."""
    row = CODECS[bits].STEP_K // CODECS[bits].ROWS
    steps *= CODECS[bits].ROWS
    units = steps * 3 * tokens * row
    factors = units + steps * tokens * 4
    plane = tokens * row
    return Digits(
        K, tokens, False, 0, plane, row, units, blocks_of(K), factors, factors, row, steps
    )


def staged_bytes(K: int, tokens: int, normed: bool) -> int:
    """Shared memory for digits, squares of blocks and factors."""
    return places_bytes(staged_digits(K, tokens), normed)


def places_of(K: int, launch: GemvLaunch, tokens: int, step_k: int) -> Digits:
    """Shared-memory layout of x; for one token, this program's blocks only."""
    if tokens > 1 or launch.split == 1:
        return staged_digits(K, tokens)
    return staged_digits(K, 1, launch.split, launch.each * step_k // BLOCK_K.value)


def places_bytes(places: Digits, normed: bool) -> int:
    """Shared memory for what a program stages of x at these places; normed: with factors."""
    tokens = places.TOKENS
    return places.FACTORS + -(-tokens // 4) * 16 if normed else places.SQUARES


def shared_bytes(K: int, launch: GemvLaunch, tokens: int, normed: bool) -> int:
    """Shared memory of a program that stages x, a power of two of tokens."""
    return staged_bytes(K, tokens, normed) + launch.sums_bytes(tokens)


@gluon.constexpr_function
def blocks_of(K):
    """Blocks of 256 elements that a token's K elements begin."""
    return -(-K // 256)


@gluon.constexpr_function
def turns_of(blocks, warps):
    """Turns in which so many warps take all blocks."""
    return -(-blocks // warps)


@gluon.constexpr_function
def gain_turns(blocks, tokens, warps):
    """Turns after which a warp takes the same blocks of another token, or has taken all."""
    period = blocks // min(blocks & -blocks, warps)
    return min(period, -(-blocks * tokens // warps))
