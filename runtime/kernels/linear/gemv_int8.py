"""gemv_int8: the product of `gemv` for x in eight bits, up to 8 tokens, on any card.

    t = fp32(sum(code * q) * scale_w)   y = fma(t, scale_x, y)   from a centre, for each group of x
    or integer sums of multiple * sum(code * q) where a token has one scale

Layout  as `gemv`; groups of x have 128, 64 or 32 elements (`formats.activations`)
Fused   as `gemv`
Bytes   as `gemv`
Plan    every program rounds all tokens in its shared memory (`stage_codes`). An `integer_mma` has a
        column for each of 8 tokens, so one costs as much as eight. The warps of a tile take its
        steps in turn. Each adds its groups from the centre on, takes the centre away and leaves its
        sums in shared memory, where one lane adds those of all warps. All of these sums but the
        terms' own rounding are exact (`formats.activations`), so a token has the same bits however
        K is divided, and in any other kernel. A program takes its tiles in rounds: words of the
        next one are on their way while the sums of a round are made
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
from lowbit.runtime.kernels.linear.gemv_int8_store import (
    load_added,
    load_units,
    result_of,
    store_round,
)
from lowbit.runtime.kernels.linear.gemv_several import leave_factors
from lowbit.runtime.kernels.linear.int8_steps import integer_starts, numbers_of_rows
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
from lowbit.runtime.kernels.linear.staged_codes import (
    columns_of,
    is_inside,
    leave_bounds,
    stage_codes,
    stage_whole,
    staged_bound,
    token_scales,
)
from lowbit.runtime.kernels.linear.sums import added_term, centre_of, group_starts
from lowbit.runtime.kernels.linear.tiles import TiledLinear
from lowbit.runtime.kernels.linear.unpack import product_codes
from lowbit.runtime.kernels.ptx.memory import (
    barrier,
    load_shared4,
    load_shared8,
    load_shared16,
    shared_memory,
    store_shared8,
    store_shared16,
)
from lowbit.runtime.kernels.ptx.mma import as_float, as_word, integer_mma, threads, unpacked_scales

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
    ROUND: int  # bytes of the sums of a round
    SHARED: int  # bytes of shared memory
    PDL: bool  # whether the kernel takes part in programmatic launch


@cache
def int8_plan(
    W: Packed, launch: GemvLaunch, tokens: int, normed: bool, paired: bool, heads: int,
    added_rows: bool, pdl: bool, limit: int,
) -> Int8Plan:  # fmt: skip
    """Constants of a launch; limit: bytes of shared memory on the GPU."""
    return Int8Plan(
        wide(W),
        int8_places(W, tokens, normed),
        launch,
        paired,
        HEAD=W.K // heads if heads else 0,
        ADDED_ROWS=added_rows,
        ROUND=launch.round_bytes(tokens),
        SHARED=max(launch.spread_bytes(limit) if pdl else 0, int8_bytes(W, launch, tokens, normed)),
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
        w.rows,
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
    x_ptr, gain_ptr, head_squares_ptr, words_ptr, scales_ptr, rows_ptr, added_ptr, y_ptr, B, N,
    tiles, eps, PLAN: gl.constexpr,
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
    own_tile = first_tile + warp // PARTS * TILES
    at = tile_addresses(words_ptr, scales_ptr, own_tile, tiles, part, lane, TILES, W)
    BOUNDED: gl.constexpr = 0 if W.WHOLE else TILES
    rows = numbers_of_rows(rows_ptr, own_tile, tiles, lane, BOUNDED)
    loaded = load_steps(at, part, 0, AHEAD, PARTS, W)
    gains = load_gains(gain_ptr, warp, lane, gain_turns(X.BLOCKS, X.TOKENS, WARPS), WARPS, X)
    if PLAN.PDL:
        gdc_wait()
        if not PLAN.LAUNCH.early:
            gdc_launch_dependents()
    if W.WHOLE:
        stage_whole(x_ptr, gains, buffer, warp, lane, zero_f32, B, W.CODEC.SUBBYTE, WARPS, X)
    else:
        stage_codes(
            x_ptr, gains, head_squares_ptr, buffer, warp, lane, zero_f32, B, eps, PLAN.HEAD,
            W.CODEC.SUBBYTE, WARPS, X,
        )  # fmt: skip
    result = result_of(warp * 32 + lane, X.TOKENS)
    added = load_added(added_ptr, result, first_tile, B, N, PLAN)
    units = load_units(rows_ptr, result, first_tile, tiles, PLAN)
    barrier()
    factor = zero_f32 + W.CODEC.FACTOR
    if X.TOKENS == 1:
        if W.WHOLE:
            bounds = zero_f32
            factor *= load_shared4(buffer + X.SCALES)
        else:
            bounds = staged_bound(buffer, zero, lane, X)
        if NORM:
            factor *= norm_factor(total_of(buffer + X.SQUARES, lane, zero_f32, X), eps, X.K)
    else:
        if not W.WHOLE:
            leave_bounds(buffer, warp, lane, WARPS, X)
        if NORM:
            leave_factors(buffer, warp, lane, zero_f32, eps, WARPS, X, W.WHOLE)
        barrier()
        bounds = buffer + X.BOUNDS + _first_token(lane, X.TOKENS) * 4
    if ROUNDS > 1:
        for turn in range(ROUNDS - 1):
            own_tile += WARP_GROUPS * TILES
            next_at = tile_addresses(words_ptr, scales_ptr, own_tile, tiles, part, lane, TILES, W)
            next_rows = numbers_of_rows(rows_ptr, own_tile, tiles, lane, BOUNDED)
            sums = buffer + X.END + turn % 2 * PLAN.ROUND
            loaded = _multiply_round(
                loaded, at, next_at, rows, bounds, buffer, sums, warp, lane, True, PLAN
            )
            barrier()
            tile = first_tile + turn * (WARP_GROUPS * TILES)
            store_round(y_ptr, added, units, factor, buffer, sums, result, tile, B, N, NORM, PLAN)
            added = load_added(added_ptr, result, tile + WARP_GROUPS * TILES, B, N, PLAN)
            units = load_units(rows_ptr, result, tile + WARP_GROUPS * TILES, tiles, PLAN)
            at = next_at
            rows = next_rows
    sums = buffer + X.END + (ROUNDS - 1) % 2 * PLAN.ROUND
    _multiply_round(loaded, at, at, rows, bounds, buffer, sums, warp, lane, False, PLAN)
    barrier()
    tile = first_tile + (ROUNDS - 1) * (WARP_GROUPS * TILES)
    store_round(y_ptr, added, units, factor, buffer, sums, result, tile, B, N, NORM, PLAN)


@gluon.jit
def _multiply_round(
    loaded, at, next_at, rows, bounds, buffer, sums, warp, lane, NEXT: gl.constexpr,
    PLAN: gl.constexpr,
):  # fmt: skip
    """Leave the sums of a warp's steps of some tiles, and return what it has loaded next.

    loaded: of `load_steps`, the first steps. at, next_at: of `tile_addresses`: of these tiles, and
    of those whose first steps are loaded meanwhile if there are any (NEXT). rows, bounds: see
    `_centres`.
    """
    W: gl.constexpr = PLAN.W
    X: gl.constexpr = PLAN.X
    PARTS: gl.constexpr = PLAN.LAUNCH.warps // PLAN.LAUNCH.warp_groups
    OWN: gl.constexpr = (W.STEPS + PARTS - 1) // PARTS
    AHEAD: gl.constexpr = min(PLAN.LAUNCH.steps, OWN)
    TILES: gl.constexpr = len(at[0])
    BYTES: gl.constexpr = 64 * X.TOKENS  # of a warp's sums of a tile
    part = warp % PARTS
    codes = buffer + (lane // 4 % X.TOKENS * X.TOKEN + lane % 4 * 16) + part * W.CODEC.STEP_K
    scales = buffer + X.SCALES + _first_token(lane, X.TOKENS) * 4
    sums += (warp // PARTS * (TILES * PARTS) + part) * BYTES + _slot(lane, X.TOKENS)
    if W.WHOLE:
        acc = ()
        for _r in gl.static_range(TILES):
            acc = acc + (integer_starts(lane, 2 * min(X.TOKENS, 2)),)
    else:
        acc = _centres(rows, bounds, W, X)
    for first in gl.static_range(0, OWN, AHEAD):
        if first + AHEAD < OWN:
            next_loaded = load_steps(
                at, part, first + AHEAD, min(AHEAD, OWN - first - AHEAD), PARTS, W
            )
        elif NEXT:
            next_loaded = load_steps(next_at, part, 0, AHEAD, PARTS, W)
        acc = _multiply_loaded(
            acc,
            loaded,
            codes,
            scales,
            sums,
            part,
            lane,
            first,
            min(AHEAD, OWN - first),
            PARTS,
            PLAN,
        )
        if first + AHEAD < OWN or NEXT:
            loaded = next_loaded
    centres = ()
    if not W.WHOLE:
        centres = _centres(rows, bounds, W, X)  # once more, so that none stay in registers
    for r in gl.static_range(TILES):
        own = ()
        for i in gl.static_range(len(acc[r])):
            one = acc[r][i]
            if not W.WHOLE:
                one -= centres[r][i]
            own = own + (one,)
        _store_sums(own, sums + r * (PARTS * BYTES), lane, X.TOKENS)
    return loaded


@gluon.jit
def _first_token(lane, TOKENS: gl.constexpr):
    """The first token whose sums a lane has."""
    return lane % 4 * 2 % TOKENS


@gluon.jit
def _centres(rows, bounds, W: gl.constexpr, X: gl.constexpr):
    """Starts of sums: of each tile the lane's row g of its one or two tokens, then row g + 8.

    rows: of `numbers_of_rows`. bounds: of a lone token its bound, of several the address of the
        bounds of the lane's two.
    """
    tokens = (bounds,)
    if X.TOKENS > 1:
        pair = load_shared8(bounds)
        tokens = (as_float(pair[0]), as_float(pair[1]))
    found = ()
    for r in gl.static_range(len(rows)):
        own = ()
        for half in gl.static_range(2):
            row = rows[r][half] * (1 / W.CODEC.FACTOR)
            for column in gl.static_range(len(tokens)):
                own = own + (centre_of(row, tokens[column]),)
        found = found + (own,)
    return found


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
    acc, loaded, codes, scales, sums_at, part, lane, LOADED: gl.constexpr, ALL: gl.constexpr,
    PARTS: gl.constexpr, PLAN: gl.constexpr,
):  # fmt: skip
    """Add ALL loaded steps to the sums of every tile, some at a time; see `_multiply_steps`.

    sums_at: where the sums of the warp's first tile wait meanwhile, so that the compiler does not
        load columns of the steps behind them early: there are no registers for those.
    """
    W: gl.constexpr = PLAN.W
    X: gl.constexpr = PLAN.X
    TILES: gl.constexpr = len(loaded[0]) // ALL
    OWN: gl.constexpr = (W.STEPS + PARTS - 1) // PARTS
    EACH: gl.constexpr = _at_once(ALL, TILES, W.CODEC.LOADS, PLAN.LAUNCH)[0]
    TOGETHER: gl.constexpr = _at_once(ALL, TILES, W.CODEC.LOADS, PLAN.LAUNCH)[1]
    for begin in gl.static_range(0, ALL, EACH):
        added = ()
        for tile in gl.static_range(0, TILES, TOGETHER):
            own = ()
            for r in gl.static_range(TOGETHER):
                own = own + (acc[tile + r],)
            own = _multiply_steps(
                own, loaded, codes, scales, part, LOADED, begin, min(EACH, ALL - begin), ALL, tile,
                PARTS, W, X,
            )  # fmt: skip
            for r in gl.static_range(TOGETHER):
                if LOADED + begin + EACH < OWN:
                    at = sums_at + (tile + r) * (PARTS * 64 * X.TOKENS)
                    _store_sums(own[r], at, lane, X.TOKENS)
                    added = added + (_load_sums(at, X.TOKENS, W.WHOLE),)
                else:
                    added = added + (own[r],)
        acc = added
    return acc


@gluon.jit
def _multiply_steps(
    acc, loaded, codes, scales, part, LOADED: gl.constexpr, BEGIN: gl.constexpr,
    COUNT: gl.constexpr, ALL: gl.constexpr, TILE: gl.constexpr, PARTS: gl.constexpr,
    W: gl.constexpr, X: gl.constexpr,
):  # fmt: skip
    """Add COUNT steps, from BEGIN on of ALL that are loaded, to the sums of some tiles.

    acc: of each tile, as `_centres` has them.
    codes: address of this lane's column in the warp's first step. scales: see `token_scales`.
    LOADED: the first of the loaded steps among the warp's. TILE: the first of the tiles.
    """
    words, raw = loaded
    CODEC: gl.constexpr = W.CODEC  # Triton 3.6 takes no record from a record as an argument
    SCALES: gl.constexpr = W.SCALES
    TILES: gl.constexpr = len(acc)
    FIRST: gl.constexpr = LOADED + BEGIN
    Q: gl.constexpr = CODEC.PRODUCTS
    GROUP_Q: gl.constexpr = X.GROUP // 32  # products of a group
    SCALE_Q: gl.constexpr = Q * len(words) // len(raw)  # that share a scale
    zero = part * 0
    sums = ()
    columns = ()  # of two products, of each step
    tokens = ()  # scales of a group of each step
    for q in gl.static_range(Q):
        if q % 2 == 0:
            columns = ()
            for c in gl.static_range(FIRST, FIRST + COUNT):
                columns = columns + (columns_of(codes, part, c, q // 2 * 64, PARTS, W),)
        if q % GROUP_Q == 0:
            tokens = ()
            for c in gl.static_range(FIRST, FIRST + COUNT):
                if W.WHOLE:
                    tokens = tokens + (is_inside(part, c, q // GROUP_Q, PARTS, W, X),)
                else:
                    tokens = tokens + (token_scales(scales, part, c, q // GROUP_Q, PARTS, W, X),)
        new = ()
        for c in gl.static_range(COUNT):
            for r in gl.static_range(TILES):
                a = product_codes(words[(TILE + r) * ALL + BEGIN + c], q, CODEC)
                if q % GROUP_Q == 0:
                    d = group_starts(zero, SCALES)
                else:
                    d = sums[c * TILES + r]
                b0 = columns[c][2 * (q % 2)]
                b1 = columns[c][2 * (q % 2) + 1]
                new = new + (integer_mma(d, a[0], a[1], a[2], a[3], b0, b1),)
        sums = new
        if (q + 1) % GROUP_Q == 0:
            added = ()
            for r in gl.static_range(TILES):
                own = acc[r]
                for c in gl.static_range(COUNT):
                    scale = unpacked_scales(
                        raw[((TILE + r) * ALL + BEGIN + c) * (Q // SCALE_Q) + q // SCALE_Q], SCALES
                    )
                    own = _add_terms(own, sums[c * TILES + r], scale, tokens[c], SCALES)
                added = added + (own,)
            acc = added
    return acc


@gluon.jit
def _add_terms(own, sums, scale, tokens, SCALES: gl.constexpr):
    """Sums of a tile with a group: its products times the scales of rows and of tokens.

    tokens: scales of the lane's tokens in the group; of tokens with one, a word of 1 or past the
        end 0.
    """
    COLUMNS: gl.constexpr = len(own) // 2
    out = ()
    for half in gl.static_range(2):
        factor = scale[half]
        if SCALES == "int16":
            factor *= tokens[0]
        for column in gl.static_range(COLUMNS):
            before = own[half * COLUMNS + column]
            token = tokens[column % len(tokens)]
            new = added_term(before, sums[2 * half + column], factor, token, SCALES)
            out = out + (new,)
    return out


@gluon.jit
def _slot(lane, TOKENS: gl.constexpr):
    """Place of a lane's sums among those that a warp has of a tile."""
    PAIRS: gl.constexpr = (TOKENS + 1) // 2
    return (lane // 4 * PAIRS + lane % 4 % PAIRS) * (8 * min(TOKENS, 2))


@gluon.jit
def _store_sums(own, at, lane, TOKENS: gl.constexpr):
    """Store rows g and g + 8 of one token, or of two."""
    words = ()
    for i in gl.static_range(len(own)):
        words = words + (as_word(own[i]),)
    held = lane % 4 < (TOKENS + 1) // 2
    if TOKENS == 1:
        store_shared8(at, words, held)
    else:
        store_shared16(at, words, held)


@gluon.jit
def _load_sums(at, TOKENS: gl.constexpr, INTEGER: gl.constexpr):
    """Sums that `_store_sums` has stored."""
    if TOKENS == 1:
        words = load_shared8(at)
    else:
        words = load_shared16(at)
    own = ()
    for i in gl.static_range(len(words)):
        own = own + (words[i] if INTEGER else as_float(words[i]),)
    return own
