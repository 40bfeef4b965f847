"""Device functions of the GEMV: tiles of a packed weight times the digits of up to 32 tokens.

A tile is 16 rows, a step of it 16 words of each row (`tiles`): what a warp loads at once. The warps
that share a tile take its steps in turn: `part` is the number of a warp's first step, and every
PARTS-th from there is its. It loads COUNT of them together, of one tile or several. Lane 4 * g + t
holds words of rows g and g + 8.

An `integer_mma` has eight columns:

    up to 4 tokens    each half is a token: its digits d0, d1, d2, d2 (`halved`)
    more              each is a token, and every digit has an `integer_mma` of its own

Integer sums are exact, so it does not matter which columns a token has, nor beside which others.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from lowbit.runtime.kernels.linear.program import BLOCK_K
from lowbit.runtime.kernels.linear.sums import (
    halved,
    leave_sums,
    own_part,
)
from lowbit.runtime.kernels.linear.unpack import product_codes
from lowbit.runtime.kernels.ptx.memory import (
    load4,
    load8,
    load_shared4,
    load_shared8,
    load_shared16,
    reload16,
    stream16,
)
from lowbit.runtime.kernels.ptx.mma import (
    as_float,
    integer_mma,
    unpacked_scales,
)


@gluon.jit
def tile_addresses(
    words_ptr, scales_ptr, first_tile, tiles, part, lane, COUNT: gl.constexpr, W: gl.constexpr
):  # fmt: skip
    """Addresses, for this lane, of the warp's first step and the first scales of COUNT tiles."""
    SCALE_BYTES: gl.constexpr = 8 if W.SCALES == "fp32" else 4  # of two rows
    STEP_BYTES: gl.constexpr = W.CODEC.STEP_BYTES
    words = ()
    scales = ()
    for r in gl.static_range(COUNT):
        tile = gl.minimum(first_tile + r, tiles - 1).to(gl.int64)
        at = tile * (W.STEPS * STEP_BYTES) + part * STEP_BYTES + lane * 16
        words = words + (words_ptr.to(gl.int64, bitcast=True) + at,)
        at = (tile * (W.GROUPS * 8) + lane // 4) * SCALE_BYTES
        scales = scales + (scales_ptr.to(gl.int64, bitcast=True) + at,)
    return words, scales


@gluon.jit
def load_steps(
    at, part, FIRST: gl.constexpr, COUNT: gl.constexpr, PARTS: gl.constexpr, W: gl.constexpr
):  # fmt: skip
    """Words and raw scales of COUNT steps of every tile, from the warp's FIRST on.

    at: of `tile_addresses`.
    """
    words, scales = at
    SCALES: gl.constexpr = W.SCALES
    STEPS: gl.constexpr = W.STEPS
    STEP_BYTES: gl.constexpr = W.CODEC.STEP_BYTES
    STEP_K: gl.constexpr = W.CODEC.STEP_K
    UNIT: gl.constexpr = min(STEP_K, W.G & -W.G)  # k of a step that surely share a scale
    GROUP_BYTES: gl.constexpr = 64 if SCALES == "fp32" else 32
    # A warp goes from one of its steps to the next by whole groups.
    SAME: gl.constexpr = PARTS * STEP_K % W.G == 0 and W.K % STEP_K == 0
    loaded = ()
    raw = ()
    for r in gl.static_range(len(words)):
        for c in gl.static_range(FIRST, FIRST + COUNT):
            if (c + 1) * PARTS <= STEPS:
                step = part + c * PARTS
                loaded = loaded + (load_step(words[r], c * PARTS * STEP_BYTES, W),)
            else:
                step = gl.minimum(part + c * PARTS, STEPS - 1)
                here = words[r] + (step - part).to(gl.int64) * STEP_BYTES
                loaded = loaded + (load_step(here, 0, W),)
            for unit in gl.static_range(STEP_K // UNIT):
                if (c + 1) * PARTS <= STEPS and SAME:
                    here = scales[r] + (part * STEP_K + unit * UNIT) // W.G * GROUP_BYTES
                    raw = raw + (raw_scales(here, c * PARTS * STEP_K // W.G * GROUP_BYTES, SCALES),)
                else:
                    group = gl.minimum((step * STEP_K + unit * UNIT) // W.G, W.GROUPS - 1)
                    raw = raw + (raw_scales(scales[r] + group * GROUP_BYTES, 0, SCALES),)
    return loaded, raw


@gluon.jit
def load_step(address, OFFSET: gl.constexpr, W: gl.constexpr):
    """A lane's words of a step, a tuple of its loads."""
    LOADS: gl.constexpr = W.CODEC.LOADS
    loads = ()
    for i in gl.static_range(LOADS):
        loads = loads + (stream16(address, OFFSET + 512 * i),)
    return loads


@gluon.jit
def raw_scales(address, OFFSET: gl.constexpr, SCALES: gl.constexpr):
    """Scales of the two rows of a lane in a group, for `unpacked_scales`."""
    if SCALES == "fp32":
        raw = load8(address, OFFSET)
    else:
        raw = load4(address, OFFSET)
    return raw


@gluon.jit
def column_of(lane, X: gl.constexpr):
    """Offset of the first 16 bytes that this lane multiplies: of its column's token and plane."""
    g = lane // 4
    if X.TOKENS == 1:
        at = gl.minimum(g, 2) * X.PLANE
    elif halved(X.TOKENS):
        at = g // 4 * X.TOKEN + gl.minimum(g % 4, 2) * X.PLANE
    else:
        at = g * X.TOKEN
    return at + lane % 4 * 16


@gluon.jit
def unit_of(lane, TOKENS: gl.constexpr):
    """Offset of the unit of the first token whose sums this lane holds, and of the next."""
    if TOKENS == 1:
        at = lane * 0
    elif halved(TOKENS):
        at = lane % 4 // 2 * 4
    else:
        at = lane % 4 * 8
    return at


@gluon.jit
def zero_sums(zero_f32, TILES: gl.constexpr, TOKENS: gl.constexpr):
    """Sums with which `multiply_steps` begins."""
    acc = ()
    if halved(TOKENS):
        for _i in gl.static_range(TILES * ((TOKENS + 1) // 2)):
            acc = acc + ((zero_f32, zero_f32),)
    else:
        for _i in gl.static_range(TILES * (TOKENS // 8)):
            four = (zero_f32, zero_f32, zero_f32, zero_f32)
            acc = acc + (four + four,)
    return acc


@gluon.jit
def multiply_steps(
    acc, loaded, digits, units, part, mixed,
    FIRST: gl.constexpr, COUNT: gl.constexpr, PARTS: gl.constexpr, W: gl.constexpr, X: gl.constexpr,
):  # fmt: skip
    """Add COUNT loaded steps of every tile to the sums of rows g and g + 8 for each token.

    A token's scaled sums are added in the order of k, whatever COUNT and the number of tokens.

    acc: where halved, for every tile and two tokens a pair: rows g and g + 8, of the lower two
        digits in even lanes, of the last digit in odd ones. Else for every tile and 8 tokens eight
        sums: of the lower digits rows g of tokens 2 * t and 2 * t + 1, and rows g + 8 of both;
        then of the last digit.
    loaded: of `load_steps`, from the warp's step FIRST on.
    digits: address of this lane's column at the warp's first step.
    units: address of the lane's first unit.
    mixed: 256 in even lanes, 0 in odd ones.
    """
    Q: gl.constexpr = W.CODEC.PRODUCTS
    GROUP_Q: gl.constexpr = min(Q, (W.G & -W.G) // 32)  # products that surely share a scale
    AT_ONCE: gl.constexpr = COUNT if GROUP_Q == Q and X.TOKENS <= 2 else 1
    for first in gl.static_range(0, COUNT, AT_ONCE):
        acc = _multiply(
            acc, loaded, digits, units, part, mixed, FIRST, first, AT_ONCE, COUNT, PARTS, W, X
        )
    return acc


@gluon.jit
def _multiply(
    acc, loaded, digits, units, part, mixed, FIRST: gl.constexpr, BEGIN: gl.constexpr,
    COUNT: gl.constexpr, ALL: gl.constexpr, PARTS: gl.constexpr, W: gl.constexpr, X: gl.constexpr,
):  # fmt: skip
    """`multiply_steps` for COUNT of ALL loaded steps, from BEGIN on."""
    words, raw = loaded
    CODEC: gl.constexpr = W.CODEC  # Triton 3.6 takes no record from a record as an argument
    SCALES: gl.constexpr = W.SCALES
    TILES: gl.constexpr = len(words) // ALL
    Q: gl.constexpr = W.CODEC.PRODUCTS
    GROUP_Q: gl.constexpr = min(Q, (W.G & -W.G) // 32)
    HALVED: gl.constexpr = halved(X.TOKENS)
    NT: gl.constexpr = (X.TOKENS + 1) // 2 if HALVED else X.TOKENS // 8
    NB: gl.constexpr = NT if HALVED else 3 * NT  # products of a step and tile, of 8 columns
    zero = mixed * 0
    factors = ()
    for c in gl.static_range(FIRST + BEGIN, FIRST + BEGIN + COUNT):
        factors = factors + (_units(units, part, c, PARTS, W, X),)
    sums = _zeros(zero, COUNT * TILES * NB)
    pairs = ()  # columns of two products, of each step
    for q in gl.static_range(Q):
        if q % 2 == 0:
            pairs = ()
            for c in gl.static_range(FIRST + BEGIN, FIRST + BEGIN + COUNT):
                for nb in gl.static_range(NB):
                    pairs = pairs + (
                        _columns(
                            digits, part, c,
                            q // 2 * X.NEXT + nb * 2 * X.TOKEN if HALVED
                            else q // 2 * X.NEXT + nb // 3 * 8 * X.TOKEN + nb % 3 * X.PLANE,
                            PARTS, W, X,
                        ),
                    )  # fmt: skip
        new = ()
        for c in gl.static_range(COUNT):
            for r in gl.static_range(TILES):
                a = product_codes(words[r * ALL + BEGIN + c], q, CODEC)
                for nb in gl.static_range(NB):
                    b = pairs[c * NB + nb]
                    d = sums[(c * TILES + r) * NB + nb]
                    b0 = b[2 * (q % 2)]
                    b1 = b[2 * (q % 2) + 1]
                    new = new + (integer_mma(d, a[0], a[1], a[2], a[3], b0, b1),)
        sums = new
        if (q + 1) % GROUP_Q == 0:
            total = ()
            for r in gl.static_range(TILES):
                for nt in gl.static_range(NT):
                    a = acc[r * NT + nt]
                    for c in gl.static_range(COUNT):
                        scale = unpacked_scales(
                            raw[(r * ALL + BEGIN + c) * (Q // GROUP_Q) + q // GROUP_Q], SCALES
                        )
                        if HALVED:
                            d = sums[(c * TILES + r) * NB + nt]
                            a = _add_pair(a, d, scale, factors[c][nt], mixed)
                        else:
                            d = (
                                sums[(c * TILES + r) * NB + 3 * nt],
                                sums[(c * TILES + r) * NB + 3 * nt + 1],
                                sums[(c * TILES + r) * NB + 3 * nt + 2],
                            )
                            a = _add_planes(a, d, scale, factors[c][nt])
                    total = total + (a,)
            acc = total
            if q + 1 < Q:
                sums = _zeros(zero, COUNT * TILES * NB)
    return acc


@gluon.jit
def _zeros(zero, COUNT: gl.constexpr):
    sums = ()
    for _i in gl.static_range(COUNT):
        sums = sums + ((zero, zero, zero, zero),)
    return sums


@gluon.jit
def _units(
    units, part, c: gl.constexpr, PARTS: gl.constexpr, W: gl.constexpr, X: gl.constexpr
):  # fmt: skip
    """Units of the warp's step c, one for each of this lane's tokens; 0 past the last step."""
    STEP_K: gl.constexpr = W.CODEC.STEP_K
    HALVED: gl.constexpr = halved(X.TOKENS)
    NT: gl.constexpr = (X.TOKENS + 1) // 2 if HALVED else X.TOKENS // 8
    BYTES: gl.constexpr = X.TOKENS * 4  # of a block
    OWN: gl.constexpr = 8 if HALVED else 32  # to the next of NT
    WHOLE: gl.constexpr = (c + 1) * PARTS <= W.STEPS and PARTS * STEP_K % BLOCK_K == 0
    EACH: gl.constexpr = PARTS // X.SHARERS
    step = part + c * PARTS
    at: gl.constexpr = c * EACH * STEP_K // BLOCK_K * BYTES if WHOLE or X.SHARERS > 1 else 0
    if WHOLE or X.SHARERS > 1:
        here = units + own_part(part, PARTS, X) * STEP_K // BLOCK_K * BYTES
    else:
        here = units + gl.minimum(step, W.STEPS - 1) * STEP_K // BLOCK_K * BYTES
    found = ()
    for nt in gl.static_range(NT):
        if HALVED:
            if X.STAGED:
                unit = load_shared4(here, at + nt * OWN)
            else:
                unit = as_float(load4(here, at + nt * OWN))
            found = found + (unit if WHOLE else gl.where(step < W.STEPS, unit, 0.0),)
        else:
            if X.STAGED:
                pair = load_shared8(here, at + nt * OWN)
            else:
                pair = load8(here, at + nt * OWN)
            first = as_float(pair[0])
            second = as_float(pair[1])
            if not WHOLE:
                first = gl.where(step < W.STEPS, first, 0.0)
                second = gl.where(step < W.STEPS, second, 0.0)
            found = found + ((first, second),)
    return found


@gluon.jit
def _columns(
    digits, part, c: gl.constexpr, OFFSET: gl.constexpr, PARTS: gl.constexpr, W: gl.constexpr,
    X: gl.constexpr,
):  # fmt: skip
    """16 bytes of this lane's column in a step: what it multiplies in two products."""
    STEP_BYTES: gl.constexpr = W.CODEC.BLOCKS * X.NEXT
    if (c + 1) * PARTS <= W.STEPS or X.SHARERS > 1:
        if X.STAGED:
            words = load_shared16(digits, c * (PARTS // X.SHARERS) * STEP_BYTES + OFFSET)
        else:
            words = reload16(digits, c * PARTS * STEP_BYTES + OFFSET)
    else:
        here = digits + (gl.minimum(part + c * PARTS, W.STEPS - 1) - part) * STEP_BYTES
        if X.STAGED:
            words = load_shared16(here, OFFSET)
        else:
            words = reload16(here, OFFSET)
    return words


@gluon.jit
def _add_pair(a, d, scale, unit, mixed):
    """Sums of two tokens with one product each."""
    return (
        a[0] + scale[0] * unit * (d[0] + d[1] * mixed).to(gl.float32),
        a[1] + scale[1] * unit * (d[2] + d[3] * mixed).to(gl.float32),
    )


@gluon.jit
def _add_planes(a, d, scale, unit):
    """Sums of eight tokens with one product each."""
    out = ()
    for i in gl.static_range(4):
        factor = scale[i // 2] * unit[i % 2]
        out = out + (a[i] + factor * (d[0][i] + d[1][i] * 256).to(gl.float32),)
    for i in gl.static_range(4):
        factor = scale[i // 2] * unit[i % 2]
        out = out + (a[4 + i] + factor * d[2][i].to(gl.float32),)
    return out


@gluon.jit
def multiply_round(
    loaded, at, next_at, digits, units, own, share, sums_at, zero_f32, NEXT: gl.constexpr,
    AHEAD: gl.constexpr, PARTS: gl.constexpr, W: gl.constexpr, X: gl.constexpr,
):  # fmt: skip
    """Multiply a warp's steps of some tiles, leave their sums, return what it has loaded next.

    loaded: of `load_steps`, the first AHEAD.
    at, next_at: of `tile_addresses`: of these tiles, and of those whose first steps are loaded
        meanwhile if there are any (NEXT).
    digits, units: see `multiply_steps`.
    own: of the lane: part, `mixed` of `multiply_steps`, whether it holds results, and their place.
    share: number of the warp's tiles among those of the program.
    """
    acc = zero_sums(zero_f32, len(at[0]), X.TOKENS)
    acc, loaded = multiply_rest(
        acc, loaded, at, next_at, digits, units, own, 0, NEXT, AHEAD, PARTS, W, X
    )
    leave_sums(acc, own, share, sums_at, PARTS, X)
    return loaded


@gluon.jit
def multiply_rest(
    acc, loaded, at, next_at, digits, units, own, FIRST: gl.constexpr, NEXT: gl.constexpr,
    AHEAD: gl.constexpr, PARTS: gl.constexpr, W: gl.constexpr, X: gl.constexpr,
):  # fmt: skip
    """`multiply_round` from the warp's step FIRST on: sums, and what is loaded next."""
    OWN: gl.constexpr = (W.STEPS + PARTS - 1) // PARTS  # steps of a warp
    part = own[0]
    for first in gl.static_range(FIRST, OWN, AHEAD):
        if first + AHEAD < OWN:
            next_loaded = load_steps(
                at, part, first + AHEAD, min(AHEAD, OWN - first - AHEAD), PARTS, W
            )
        elif NEXT:
            next_loaded = load_steps(next_at, part, 0, min(AHEAD, OWN), PARTS, W)
        acc = multiply_steps(
            acc, loaded, digits, units, part, own[1], first, min(AHEAD, OWN - first), PARTS, W, X
        )
        if first + AHEAD < OWN or NEXT:
            loaded = next_loaded
    return acc, loaded
