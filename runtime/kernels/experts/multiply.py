"""Device functions of `experts_products`: tiles of an expert times a block of tokens.

Words, scales and x are copied to shared memory some turns ahead. A lane reads the words and scales
that it has copied itself: they become its A fragments of `mma`. Its 16 bytes of x are the B
fragments of two products, as their k follow in a word. In odd rows of x neighbours of 64 bytes have
changed places, so that lanes hit different banks.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

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


def stage_bytes(
    bits: int, group_size: int, scale_bytes: int, rows: int, tiles: int, warps: int, steps: int
) -> int:
    """Shared memory of a turn: x, words, scales.

    Args:
        bits: of a code.
        group_size: weights that share a scale.
        scale_bytes: of one.
        rows: tokens.
        tiles: of a warp.
        warps: of a program.
        steps: of a turn.
    """
    units = steps * scale_units(bits, group_size)
    words = scale_words(scale_bytes)
    return rows * steps * 1024 // bits + warps * tiles * (steps * 1024 + units * words * 128)


def scale_units(bits: int, group_size: int) -> int:
    """Parts of a step that surely share a scale each."""
    step = 512 // bits
    return step // min(step, group_size & -group_size)


def scale_words(scale_bytes: int) -> int:
    """Words that hold the scales of two rows."""
    return 2 if scale_bytes == 4 else 1


@gluon.jit
def tile_of(
    turns, tiles, warp, TURNS: gl.constexpr, R: gl.constexpr, WARPS: gl.constexpr,
    PASSES: gl.constexpr,
):  # fmt: skip
    """The first tile that a warp multiplies after so many turns; the last tiles may be repeated."""
    first = (gl.program_id(0) * PASSES + turns // TURNS) * WARPS
    return gl.minimum((first + warp) * R, tiles - R)


@gluon.jit
def begin(
    words, scales, x, buffer, tiles, warp, lane,
    K: gl.constexpr, G: gl.constexpr, BITS: gl.constexpr, SCALES: gl.constexpr, R: gl.constexpr,
    C: gl.constexpr, ROWS: gl.constexpr, WARPS: gl.constexpr, PASSES: gl.constexpr,
    STAGES: gl.constexpr, STAGE: gl.constexpr,
):  # fmt: skip
    """Begin to copy the first turns; see `multiply`."""
    TURNS: gl.constexpr = (K * BITS + 511) // 512 // C
    for turn in gl.static_range(STAGES - 1):
        if turn < TURNS * PASSES:
            _copy_turn(
                words, scales, x, buffer + turn * STAGE, turn, tiles, warp, lane,
                K, G, BITS, SCALES, R, C, ROWS, WARPS, PASSES,
            )  # fmt: skip
        commit_copies()


@gluon.jit
def multiply(
    words, scales, x, buffer, read_at, write_at, done, tiles, warp, lane, none,
    K: gl.constexpr, G: gl.constexpr, BITS: gl.constexpr, SCALES: gl.constexpr, R: gl.constexpr,
    C: gl.constexpr, ROWS: gl.constexpr, WARPS: gl.constexpr, PASSES: gl.constexpr,
    STAGES: gl.constexpr, STAGE: gl.constexpr,
):  # fmt: skip
    """Sums [ROWS / 8][R] of four: rows g and g + 8 of a tile, of tokens 2 * t and 2 * t + 1.

    words, scales: addresses of this lane's first in the expert's first tile. x: for each copy of
    this thread the address of a chunk in the first turn; see `chunk_row`. read_at, write_at: where
    the stages of this turn and of the next to be copied begin. done: turns of earlier passes.
    C: steps of a turn, which divide those of K. STAGE: bytes of a turn.
    """
    TURNS: gl.constexpr = (K * BITS + 511) // 512 // C
    acc = ()
    for _i in gl.static_range(R * (ROWS // 8)):
        acc = acc + ((none, none, none, none),)
    for turn in range(0, TURNS):
        wait_copies(STAGES - 2)
        barrier()
        following = done + turn + (STAGES - 1)
        if following < TURNS * PASSES:
            _copy_turn(
                words, scales, x, buffer + write_at, following, tiles, warp, lane,
                K, G, BITS, SCALES, R, C, ROWS, WARPS, PASSES,
            )  # fmt: skip
        commit_copies()
        acc = _multiply_turn(
            acc, buffer + read_at, warp, lane, G, BITS, SCALES, R, C, ROWS, WARPS
        )  # fmt: skip
        read_at = gl.where(read_at == (STAGES - 1) * STAGE, 0, read_at + STAGE)
        write_at = gl.where(write_at == (STAGES - 1) * STAGE, 0, write_at + STAGE)
    return acc, read_at, write_at


@gluon.jit
def chunk_row(thread, i: gl.constexpr, BITS: gl.constexpr, C: gl.constexpr, ROWS: gl.constexpr,
    WARPS: gl.constexpr,
):  # fmt: skip
    """The row of the i-th chunk of 16 bytes that a thread copies."""
    CHUNKS: gl.constexpr = C * 64 // BITS
    return gl.minimum(thread // CHUNKS + i * (WARPS * 32 // CHUNKS), ROWS - 1)


@gluon.jit
def _copy_turn(
    words, scales, x, buffer, turns, tiles, warp, lane,
    K: gl.constexpr, G: gl.constexpr, BITS: gl.constexpr, SCALES: gl.constexpr, R: gl.constexpr,
    C: gl.constexpr, ROWS: gl.constexpr, WARPS: gl.constexpr, PASSES: gl.constexpr,
):  # fmt: skip
    """Begin to copy what is multiplied after so many turns."""
    STEPS: gl.constexpr = (K * BITS + 511) // 512
    STEP_K: gl.constexpr = 512 // BITS
    GROUPS: gl.constexpr = K // G
    UNIT: gl.constexpr = min(STEP_K, G & -G)
    UNITS: gl.constexpr = C * STEP_K // UNIT
    PARTS: gl.constexpr = 2 if SCALES == "fp32" else 1
    CHUNKS: gl.constexpr = C * STEP_K // 8
    STRIDE: gl.constexpr = CHUNKS * 16
    WORDS_AT: gl.constexpr = ROWS * STRIDE
    SCALES_AT: gl.constexpr = WORDS_AT + WARPS * R * C * 1024
    TURNS: gl.constexpr = STEPS // C
    turn = turns % TURNS
    tile = tile_of(turns, tiles, warp, TURNS, R, WARPS, PASSES).to(gl.int64)
    thread = warp * 32 + lane
    own = buffer + warp * (R * C * 1024) + lane * 16
    here = words + tile * (STEPS * 1024) + turn * (C * 1024)
    for r in gl.static_range(R):
        for i in gl.static_range(2 * C):
            copy16(own, here, r * (STEPS * 1024) + i * 512, WORDS_AT + r * (C * 1024) + i * 512)
    own = buffer + warp * (R * UNITS * PARTS * 128) + lane * 4
    for unit in gl.static_range(UNITS):
        group = gl.minimum((turn * (C * STEP_K) + unit * UNIT) // G, GROUPS - 1)
        here = scales + tile * (GROUPS * 32 * PARTS) + group * (32 * PARTS)
        for r in gl.static_range(R):
            for part in gl.static_range(PARTS):
                copy4(
                    own, here, r * (GROUPS * 32 * PARTS) + part * 4,
                    SCALES_AT + ((r * UNITS + unit) * PARTS + part) * 128,
                )  # fmt: skip
    k = turn * (C * STEP_K)
    chunk = thread % CHUNKS
    FULL: gl.constexpr = ROWS * CHUNKS % (WARPS * 32) == 0  # no row is copied twice
    for i in gl.static_range(len(x)):
        row = chunk_row(thread, 0 if FULL else i, BITS, C, ROWS, WARPS)
        target = buffer + row * STRIDE + (chunk ^ row % 2 * 4) * 16
        if K % (C * STEP_K) == 0:
            copy16(target, x[i] + k * 2, 0, i * WARPS * 512 if FULL else 0)
        else:
            inside = k + chunk * 8 < K
            source = x[i] + gl.where(inside, k * 2, chunk * -16)
            copy16_or_zeros(target, source, inside, i * WARPS * 512 if FULL else 0)


@gluon.jit
def _multiply_turn(
    acc, buffer, warp, lane, G: gl.constexpr, BITS: gl.constexpr, SCALES: gl.constexpr,
    R: gl.constexpr, C: gl.constexpr, ROWS: gl.constexpr, WARPS: gl.constexpr,
):  # fmt: skip
    """Acc with what a turn adds."""
    STEP_K: gl.constexpr = 512 // BITS
    Q: gl.constexpr = 16 // BITS
    UNIT: gl.constexpr = min(STEP_K, G & -G)
    UNITS: gl.constexpr = C * STEP_K // UNIT
    PARTS: gl.constexpr = 2 if SCALES == "fp32" else 1
    STRIDE: gl.constexpr = C * STEP_K * 2
    WORDS_AT: gl.constexpr = ROWS * STRIDE
    SCALES_AT: gl.constexpr = WORDS_AT + WARPS * R * C * 1024
    NB: gl.constexpr = ROWS // 8
    words_at = buffer + warp * (R * C * 1024) + lane * 16
    scales_at = buffer + warp * (R * UNITS * PARTS * 128) + lane * 4
    g = lane // 4
    even_at = buffer + g * STRIDE + g % 2 * 64 + lane % 4 * 16
    odd_at = buffer + g * STRIDE + (1 - g % 2) * 64 + lane % 4 * 16
    for c in gl.static_range(C):
        low = ()
        high = ()
        for r in gl.static_range(R):
            low = low + (load_shared16(words_at, WORDS_AT + (r * C + c) * 1024),)
            high = high + (load_shared16(words_at, WORDS_AT + (r * C + c) * 1024 + 512),)
        scale = ()
        for q in gl.static_range(Q):
            if q * 32 % UNIT == 0:
                scale = ()
                for r in gl.static_range(R):
                    scale = scale + (
                        _scales_of(
                            scales_at,
                            SCALES_AT + (r * UNITS + (c * STEP_K + q * 32) // UNIT) * PARTS * 128,
                            SCALES,
                        ),
                    )
            a = ()
            for r in gl.static_range(R):
                first = _weights(low[r], q, scale[r][0], BITS, SCALES)
                second = _weights(high[r], q, scale[r][1], BITS, SCALES)
                a = a + ((first, second),)
            new = ()
            for nb in gl.static_range(NB):
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
def _weights(words, q: gl.constexpr, scale, BITS: gl.constexpr, SCALES: gl.constexpr):
    """A lane's q-th chunk of a row: four words of two weights, rounded once as `widen` does it."""
    codes = ()
    if BITS == 4:
        codes = pairs(words[q], BITS)
    else:
        for i in gl.static_range(2):
            low0, high0, low1, high1 = pairs(words[2 * q + i], BITS)
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
