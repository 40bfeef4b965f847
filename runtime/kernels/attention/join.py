"""attention_join: partial results of an attention head, merged across warps and across splits.

    out_h = sum over splits of 2^(top - highest) * sums / sum of 2^(top - highest) * total

Layout  sums [M * Hq, splits, D] fp32, state [M * Hq, splits, 2] fp32: top and total of each split,
        sums and total relative to it; out [M, Hq * D] bf16
Bytes   4 * Hq * splits * D; 16 heads of 256 in 32 splits: 0.5 MB, from L2
Plan    Warps of a program exchange through shared memory, at the end of the kernel that attends.
        Splits take a kernel of their own, a program for up to 64 columns of a head, whose loads are
        all on their way at once: the program that comes last would read everything by itself, in
        turns
"""

from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from lowbit.runtime.kernels.launch.attention import KeySplit
from lowbit.runtime.kernels.launch.device import run
from lowbit.runtime.kernels.ptx.memory import barrier, floats, store_shared4, store_shared16
from lowbit.runtime.kernels.ptx.mma import as_word, from_lane

WARP_COLUMNS = 16
MOST_WARPS = 4


@gluon.jit
def weigh_warps(
    top, total, acc, new_score, own_new, buffer, sums_at, warp, g, t, QUAD: gl.constexpr,
    PAIRS: gl.constexpr, WARPS: gl.constexpr, GROUPS: gl.constexpr,
):  # fmt: skip
    """Weights of each warp's sums in its group, for heads 2 * t and 2 * t + 1; sums are stored.

    top, total, new_score: of head g; own_new: whether the new token counts here; buffer: shared
    memory for 16 numbers of each warp; sums_at: of this lane's, QUAD bytes each.

    Returns:
        Highest score and sum of weights of every group, the weight of every warp's sums, each of
        the second head after the first; that of the new value, which the first group counts.
    """
    totals_at = buffer + 32 * WARPS
    mine = (g * WARPS + warp) * 4
    store_shared4(buffer + mine, top, t == 0)
    store_shared4(totals_at + mine, total, t == 0)
    for quad in gl.static_range(len(acc)):
        c = acc[quad]
        words = (as_word(c[0]), as_word(c[1]), as_word(c[2]), as_word(c[3]))
        store_shared16(sums_at + (warp * len(acc) + quad) * QUAD, words, t < PAIRS)
    barrier()
    tops = ()
    wholes = ()
    weights = ()
    news = ()
    EACH: gl.constexpr = WARPS // GROUPS
    for i in gl.static_range(2):
        of_head = (2 * t + i) * (4 * WARPS)
        own = floats(buffer + of_head, WARPS)
        totals = floats(totals_at + of_head, WARPS)
        new_of = from_lane(new_score, t * 8 + 4 * i)
        for n in gl.static_range(GROUPS):
            highest = new_of
            for w in gl.static_range(n * EACH, (n + 1) * EACH):
                highest = gl.maximum(highest, own[w])
            whole = gl.exp2(new_of - highest)
            if n == 0:
                whole = gl.where(own_new, whole, 0.0)
                news = news + (whole,)
            else:
                whole = whole * 0.0
            for w in gl.static_range(n * EACH, (n + 1) * EACH):
                weight = gl.exp2(own[w] - highest)
                whole = gl.fma(weight, totals[w], whole)
                weights = weights + (weight,)
            tops = tops + (highest,)
            wholes = wholes + (whole,)
    return tops, wholes, weights, news


@gluon.jit
def weigh_groups(tops, wholes, GROUPS: gl.constexpr):
    """Weights of the groups' sums, the second head's last, and both inverse sums of all weights.

    The groups of a program are joined as `_attention_join_kernel` joins as many splits: products
    are rounded before they are added.
    """
    shares = ()
    inverses = ()
    for i in gl.static_range(2):
        highest = tops[GROUPS * i]
        for n in gl.static_range(1, GROUPS):
            highest = gl.maximum(highest, tops[GROUPS * i + n])
        whole = highest * 0.0
        for n in gl.static_range(GROUPS):
            share = gl.exp2(tops[GROUPS * i + n] - highest)
            whole += share * wholes[GROUPS * i + n]
            shares = shares + (share,)
        inverses = inverses + (1.0 / whole,)
    return shares, inverses


@gluon.jit
def running_splits(
    position, MOST: gl.constexpr, GROUPS: gl.constexpr, WHOLE: gl.constexpr, TURN: gl.constexpr
):  # fmt: skip
    """Splits that have keys, at least one."""
    short = gl.minimum(gl.cdiv(position, TURN), GROUPS)
    rows = gl.cdiv(gl.cdiv(position, MOST), TURN) * TURN
    return gl.maximum(gl.where(position <= WHOLE, short, gl.cdiv(position, rows)), 1)


