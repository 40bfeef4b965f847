"""The GPU backend: `lowbit.runtime.backends.ops.Ops` over the Triton kernels.

A decode step, of one token or of one of each of several sequences, takes the GEMVs and split
attention, without a synchronization or a host read, so a CUDA graph can capture it; a prompt takes
the GEMVs up to 128 tokens and weights widened for cuBLAS beyond.
"""

import torch
from torch import Tensor
from torch.nn import functional

from lowbit.formats.errors import UnsupportedModelError
from lowbit.runtime.backends.cuda_experts import check_experts as check_experts
from lowbit.runtime.backends.cuda_experts import mixture
from lowbit.runtime.kernels.attention.decode import attention_decode
from lowbit.runtime.kernels.attention.prefill import attention_prefill
from lowbit.runtime.kernels.delta.decode import MOST_DIM, delta_decode, delta_decode_parts
from lowbit.runtime.kernels.delta.prefill import delta_prefill
from lowbit.runtime.kernels.experts.tiled import gathered as gathered
from lowbit.runtime.kernels.head import head_input as head_input
from lowbit.runtime.kernels.head import leave_rows as leave_rows
from lowbit.runtime.kernels.launch.tokens import DENSE_TOKENS
from lowbit.runtime.kernels.linear.dense import dense_gemv
from lowbit.runtime.kernels.linear.gemv import gemv, gemv_and_rows
from lowbit.runtime.kernels.linear.tiles import GpuLinear, TiledLinear, tiled
from lowbit.runtime.kernels.linear.widen import gemm, gemm_swiglu
from lowbit.runtime.kernels.rows import embed as embed
from lowbit.runtime.kernels.rows import rms_norm as rms_norm
from lowbit.runtime.kernels.rows import swiglu
from lowbit.runtime.kernels.sampling.accept import accept as accept
from lowbit.runtime.kernels.sampling.choose import choose as choose
from lowbit.runtime.kernels.sampling.logprobs import log_probabilities as log_probabilities
from lowbit.runtime.state.delta import DeltaSlots, DeltaWeights
from lowbit.runtime.state.pages import KVPages
from lowbit.runtime.state.rope import Rope
from lowbit.runtime.state.step import Step
from lowbit.runtime.weights.experts import ExpertWeights
from lowbit.runtime.weights.linear import DenseLinear, Linear, PackedLinear

LEAST_HEAD = 16  # what a tensor-core tile takes
MOST_SHARED = 8  # rows of half a tile
MOST_HEAD = 256  # what registers hold
MOST_EXACT = 16  # tokens of a step that each get the bits of a step of their own
GEMV_TOKENS = 128  # up to here weights are widened on their way, above before


def prepare(w: Linear, paired: bool = False) -> GpuLinear:
    """The form of a linear that the kernels read.

    Raises:
        FormatError: rows or groups are not a multiple of 32 codes.
    """
    return tiled(w, paired) if isinstance(w, PackedLinear) else w


def check_heads(most: int, **dims: int) -> None:
    """Refuse head sizes the kernels cannot tile.

    Raises:
        UnsupportedModelError: a size that is not a power of two from 16 to `most`, by name.
    """
    for name, size in dims.items():
        if not LEAST_HEAD <= size <= most or size & (size - 1):
            raise UnsupportedModelError(
                f"{name} = {size} has no GPU kernel: heads must be a power of two from "
                f"{LEAST_HEAD} to {most}",
                hint="run on the CPU with --device cpu",
            )


def check_attention(heads: int, kv_heads: int, head_dim: int, rotary_dim: int) -> None:
    """Refuse attention that the decode kernel has no place for.

    Raises:
        UnsupportedModelError: naming the size.
    """
    check_heads(MOST_HEAD, head_dim=head_dim)
    shared = heads // kv_heads
    for wrong, what in (
        (shared > MOST_SHARED, f"{shared} query heads on one kv head, at most {MOST_SHARED}"),
        (rotary_dim % LEAST_HEAD, f"{rotary_dim} rotated dimensions, not a multiple of 16"),
    ):
        if wrong:
            raise UnsupportedModelError(
                f"attention has no GPU kernel: {what}", hint="run on the CPU with --device cpu"
            )


def check_delta(key_dim: int, value_dim: int) -> None:
    """Refuse gated DeltaNet heads whose memory has no place in a program.

    Raises:
        UnsupportedModelError: naming the size.
    """
    check_heads(MOST_DIM, linear_key_head_dim=key_dim, linear_value_head_dim=value_dim)


def norm_linear(
    x: Tensor, norm: Tensor, eps: float, w: GpuLinear, bias: Tensor | None = None
) -> Tensor:
    """`rms_norm(x) * norm @ w.T + bias`; see `Ops.norm_linear`."""
    added = None if bias is None else bias[None]
    if isinstance(w, TiledLinear):
        return _product(x, w, norm, eps, added)
    if x.shape[0] <= DENSE_TOKENS:
        return dense_gemv(x, w.weight, norm=norm, eps=eps, added=added)
    return functional.linear(rms_norm(x, norm, eps), w.weight, bias)


