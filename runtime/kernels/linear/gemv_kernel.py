"""The kernel of `gemv`: programs with tiles of the packed weight, and programs with dense rows."""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from lowbit.runtime.kernels.linear.columns import (
    PAIRED_TOKENS,
    TOP_WEIGHT,
    column_of,
    multiply_digits,
    sums_of_tokens,
    unit_of,
)
from lowbit.runtime.kernels.linear.dense_rows import multiply_rows
from lowbit.runtime.kernels.linear.digit_planes import stage_tokens
from lowbit.runtime.kernels.linear.stage import (
    BLOCK_K,
    SQUARES_BYTES,
    load_gains,
    norm_factor,
    sum_of_parts,
    total_of,
)
from lowbit.runtime.kernels.linear.steps import load_steps
from lowbit.runtime.kernels.ptx.memory import (
    barrier,
    large_shared_buffer,
    load_shared4,
    shared_buffer,
    store16,
    store_shared4,
    store_shared8,
    store_shared16,
)
from lowbit.runtime.kernels.ptx.mma import across, as_word, threads


@gluon.jit(do_not_specialize=["B", "N", "tiles", "added_stride"])
def gemv_kernel(
    x_ptr, planes_ptr, gain_ptr, head_squares_ptr, words_ptr, scales_ptr, added_ptr, rows_ptr,
    y_ptr, rows_y_ptr, sums_ptr, B, N, tiles, added_stride, eps,
    SWIGLU: gl.constexpr, TOKENS: gl.constexpr, K: gl.constexpr, G: gl.constexpr,
    BITS: gl.constexpr, SCALES: gl.constexpr, HEAD: gl.constexpr, ROWS: gl.constexpr,
    R: gl.constexpr, C: gl.constexpr, WARPS: gl.constexpr, ABREAST: gl.constexpr,
    ROUNDS: gl.constexpr, SPLIT: gl.constexpr, SHARED: gl.constexpr, LARGE: gl.constexpr,
    X_BYTES: gl.constexpr, DIGITS: gl.constexpr, PLANE: gl.constexpr, NARROW: gl.constexpr,
    PDL: gl.constexpr, EARLY: gl.constexpr,
):  # fmt: skip
    """TOKENS: that there is room for, a power of two, of which B are there.

    HEAD: elements of x that are normed by one of the sums of squares, where those are given.

    SPLIT: programs that share a tile; where there are several, they leave their sums in `sums_ptr`
        for `join`.

    X_BYTES: of shared memory that x takes, DIGITS without its squares; 0 where planes are given.

    NARROW: whether a thread has no register for the norm of one token while it multiplies.
    """
    if PDL and EARLY:
        gdc_launch_dependents()
    warp, lane, zero, none = threads(WARPS)
    if LARGE > 0:
        buffer = large_shared_buffer(N < 0, LARGE, WARPS) + zero
    else:
        buffer = shared_buffer(SHARED) + zero
    first: gl.constexpr = (ROWS + 15) // 16  # programs with dense rows: they take longest
    if ROWS > 0 and gl.program_id(0) < first:
        if SPLIT == 1 or gl.program_id(1) == 0:
            multiply_rows(
                x_ptr, gain_ptr, rows_ptr, None, rows_y_ptr, buffer, warp, lane, none, B, ROWS, 0,
                eps, TOKENS, K, WARPS, PDL, EARLY, TOKENS == 1 and K % 256 == 0,
            )  # fmt: skip
        elif PDL:
            gdc_wait()
    else:
        _multiply_tiles(
            x_ptr, planes_ptr, gain_ptr, head_squares_ptr, words_ptr, scales_ptr, added_ptr, y_ptr,
            sums_ptr, B, N, tiles, added_stride, eps, gl.program_id(0) - first, buffer, warp, lane,
            none, SWIGLU, TOKENS, K, G, BITS, SCALES, HEAD, R, C, WARPS, ABREAST, ROUNDS, SPLIT,
            X_BYTES, DIGITS, PLANE, NARROW, PDL, EARLY,
        )  # fmt: skip


