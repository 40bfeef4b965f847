"""Device functions of `experts_products`: tiles of an expert times a block of tokens.

Words, scales and x are copied to shared memory some turns ahead. A lane reads the words and scales
that it has copied itself: they become its A fragments of `mma`. Its 16 bytes of x are the B
fragments of two products, as their k follow in a word. In odd rows of x neighbours of 64 bytes have
changed places, so that lanes hit different banks.
"""

from dataclasses import dataclass, replace
from functools import cache

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from lowbit.runtime.kernels.launch.experts import GemmTiles
from lowbit.runtime.kernels.linear.program import Packed
from lowbit.runtime.kernels.linear.unpack import chunk_pairs
from lowbit.runtime.kernels.ptx.memory import (
    barrier,
    commit_copies,
    copy4,
    copy16,
    copy16_or_zeros,
    load_shared4,
    load_shared16,
    wait_copies,
)
from lowbit.runtime.kernels.ptx.mma import (
    as_word,
    bf16_pair,
    bytes_of,
    high_half,
    low_half,
    mma,
    pairs,
    times,
    times_plus,
    unpacked_scales,
)


@dataclass(frozen=True, slots=True, eq=False)
class Block:
    """Constants of a program that multiplies a block of tokens by tiles of an expert; made once.

    A turn multiplies one stage, which lies in shared memory: some columns of x for every token,
    then the words of every warp, then their scales.
    """

    W: Packed  # weight of an expert
    # share of the program; its steps are those of a turn, and divide those of a row
    LAUNCH: GemmTiles
    ROWS: int  # tokens of the loop
    TURNS: int  # of a row
    COLUMNS: int  # of a turn
    UNIT: int  # columns that surely share a scale
    UNITS: int  # of a turn
    PARTS: int  # words that hold the scales of two rows
    STRIDE: int  # bytes from one token to the next
    WORDS_AT: int  # bytes before the words of a stage
    SCALES_AT: int  # bytes before its scales
    STAGE: int  # bytes from one stage to the next
    SHORTER: tuple["Block", ...] = ()  # of the loops over fewer tokens, the shortest first


