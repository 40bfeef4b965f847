"""delta_decode: one token of a gated DeltaNet layer.

    q, k, v = silu(conv(window, token))                      (depthwise, over the last W inputs)
    q, k    = q * rsqrt(sum(q^2) + 1e-6) / sqrt(Dk), k * rsqrt(sum(k^2) + 1e-6)
    S       = exp(g) * S + k u^T,   u = beta * (v - exp(g) * S^T k)       (per value head, FP32)
    out     = gated_norm(S^T q)            (of one sequence S^T q * gain * silu(z), see Plan)

Layout  qkvz [B, C + Hv * Dv] bf16, ba [B, 2 * Hv], memory [B * Hv, Dk, Dv] fp32, window
        [B * (W - 1), C] bf16; out [B, Hv * Dv] bf16, squares [Hv, SPLITS] fp32
Bytes   8 * Hv * Dk * Dv; 32 heads of 128 x 128: 4.2 MB = 1 us at 4.3 TB/s
Plan    programs of a value head and sequence hold S in registers, some of its columns each, read
        before the kernel waits for its predecessor: an earlier step wrote it. A thread convolves
        one channel of q or k and one of v or z. S^T q of the new S is exp(g) * S^T q + (k . q) * u,
        so one pass over S gives both products and q and k enter before they are normed; rows are
        summed over the warps through shared memory. Programs that share q and k convolve them each
        for themselves; the last of them moves the window that all have read. A kernel ends when all
        it has stored is there, so the state of one sequence is stored by four programs a head; the
        norm of a head, which none of them can take, is left to the output linear, with the sums of
        squares for it. No float atomics, so bit-reproducible
"""

import torch
from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from lowbit.runtime.kernels.access import (
    barrier,
    count_up,
    declaration,
    floats,
    load_shared4,
    shared_buffer,
    store16,
    store_shared4,
    store_shared16,
    stream16,
)
from lowbit.runtime.kernels.delta_gates import gates, gates_ref
from lowbit.runtime.kernels.delta_out import gated_norm_ref, window_ref
from lowbit.runtime.kernels.device import programmatic_launch, run
from lowbit.runtime.kernels.gemv_stage import SQUARES
from lowbit.runtime.kernels.launch import CROWD, STATIC_SHARED
from lowbit.runtime.kernels.mma import across, as_float, as_word, threads
from lowbit.runtime.state.delta import DeltaState, DeltaWeights

WARPS = 8
SPLITS = SQUARES  # programs of a head of one sequence
MOST_DIM = 128  # of a head: columns of a warp, and channels of half the threads
L2_EPS = 1e-6  # on the sum of squares, whatever the model's eps


