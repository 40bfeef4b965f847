"""gemv_int8: the product of `gemv` for x in eight bits, up to 8 tokens, on any card.

    t = fp32(sum(code * q) * scale_w)    y = fma(t, scale_x, y)      for each group of x in order

Layout  as `gemv`; groups of x have 128, 64 or 32 elements (`formats.activations`)
Fused   as `gemv`
Bytes   as `gemv`
Plan    every program rounds all tokens in its shared memory (`stage_codes`). An `integer_mma` has a
        column for each of 8 tokens, so one costs as much as eight. The warps of a tile take its
        steps in turn, and leave each group's term t in shared memory; then one lane adds all groups
        of its results in order (`chain`), so a token has the same bits however K is divided, and in
        any other kernel that adds so. A program takes its tiles in rounds: words of the next one
        are on their way while the sums of a round are made
"""

from dataclasses import dataclass
from functools import cache

import torch
from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from lowbit.runtime.kernels.launch.device import card_of, run
from lowbit.runtime.kernels.launch.linear import GemvLaunch
from lowbit.runtime.kernels.linear.gemv_several import leave_factors
from lowbit.runtime.kernels.linear.norm import load_gains, norm_factor, total_of
from lowbit.runtime.kernels.linear.products import load_steps, tile_addresses
from lowbit.runtime.kernels.linear.program import (
    Codes,
    Packed,
    gain_turns,
    int8_bytes,
    int8_places,
    wide,
)
from lowbit.runtime.kernels.linear.quantize import stage_codes
from lowbit.runtime.kernels.linear.sums import store_finished, term_of
from lowbit.runtime.kernels.linear.tiles import TiledLinear
from lowbit.runtime.kernels.linear.unpack import product_codes
from lowbit.runtime.kernels.ptx.chain import chain, term_bytes
from lowbit.runtime.kernels.ptx.memory import (
    barrier,
    load_shared4,
    load_shared16,
    shared_memory,
    store_shared8,
    store_shared16,
)
from lowbit.runtime.kernels.ptx.mma import as_word, integer_mma, threads, unpacked_scales

TIGHT = 96  # registers of a thread


@dataclass(frozen=True, slots=True, eq=False)
class Int8Plan:
    """Constants of a launch; made once, so compared by identity (see `program`)."""

    W: Packed  # the weight, `wide`
    X: Codes  # places of x
    LAUNCH: GemvLaunch  # share of a program
    PAIRED: bool  # whether rows are those of gate and up in turn, which become their SwiGLU
    HEAD: int  # elements of x that are normed by one of the sums of squares, where those are given
    ADDED_ROWS: bool  # whether each token has its own row of what is added, not all the same
    ROUND: int  # bytes of the terms of a round
    BUFFERS: int  # of such terms, 1 or 2
    SHARED: int  # bytes of shared memory
    PDL: bool  # whether the kernel takes part in programmatic launch


@cache
def int8_plan(
    W: Packed, launch: GemvLaunch, tokens: int, normed: bool, paired: bool, heads: int,
    added_rows: bool, pdl: bool, limit: int,
) -> Int8Plan:  # fmt: skip
    """Constants of a launch; limit: bytes of shared memory on the GPU."""
    X = int8_places(W, tokens, normed)
    terms = int8_bytes(W, launch, tokens, normed) - X.END
    buffers = 2 if launch.rounds > 1 and X.END + 2 * terms <= limit else 1
    return Int8Plan(
        wide(W),
        X,
        launch,
        paired,
        HEAD=W.K // heads if heads else 0,
        ADDED_ROWS=added_rows,
        ROUND=terms,
        BUFFERS=buffers,
        SHARED=max(launch.spread_bytes(limit) if pdl else 0, X.END + buffers * terms),
        PDL=pdl,
    )


