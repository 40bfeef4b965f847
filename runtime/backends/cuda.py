"""The GPU backend: `lowbit.runtime.backends.ops.Ops` over the Triton kernels.

A decode step launches GEMVs and decode attention without a synchronization or a host read, so a
CUDA graph can capture it; a short chunk of a prompt too, and on Hopper any (`engine.chunks`). A
prompt takes the GEMVs while its tokens are few; beyond, weights are widened in registers on Hopper,
and for cuBLAS elsewhere (`launch.choose`).
"""

from dataclasses import replace

import torch
from torch import Tensor

from lowbit.formats.activation_modes import Activations, Inputs
from lowbit.formats.activations import activation_group
from lowbit.formats.errors import UnsupportedModelError
from lowbit.runtime.backends.cuda_experts import check_experts as check_experts
from lowbit.runtime.backends.cuda_experts import mixture
from lowbit.runtime.kernels.attention.block import attend_block as attend_block
from lowbit.runtime.kernels.attention.block import write_context as write_context
from lowbit.runtime.kernels.attention.decode import attention_decode
from lowbit.runtime.kernels.attention.prefill import attention_prefill
from lowbit.runtime.kernels.convolve import convolve as convolve
from lowbit.runtime.kernels.delta.decode import delta_decode, delta_decode_parts
from lowbit.runtime.kernels.delta.prefill import delta_prefill
from lowbit.runtime.kernels.experts.tiled import gathered as gathered
from lowbit.runtime.kernels.head import head_input as head_input
from lowbit.runtime.kernels.head import store_hidden as store_hidden
from lowbit.runtime.kernels.launch.choose import choose as choose_product
from lowbit.runtime.kernels.launch.choose import takes_rows
from lowbit.runtime.kernels.launch.delta import MOST_DIM, norms_later
from lowbit.runtime.kernels.launch.device import card_of
from lowbit.runtime.kernels.launch.tuned import Launches
from lowbit.runtime.kernels.linear.dense import dense_gemm, dense_gemv
from lowbit.runtime.kernels.linear.gemm import gemm
from lowbit.runtime.kernels.linear.gemm_int8 import gemm_int8
from lowbit.runtime.kernels.linear.gemv import gemv, gemv_and_rows
from lowbit.runtime.kernels.linear.mma_int8 import mma_int8
from lowbit.runtime.kernels.linear.remainders import with_remainders
from lowbit.runtime.kernels.linear.stream_int8 import stream_int8
from lowbit.runtime.kernels.linear.tiles import GpuLinear, TiledLinear, tiled
from lowbit.runtime.kernels.linear.widen import widened_gemm
from lowbit.runtime.kernels.rows import embed as embed
from lowbit.runtime.kernels.rows import rms_norm as rms_norm
from lowbit.runtime.kernels.rows import swiglu as swiglu_of
from lowbit.runtime.kernels.sampling.accept import accept as accept
from lowbit.runtime.kernels.sampling.choose import choose as choose
from lowbit.runtime.kernels.sampling.drafts import begin_blocks as begin_blocks
from lowbit.runtime.kernels.sampling.drafts import place_drafts as place_drafts
from lowbit.runtime.kernels.sampling.join import join_copies as join_copies
from lowbit.runtime.kernels.sampling.logprobs import log_probabilities as log_probabilities
from lowbit.runtime.state.delta import LayerStates
from lowbit.runtime.state.pages import KVPages
from lowbit.runtime.state.step import Step
from lowbit.runtime.weights.layers import AttentionLayer, DeltaLayer
from lowbit.runtime.weights.linear import DenseLinear, ExpertWeights, Linear, PackedLinear

LEAST_HEAD = 16  # what a tensor-core tile takes
MOST_HEAD = 256  # what registers hold


def prepare(
    w: Linear,
    paired: bool = False,
    inputs: Inputs = "exact",
    launches: Launches | None = None,
) -> GpuLinear:
    """The form of a linear that the kernels read.

    Args:
        paired: rows of its first half meet those of the second, see `TiledLinear`.
        inputs: of a packed linear; a dense one takes them as they are.
        launches: measured on this card, for exact inputs; None for those of the tables alone.

    Raises:
        FormatError: rows or groups are not a multiple of 32 codes.
    """
    if not isinstance(w, PackedLinear):
        return w
    activations: Activations = "exact" if inputs == "exact" else "int8"
    made = tiled(w, paired, activations, whole=inputs == "whole")
    if inputs == "int16":
        return replace(made, remainders=True)
    if launches is None or inputs != "exact":
        return made
    return replace(made, tuned=launches.of(made.size))


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


def check_attention(head_dim: int, rotary_dim: int) -> None:
    """Refuse attention that the kernels cannot compute.

    Raises:
        UnsupportedModelError: naming the size.
    """
    check_heads(MOST_HEAD, head_dim=head_dim)
    if rotary_dim % LEAST_HEAD:
        raise UnsupportedModelError(
            f"attention has no GPU kernel: {rotary_dim} rotated dimensions, not a multiple of 16",
            hint="run on the CPU with --device cpu",
        )