@gluon.jit
def _multiply_tiles(
    x_ptr, planes_ptr, gain_ptr, head_squares_ptr, words_ptr, scales_ptr, added_ptr, y_ptr,
    sums_ptr, B, N, tiles, added_stride, eps, program, buffer, warp, lane, none,
    SWIGLU: gl.constexpr, TOKENS: gl.constexpr, K: gl.constexpr, G: gl.constexpr,
    BITS: gl.constexpr, SCALES: gl.constexpr, HEAD: gl.constexpr, R: gl.constexpr, C: gl.constexpr,
    WARPS: gl.constexpr, ABREAST: gl.constexpr, ROUNDS: gl.constexpr, SPLIT: gl.constexpr,
    X_BYTES: gl.constexpr, DIGITS: gl.constexpr, PLANE: gl.constexpr, NARROW: gl.constexpr,
    PDL: gl.constexpr, EARLY: gl.constexpr,
):  # fmt: skip
    """One program's tiles of the packed weight."""
    STAGED: gl.constexpr = X_BYTES > 0
    NORM: gl.constexpr = gain_ptr is not None
    FP32: gl.constexpr = gain_ptr is not None and gain_ptr.dtype.element_ty == gl.float32
    STEPS: gl.constexpr = (K * BITS + 511) // 512
    GROUPS: gl.constexpr = (K + G - 1) // G
    BLOCKS: gl.constexpr = (K + BLOCK_K - 1) // BLOCK_K
    EACH: gl.constexpr = WARPS // ABREAST  # warps of a program that share a tile
    PARTS: gl.constexpr = EACH * SPLIT  # of a tile's steps
    S: gl.constexpr = (STEPS + PARTS - 1) // PARTS
    # How digits lie: bytes to the next 64 k, plane and token.
    STRIDE: gl.constexpr = 64 if STAGED else 192 * TOKENS
    TO_PLANE: gl.constexpr = PLANE if STAGED else 64 * TOKENS
    TO_TOKEN: gl.constexpr = 3 * PLANE if STAGED else 64
    g = lane // 4
    t = lane % 4
    part = warp % EACH
    if SPLIT > 1:
        part += gl.program_id(1) * EACH
    first_tile = program * (ROUNDS * ABREAST * R)
    words, scales = tile_addresses(
        words_ptr, scales_ptr, first_tile + warp // EACH * R, tiles, part, lane, STEPS, GROUPS,
        SCALES, R,
    )  # fmt: skip
    loaded, raw = load_steps(
        words, scales, part, 0, G, BITS, K, R, C if C < S else S, PARTS, SCALES
    )  # fmt: skip
    gains = ()
    TURNS: gl.constexpr = (TOKENS * BLOCKS + WARPS - 1) // WARPS
    # After so many turns the same blocks come again: WARPS is a power of two.
    PERIOD: gl.constexpr = BLOCKS // min(BLOCKS & -BLOCKS, WARPS)
    if STAGED:
        gains = load_gains(
            gain_ptr, warp, lane, K, WARPS, TOKENS, PERIOD if PERIOD < TURNS else TURNS
        )  # fmt: skip

    if PDL:
        gdc_wait()
        if not EARLY:
            gdc_launch_dependents()

    # An item is 16 rows and the tokens of a lane's sums: one, two in turn, or two side by side.
    PAIRED: gl.constexpr = TOKENS <= PAIRED_TOKENS
    COLUMNS: gl.constexpr = 1 if PAIRED else 2  # tokens of a lane
    NT: gl.constexpr = (TOKENS + 1) // 2 if PAIRED else TOKENS // 8
    ITEMS: gl.constexpr = ROUNDS * ABREAST * R * NT
    HELD: gl.constexpr = 8 if TOKENS == 1 else (16 if PAIRED else 32)  # lanes with results
    held = lane >= 0
    slot = lane
    token = 2 * t
    if TOKENS == 1:
        held = t == 0
        slot = g
        token = t * 0
    elif PAIRED:
        held = t % 2 == 0
        slot = lane // 2
        token = t // 2
    added = ()
    if added_ptr is not None:
        for first in gl.static_range(0, ITEMS, WARPS):
            for i in gl.static_range(2 * COLUMNS):
                n = (first_tile + (first + warp) // NT) * 16 + i // COLUMNS * 8 + g
                at = gl.minimum(n, N - 1)
                if TOKENS > 1:
                    b = (first + warp) % NT * (2 if PAIRED else 8) + token + i % COLUMNS
                    at += gl.minimum(b, B - 1) * added_stride
                added = added + (gl.load(added_ptr + at).to(gl.float32),)
    factor = none + (1.0 if BITS == 8 else 0.0625)  # digits meet 16 times the code
    if SPLIT > 1:
        sums_at = sums_ptr.to(gl.int64, bitcast=True) + first_tile * (NT * PARTS * HELD * 16)
    else:
        sums_at = buffer + X_BYTES
    if STAGED:
        stage_tokens(
            x_ptr, gains, head_squares_ptr, buffer, warp, lane, none, B, eps,
            NORM, FP32, K, WARPS, TOKENS, TURNS, BITS, HEAD, PLANE, DIGITS,
        )  # fmt: skip
        barrier()
        squares_at = buffer + DIGITS
        factors_at = squares_at + TOKENS * BLOCKS * SQUARES_BYTES
        if NORM and TOKENS == 1 and not NARROW:  # before the products, which hide it
            factor *= norm_factor(total_of(squares_at, lane, none, K), eps, K)
        if NORM and TOKENS > 1:
            for turn in gl.static_range((TOKENS + WARPS - 1) // WARPS):
                b = gl.minimum(turn * WARPS + warp, TOKENS - 1)
                total = total_of(squares_at + b * (BLOCKS * SQUARES_BYTES), lane, none, K)
                store_shared4(factors_at + b * 4, norm_factor(total, eps, K), lane == 0)
        digits = buffer
        units = buffer + TOKENS * 3 * PLANE + unit_of(lane, TOKENS)
    else:
        planes = planes_ptr.to(gl.int64, bitcast=True)
        digits = planes
        units = planes + ((K + 127) // 128 * 384 * TOKENS + unit_of(lane, TOKENS))
    digits = digits + column_of(lane, TOKENS, TO_PLANE, TO_TOKEN) + part * (8 // BITS * STRIDE)
    mixed = gl.where(t % 2 == 0, 256, 0)
    if ROUNDS == 1:
        loaded, raw = multiply_round(
            loaded, raw, words, scales, words, scales, digits, units, part, mixed, held,
            warp // EACH, slot, sums_at, none, G, BITS, K, R, C, PARTS, SCALES, TOKENS, STAGED,
            STRIDE, TO_PLANE, TO_TOKEN, HELD, False,
        )  # fmt: skip
    else:
        for turn in range(ROUNDS):
            own = gl.minimum(turn + 1, ROUNDS - 1) * ABREAST + warp // EACH
            next_words, next_scales = tile_addresses(
                words_ptr, scales_ptr, first_tile + own * R, tiles, part, lane, STEPS, GROUPS,
                SCALES, R,
            )  # fmt: skip
            loaded, raw = multiply_round(
                loaded, raw, words, scales, next_words, next_scales, digits, units, part, mixed,
                held, turn * ABREAST + warp // EACH, slot, sums_at,
                none, G, BITS, K, R, C, PARTS, SCALES, TOKENS, STAGED, STRIDE, TO_PLANE, TO_TOKEN,
                HELD, True,
            )  # fmt: skip
            words = next_words
            scales = next_scales
    if NORM and STAGED and TOKENS == 1 and NARROW:
        factor *= norm_factor(total_of(buffer + DIGITS, lane, none, K), eps, K)
    barrier()
    for first in gl.static_range(0, ITEMS if SPLIT == 1 else 0, WARPS):
        item = first + warp
        at = sums_at + (gl.minimum(item, ITEMS - 1) * PARTS * HELD + slot) * (8 * COLUMNS)
        y = sum_of_parts(at, none, PARTS, HELD, COLUMNS)  # rows g, then rows g + 8
        for column in gl.static_range(COLUMNS):
            b = token
            stored = held & (item < ITEMS)
            if TOKENS > 1:
                b = item % NT * (2 if PAIRED else 8) + token + column
                stored = stored & (b < B)
            own = factor
            if NORM and not STAGED:
                own = factor * given_factor(planes_ptr, b, K, BLOCKS, TOKENS)
            elif NORM and TOKENS > 1:
                own = factor * load_shared4(factors_at + b * 4)
            more = (none, none)
            if added_ptr is not None:
                more = (
                    added[first // WARPS * 2 * COLUMNS + column],
                    added[(first // WARPS * 2 + 1) * COLUMNS + column],
                )
            store_result(
                y_ptr, y[column] * own, y[COLUMNS + column] * own, more, first_tile + item // NT, g,
                b, stored, N, SWIGLU, added_ptr is not None,
            )  # fmt: skip


@gluon.jit
def store_result(
    y_ptr, low, high, added, tile, g, b, stored, N, SWIGLU: gl.constexpr, ADDED: gl.constexpr
):  # fmt: skip
    """Rows g and g + 8 of a tile for one token, or what becomes of gate and up."""
    if SWIGLU:
        n = tile * 8 + g
        act = low * high / (1.0 + gl.exp(-low))
        at = y_ptr + b * (N // 2) + n
        gl.store(at, act.to(y_ptr.dtype.element_ty), mask=stored & (n < N // 2))
    else:
        for half in gl.static_range(2):
            n = tile * 16 + half * 8 + g
            v = low if half == 0 else high
            if ADDED:
                v += added[half]
            gl.store(y_ptr + b * N + n, v.to(y_ptr.dtype.element_ty), mask=stored & (n < N))


@gluon.jit
def multiply_round(
    loaded, raw, words, scales, next_words, next_scales, digits, units, part, mixed, held, share,
    slot, sums_at, none, G: gl.constexpr, BITS: gl.constexpr, K: gl.constexpr, R: gl.constexpr,
    C: gl.constexpr, PARTS: gl.constexpr, SCALES: gl.constexpr, TOKENS: gl.constexpr,
    STAGED: gl.constexpr, STRIDE: gl.constexpr, PLANE: gl.constexpr, TOKEN: gl.constexpr,
    HELD: gl.constexpr, NEXT: gl.constexpr,
):  # fmt: skip
    """Multiply the steps of R tiles, leave their sums in shared memory; the next round's loads.

    loaded, raw: of the first steps.
    share: number of the warp's R tiles among those of the program.
    """
    STEPS: gl.constexpr = (K * BITS + 511) // 512
    S: gl.constexpr = (STEPS + PARTS - 1) // PARTS
    PAIRED: gl.constexpr = TOKENS <= PAIRED_TOKENS
    COLUMNS: gl.constexpr = 1 if PAIRED else 2
    # Several tokens in a loop, where every turn is like the others: what the compiler would load
    # early of an unrolled one does not fit into registers. Steps that only some warps have follow.
    STEP_K: gl.constexpr = 512 // BITS
    TURN_K: gl.constexpr = C * PARTS * STEP_K
    EVEN: gl.constexpr = TURN_K % BLOCK_K == 0 and TURN_K % G == 0 and K % STEP_K == 0
    ALL: gl.constexpr = STEPS % PARTS == 0 and S % C == 0  # are in the loop
    MOST: gl.constexpr = S // C if ALL else STEPS // PARTS // C - 1
    TURNS: gl.constexpr = MOST if TOKENS >= 4 and EVEN and S > C else 0
    acc = sums_of_tokens(none, R, TOKENS)
    if TURNS > 0:
        GROUP_BYTES: gl.constexpr = 64 if SCALES == "fp32" else 32
        for turn in range(TURNS):
            next_words_at = ()
            next_scales_at = ()
            for r in gl.static_range(R):
                words_at = words[r] + (turn + 1) * (C * PARTS * 1024)
                scales_at = scales[r] + (turn + 1) * (TURN_K // G * GROUP_BYTES)
                if ALL:
                    last = turn + 1 + part * 0 == TURNS
                    words_at = gl.where(last, next_words[r], words_at)
                    scales_at = gl.where(last, next_scales[r], scales_at)
                next_words_at = next_words_at + (words_at,)
                next_scales_at = next_scales_at + (scales_at,)
            next_loaded, next_raw = load_steps(
                next_words_at, next_scales_at, part, 0, G, BITS, K, R, C, PARTS, SCALES
            )  # fmt: skip
            acc = multiply_digits(
                acc, loaded, raw, digits + turn * (TURN_K // 64 * STRIDE),
                units + turn * (TURN_K // BLOCK_K * TOKENS * 4), part, mixed, 0, C, G, BITS, K, R,
                PARTS, SCALES, TOKENS, STAGED, STRIDE, PLANE, TOKEN,
            )  # fmt: skip
            loaded = next_loaded
            raw = next_raw
    for first in gl.static_range(TURNS * C if TURNS > 0 else 0, S, C):
        if first + C < S:
            next_loaded, next_raw = load_steps(
                words, scales, part, first + C, G, BITS, K, R,
                C if first + 2 * C <= S else S - first - C, PARTS, SCALES,
            )  # fmt: skip
        elif NEXT:
            next_loaded, next_raw = load_steps(
                next_words, next_scales, part, 0, G, BITS, K, R, C if C < S else S, PARTS, SCALES
            )  # fmt: skip
        acc = multiply_digits(
            acc, loaded, raw, digits, units, part, mixed, first,
            C if first + C <= S else S - first, G, BITS, K, R, PARTS, SCALES, TOKENS, STAGED,
            STRIDE, PLANE, TOKEN,
        )  # fmt: skip
        if first + C < S or NEXT:
            loaded = next_loaded
            raw = next_raw
    at = sums_at + ((share * len(acc) * PARTS + part) * HELD + slot) * (8 * COLUMNS)
    for i in gl.static_range(len(acc)):
        store_sums(acc[i], at + i * (PARTS * HELD * 8 * COLUMNS), held, PAIRED)
    return loaded, raw


@gluon.jit
def tile_addresses(
    words_ptr, scales_ptr, first_tile, tiles, part, lane, STEPS: gl.constexpr,
    GROUPS: gl.constexpr, SCALES: gl.constexpr, R: gl.constexpr,
):  # fmt: skip
    """Addresses, for this lane, of the warp's first step and the first scales of R tiles."""
    SCALE_BYTES: gl.constexpr = 8 if SCALES == "fp32" else 4  # of two rows
    words = ()
    scales = ()
    for r in gl.static_range(R):
        tile = gl.minimum(first_tile + r, tiles - 1).to(gl.int64)
        at = tile * (STEPS * 1024) + part * 1024 + lane * 16
        words = words + (words_ptr.to(gl.int64, bitcast=True) + at,)
        at = (tile * (GROUPS * 8) + lane // 4) * SCALE_BYTES
        scales = scales + (scales_ptr.to(gl.int64, bitcast=True) + at,)
    return words, scales


@gluon.jit
def store_sums(a, at, held, PAIRED: gl.constexpr):
    """Join the digits of a warp's sums and leave them in shared or, where split, global memory."""
    if PAIRED:
        low = a[0] + TOP_WEIGHT * across(a[0], 1)
        high = a[1] + TOP_WEIGHT * across(a[1], 1)
        store_shared8(at, (as_word(low), as_word(high)), held)
    else:
        joined = ()
        for j in gl.static_range(4):
            joined = joined + (as_word(a[j] + TOP_WEIGHT * a[4 + j]),)
        if at.dtype == gl.int64:
            store16(at, joined, held)
        else:
            store_shared16(at, joined, held)


@gluon.jit
def given_factor(planes_ptr, token, K: gl.constexpr, BLOCKS: gl.constexpr, TOKENS: gl.constexpr):
    """The factor of a token's norm that `digits` has left behind planes and units."""
    at: gl.constexpr = (K + 127) // 128 * 96 * TOKENS + BLOCKS * TOKENS
    return gl.load(planes_ptr + at + token).to(gl.float32, bitcast=True)