def gemv_int8(
    x: Tensor, w: TiledLinear, y: Tensor, launch: GemvLaunch, room: int, eps: float,
    gain: Tensor | None, squares: Tensor | None, added: Tensor | None,
) -> None:  # fmt: skip
    """One product into y; see `gemv.gemv`. room: power of two of tokens, at least those of x."""
    card = card_of(x)
    heads = 0 if squares is None else squares.shape[1]
    added_rows = added is not None and added.shape[0] > 1
    plan = int8_plan(
        w.constants, launch, room, gain is not None, w.paired, heads, added_rows, card.overlaps,
        card.shared_bytes,
    )  # fmt: skip
    run(
        gemv_int8_kernel,
        (-(-w.tiles // launch.program_tiles),),
        x,
        gain,
        squares,
        w.words,
        w.scales.view(torch.int32),
        added,
        y,
        x.shape[0],
        w.N,
        w.tiles,
        eps,
        PLAN=plan,
        num_warps=launch.warps,
        maxnreg=card.register_cap(launch.registers),
        launch_pdl=plan.PDL,
        enable_fp_fusion=True,
    )


@gluon.jit(do_not_specialize=["B", "N", "tiles"])
def gemv_int8_kernel(
    x_ptr, gain_ptr, head_squares_ptr, words_ptr, scales_ptr, added_ptr, y_ptr, B, N, tiles, eps,
    PLAN: gl.constexpr,
):  # fmt: skip
    """See `gemv_int8`; PLAN is an `Int8Plan`."""
    W: gl.constexpr = PLAN.W
    X: gl.constexpr = PLAN.X
    TILES: gl.constexpr = PLAN.LAUNCH.tiles
    WARPS: gl.constexpr = PLAN.LAUNCH.warps
    WARP_GROUPS: gl.constexpr = PLAN.LAUNCH.warp_groups
    ROUNDS: gl.constexpr = PLAN.LAUNCH.rounds
    PARTS: gl.constexpr = WARPS // WARP_GROUPS  # warps that share a tile
    OWN: gl.constexpr = (W.STEPS + PARTS - 1) // PARTS  # steps of a warp
    AHEAD: gl.constexpr = min(PLAN.LAUNCH.steps, OWN)
    NORM: gl.constexpr = gain_ptr is not None
    if PLAN.PDL and PLAN.LAUNCH.early:
        gdc_launch_dependents()
    warp, lane, zero, zero_f32 = threads(WARPS)
    buffer = shared_memory(PLAN.SHARED, WARPS, N < 0) + zero
    part = warp % PARTS
    first_tile = gl.program_id(0) * (ROUNDS * WARP_GROUPS * TILES)
    at = tile_addresses(
        words_ptr, scales_ptr, first_tile + warp // PARTS * TILES, tiles, part, lane, TILES, W
    )
    loaded = load_steps(at, part, 0, AHEAD, PARTS, W)
    gains = load_gains(gain_ptr, warp, lane, gain_turns(X.BLOCKS, X.TOKENS, WARPS), WARPS, X)
    if PLAN.PDL:
        gdc_wait()
        if not PLAN.LAUNCH.early:
            gdc_launch_dependents()
    result = _result_of(warp * 32 + lane, X.TOKENS)
    added = _load_added(added_ptr, result, first_tile, B, N, PLAN)
    stage_codes(
        x_ptr, gains, head_squares_ptr, buffer, warp, lane, zero_f32, B, eps, PLAN.HEAD,
        W.CODEC.SUBBYTE, WARPS, X,
    )  # fmt: skip
    barrier()
    factor = zero_f32 + W.CODEC.FACTOR
    if NORM and X.TOKENS == 1:
        factor *= norm_factor(total_of(buffer + X.SQUARES, lane, zero_f32, X), eps, X.K)
    elif NORM:
        leave_factors(buffer, warp, lane, zero_f32, eps, WARPS, X)
    if ROUNDS > 1:
        for turn in range(ROUNDS - 1):
            tile = first_tile + (turn + 1) * (WARP_GROUPS * TILES)
            next_at = tile_addresses(
                words_ptr, scales_ptr, tile + warp // PARTS * TILES, tiles, part, lane, TILES, W
            )
            terms = buffer + X.END + turn % PLAN.BUFFERS * PLAN.ROUND
            loaded = _multiply_round(loaded, at, next_at, buffer, terms, warp, lane, True, PLAN)
            barrier()
            _store_round(
                y_ptr, added, factor, buffer, terms, result, tile - WARP_GROUPS * TILES, B, N, NORM,
                PLAN,
            )  # fmt: skip
            added = _load_added(added_ptr, result, tile, B, N, PLAN)
            if PLAN.BUFFERS == 1:
                barrier()
            at = next_at
    terms = buffer + X.END + (ROUNDS - 1) % PLAN.BUFFERS * PLAN.ROUND
    _multiply_round(loaded, at, at, buffer, terms, warp, lane, False, PLAN)
    barrier()
    tile = first_tile + (ROUNDS - 1) * (WARP_GROUPS * TILES)
    _store_round(y_ptr, added, factor, buffer, terms, result, tile, B, N, NORM, PLAN)


@gluon.jit
def _multiply_round(
    loaded, at, next_at, buffer, terms, warp, lane, NEXT: gl.constexpr, PLAN: gl.constexpr
):  # fmt: skip
    """Leave the terms of a warp's steps of some tiles, and return what it has loaded next.

    loaded: of `load_steps`, the first steps. at, next_at: of `tile_addresses`: of these tiles, and
    of those whose first steps are loaded meanwhile if there are any (NEXT).
    """
    W: gl.constexpr = PLAN.W
    X: gl.constexpr = PLAN.X
    PARTS: gl.constexpr = PLAN.LAUNCH.warps // PLAN.LAUNCH.warp_groups
    OWN: gl.constexpr = (W.STEPS + PARTS - 1) // PARTS
    AHEAD: gl.constexpr = min(PLAN.LAUNCH.steps, OWN)
    TILES: gl.constexpr = len(at[0])
    part = warp % PARTS
    codes = buffer + (lane // 4 % X.TOKENS * X.TOKEN + lane % 4 * 16) + part * W.CODEC.STEP_K
    terms += warp // PARTS * (TILES * X.GROUPS * term_bytes(X.TOKENS))
    terms += part * (W.CODEC.STEP_K // X.GROUP * term_bytes(X.TOKENS))
    for first in gl.static_range(0, OWN, AHEAD):
        if first + AHEAD < OWN:
            next_loaded = load_steps(
                at, part, first + AHEAD, min(AHEAD, OWN - first - AHEAD), PARTS, W
            )
        elif NEXT:
            next_loaded = load_steps(next_at, part, 0, AHEAD, PARTS, W)
        _multiply_loaded(
            loaded, codes, terms, part, lane, first, min(AHEAD, OWN - first), PARTS, PLAN
        )
        if first + AHEAD < OWN or NEXT:
            loaded = next_loaded
    return loaded


@gluon.constexpr_function
def _at_once(count, tiles, loads, launch):
    """Steps and tiles whose products alternate, of so many loaded ones; of more registers spill."""
    most = (3 if launch.registers > TIGHT else 2) - (loads > 2) - 2 * (launch.rounds > 1)
    if loads > 3 and launch.registers <= 128:
        most = 1
    most = max(1, most)
    steps = -(-count // -(-count // max(1, most // tiles)))
    return steps, (tiles if loads < 4 or most >= tiles else 1)


@gluon.jit
def _multiply_loaded(
    loaded, codes, terms, part, lane, LOADED: gl.constexpr, ALL: gl.constexpr, PARTS: gl.constexpr,
    PLAN: gl.constexpr,
):  # fmt: skip
    """Leave the terms of ALL loaded steps, some at a time; see `_multiply_steps`."""
    W: gl.constexpr = PLAN.W
    X: gl.constexpr = PLAN.X
    TILES: gl.constexpr = len(loaded[0]) // ALL
    EACH: gl.constexpr = _at_once(ALL, TILES, W.CODEC.LOADS, PLAN.LAUNCH)[0]
    TOGETHER: gl.constexpr = _at_once(ALL, TILES, W.CODEC.LOADS, PLAN.LAUNCH)[1]
    for begin in gl.static_range(0, ALL, EACH):
        for tile in gl.static_range(0, TILES, TOGETHER):
            _multiply_steps(
                loaded, codes, terms, part, lane, LOADED, begin, min(EACH, ALL - begin), ALL, tile,
                TOGETHER, PARTS, W, X,
            )  # fmt: skip


@gluon.jit
def _multiply_steps(
    loaded, codes, terms, part, lane, LOADED: gl.constexpr, BEGIN: gl.constexpr,
    COUNT: gl.constexpr, ALL: gl.constexpr, TILE: gl.constexpr, TILES: gl.constexpr,
    PARTS: gl.constexpr, W: gl.constexpr, X: gl.constexpr,
):  # fmt: skip
    """Leave the terms of COUNT steps of TILES tiles, from BEGIN on of ALL that are loaded.

    codes: address of this lane's column in the warp's first step. terms: address of the first
        tile's and group's terms of that step.
    LOADED: the first of the loaded steps among the warp's. TILE: the first of the tiles.
    """
    words, raw = loaded
    CODEC: gl.constexpr = W.CODEC  # Triton 3.6 takes no record from a record as an argument
    SCALES: gl.constexpr = W.SCALES
    FIRST: gl.constexpr = LOADED + BEGIN
    Q: gl.constexpr = CODEC.PRODUCTS
    GROUP_Q: gl.constexpr = X.GROUP // 32  # products of a group
    SCALE_Q: gl.constexpr = Q * len(words) // len(raw)  # that share a scale
    zero = lane * 0
    found = ()
    sums = ()
    columns = ()  # of two products, of each step
    for q in gl.static_range(Q):
        if q % 2 == 0:
            columns = ()
            for c in gl.static_range(FIRST, FIRST + COUNT):
                columns = columns + (_columns(codes, part, c, q // 2 * 64, PARTS, W),)
        new = ()
        for c in gl.static_range(COUNT):
            for r in gl.static_range(TILES):
                a = product_codes(words[(TILE + r) * ALL + BEGIN + c], q, CODEC)
                if q % GROUP_Q == 0:
                    d = (zero, zero, zero, zero)
                else:
                    d = sums[c * TILES + r]
                b0 = columns[c][2 * (q % 2)]
                b1 = columns[c][2 * (q % 2) + 1]
                new = new + (integer_mma(d, a[0], a[1], a[2], a[3], b0, b1),)
        sums = new
        if (q + 1) % GROUP_Q == 0:
            for c in gl.static_range(COUNT):
                for r in gl.static_range(TILES):
                    scale = unpacked_scales(
                        raw[((TILE + r) * ALL + BEGIN + c) * (Q // SCALE_Q) + q // SCALE_Q], SCALES
                    )
                    found = found + (_terms(sums[c * TILES + r], scale),)
    # Stored when all are there: the next columns would wait for what is stored before them.
    GROUPS: gl.constexpr = CODEC.STEP_K // X.GROUP  # of a step
    BYTES: gl.constexpr = term_bytes(X.TOKENS)
    for i in gl.static_range(GROUPS):
        for c in gl.static_range(COUNT):
            at = terms + ((FIRST + c) * PARTS * GROUPS + i) * BYTES
            step = part + (FIRST + c) * PARTS
            held = lane % 4 < (X.TOKENS + 1) // 2
            if W.K % CODEC.STEP_K != 0:
                held = held & (step * GROUPS + i < X.GROUPS)
            elif (FIRST + c + 1) * PARTS > W.STEPS:
                held = held & (step < W.STEPS)
            for r in gl.static_range(TILES):
                own = found[(i * COUNT + c) * TILES + r]
                _leave_terms(own, at + (TILE + r) * (X.GROUPS * BYTES), lane, held, X.TOKENS)


@gluon.jit
def _columns(
    codes, part, c: gl.constexpr, OFFSET: gl.constexpr, PARTS: gl.constexpr, W: gl.constexpr
):  # fmt: skip
    """16 bytes of this lane's column in the warp's step c: what it multiplies in two products."""
    if (c + 1) * PARTS <= W.STEPS:
        found = load_shared16(codes, c * PARTS * W.CODEC.STEP_K + OFFSET)
    else:
        step = gl.minimum(part + c * PARTS, W.STEPS - 1) - part
        found = load_shared16(codes + step * W.CODEC.STEP_K, OFFSET)
    return found


@gluon.jit
def _terms(sums, scale):
    """Sums times the scales of their rows g and g + 8, each rounded to FP32."""
    out = ()
    for i in gl.static_range(4):
        out = out + (as_word(term_of(sums[i], scale[i // 2])),)
    return out


@gluon.jit
def _leave_terms(own, at, lane, held, TOKENS: gl.constexpr):
    """Store rows g and g + 8 of one token, or of two."""
    if TOKENS == 1:
        store_shared8(at + lane // 4 * 8, (own[0], own[2]), held)
    else:
        slot = lane // 4 * (TOKENS // 2) + lane % 4
        store_shared16(at + slot * 16, own, held)


@gluon.jit
def _result_of(thread, TOKENS: gl.constexpr):
    """Tile of a round, lane of its terms, row g and first token of a thread's results."""
    PAIRS: gl.constexpr = (TOKENS + 1) // 2
    slot = thread % (8 * PAIRS)
    return thread // (8 * PAIRS), slot, slot // PAIRS, slot % PAIRS * 2


@gluon.jit
def _load_added(added_ptr, result, first_tile, B, N, PLAN: gl.constexpr):
    """Rows of what is added for a thread's results in a round, for each of its turns."""
    tile, _slot, g, token = result
    COLUMNS: gl.constexpr = min(PLAN.X.TOKENS, 2)
    TURNS: gl.constexpr = _turns(PLAN)
    added = ()
    if added_ptr is not None:
        for turn in gl.static_range(TURNS):
            for i in gl.static_range(2 * COLUMNS):
                n = (first_tile + tile + turn * _turn_tiles(PLAN)) * 16 + i // COLUMNS * 8 + g
                n = gl.minimum(n, N - 1)
                if PLAN.ADDED_ROWS:
                    n += gl.minimum(token + i % COLUMNS, B - 1) * N
                added = added + (gl.load(added_ptr + n).to(gl.float32),)
    return added


@gluon.constexpr_function
def _turn_tiles(plan):
    """Tiles of a round whose results all threads of a program have together."""
    return plan.LAUNCH.warps * 32 // (8 * ((plan.X.TOKENS + 1) // 2))


@gluon.constexpr_function
def _turns(plan):
    """Times that a thread makes results of a round."""
    return -(-plan.LAUNCH.tiles * plan.LAUNCH.warp_groups // _turn_tiles(plan))


@gluon.jit
def _store_round(
    y_ptr, added, factor, buffer, terms, result, first_tile, B, N, NORM: gl.constexpr,
    PLAN: gl.constexpr,
):  # fmt: skip
    """Add the groups of a round's results, and store them."""
    X: gl.constexpr = PLAN.X
    TILES: gl.constexpr = PLAN.LAUNCH.tiles * PLAN.LAUNCH.warp_groups  # of a round
    COLUMNS: gl.constexpr = min(X.TOKENS, 2)
    BYTES: gl.constexpr = X.GROUPS * term_bytes(X.TOKENS)  # of a tile
    tile, slot, g, token = result
    for turn in gl.static_range(_turns(PLAN)):
        own = tile + turn * _turn_tiles(PLAN)
        inside = own < TILES
        at = terms + gl.minimum(own, TILES - 1) * BYTES + slot * (8 * COLUMNS)
        y = chain(at, buffer + X.SCALES + token * 4, inside, X.GROUPS, X.TOKENS)
        for column in gl.static_range(COLUMNS):
            b = token + column
            own_factor = factor
            if NORM and X.TOKENS > 1:
                own_factor = factor * load_shared4(buffer + X.FACTORS + b * 4)
            more = ()
            if len(added) > 0:
                more = (
                    added[turn * 2 * COLUMNS + column],
                    added[(turn * 2 + 1) * COLUMNS + column],
                )
            store_finished(
                y_ptr, y[column], y[COLUMNS + column], own_factor, more, first_tile + own, g, b,
                inside & (b < B), N, PLAN.PAIRED,
            )  # fmt: skip
