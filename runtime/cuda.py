"""The GPU backend: `lowbit.runtime.ops.Ops` over the Triton kernels.

One token (a decode step) takes the fused GEMVs and split attention, without a synchronization or a
host read, so a CUDA graph can capture it; several tokens (prefill) take the tensor cores.
"""

import torch
from torch import Tensor
from torch.nn.functional import linear

from lowbit.formats.errors import FormatError
from lowbit.runtime.cache import KVCache
from lowbit.runtime.kernels.attention_decode import attention_decode
from lowbit.runtime.kernels.attention_prefill import attention_prefill
from lowbit.runtime.kernels.gemm import gemm
from lowbit.runtime.kernels.gemv import gemv, gemv_swiglu
from lowbit.runtime.kernels.rows import embed as embed
from lowbit.runtime.kernels.rows import rms_norm, swiglu
from lowbit.runtime.linear import DenseLinear, Linear, PackedLinear
from lowbit.runtime.ops import Rope

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


def norm_linear(x: Tensor, norm: Tensor, eps: float, w: Linear) -> Tensor:
    """`rms_norm(x) * norm @ w.T`; see `Ops.norm_linear`."""
    if isinstance(w, DenseLinear):
        return linear(rms_norm(x, norm, eps), w.weight)
    if x.shape[0] == 1:
        return gemv(x, w, norm=norm, eps=eps)
    return gemm(rms_norm(x, norm, eps), w)


def norm_logits(x: Tensor, norm: Tensor, eps: float, w: Linear) -> Tensor:
    """`rms_norm(x) * norm @ w.T` in float32, for a head: [M, K] to [M, N].

    A packed head's sums are returned as they are, a dense one's are rounded to its dtype first.
    """
    if isinstance(w, DenseLinear):
        return linear(rms_norm(x, norm, eps), w.weight).float()
    if x.shape[0] == 1:
        return gemv(x, w, norm=norm, eps=eps, dtype=torch.float32)
    return gemm(rms_norm(x, norm, eps), w, dtype=torch.float32)


def norm_swiglu(x: Tensor, norm: Tensor, eps: float, gate_up: Linear) -> Tensor:
    """`silu(gate) * up` of the normed x; see `Ops.norm_swiglu`."""
    if isinstance(gate_up, DenseLinear):
        return swiglu(linear(rms_norm(x, norm, eps), gate_up.weight))
    if x.shape[0] == 1:
        return gemv_swiglu(x, norm, eps, gate_up)
    return swiglu(gemm(rms_norm(x, norm, eps), gate_up))


def linear_add(x: Tensor, w: Linear, residual: Tensor) -> Tensor:
    """`residual + x @ w.T`; see `Ops.linear_add`."""
    if isinstance(w, DenseLinear):
        return residual + linear(x, w.weight)
    if x.shape[0] == 1:
        return gemv(x, w, residual=residual)
    return gemm(x, w, residual)


def attention(
    qkv: Tensor,
    q_norm: Tensor,
    k_norm: Tensor,
    eps: float,
    rope: Rope,
    cache: KVCache,
    layer: int,
) -> Tensor:
    """Norm, rotate, append, attend; see `Ops.attention`."""
    attend = attention_decode if qkv.shape[0] == 1 else attention_prefill
    return attend(qkv, q_norm, k_norm, eps, rope, cache, layer)
