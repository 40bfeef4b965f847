"""delta_decode: a few tokens of each of several sequences in a gated DeltaNet layer.

    q, k, v = silu(conv(window, token))                      (depthwise, over the last W inputs)
    q, k    = q * rsqrt(sum(q^2) + 1e-6) / sqrt(Dk), k * rsqrt(sum(k^2) + 1e-6)
    S       = exp(g) * S + k u^T,   u = beta * (v - exp(g) * S^T k)       (per value head, FP32)
    o       = S^T q
    part    = o * gain * silu(z),  squares = parts of sum(o^2)       (the norm follows from these)

Layout  qkvz [M, C + Hv * Dv] bf16, ba [M, 2 * Hv]; slots: memory [S, Hv, Dk, Dv] fp32, window
        [S, W - 1, C] bf16; part [M, Hv * Dv], squares [M, Hv, SPLITS] fp32
Bytes   a sequence: 4 * Hv * Dk * Dv read, as much written for every state that is kept; 32 heads of
        128 x 128: 2.1 MB each way, 1 us together at 4.3 TB/s
Plan    SPLITS programs of a value head and sequence hold some columns of S each, in registers; they
        read slot and window before the kernel waits for its predecessor (an earlier step wrote
        them) and take the sequence's tokens one after another. A thread convolves one channel of q
        or k and one of v or z, of the next token while sums of the present one are on their way.
        S^T q of the new S is exp(g) * S^T q + (k . q) * u, so one pass over S gives both products,
        and q and k enter before they are normed; rows are summed over the warps through shared
        memory. Whatever else is in the step, a token takes the same arithmetic in the same order.
        Programs that share q and k convolve them each for themselves. Where a state goes back to
        the slot it came from, the last program to arrive writes their window, after all have read
        it; elsewhere the first of them does. The norm of a head, of which no program has all
        columns, is left to `gemv` or `norm_heads`. No float atomics
"""

import torch
from torch import Tensor

from lowbit.runtime.kernels.delta.gates import gates_ref
from lowbit.runtime.kernels.delta.out import gated_norm_ref, norm_heads, window_ref
from lowbit.runtime.kernels.delta.program import L2_EPS, plan, sizes_of, splits_of
from lowbit.runtime.kernels.delta.recurrence import recurrence_kernel
from lowbit.runtime.kernels.launch.device import programmatic_launch, register_cap, run
from lowbit.runtime.kernels.linear.norm import SQUARES
from lowbit.runtime.state.delta import DeltaSlots, DeltaWeights
from lowbit.runtime.state.step import Step

REGISTERS = {4: 128, 2: 96, 1: 128}  # of a thread, by programs of a head


def delta_decode_ref(
    qkvz: Tensor,
    ba: Tensor,
    weights: DeltaWeights,
    eps: float,
    slots: DeltaSlots,
    step: Step,
    layer: int,
) -> tuple[Tensor, Tensor, Tensor]:
    """The values `delta_decode` approximates; no slot is written.

    Returns:
        out [M, Hv * Dv] and the memory after each token [M, Hv, Dk, Dv] in float64, and the window
        after each token [M, W - 1, C].
    """
    starts, read = step.starts.tolist(), step.read.tolist()
    outs, memories, windows = [], [], []
    for slot, first, end in zip(read, starts, starts[1:], strict=False):
        window, memory = slots.conv[layer, slot], slots.memory[layer, slot].double()
        for m in range(first, end):
            x, gate = qkvz[m : m + 1], ba[m : m + 1]
            out, memory, window = token_ref(x, gate, weights, eps, window, memory)
            outs.append(out)
            memories.append(memory)
            windows.append(window)
    return torch.cat(outs), torch.stack(memories), torch.stack(windows)


