"""The GPU backend: `lowbit.runtime.ops.Ops` over the Triton kernels.

One token (a decode step) takes the fused GEMVs and split attention, without a synchronization or a
host read, so a CUDA graph can capture it; several tokens (prefill) take the tensor cores.
"""

import torch
from torch import Tensor
from torch.nn.functional import linear

from lowbit.formats.errors import FormatError, UnsupportedModelError
from lowbit.runtime.cache import KVCache
from lowbit.runtime.delta import DeltaState, DeltaWeights
from lowbit.runtime.kernels.attention_decode import attention_decode
from lowbit.runtime.kernels.attention_prefill import attention_prefill
from lowbit.runtime.kernels.delta_decode import delta_decode
from lowbit.runtime.kernels.delta_prefill import delta_prefill
from lowbit.runtime.kernels.dense_gemv import dense_gemv
from lowbit.runtime.kernels.gemm import gemm
from lowbit.runtime.kernels.gemv import gemv, gemv_swiglu
from lowbit.runtime.kernels.rows import embed as embed
from lowbit.runtime.kernels.rows import rms_norm, swiglu
from lowbit.runtime.linear import DenseLinear, Linear, PackedLinear
from lowbit.runtime.ops import Rope

LEAST_HEAD = 16  # what a tensor-core tile takes
QUAD = 32  # codes that the kernels read at a time; no group may be smaller


def prepare(w: Linear) -> Linear:
    """The linear itself, if the kernels can read it.

    Raises:
        FormatError: rows or groups are not a multiple of 32 codes.
    """
    if isinstance(w, PackedLinear) and (w.K % QUAD or w.group_size % QUAD):
        raise FormatError(
            f"packed linear: rows of {w.K} in groups of {w.group_size} codes have no GPU kernel, "
            f"both must be multiples of {QUAD}",
            hint="convert with another --group-size, or run on the CPU",
        )
    return w


def check_heads(**dims: int) -> None:
    """Refuse head sizes the kernels cannot tile.

    Raises:
        UnsupportedModelError: a size that is not a power of two from 16 on, by name.
    """
    for name, size in dims.items():
        if size < LEAST_HEAD or size & (size - 1):
            raise UnsupportedModelError(
                f"{name} = {size} has no GPU kernel: heads must be a power of two from "
                f"{LEAST_HEAD} on",
                hint="run on the CPU with --device cpu",
            )


def norm_linear(
    x: Tensor, norm: Tensor, eps: float, w: Linear, bias: Tensor | None = None
) -> Tensor:
    """`rms_norm(x) * norm @ w.T + bias`; see `Ops.norm_linear`."""
    if x.shape[0] == 1:
        added = None if bias is None else bias[None]
        if isinstance(w, DenseLinear):
            return dense_gemv(x, w.weight, norm=norm, eps=eps, residual=added)
        return gemv(x, w, norm=norm, eps=eps, residual=added)
    if isinstance(w, DenseLinear):
        return linear(rms_norm(x, norm, eps), w.weight, bias)
    added = None if bias is None else bias.expand(x.shape[0], -1)
    return gemm(rms_norm(x, norm, eps), w, added)


def norm_logits(x: Tensor, norm: Tensor, eps: float, w: Linear) -> Tensor:
    """`rms_norm(x) * norm @ w.T` in float32, for a head: [M, K] to [M, N].

    Sums are returned as they are, but for a dense head of several tokens: those are rounded first.
    """
    if x.shape[0] == 1:
        if isinstance(w, DenseLinear):
            return dense_gemv(x, w.weight, norm=norm, eps=eps, dtype=torch.float32)
        return gemv(x, w, norm=norm, eps=eps, dtype=torch.float32)
    if isinstance(w, DenseLinear):
        return linear(rms_norm(x, norm, eps), w.weight).float()
    return gemm(rms_norm(x, norm, eps), w, dtype=torch.float32)


def norm_swiglu(x: Tensor, norm: Tensor, eps: float, gate_up: Linear) -> Tensor:
    """`silu(gate) * up` of the normed x; see `Ops.norm_swiglu`."""
    if x.shape[0] == 1:
        if isinstance(gate_up, DenseLinear):
            return swiglu(dense_gemv(x, gate_up.weight, norm=norm, eps=eps))
        return gemv_swiglu(x, norm, eps, gate_up)
    if isinstance(gate_up, DenseLinear):
        return swiglu(linear(rms_norm(x, norm, eps), gate_up.weight))
    return swiglu(gemm(rms_norm(x, norm, eps), gate_up))


def linear_add(x: Tensor, w: Linear, residual: Tensor) -> Tensor:
    """`residual + x @ w.T`; see `Ops.linear_add`."""
    if x.shape[0] == 1:
        if isinstance(w, DenseLinear):
            return dense_gemv(x, w.weight, residual=residual)
        return gemv(x, w, residual=residual)
    if isinstance(w, DenseLinear):
        return residual + linear(x, w.weight)
    return gemm(x, w, residual)


def attention(
    qkv: Tensor,
    q_norm: Tensor | None,
    k_norm: Tensor | None,
    eps: float,
    rope: Rope,
    cache: KVCache,
    layer: int,
    gated: bool = False,
) -> Tensor:
    """Norm, rotate, append, attend; see `Ops.attention`."""
    attend = attention_decode if qkv.shape[0] == 1 else attention_prefill
    return attend(qkv, q_norm, k_norm, eps, rope, cache, layer, gated)


def delta_net(
    qkvz: Tensor, ba: Tensor, weights: DeltaWeights, eps: float, state: DeltaState, layer: int
) -> Tensor:
    """Convolution, gates, delta rule, gated norm; see `Ops.delta_net`."""
    advance = delta_decode if qkvz.shape[0] == 1 else delta_prefill
    return advance(qkvz, ba, weights, eps, state, layer)
