"""delta_decode: a few tokens of each of several sequences in a gated DeltaNet layer.

    q, k, v = silu(conv(window, token))                      (depthwise, over the last W inputs)
    q, k    = q * rsqrt(sum(q^2) + 1e-6) / sqrt(Dk), k * rsqrt(sum(k^2) + 1e-6)
    S       = exp(g) * S + k u^T,   u = beta * (v - exp(g) * S^T k)       (per value head, FP32)
    o       = S^T q
    part    = o * gain * silu(z),  squares = parts of sum(o^2)       (the norm follows from these)

Layout  qkvz [M, C + Hv * Dv] bf16, ba [M, 2 * Hv]; slots: memory [S, Hv, Dk, Dv] fp32, window
        [S, W - 1, C] bf16; part [M, Hv * Dv], squares [M, Hv, SPLITS] fp32
Bytes   per sequence 4 * Hv * Dk * Dv read, and as much written for every state that is kept; for 32
        heads of 128 x 128 2.1 MB each way, together 1 us at 4.3 TB/s
Plan    A program has a value head of one sequence, or some columns of it. Its part of S stays in
        registers while it takes the sequence's tokens one after another. It reads slot and window
        before it waits for the kernel ahead, since an earlier step wrote them. A thread convolves
        one channel of q or k and one of v or z, for the next tokens while sums of the present one
        are on their way. S^T q of the new S is exp(g) * S^T q + (k . q) * u, so one pass over S
        gives both products; q and k enter them before they are normed. Sums over the warps go
        through shared memory. A token takes the same arithmetic in the same order, whatever else
        is in the step.
        Programs that share q and k each convolve them. Where a state goes back to the slot it came
        from, the last program to arrive writes their window, after all have read it; elsewhere the
        first program does. The norm of a head that no program has as a whole is left to `gemv` or
        `norm_heads`. No float atomics
"""

import torch
from torch import Tensor

from lowbit.runtime.kernels.delta.out import norm_heads
from lowbit.runtime.kernels.delta.program import plan, sizes_of
from lowbit.runtime.kernels.delta.recurrence import recurrence_kernel
from lowbit.runtime.kernels.launch.delta import REGISTERS, delta_splits
from lowbit.runtime.kernels.launch.device import programmatic_launch, register_cap, run
from lowbit.runtime.kernels.linear.norm import SQUARES
from lowbit.runtime.state.delta import LayerStates
from lowbit.runtime.state.step import Step
from lowbit.runtime.weights.layers import DeltaLayer


def delta_decode(
    qkvz: Tensor, ba: Tensor, layer: DeltaLayer, states: LayerStates, step: Step
) -> Tensor:
    """Result of a gated DeltaNet layer for tokens of several sequences; see `Ops.delta_linear`.

    Heads have 16 to 128 dimensions, a power of two. A token gets the same bits in any step.

    Returns:
        [M, Hv * Dv] in the dtype of qkvz; the slots that the step names hold the states.
    """
    Hv, Dv = layer.value_heads, layer.value_dim
    if delta_splits(layer.key_dim, Dv, Hv * step.read.shape[0]) > 1:
        parts, squares = delta_decode_parts(qkvz, ba, layer, states, step, torch.float32)
        return norm_heads(parts, squares, layer.eps, qkvz.dtype)
    out = torch.empty((qkvz.shape[0], Hv * Dv), dtype=qkvz.dtype, device=qkvz.device)
    _launch(qkvz, ba, layer, states, step, out, None)
    return out


def delta_decode_parts(
    qkvz: Tensor,
    ba: Tensor,
    layer: DeltaLayer,
    states: LayerStates,
    step: Step,
    dtype: torch.dtype | None = None,
) -> tuple[Tensor, Tensor]:
    """`delta_decode` without the factor of the norm, which `gemv` applies.

    Returns:
        parts [M, Hv * Dv] in a dtype, that of qkvz if it is None, and the sums of squares that the
        factors follow from, [M, Hv, SQUARES] float32.
    """
    M, Hv, device = qkvz.shape[0], layer.value_heads, qkvz.device
    parts = torch.empty((M, Hv * layer.value_dim), dtype=dtype or qkvz.dtype, device=device)
    squares = torch.empty((M, Hv, SQUARES), dtype=torch.float32, device=device)
    _launch(qkvz, ba, layer, states, step, parts, squares)
    return parts, squares


def _launch(
    qkvz: Tensor,
    ba: Tensor,
    layer: DeltaLayer,
    states: LayerStates,
    step: Step,
    out: Tensor,
    squares: Tensor | None,
) -> None:
    """Run the recurrence; heads are normed unless their sums of squares are wanted."""
    sizes, sequences = sizes_of(layer), step.read.shape[0]
    constants = plan(sizes, sequences, squares is None, programmatic_launch(qkvz))
    run(
        recurrence_kernel,
        (sizes.Hv * constants.splits, sequences),
        *(qkvz, ba, states.window, states.memory, states.arrived),
        *(step.starts, step.read, step.write),
        *(layer.conv, layer.decay, layer.dt_bias, layer.norm),
        *(out, squares, layer.eps),
        PLAN=constants,
        num_warps=constants.warps,
        maxnreg=register_cap(qkvz, REGISTERS[constants.splits]),
        launch_pdl=constants.pdl,
        enable_fp_fusion=True,
    )
