"""What warps, and splits, know of an attention head becomes one result.

    out_h = sum over splits of 2^(top - highest) * sums / sum of 2^(top - highest) * total

Layout  sums [B * Hq, SPLITS, D] fp32, state [B * Hq, SPLITS, 2] fp32: top and total of each split,
        sums and total relative to it; out [B, Hq * D] bf16
Bytes   4 * Hq * SPLITS * D; 16 heads of 256 in 32 splits: 0.5 MB, from L2
Plan    the warps of a program through shared memory, at the end of the kernel that attends. Splits
        in a kernel of their own, a program for up to 64 columns of a head, whose loads are all on
        their way at once: the program that comes last would read everything by itself, in turns
"""

from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from lowbit.runtime.kernels.access import barrier, floats, store_shared4, store_shared16
from lowbit.runtime.kernels.device import run
from lowbit.runtime.kernels.mma import as_word, from_lane

WARP_COLUMNS = 16
MOST_WARPS = 4


@gluon.jit
def weigh_warps(
    top, total, acc, new_score, own_new, buffer, sums_at, warp, g, t, QUAD: gl.constexpr,
    PAIRS: gl.constexpr, WARPS: gl.constexpr,
):  # fmt: skip
    """What each warp's sums weigh, for heads 2 * t and 2 * t + 1 of this lane; sums are stored.

    top, total, new_score: of head g; own_new: whether the new token counts here; buffer: shared
    memory for 16 numbers of each warp; sums_at: of this lane's, QUAD bytes each.

    Returns:
        Of each of the two heads the highest score, the sum of weights and its inverse; the weight
        of every warp's sums, the second head's after the first's; that of the new value.
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
    inverses = ()
    weights = ()
    news = ()
    for i in gl.static_range(2):
        of_head = (2 * t + i) * (4 * WARPS)
        own = floats(buffer + of_head, WARPS)
        totals = floats(totals_at + of_head, WARPS)
        new_of = from_lane(new_score, t * 8 + 4 * i)
        highest = new_of
        for w in gl.static_range(WARPS):
            highest = gl.maximum(highest, own[w])
        new_weight = gl.where(own_new, gl.exp2(new_of - highest), 0.0)
        whole = new_weight
        for w in gl.static_range(WARPS):
            weight = gl.exp2(own[w] - highest)
            whole += weight * totals[w]
            weights = weights + (weight,)
        tops = tops + (highest,)
        wholes = wholes + (whole,)
        inverses = inverses + (1.0 / whole,)
        news = news + (new_weight,)
    return tops, wholes, inverses, weights, news


@gluon.jit
def rows_of_split(position, SPLITS: gl.constexpr, TURN: gl.constexpr):
    """The rows before the position that each split takes: whole turns of a program."""
    return gl.cdiv(gl.cdiv(position, SPLITS), TURN) * TURN


@gluon.jit
def _attention_join_kernel(
    sums_ptr, state_ptr, qkv_ptr, position_ptr, out_ptr, qkv_stride,
    GATED: gl.constexpr, D: gl.constexpr, SPLITS: gl.constexpr, TURN: gl.constexpr,
    COLUMNS: gl.constexpr, WARPS: gl.constexpr, PDL: gl.constexpr, EARLY: gl.constexpr,
):  # fmt: skip
    """A warp has columns of its own and lanes share the splits: shuffles are all they exchange."""
    if PDL and EARLY:
        gdc_launch_dependents()
    L: gl.constexpr = gl.BlockedLayout([1, 4], [8, 4], [1, WARPS], [1, 0])
    head, token = gl.program_id(0), gl.program_id(2)
    row = token * gl.num_programs(0) + head
    s = gl.arange(0, SPLITS, layout=gl.SliceLayout(1, L))
    d = gl.program_id(1) * COLUMNS + gl.arange(0, COLUMNS, layout=gl.SliceLayout(0, L))
    position = gl.load(position_ptr + token)
    rows = rows_of_split(position, SPLITS, TURN)
    running = gl.maximum(gl.cdiv(position, gl.maximum(rows, 1)), 1)
    if PDL:
        gdc_wait()
        if not EARLY:
            gdc_launch_dependents()
    at = row * SPLITS + s
    if GATED:
        gate_at = qkv_ptr + token * qkv_stride + head * (2 * D) + D + d
        gate = gl.load(gate_at).to(gl.float32)
    sums_at = sums_ptr + at[:, None] * D + d[None, :]  # first: the compiler keeps loads in order
    sums = gl.load(sums_at, mask=(s < running)[:, None], other=0.0)
    tops = gl.load(state_ptr + 2 * at, mask=s < running, other=float("-inf"))
    totals = gl.load(state_ptr + 2 * at + 1, mask=s < running, other=0.0)
    weights = gl.exp2(tops - gl.max(tops, axis=0))
    y = gl.sum(weights[:, None] * sums, axis=0) / gl.sum(weights * totals, axis=0)
    if GATED:
        y /= 1.0 + gl.exp(-gate)
    gl.store(out_ptr + row * D + d, y.to(out_ptr.dtype.element_ty))


def join_splits(
    sums: Tensor, state: Tensor, qkv: Tensor, position: Tensor, out: Tensor, turn: int,
    early: bool, gated: bool, pdl: bool,
) -> None:  # fmt: skip
    """Fill out with the heads of all splits.

    Args:
        sums: [B * Hq, SPLITS, D] fp32; of splits without rows anything.
        state: [B * Hq, SPLITS, 2] fp32.
        qkv: [B, (Hq + 2 * Hkv) * D], each query followed by its gate where gated.
        position: [B] int32 on the device.
        out: [B, Hq * D], written.
        turn: rows that a program takes at a time.
        early: whether the next kernel may start while the splits are still read.
        gated: whether heads have gates.
        pdl: whether the kernel may start before the one that attends ends.
    """
    rows, splits, D = sums.shape
    B = position.shape[0]
    warps = min(MOST_WARPS, D // WARP_COLUMNS)
    columns = WARP_COLUMNS * warps
    run(
        _attention_join_kernel,
        (rows // B, D // columns, B),
        sums,
        state,
        qkv,
        position,
        out,
        qkv.shape[1],
        GATED=gated,
        D=D,
        SPLITS=splits,
        TURN=turn,
        COLUMNS=columns,
        WARPS=warps,
        PDL=pdl,
        EARLY=early,
        num_warps=warps,
        launch_pdl=pdl,
        enable_fp_fusion=True,
    )