def delta_decode_ref(
    qkvz: Tensor, ba: Tensor, weights: DeltaWeights, eps: float, state: DeltaState, layer: int
) -> tuple[Tensor, Tensor, Tensor]:
    """The values `delta_decode` approximates; the state is not written.

    Returns:
        out [1, Hv * Dv] and the new memory [Hv, Dk, Dv] in float64, and the new window [W - 1, C].
    """
    C, _ = weights.conv.shape
    Hk, Dk = weights.key_heads, weights.key_dim
    Hv, Dv = weights.value_heads, weights.value_dim
    window, S = state.conv[layer], state.memory[layer].double()
    inputs = torch.cat((window.double(), qkvz[:, :C].double()))  # [W, C]
    mixed = torch.nn.functional.silu((inputs * weights.conv.double().T).sum(0))
    q, k, v = mixed.split((Hk * Dk, Hk * Dk, Hv * Dv))
    q, k = q.view(Hk, Dk), k.view(Hk, Dk)
    q = q * torch.rsqrt(q.square().sum(-1, keepdim=True) + L2_EPS) * Dk**-0.5
    k = k * torch.rsqrt(k.square().sum(-1, keepdim=True) + L2_EPS)
    q, k = q.repeat_interleave(Hv // Hk, 0), k.repeat_interleave(Hv // Hk, 0)
    beta, g = gates_ref(ba, weights)
    S = S * g[0].exp()[:, None, None]
    u = beta[0][:, None] * (v.view(Hv, Dv) - torch.einsum("hkv,hk->hv", S, k))
    S = S + k[:, :, None] * u[:, None, :]
    o = torch.einsum("hkv,hk->hv", S, q).view(1, -1)
    return gated_norm_ref(o, qkvz, weights, eps), S, window_ref(qkvz, window)


@gluon.jit
def _window(window_ptr, channel, inside, C: gl.constexpr, W: gl.constexpr):
    """The last W - 1 inputs of a channel."""
    rows = ()
    for row in gl.static_range(W - 1):
        rows = rows + (gl.load(window_ptr + row * C + channel, mask=inside, other=0.0),)
    return rows


@gluon.jit
def _convolved(inputs, taps, W: gl.constexpr):
    """Convolution and SiLU, in FP32."""
    y = inputs[0].to(gl.float32) * taps[0]
    for row in gl.static_range(1, W):
        y += inputs[row].to(gl.float32) * taps[row]
    return y / (1.0 + gl.exp(-y))


@gluon.jit
def _move(window_ptr, inputs, channel, inside, C: gl.constexpr, W: gl.constexpr):
    """The window becomes the last W - 1 inputs."""
    for row in gl.static_range(W - 1):
        value = inputs[row + 1].to(window_ptr.dtype.element_ty)
        gl.store(window_ptr + row * C + channel, value, mask=inside)


@gluon.jit
def _over_lanes(x, FIRST: gl.constexpr, LANES: gl.constexpr):
    """Sums over lanes whose numbers differ in bits FIRST to LANES / 2."""
    for i in gl.static_range(5):
        if (1 << i) >= FIRST and (1 << i) < LANES:
            x += across(x, 1 << i)
    return x


@gluon.jit
def _recurrence_kernel(
    qkvz_ptr, ba_ptr, window_ptr, memory_ptr, taps_ptr, decay_ptr, dt_bias_ptr, gain_ptr,
    arrived_ptr, out_ptr, squares_ptr, l2_eps, eps,
    Hk: gl.constexpr, Hv: gl.constexpr, Dk: gl.constexpr, Dv: gl.constexpr, W: gl.constexpr,
    WARPS: gl.constexpr, SHARED: gl.constexpr, SPLITS: gl.constexpr, BUFFER: gl.constexpr,
    PDL: gl.constexpr,
):  # fmt: skip
    """SHARED: value heads that have a q and k together; SPLITS: programs of a value head."""
    C: gl.constexpr = 2 * Hk * Dk + Hv * Dv
    HALF: gl.constexpr = WARPS * 16  # threads
    COLUMNS: gl.constexpr = Dv // SPLITS
    LANES: gl.constexpr = COLUMNS // 4  # lanes that have a row of S, four columns each
    ROWS: gl.constexpr = 32 // LANES  # of S that a warp holds at a time
    EACH: gl.constexpr = (Dk + WARPS * ROWS - 1) // (WARPS * ROWS)  # rows of a thread
    warp, lane, zero, none = threads(WARPS)
    thread = warp * 32 + lane
    head, token = gl.program_id(0) // SPLITS, gl.program_id(1).to(gl.int64)
    split = gl.program_id(0) % SPLITS
    qkvz_ptr += token * (C + Hv * Dv)
    ba_ptr += token * (2 * Hv)
    window_ptr += token * (W - 1) * C

    own = lane % LANES * 4  # column of those that the program has
    column = split * COLUMNS + own
    first_row = (warp * ROWS + lane // LANES) * EACH
    held = first_row < Dk
    memory = memory_ptr.to(gl.int64, bitcast=True) + (token * Hv + head) * (Dk * Dv * 4)
    memory = memory + (gl.minimum(first_row, Dk - EACH) * Dv + column).to(gl.int64) * 4
    S = ()
    for i in gl.static_range(EACH):
        S = S + (stream16(memory + i * (Dv * 4)),)
    upper = thread >= HALF
    of_head = thread % HALF
    is_key = of_head < Dk
    is_value = of_head < COLUMNS
    qk_channel = gl.where(upper, Hk * Dk, 0) + head // SHARED * Dk + of_head
    v_channel = 2 * Hk * Dk + head * Dv + split * COLUMNS + of_head
    qk_taps = ()
    v_taps = ()
    for tap in gl.static_range(W):
        qk_taps = qk_taps + (gl.load(taps_ptr + qk_channel * W + tap, mask=is_key, other=0.0),)
        v_taps = v_taps + (gl.load(taps_ptr + v_channel * W + tap, mask=is_value, other=0.0),)
    decay = gl.load(decay_ptr + head)
    dt_bias = gl.load(dt_bias_ptr + head)
    convolves = is_value & (thread < HALF)
    qk_window = _window(window_ptr, qk_channel, is_key, C, W)
    v_window = _window(window_ptr, v_channel, convolves, C, W)
    gains = ()
    for i in gl.static_range(4):
        gains = gains + (gl.load(gain_ptr + column + i).to(gl.float32),)
    if PDL:
        gdc_wait()
        gdc_launch_dependents()

    qk_in = qk_window + (gl.load(qkvz_ptr + qk_channel, mask=is_key, other=0.0),)
    v_in = v_window + (gl.load(qkvz_ptr + v_channel, mask=convolves, other=0.0),)
    z_at = qkvz_ptr + C + head * Dv + split * COLUMNS + of_head
    z = gl.load(z_at, mask=is_value & upper, other=0.0)
    b = gl.load(ba_ptr + head)
    a = gl.load(ba_ptr + Hv + head)
    z = z.to(gl.float32)
    at = shared_buffer(BUFFER) + zero  # q, k, v, silu(z)
    store_shared4(at + thread * 4, _convolved(qk_in, qk_taps, W), is_key)
    vz = gl.where(upper, z / (1.0 + gl.exp(-z)), _convolved(v_in, v_taps, W))
    store_shared4(at + HALF * 8 + thread * 4, vz, is_value)
    barrier()
    before = zero  # programs that have read the window they share, all threads of them
    if SHARED * SPLITS > 1:
        arrived = arrived_ptr.to(gl.int64, bitcast=True) + (token * Hk + head // SHARED) * 4
        before = count_up(arrived + zero, thread == 0)
    _move(window_ptr, v_in, v_channel, convolves, C, W)
    beta, g = gates(b, a, decay, dt_bias)
    fade = gl.exp(g)
    q_at = at + first_row * 4
    k_at = q_at + HALF * 4
    part_q = (none, none, none, none)
    part_k = (none, none, none, none)
    keys = ()
    for i in gl.static_range(EACH):
        q = load_shared4(q_at + i * 4)
        k = load_shared4(k_at + i * 4)
        row = S[i]
        part_q = _add4(part_q, row, q)
        part_k = _add4(part_k, row, k)
        keys = keys + (k,)
    sums_at = at + HALF * 16
    for which in gl.static_range(2):
        part = part_q if which == 0 else part_k
        words = ()
        for i in gl.static_range(4):
            y = gl.where(held, part[i], 0.0)
            words = words + (as_word(_over_lanes(y, LANES, 32)),)
        store_shared16(sums_at + ((which * WARPS + warp) * COLUMNS + own) * 4, words, lane < LANES)
    qq = none
    kk = none
    qk = none
    for first in gl.static_range(0, Dk, 32):
        there = first + lane < Dk
        q = gl.where(there, load_shared4(at + (first + lane) * 4), 0.0)
        k = gl.where(there, load_shared4(at + (HALF + first + lane) * 4), 0.0)
        qq += q * q
        kk += k * k
        qk += q * k
    q_norm = gl.rsqrt(_over_lanes(qq, 1, 32) + l2_eps) * Dk**-0.5
    k_norm = gl.rsqrt(_over_lanes(kk, 1, 32) + l2_eps)
    qk = _over_lanes(qk, 1, 32)
    barrier()
    total = none  # of one column, for q below HALF and for k above
    for w in gl.static_range(WARPS):
        of_warp = (gl.where(upper, WARPS, 0) + w) * COLUMNS + gl.minimum(of_head, COLUMNS - 1)
        total += load_shared4(sums_at + of_warp * 4)
    totals_at = sums_at + 2 * WARPS * COLUMNS * 4
    store_shared4(totals_at + (gl.where(upper, COLUMNS, 0) + of_head) * 4, total, is_value)
    before_at = totals_at + 2 * COLUMNS * 4
    if SHARED * SPLITS > 1:
        store_shared4(before_at, as_float(before), thread == 0)
    barrier()
    Sq = floats(totals_at + own * 4, 4)
    Sk = floats(totals_at + (COLUMNS + own) * 4, 4)
    v = floats(at + (2 * HALF + own) * 4, 4)
    silu_z = floats(at + (3 * HALF + own) * 4, 4)
    u = ()
    o = ()
    squares = none
    for i in gl.static_range(4):
        one = beta * (v[i] - fade * k_norm * Sk[i])
        y = q_norm * (fade * Sq[i] + k_norm * qk * one)
        squares += y * y
        u = u + (k_norm * one,)
        o = o + (y,)
    for i in gl.static_range(EACH):
        words = ()
        for j in gl.static_range(4):
            words = words + (as_word(fade * as_float(S[i][j]) + keys[i] * u[j]),)
        store16(memory + i * (Dv * 4), words, held)
    squares = _over_lanes(squares, 1, LANES)
    factor = none + 1.0
    if SPLITS == 1:
        factor = gl.rsqrt(squares / Dv + eps)
    else:
        at_head = squares_ptr + (token * Hv + head) * SPLITS + split + zero
        gl.store(at_head, squares, mask=thread == 0)
    out = out_ptr + (token * Hv + head) * Dv + column
    for i in gl.static_range(4):
        y = o[i] * factor * gains[i] * silu_z[i]
        gl.store(out + i, y.to(out_ptr.dtype.element_ty), mask=(warp == 0) & (lane < LANES))
    if SHARED * SPLITS > 1:
        last = as_word(load_shared4(before_at)) == SHARED * SPLITS - 1
        _move(window_ptr, qk_in, qk_channel, is_key & last, C, W)
        gl.store(arrived_ptr + token * Hk + head // SHARED + zero, 0, mask=last & (thread == 0))
    else:
        _move(window_ptr, qk_in, qk_channel, is_key, C, W)


@gluon.jit
def _add4(sums, words, factor):
    return (
        sums[0] + as_float(words[0]) * factor,
        sums[1] + as_float(words[1]) * factor,
        sums[2] + as_float(words[2]) * factor,
        sums[3] + as_float(words[3]) * factor,
    )


def delta_decode(
    qkvz: Tensor, ba: Tensor, weights: DeltaWeights, eps: float, state: DeltaState, layer: int
) -> Tensor:
    """One token of each of B sequences in a gated DeltaNet layer; see `Ops.delta_linear`.

    Heads have 16 to 128 dimensions, a power of two.

    Returns:
        [B, Hv * Dv] in the dtype of qkvz; the state's layer has moved on by the token.
    """
    return _launch(qkvz, ba, weights, eps, state, layer, None)


def delta_decode_parts(
    qkvz: Tensor, ba: Tensor, weights: DeltaWeights, eps: float, state: DeltaState, layer: int
) -> tuple[Tensor, Tensor]:
    """`delta_decode` of one sequence, by SPLITS programs a head: `gemv` norms what this returns.

    Returns:
        out [1, Hv * Dv], all but the norm's factor, and the sums of squares that it follows from,
        [Hv, SPLITS] float32.
    """
    squares = torch.empty((weights.value_heads, SPLITS), dtype=torch.float32, device=qkvz.device)
    return _launch(qkvz, ba, weights, eps, state, layer, squares), squares


def _launch(
    qkvz: Tensor,
    ba: Tensor,
    weights: DeltaWeights,
    eps: float,
    state: DeltaState,
    layer: int,
    squares: Tensor | None,
) -> Tensor:
    B = qkvz.shape[0]
    Hv, Dv = weights.value_heads, weights.value_dim
    splits = 1 if squares is None else SPLITS
    out = torch.empty((B, Hv * Dv), dtype=qkvz.dtype, device=qkvz.device)
    pdl = programmatic_launch(qkvz)
    used = WARPS * 16 * 16 + (2 * WARPS + 2) * Dv // splits * 4 + 16
    least = STATIC_SHARED if pdl and Hv * splits >= CROWD else 0
    run(
        _recurrence_kernel,
        (Hv * splits, B),
        qkvz,
        ba,
        state.conv[layer],
        state.memory[layer],
        weights.conv,
        weights.decay,
        weights.dt_bias,
        weights.norm,
        state.arrived,
        out,
        squares,
        L2_EPS,
        eps,
        Hk=weights.key_heads,
        Hv=Hv,
        Dk=weights.key_dim,
        Dv=Dv,
        W=weights.conv.shape[1],
        WARPS=WARPS,
        SHARED=Hv // weights.key_heads,
        SPLITS=splits,
        BUFFER=declaration(max(least, used)),
        PDL=pdl,
        num_warps=WARPS,
        launch_pdl=pdl,
        enable_fp_fusion=True,
    )
    return out
