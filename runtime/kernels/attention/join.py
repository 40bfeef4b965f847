"""attention_join: the splits of an attention head, joined in order.

    out_h = sum over splits of 2^(top - highest) * sums / sum of 2^(top - highest) * total

Layout  sums [M * Hq, splits, D] fp32, state [M * Hq, splits, 2] fp32: top and total of each split,
        sums and total relative to it; out [M, Hq * D] bf16
Bytes   4 * Hq * splits * D; 16 heads of 256 in 32 splits: 0.5 MB, from L2
Plan    A kernel of its own, a program for up to 64 columns of a head, whose loads are all on their
        way at once: the program of a split that comes last would read everything by itself, in
        turns
"""

from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from lowbit.runtime.kernels.launch.attention import AttentionLaunch
from lowbit.runtime.kernels.launch.device import run

WARP_COLUMNS = 16
MOST_WARPS = 4


@gluon.jit
def running_splits(position, TURN: gl.constexpr, RULE: gl.constexpr):
    """Splits that have keys, at least one. RULE: see `KeySplit`; TURN: its turn."""
    short = gl.minimum(gl.cdiv(position, TURN), RULE.groups)
    rows = gl.cdiv(gl.cdiv(position, RULE.most), TURN) * TURN
    return gl.maximum(gl.where(position <= RULE.whole, short, gl.cdiv(position, rows)), 1)


@gluon.jit
def rows_of_split(position, split, TURN: gl.constexpr, RULE: gl.constexpr):
    """First row of a split, the row before which it ends and rows from turn to turn.

    Up to `whole` rows groups take turns; more are divided into `most` splits or less, of whole
    turns.
    """
    short = position <= RULE.whole
    rows = gl.cdiv(gl.cdiv(position, RULE.most), TURN) * TURN
    start = split * gl.where(short, TURN, rows)
    end = gl.where(short, position, gl.minimum(start + rows, position))
    return start, end, gl.where(short, RULE.groups * TURN, TURN)


@gluon.jit(do_not_specialize=["splits", "qkv_stride"])
def _attention_join_kernel(
    sums_ptr, state_ptr, qkv_ptr, positions_ptr, out_ptr, splits, qkv_stride,
    RULE: gl.constexpr, TURN: gl.constexpr, GATED: gl.constexpr, D: gl.constexpr,
    COLUMNS: gl.constexpr, WARPS: gl.constexpr, PDL: gl.constexpr, EARLY: gl.constexpr,
):  # fmt: skip
    """A warp has columns of its own and lanes share the splits: shuffles are all they exchange.

    All splits that there may be are added up in one order, those that are not there as zeros; so
    `splits`, how many were launched, changes no bit. Up to `whole` keys come out as from a program
    that takes all. RULE: see `KeySplit`; TURN: its turn.
    """
    if PDL and EARLY:
        gdc_launch_dependents()
    L: gl.constexpr = gl.BlockedLayout([1, 4], [8, 4], [1, WARPS], [1, 0])
    head, token = gl.program_id(0), gl.program_id(2)
    row = token * gl.num_programs(0) + head
    s = gl.arange(0, RULE.most, layout=gl.SliceLayout(1, L))
    d = gl.program_id(1) * COLUMNS + gl.arange(0, COLUMNS, layout=gl.SliceLayout(0, L))
    position = gl.load(positions_ptr + token)
    running = running_splits(position, TURN, RULE)
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
    sums: Tensor, state: Tensor, qkv: Tensor, positions: Tensor, out: Tensor,
    launch: AttentionLaunch, gated: bool, pdl: bool,
) -> None:  # fmt: skip
    """Join the splits of every head, writing to `out`.

    Args:
        sums: [M * Hq, splits, D] fp32; of splits without rows anything.
        state: [M * Hq, splits, 2] fp32.
        qkv: [M, (Hq + 2 * Hkv) * D], each query followed by its gate where gated.
        positions: [M] int32 on the device.
        out: [M, Hq * D], written.
        launch: with the rule by which the keys were split.
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
        RULE=launch.keys,
        TURN=launch.keys.turn,
        GATED=gated,
        D=D,
        COLUMNS=columns,
        WARPS=warps,
        PDL=pdl,
        EARLY=launch.early,
        num_warps=warps,
        launch_pdl=pdl,
        enable_fp_fusion=False,
    )