def token_ref(
    qkvz: Tensor, ba: Tensor, weights: DeltaWeights, eps: float, window: Tensor, S: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """One token: out [1, Hv * Dv], and memory and window after it."""
    C, _ = weights.conv.shape
    Hk, Dk = weights.key_heads, weights.key_dim
    Hv, Dv = weights.value_heads, weights.value_dim
    inputs = torch.cat((window.double(), qkvz[:, :C].double()))  # [W, C]
    mixed = torch.nn.functional.silu((inputs * weights.conv.double().T).sum(0))
    q, k, v = mixed.split((Hk * Dk, Hk * Dk, Hv * Dv))
    q, k = q.view(Hk, Dk), k.view(Hk, Dk)
    q = q * torch.rsqrt(q.square().sum(-1, keepdim=True) + L2_EPS.value) * Dk**-0.5
    k = k * torch.rsqrt(k.square().sum(-1, keepdim=True) + L2_EPS.value)
    q, k = q.repeat_interleave(Hv // Hk, 0), k.repeat_interleave(Hv // Hk, 0)
    beta, g = gates_ref(ba, weights)
    S = S * g[0].exp()[:, None, None]
    u = beta[0][:, None] * (v.view(Hv, Dv) - torch.einsum("hkv,hk->hv", S, k))
    S = S + k[:, :, None] * u[:, None, :]
    o = torch.einsum("hkv,hk->hv", S, q).view(1, -1)
    return gated_norm_ref(o, qkvz, weights, eps), S, window_ref(qkvz, window)


def delta_decode(
    qkvz: Tensor,
    ba: Tensor,
    weights: DeltaWeights,
    eps: float,
    slots: DeltaSlots,
    step: Step,
    layer: int,
) -> Tensor:
    """Tokens of several sequences in a gated DeltaNet layer; see `Ops.delta_linear`.

    Heads have 16 to 128 dimensions, a power of two. A token gets the same bits in any step.

    Returns:
        [M, Hv * Dv] in the dtype of qkvz; the slots that the step names hold the states.
    """
    if splits_of(sizes_of(weights), step.read.shape[0]) > 1:
        parts, squares = delta_decode_parts(qkvz, ba, weights, slots, step, layer, torch.float32)
        return norm_heads(parts, squares, eps, qkvz.dtype)
    width = weights.value_heads * weights.value_dim
    out = torch.empty((qkvz.shape[0], width), dtype=qkvz.dtype, device=qkvz.device)
    _launch(qkvz, ba, weights, eps, slots, step, layer, out, None)
    return out


def delta_decode_parts(
    qkvz: Tensor,
    ba: Tensor,
    weights: DeltaWeights,
    slots: DeltaSlots,
    step: Step,
    layer: int,
    dtype: torch.dtype | None = None,
) -> tuple[Tensor, Tensor]:
    """`delta_decode` without the factor of the norm, which `gemv` applies.

    Returns:
        parts [M, Hv * Dv] in a dtype, that of qkvz if it is None, and the sums of squares that the
        factors follow from, [M, Hv, SQUARES] float32.
    """
    M, Hv, device = qkvz.shape[0], weights.value_heads, qkvz.device
    parts = torch.empty((M, Hv * weights.value_dim), dtype=dtype or qkvz.dtype, device=device)
    squares = torch.empty((M, Hv, SQUARES), dtype=torch.float32, device=device)
    _launch(qkvz, ba, weights, 0.0, slots, step, layer, parts, squares)
    return parts, squares


def _launch(
    qkvz: Tensor,
    ba: Tensor,
    weights: DeltaWeights,
    eps: float,
    slots: DeltaSlots,
    step: Step,
    layer: int,
    out: Tensor,
    squares: Tensor | None,
) -> None:
    sizes, sequences = sizes_of(weights), step.read.shape[0]
    constants = plan(sizes, sequences, squares is None, programmatic_launch(qkvz))
    run(
        recurrence_kernel,
        (sizes.Hv * constants.splits, sequences),
        *(qkvz, ba, slots.conv[layer], slots.memory[layer], slots.arrived),
        *(step.starts, step.read, step.write),
        *(weights.conv, weights.decay, weights.dt_bias, weights.norm),
        *(out, squares, eps),
        PLAN=constants,
        num_warps=constants.warps,
        maxnreg=register_cap(qkvz, REGISTERS[constants.splits]),
        launch_pdl=constants.pdl,
        enable_fp_fusion=True,
    )