def linear(x: Tensor, w: GpuLinear) -> Tensor:
    """`x @ w.T`; see `Ops.linear`."""
    if isinstance(w, TiledLinear):
        return _product(x, w)
    if x.shape[0] <= DENSE_TOKENS:
        return dense_gemv(x, w.weight)
    return functional.linear(x, w.weight)


def norm_linears(
    x: Tensor, norm: Tensor, eps: float, w: GpuLinear, small: GpuLinear
) -> tuple[Tensor, Tensor]:
    """`norm_linear` of two weights; see `Ops.norm_linears`."""
    few = x.shape[0] <= DENSE_TOKENS
    if few and isinstance(w, TiledLinear) and isinstance(small, DenseLinear):
        return gemv_and_rows(x, w, small.weight, norm=norm, eps=eps)
    return norm_linear(x, norm, eps, w), norm_linear(x, norm, eps, small)


def norm_logits(x: Tensor, norm: Tensor, eps: float, w: GpuLinear) -> Tensor:
    """`rms_norm(x) * norm @ w.T` in float32, for a head: [M, K] to [M, N].

    Sums are returned as they are, but for a dense head of more than 16 tokens, whose are rounded.
    """
    if isinstance(w, TiledLinear):
        return _product(x, w, norm, eps, dtype=torch.float32)
    if x.shape[0] <= DENSE_TOKENS:
        return dense_gemv(x, w.weight, norm=norm, eps=eps, dtype=torch.float32)
    return functional.linear(rms_norm(x, norm, eps), w.weight).float()


def norm_swiglu(x: Tensor, norm: Tensor, eps: float, gate_up: GpuLinear) -> Tensor:
    """`silu(gate) * up` of the normed x; see `Ops.norm_swiglu`."""
    if isinstance(gate_up, DenseLinear):
        return swiglu(norm_linear(x, norm, eps, gate_up))
    if x.shape[0] <= GEMV_TOKENS:
        return gemv(x, gate_up, norm=norm, eps=eps)
    return gemm_swiglu(rms_norm(x, norm, eps), gate_up)


def linear_add(x: Tensor, w: GpuLinear, residual: Tensor) -> Tensor:
    """`residual + x @ w.T`; see `Ops.linear_add`."""
    if isinstance(w, TiledLinear):
        return _product(x, w, added=residual)
    if x.shape[0] <= DENSE_TOKENS:
        return dense_gemv(x, w.weight, added=residual)
    return residual + functional.linear(x, w.weight)


def moe(x: Tensor, norm: Tensor, eps: float, experts: ExpertWeights[GpuLinear]) -> Tensor:
    """`x` plus what a mixture of experts makes of it; see `Ops.moe`."""
    return mixture(x, norm, eps, experts)


def _product(
    x: Tensor,
    w: TiledLinear,
    norm: Tensor | None = None,
    eps: float = 0.0,
    added: Tensor | None = None,
    dtype: torch.dtype | None = None,
) -> Tensor:
    """`added + rms_norm(x) @ w.T`, by the kernel for so many tokens."""
    if x.shape[0] <= GEMV_TOKENS:
        return gemv(x, w, norm=norm, eps=eps, added=added, dtype=dtype)
    return gemm(x if norm is None else rms_norm(x, norm, eps), w, added, dtype)


def attention(
    qkv: Tensor,
    q_norm: Tensor | None,
    k_norm: Tensor | None,
    eps: float,
    rope: Rope,
    pages: KVPages,
    step: Step,
    layer: int,
    gated: bool = False,
) -> Tensor:
    """Norm, rotate, append, attend; see `Ops.attention`."""
    attend = attention_prefill if step.prompt else attention_decode
    return attend(qkv, q_norm, k_norm, eps, rope, pages, step, layer, gated)


def delta_linear(
    qkvz: Tensor,
    ba: Tensor,
    weights: DeltaWeights,
    eps: float,
    slots: DeltaSlots,
    step: Step,
    layer: int,
    w: GpuLinear,
    residual: Tensor,
) -> Tensor:
    """Gated DeltaNet and its output linear; see `Ops.delta_linear`."""
    few = not step.prompt and qkvz.shape[0] <= MOST_EXACT
    if few and isinstance(w, TiledLinear):
        parts, squares = delta_decode_parts(qkvz, ba, weights, slots, step, layer)
        return gemv(parts, w, squares=squares, eps=eps, added=residual)
    return linear_add(delta_net(qkvz, ba, weights, eps, slots, step, layer), w, residual)


def delta_net(
    qkvz: Tensor,
    ba: Tensor,
    weights: DeltaWeights,
    eps: float,
    slots: DeltaSlots,
    step: Step,
    layer: int,
) -> Tensor:
    """Gated DeltaNet without its output linear: [M, Hv * Dv]."""
    advance = delta_prefill if step.prompt else delta_decode
    return advance(qkvz, ba, weights, eps, slots, step, layer)
