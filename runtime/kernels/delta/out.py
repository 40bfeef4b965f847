"""Norm at the end of a gated DeltaNet layer: `gated_norm` for prompts, `norm_heads` for decoding.

    out[m, h] = o[m, h] * rsqrt(mean(o[m, h]^2) + eps) * gain * silu(z[m, h])       (per head, FP32)
    window    = the last W - 1 inputs of the convolution, of old window and new tokens together

Layout  o [M, Hv * Dv] fp32, qkvz [M, C + Hv * Dv] bf16, z after the channels; parts [M, Hv * Dv],
        o * gain * silu(z), and squares [M, Hv, SQUARES] fp32, parts of sum(o^2); out [M, Hv * Dv]
        bf16
Plan    A program per token and head. A prompt's window moves in `gated_norm` and nowhere else,
        because many programs of the kernels before it read the window. The programs of a sequence's
        last token each move some channels; one thread moves the rows of a channel, oldest first, so
        the new window may take the place of the old one
"""

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from lowbit.runtime.kernels.delta.program import sizes_of
from lowbit.runtime.kernels.delta.sequences import sequence_number
from lowbit.runtime.kernels.launch.device import programmatic_launch, run
from lowbit.runtime.kernels.linear.norm import SQUARES
from lowbit.runtime.state.delta import LayerStates
from lowbit.runtime.state.step import Step
from lowbit.runtime.weights.layers import DeltaLayer


@triton.jit
def _gated_norm_kernel(
    o_ptr, qkvz_ptr, gain_ptr, window_ptr, read_ptr, write_ptr, starts_ptr, out_ptr, eps,
    SIZES: tl.constexpr, BLOCK_C: tl.constexpr, SEQUENCES: tl.constexpr,
):  # fmt: skip
    """A program per token and head; those of a last token move BLOCK_C channels of a window."""
    C: tl.constexpr = SIZES.C
    Dv: tl.constexpr = SIZES.Dv
    W: tl.constexpr = SIZES.W
    token, head = tl.program_id(0).to(tl.int64), tl.program_id(1)
    Hv = tl.num_programs(1)
    M = tl.load(starts_ptr + SEQUENCES)
    if token >= M:  # padding
        return
    stride = C + Hv * Dv
    offs_d = head * Dv + tl.arange(0, Dv)
    gain = tl.load(gain_ptr + tl.arange(0, Dv)).to(tl.float32)
    o = tl.load(o_ptr + token * Hv * Dv + offs_d)
    z = tl.load(qkvz_ptr + token * stride + C + offs_d).to(tl.float32)
    o *= tl.rsqrt(tl.sum(o * o, axis=0) / Dv + eps) * gain
    out = o * z * tl.sigmoid(z)
    tl.store(out_ptr + token * Hv * Dv + offs_d, out.to(out_ptr.dtype.element_ty))
    target = tl.load(write_ptr + token).to(tl.int64)
    if target >= 0:
        number = sequence_number(starts_ptr, token, SEQUENCES)
        first = tl.load(starts_ptr + number).to(tl.int64)
        if token + 1 == tl.load(starts_ptr + number + 1):
            old_ptr = window_ptr + tl.load(read_ptr + number).to(tl.int64) * ((W - 1) * C)
            new_ptr = window_ptr + target * ((W - 1) * C)
            offs_c = head * BLOCK_C + tl.arange(0, BLOCK_C)
            inside = offs_c < C
            for row in tl.static_range(W - 1):
                # of the old window, then the tokens
                source = tl.zeros([BLOCK_C], tl.int64) + (token + 1 - first) + row
                held = source < W - 1
                old = tl.load(old_ptr + source * C + offs_c, mask=inside & held, other=0.0)
                tokens = qkvz_ptr + (first + source - (W - 1)) * stride
                new = tl.load(tokens + offs_c, mask=inside & (source >= W - 1), other=0.0)
                moved = tl.where(held, old, new.to(old.dtype))
                tl.store(new_ptr + row * C + offs_c, moved, mask=inside)


@triton.jit
def _norm_heads_kernel(
    parts_ptr, squares_ptr, out_ptr, eps,
    Dv: tl.constexpr, SQUARES: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """A program per token and head."""
    head = tl.program_id(0).to(tl.int64) * tl.num_programs(1) + tl.program_id(1)
    offs = head * Dv + tl.arange(0, Dv)
    if PDL:
        gdc_wait()
        gdc_launch_dependents()
    squares = squares_ptr + head * SQUARES
    low = tl.load(squares) + tl.load(squares + 1)  # in the order of `head_factor`
    mean = (low + (tl.load(squares + 2) + tl.load(squares + 3))) / Dv
    out = tl.load(parts_ptr + offs).to(tl.float32) * tl.rsqrt(mean + eps)
    tl.store(out_ptr + offs, out.to(out_ptr.dtype.element_ty))


def norm_heads(parts: Tensor, squares: Tensor, eps: float, dtype: torch.dtype) -> Tensor:
    """Parts of `delta_decode` times the factors of the norm: [M, Hv * Dv] in a dtype.

    Args:
        parts: [M, Hv * Dv].
        squares: [M, Hv, SQUARES] float32.
        dtype: of the result.
    """
    M, Hv, _ = squares.shape
    out = torch.empty(parts.shape, dtype=dtype, device=parts.device)
    pdl = programmatic_launch(parts)
    run(
        _norm_heads_kernel,
        (M, Hv),
        *(parts, squares, out, eps),
        Dv=parts.shape[1] // Hv,
        SQUARES=SQUARES,
        PDL=pdl,
        num_warps=1,
        launch_pdl=pdl,
        enable_fp_fusion=True,
    )
    return out


def gated_norm(
    o: Tensor, qkvz: Tensor, layer: DeltaLayer, states: LayerStates, step: Step
) -> Tensor:
    """Gated RMS norm of every head of prompts; each sequence's window moves past its tokens.

    Args:
        o: [M, Hv * Dv] float32, the recurrence's output.
        qkvz: [M, C + Hv * Dv], inputs of the convolution and then z.
        layer: of the layer; Dv is a power of two.
        step: the slot in `read` has the window before a sequence's first token, the one that
            `write` has for its last token takes the window after it; M rows may have padding behind
            all of them.

    Returns:
        [M, Hv * Dv] in the dtype of qkvz; anything for padding.
    """
    M, sizes = o.shape[0], sizes_of(layer)
    out = torch.empty(o.shape, dtype=qkvz.dtype, device=qkvz.device)
    run(
        _gated_norm_kernel,
        (M, sizes.Hv),
        *(o, qkvz, layer.norm, states.window, step.read, step.write, step.starts, out),
        layer.eps,
        SIZES=sizes,
        BLOCK_C=triton.next_power_of_2(triton.cdiv(sizes.C, sizes.Hv)),
        SEQUENCES=len(step.starts) - 1,
        num_warps=1,
        enable_fp_fusion=True,
    )
    return out