@gluon.jit
def rows_of_split(
    position, split, MOST: gl.constexpr, GROUPS: gl.constexpr, WHOLE: gl.constexpr,
    TURN: gl.constexpr,
):  # fmt: skip
    """First row of a split, the row before which it ends and rows from turn to turn.

    Up to WHOLE rows groups take turns; more are divided into MOST splits or less, of whole turns.
    """
    short = position <= WHOLE
    rows = gl.cdiv(gl.cdiv(position, MOST), TURN) * TURN
    start = split * gl.where(short, TURN, rows)
    end = gl.where(short, position, gl.minimum(start + rows, position))
    return start, end, gl.where(short, GROUPS * TURN, TURN)


@gluon.jit(do_not_specialize=["splits", "qkv_stride"])
def _attention_join_kernel(
    sums_ptr, state_ptr, qkv_ptr, positions_ptr, out_ptr, splits, qkv_stride,
    GATED: gl.constexpr, D: gl.constexpr, MOST: gl.constexpr, GROUPS: gl.constexpr,
    WHOLE: gl.constexpr, TURN: gl.constexpr, COLUMNS: gl.constexpr, WARPS: gl.constexpr,
    PDL: gl.constexpr, EARLY: gl.constexpr,
):  # fmt: skip
    """A warp has columns of its own and lanes share the splits: shuffles are all they exchange.

    MOST splits are added up in one order, those that are not there as zeros; so `splits`, how many
    were launched, changes no bit. Up to WHOLE keys come out as from a program that takes all.
    """
    if PDL and EARLY:
        gdc_launch_dependents()
    L: gl.constexpr = gl.BlockedLayout([1, 4], [8, 4], [1, WARPS], [1, 0])
    head, token = gl.program_id(0), gl.program_id(2)
    row = token * gl.num_programs(0) + head
    s = gl.arange(0, MOST, layout=gl.SliceLayout(1, L))
    d = gl.program_id(1) * COLUMNS + gl.arange(0, COLUMNS, layout=gl.SliceLayout(0, L))
    position = gl.load(positions_ptr + token)
    running = running_splits(position, MOST, GROUPS, WHOLE, TURN)
    if PDL:
        gdc_wait()
        if not EARLY:
            gdc_launch_dependents()
    at = row * splits + s
    if GATED:
        gate_at = qkv_ptr + token * qkv_stride + head * (2 * D) + D + d
        gate = gl.load(gate_at).to(gl.float32)
    sums_at = sums_ptr + at[:, None] * D + d[None, :]  # first: the compiler keeps loads in order
    sums = gl.load(sums_at, mask=(s < running)[:, None], other=0.0)
    tops = gl.load(state_ptr + 2 * at, mask=s < running, other=float("-inf"))
    totals = gl.load(state_ptr + 2 * at + 1, mask=s < running, other=0.0)
    weights = gl.exp2(tops - gl.max(tops, axis=0))
    inverse = 1.0 / gl.sum(weights * totals, axis=0)
    y = gl.sum(weights[:, None] * sums, axis=0) * inverse
    if GATED:
        y /= 1.0 + gl.exp(-gate)
    gl.store(out_ptr + row * D + d, y.to(out_ptr.dtype.element_ty))


def join_splits(
    sums: Tensor, state: Tensor, qkv: Tensor, positions: Tensor, out: Tensor, keys: KeySplit,
    early: bool, gated: bool, pdl: bool,
) -> None:  # fmt: skip
    """Fill out with the heads of all splits.

    Args:
        sums: [M * Hq, splits, D] fp32; of splits without rows anything.
        state: [M * Hq, splits, 2] fp32.
        qkv: [M, (Hq + 2 * Hkv) * D], each query followed by its gate where gated.
        positions: [M] int32 on the device.
        out: [M, Hq * D], written.
        keys: the rule by which the keys were split.
        early: whether the next kernel may start while the splits are still read.
        gated: whether heads have gates.
        pdl: whether the kernel may start before the one that attends ends.
    """
    rows, splits, D = sums.shape
    M = positions.shape[0]
    warps = min(MOST_WARPS, D // WARP_COLUMNS)
    columns = WARP_COLUMNS * warps
    run(
        _attention_join_kernel,
        (rows // M, D // columns, M),
        sums,
        state,
        qkv,
        positions,
        out,
        splits,
        qkv.shape[1],
        GATED=gated,
        D=D,
        MOST=keys.most,
        GROUPS=keys.groups,
        WHOLE=keys.whole,
        TURN=keys.turn,
        COLUMNS=columns,
        WARPS=warps,
        PDL=pdl,
        EARLY=early,
        num_warps=warps,
        launch_pdl=pdl,
        enable_fp_fusion=False,
    )