@cache
def block_of(W: Packed, launch: GemmTiles, tiles: int, rows: int, limit: int) -> Block:
    """Constants for blocks of up to `rows` tokens.

    Args:
        launch: share of a program, reduced here to fit the weight and shared memory.
        rows: a multiple of 8.
        limit: bytes of shared memory on the GPU.

    Raises:
        ValueError: the launch does not fit.
    """
    launch = replace(
        launch,
        tiles=min(launch.tiles, tiles),
        steps=launch.steps if W.STEPS % launch.steps == 0 else 1,
        least=min(launch.least, rows),
    )
    stage = _block(W, launch, rows).STAGE
    if launch.warps * 32 % (launch.steps * W.CODEC.STEP_K // 4):
        raise ValueError(f"{launch} copies no whole pairs of rows of x at a time")
    launch = replace(launch, stages=min(launch.stages, limit // stage))
    if launch.stages < 2:
        raise ValueError(f"{launch} has no room for two stages of {stage} bytes")
    fewer = (_block(W, launch, count) for count in range(launch.least, rows, launch.least))
    shorter = tuple(replace(block, STAGE=stage) for block in fewer)
    return replace(_block(W, launch, rows), SHORTER=shorter)


def _block(W: Packed, launch: GemmTiles, rows: int) -> Block:
    step = W.CODEC.STEP_K
    columns, unit = launch.steps * step, min(step, W.G & -W.G)
    parts = 2 if W.SCALES == "fp32" else 1
    tiles = launch.warps * launch.tiles
    words_at = rows * columns * 2
    scales_at = words_at + tiles * launch.steps * W.CODEC.STEP_BYTES
    return Block(
        W,
        launch,
        ROWS=rows,
        TURNS=W.STEPS // launch.steps,
        COLUMNS=columns,
        UNIT=unit,
        UNITS=columns // unit,
        PARTS=parts,
        STRIDE=columns * 2,
        WORDS_AT=words_at,
        SCALES_AT=scales_at,
        STAGE=scales_at + tiles * (columns // unit) * parts * 128,
    )


@gluon.constexpr_function
def shorter(block, i):
    """Constants of the i-th of the shorter loops."""
    return block.SHORTER[i]


@gluon.jit
def tile_of(turns, tiles, warp, B: gl.constexpr):
    """The first tile that a warp multiplies after so many turns; the last tiles may be repeated."""
    first = (gl.program_id(0) * B.LAUNCH.passes + turns // B.TURNS) * B.LAUNCH.warps
    return gl.minimum((first + warp) * B.LAUNCH.tiles, tiles - B.LAUNCH.tiles)


@gluon.jit
def begin(weights, x, buffer, tiles, warp, lane, B: gl.constexpr):
    """Begin to copy the first turns; see `multiply`."""
    for turn in gl.static_range(B.LAUNCH.stages - 1):
        if turn < B.TURNS * B.LAUNCH.passes:
            _copy_turn(weights, x, buffer + turn * B.STAGE, turn, tiles, warp, lane, B)
        commit_copies()


@gluon.jit
def multiply(
    weights, x, buffer, read_at, write_at, done, tiles, warp, lane, zero_f32, B: gl.constexpr
):  # fmt: skip
    """Sums [ROWS / 8][tiles] of four: rows g and g + 8 of a tile, of tokens 2 * t and 2 * t + 1.

    weights: addresses of this lane's first words and scales in the expert's first tile.
    x: for each copy of this thread the address of a chunk in the first turn; see `chunk_row`.
    read_at, write_at: where the stages of this turn and of the next to be copied begin.
    done: turns of earlier passes.
    """
    LAST: gl.constexpr = (B.LAUNCH.stages - 1) * B.STAGE
    acc = ()
    for _i in gl.static_range(B.LAUNCH.tiles * (B.ROWS // 8)):
        acc = acc + ((zero_f32, zero_f32, zero_f32, zero_f32),)
    for turn in range(0, B.TURNS):
        wait_copies(B.LAUNCH.stages - 2)
        barrier()
        following = done + turn + (B.LAUNCH.stages - 1)
        if following < B.TURNS * B.LAUNCH.passes:
            _copy_turn(weights, x, buffer + write_at, following, tiles, warp, lane, B)
        commit_copies()
        acc = _multiply_turn(acc, buffer + read_at, warp, lane, B)
        read_at = gl.where(read_at == LAST, 0, read_at + B.STAGE)
        write_at = gl.where(write_at == LAST, 0, write_at + B.STAGE)
    return acc, read_at, write_at


@gluon.jit
def chunk_row(thread, i: gl.constexpr, B: gl.constexpr):
    """The row of the i-th chunk of 16 bytes that a thread copies."""
    CHUNKS: gl.constexpr = B.STRIDE // 16
    return gl.minimum(thread // CHUNKS + i * (B.LAUNCH.warps * 32 // CHUNKS), B.ROWS - 1)


@gluon.jit
def _copy_turn(weights, x, buffer, turns, tiles, warp, lane, B: gl.constexpr):
    """Begin to copy what is multiplied after so many turns."""
    W: gl.constexpr = B.W
    R: gl.constexpr = B.LAUNCH.tiles
    C: gl.constexpr = B.LAUNCH.steps
    THREADS: gl.constexpr = B.LAUNCH.warps * 32
    UNITS: gl.constexpr = B.UNITS
    PARTS: gl.constexpr = B.PARTS
    CHUNKS: gl.constexpr = B.STRIDE // 16
    words, scales = weights
    turn = turns % B.TURNS
    tile = tile_of(turns, tiles, warp, B).to(gl.int64)
    thread = warp * 32 + lane
    OWN: gl.constexpr = C * W.CODEC.STEP_BYTES  # bytes of a tile in a turn
    TILE: gl.constexpr = W.STEPS * W.CODEC.STEP_BYTES
    own = buffer + warp * (R * OWN) + lane * 16
    here = words + tile * TILE + turn * OWN
    for r in gl.static_range(R):
        for i in gl.static_range(OWN // 512):
            copy16(own, here, r * TILE + i * 512, B.WORDS_AT + r * OWN + i * 512)
    own = buffer + warp * (R * UNITS * PARTS * 128) + lane * 4
    for unit in gl.static_range(UNITS):
        group = gl.minimum((turn * B.COLUMNS + unit * B.UNIT) // W.G, W.GROUPS - 1)
        here = scales + tile * (W.GROUPS * 32 * PARTS) + group * (32 * PARTS)
        for r in gl.static_range(R):
            for part in gl.static_range(PARTS):
                copy4(
                    own, here, r * (W.GROUPS * 32 * PARTS) + part * 4,
                    B.SCALES_AT + ((r * UNITS + unit) * PARTS + part) * 128,
                )  # fmt: skip
    k = turn * B.COLUMNS
    chunk = thread % CHUNKS
    FULL: gl.constexpr = B.ROWS * CHUNKS % THREADS == 0  # no row is copied twice
    for i in gl.static_range(len(x)):
        row = chunk_row(thread, 0 if FULL else i, B)
        target = buffer + row * B.STRIDE + (chunk ^ row % 2 * 4) * 16
        if W.K % B.COLUMNS == 0:
            copy16(target, x[i] + k * 2, 0, i * THREADS * 16 if FULL else 0)
        else:
            inside = k + chunk * 8 < W.K
            source = x[i] + gl.where(inside, k * 2, chunk * -16)
            copy16_or_zeros(target, source, inside, i * THREADS * 16 if FULL else 0)


@gluon.jit
def _multiply_turn(acc, buffer, warp, lane, B: gl.constexpr):
    SCALES: gl.constexpr = B.W.SCALES  # Triton 3.6 takes no text from a record as an argument,
    CODEC: gl.constexpr = B.W.CODEC  # and no record
    STEP_K: gl.constexpr = B.W.CODEC.STEP_K
    STEP_BYTES: gl.constexpr = B.W.CODEC.STEP_BYTES
    Q: gl.constexpr = B.W.CODEC.PRODUCTS
    R: gl.constexpr = B.LAUNCH.tiles
    C: gl.constexpr = B.LAUNCH.steps
    UNIT: gl.constexpr = B.UNIT
    UNITS: gl.constexpr = B.UNITS
    STRIDE: gl.constexpr = B.STRIDE
    WORDS_AT: gl.constexpr = B.WORDS_AT
    words_at = buffer + warp * (R * C * STEP_BYTES) + lane * 16
    scales_at = buffer + warp * (R * UNITS * B.PARTS * 128) + lane * 4
    g = lane // 4
    even_at = buffer + g * STRIDE + g % 2 * 64 + lane % 4 * 16
    odd_at = buffer + g * STRIDE + (1 - g % 2) * 64 + lane % 4 * 16
    for c in gl.static_range(C):
        loads = ()
        for r in gl.static_range(R):
            loads = loads + (_load_step(words_at, WORDS_AT + (r * C + c) * STEP_BYTES, B),)
        scale = ()
        for q in gl.static_range(Q):
            if q * 32 % UNIT == 0:
                scale = ()
                for r in gl.static_range(R):
                    scale = scale + (
                        _scales_of(
                            scales_at,
                            B.SCALES_AT
                            + (r * UNITS + (c * STEP_K + q * 32) // UNIT) * B.PARTS * 128,
                            SCALES,
                        ),
                    )
            a = ()
            for r in gl.static_range(R):
                first = _weights(loads[r], q, 0, scale[r][0], SCALES, CODEC)
                second = _weights(loads[r], q, 1, scale[r][1], SCALES, CODEC)
                a = a + ((first, second),)
            new = ()
            for nb in gl.static_range(B.ROWS // 8):
                b = load_shared16(
                    odd_at if q % 2 == 1 else even_at,
                    nb * 8 * STRIDE + c * STEP_K * 2 + q // 2 * 128,
                )
                for r in gl.static_range(R):
                    u, v = a[r]
                    d = mma(acc[nb * R + r], u[0], v[0], u[1], v[1], b[0], b[1])
                    new = new + (mma(d, u[2], v[2], u[3], v[3], b[2], b[3]),)
            acc = new
    return acc


@gluon.jit
def _load_step(address, OFFSET: gl.constexpr, B: gl.constexpr):
    LOADS: gl.constexpr = B.W.CODEC.LOADS
    loads = ()
    for i in gl.static_range(LOADS):
        loads = loads + (load_shared16(address, OFFSET + 512 * i),)
    return loads


@gluon.jit
def _scales_of(address, OFFSET: gl.constexpr, SCALES: gl.constexpr):
    """Scales of the two rows of a lane: in both halves of a word if they are BF16, else in FP32."""
    if SCALES == "fp32":
        low = load_shared4(address, OFFSET)
        high = load_shared4(address, OFFSET + 128)
    else:
        raw = as_word(load_shared4(address, OFFSET))
        if SCALES == "bf16":
            low = bytes_of(raw, raw, 0x1010)
            high = bytes_of(raw, raw, 0x3232)
        else:
            low, high = unpacked_scales(raw, SCALES)
    return low, high


@gluon.jit
def _weights(
    loads, q: gl.constexpr, half: gl.constexpr, scale, SCALES: gl.constexpr, CODEC: gl.constexpr
):  # fmt: skip
    """A lane's q-th chunk of a row: four words of two weights, rounded once as `widen` does it."""
    codes = ()
    if CODEC.SUBBYTE:
        codes = chunk_pairs(loads, q, half, CODEC)
    else:
        for i in gl.static_range(2):
            low0, high0, low1, high1 = pairs(loads[half][2 * q + i], False)
            # exact: a code has 8 bits, as BF16 has
            codes = codes + (
                times_plus(high0, 0x41804180, low0),
                times_plus(high1, 0x41804180, low1),
            )
    out = ()
    for i in gl.static_range(4):
        if SCALES == "bf16":
            out = out + (times(codes[i], scale),)
        else:
            out = out + (bf16_pair(low_half(codes[i]) * scale, high_half(codes[i]) * scale),)
    return out