def check_delta(key_dim: int, value_dim: int) -> None:
    """Refuse gated DeltaNet heads that the kernels cannot tile.

    Raises:
        UnsupportedModelError: naming the size.
    """
    check_heads(MOST_DIM, linear_key_head_dim=key_dim, linear_value_head_dim=value_dim)


def product(
    x: Tensor,
    w: GpuLinear,
    *,
    norm: Tensor | None = None,
    eps: float = 0.0,
    added: Tensor | None = None,
    swiglu: bool = False,
    logits: bool = False,
    squares: Tensor | None = None,
) -> Tensor:
    """`added + rms_norm(x) @ w.T`; see `Ops.product`.

    Logits of a dense head are rounded for more than DENSE_TOKENS tokens.

    Args:
        x: [M, K].
        swiglu: of gate and up; a packed weight must have been prepared as paired.
        squares: of the heads of x, whose norm takes the place of `norm`; see `gemv`.
    """
    if isinstance(w, TiledLinear) and w.remainders:
        if norm is None or added is not None:
            raise ValueError("a head is given a norm and nothing to add")
        return _head_product(x, w, norm, eps)
    dtype = torch.float32 if logits else x.dtype
    if added is not None and added.dim() == 1:
        added = added[None]
    variant = choose_product(w, len(x), card_of(x), normed=norm is not None, logits=logits)
    way = variant.way
    if isinstance(w, TiledLinear):
        if way in ("gemv", "wgmma"):
            return gemv(x, w, variant, norm, squares, eps, added, dtype)
        if way == "stream":
            return stream_int8(
                x, w, variant.stream, norm=norm, squares=squares, eps=eps, added=added, dtype=dtype
            )
        if way == "int8":
            return gemm_int8(
                x, w, variant.int8, norm=norm, squares=squares, eps=eps, added=added, dtype=dtype
            )
        if way == "mma":
            return mma_int8(x, w, norm=norm, squares=squares, eps=eps, added=added, dtype=dtype)
        if way == "gemm":
            return gemm(x, w, norm=norm, eps=eps, added=added)
        return widened_gemm(x if norm is None else rms_norm(x, norm, eps), w, added, dtype)
    if way == "rows":
        y = dense_gemv(x, w.weight, norm=norm, eps=eps, added=added, dtype=dtype)
    else:
        y = dense_gemm(x if norm is None else rms_norm(x, norm, eps), w.weight, added, dtype)
    return swiglu_of(y) if swiglu else y


def _head_product(x: Tensor, w: TiledLinear, norm: Tensor, eps: float) -> Tensor:
    """`rms_norm(x) @ w.T` of inputs in 16 bits, for any number of tokens the same bits of each."""
    both = with_remainders(x, activation_group(w.group_size, w.K), norm, eps)
    variant = choose_product(w, len(both), card_of(x))
    if variant.way == "gemv":
        y = gemv(both, w, variant, dtype=torch.float32)
        return y[::2] + y[1::2]
    if variant.way == "stream":
        return stream_int8(both, w, variant.stream, dtype=torch.float32)
    if variant.way == "int8":
        return gemm_int8(both, w, variant.int8, dtype=torch.float32)
    return mma_int8(both, w, dtype=torch.float32)


def two_products(
    x: Tensor, w: GpuLinear, small: GpuLinear, norm: Tensor, eps: float, few: bool = False
) -> tuple[Tensor, Tensor]:
    """`product` of two weights for the same normed x; see `Ops.two_products`."""
    if (
        isinstance(w, TiledLinear)
        and isinstance(small, DenseLinear)
        and w.activations == "exact"
        and takes_rows(x.shape[0])
    ):
        return gemv_and_rows(x, w, small.weight, norm=norm, eps=eps)
    first = product(x, w, norm=norm, eps=eps)
    if isinstance(small, DenseLinear):
        return first, dense_gemv(x, small.weight, norm=norm, eps=eps)
    return first, product(x, small, norm=norm, eps=eps)


def moe(x: Tensor, norm: Tensor, eps: float, experts: ExpertWeights[GpuLinear]) -> Tensor:
    """Add the output of a mixture of experts to x; see `Ops.moe`."""
    return mixture(x, norm, eps, experts)


def attention(qkv: Tensor, layer: AttentionLayer, pages: KVPages, step: Step) -> Tensor:
    """Norm, rotate, append, attend; see `Ops.attention`."""
    attend = attention_prefill if step.prompt else attention_decode
    return attend(qkv, layer, pages, step)


def delta_linear(
    qkvz: Tensor,
    ba: Tensor,
    layer: DeltaLayer,
    states: LayerStates,
    step: Step,
    w: GpuLinear,
    residual: Tensor,
) -> Tensor:
    """Gated DeltaNet and its output linear; see `Ops.delta_linear`."""
    if isinstance(w, TiledLinear) and norms_later(len(qkvz), step.prompt, w.activations):
        parts, squares = delta_decode_parts(qkvz, ba, layer, states, step)
        return product(parts, w, squares=squares, eps=layer.eps, added=residual)
    advance = delta_prefill if step.prompt else delta_decode
    return product(advance(qkvz, ba, layer, states, step), w, added=residual)
