"""The ops of a rank on a GPU: those of `backends.cuda`, with an exchange behind partial products.

Linears shared out by rows give the rank's heads and widths. Those shared out by columns give FP32
sums, which are pushed to all ranks and added there in one order, the residual last, and rounded
once. So ranks have the same bits; a single GPU adds the parts of K in another order.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import Tensor

from lowbit.formats.activation_modes import Inputs
from lowbit.runtime.backends import cuda
from lowbit.runtime.backends.cuda_experts import mixture
from lowbit.runtime.kernels.delta.decode import delta_decode, delta_decode_parts
from lowbit.runtime.kernels.delta.prefill import delta_prefill
from lowbit.runtime.kernels.exchange import exchange_columns, exchange_sum, sum_pushed
from lowbit.runtime.kernels.exchange_wide import exchange_wide, takes_wide
from lowbit.runtime.kernels.launch.choose import choose as choose_product
from lowbit.runtime.kernels.launch.delta import norms_later
from lowbit.runtime.kernels.launch.device import card_of
from lowbit.runtime.kernels.linear.gemv import gemv_pushed, pushes
from lowbit.runtime.kernels.linear.tiles import GpuLinear, TiledLinear
from lowbit.runtime.kernels.ptx.peers import Peers
from lowbit.runtime.state.delta import LayerStates
from lowbit.runtime.state.step import Step
from lowbit.runtime.weights.layers import DeltaLayer
from lowbit.runtime.weights.linear import DenseLinear, ExpertWeights, Linear
from lowbit.runtime.weights.share import (
    HEAD,
    PARTIAL_ENDS,
    HeadRows,
    HeadShare,
    PartialLinear,
    Share,
    widths_of,
)

RankLinear = GpuLinear | PartialLinear[GpuLinear] | HeadRows[GpuLinear]
EXPERTS = (".experts.", ".shared_expert.")  # in names of linears of a mixture


def prepare(w: Linear, paired: bool, inputs: Inputs) -> RankLinear:
    """The form of a linear that is no partial one yet; see `cuda.prepare`."""
    return cuda.prepare(w, paired, inputs)


def gathered(read: Callable[[int, int], RankLinear], count: int) -> Sequence[RankLinear]:
    """Linears of all experts in one buffer, which are no partial ones; see `cuda.gathered`."""
    return cuda.gathered(lambda first, stop: by_rows(read(first, stop)), count)


def rank_form(module: str, form: RankLinear, share: Share, rows: HeadShare) -> RankLinear:
    """The form of a rank's part of a linear; see `cpu_parallel.rank_form`.

    Those of experts stay as they are: `RankOps.moe` adds all experts of a token.
    """
    if module == HEAD:
        head = by_rows(form)
        if isinstance(head, DenseLinear) and rows[-1][1] == head.N:  # the embedding
            head = DenseLinear(head.weight[slice(*rows[share.rank])])
        return HeadRows(head, widths_of(rows))
    if module.endswith(PARTIAL_ENDS) and not any(name in module for name in EXPERTS):
        return PartialLinear(by_rows(form))
    return form


@dataclass(frozen=True, slots=True)
class RankOps:
    """The ops of `Ops` over the parts of a rank; all ranks call the same in the same order."""

    peers: Peers
    zeros: Tensor  # [M, h] float32, for the most tokens that pass a mixture of experts together

    embed = staticmethod(cuda.embed)
    rms_norm = staticmethod(cuda.rms_norm)
    attention = staticmethod(cuda.attention)
    choose = staticmethod(cuda.choose)
    log_probabilities = staticmethod(cuda.log_probabilities)
    accept = staticmethod(cuda.accept)
    place_drafts = staticmethod(cuda.place_drafts)
    head_input = staticmethod(cuda.head_input)
    store_hidden = staticmethod(cuda.store_hidden)

    def product(
        self,
        x: Tensor,
        w: RankLinear,
        *,
        norm: Tensor | None = None,
        eps: float = 0.0,
        added: Tensor | None = None,
        swiglu: bool = False,
        logits: bool = False,
    ) -> Tensor:
        """`added + rms_norm(x) @ w.T` of all ranks' parts; see `Ops.product`."""
        if isinstance(w, PartialLinear):
            return self._sum(x, w.form, added)
        form = w.form if isinstance(w, HeadRows) else w
        y = cuda.product(x, form, norm=norm, eps=eps, added=added, swiglu=swiglu, logits=logits)
        return exchange_columns(y, w.widths, self.peers) if isinstance(w, HeadRows) else y

    def two_products(
        self,
        x: Tensor,
        w: RankLinear,
        small: RankLinear,
        norm: Tensor,
        eps: float,
        few: bool = False,
    ) -> tuple[Tensor, Tensor]:
        """`product` of two weights shared out by rows; see `Ops.two_products`."""
        return cuda.two_products(x, by_rows(w), by_rows(small), norm, eps, few)

    def moe(
        self, x: Tensor, norm: Tensor, eps: float, experts: ExpertWeights[RankLinear]
    ) -> Tensor:
        """Add the output of a mixture of experts, each with a part of its width; see `Ops.moe`."""
        parts = cast("ExpertWeights[GpuLinear]", experts)
        return self._total(mixture(x, norm, eps, parts, self.zeros[: len(x)]), x, x.dtype)

    def delta_linear(
        self,
        qkvz: Tensor,
        ba: Tensor,
        layer: DeltaLayer,
        states: LayerStates,
        step: Step,
        w: RankLinear,
        residual: Tensor,
    ) -> Tensor:
        """Gated DeltaNet of the rank's heads, and its output linear; see `Ops.delta_linear`."""
        if not isinstance(w, PartialLinear):
            raise TypeError(f"{type(w).__name__} has no partial sums")
        form, inputs = w.form, (qkvz, ba, layer, states, step)
        if isinstance(form, TiledLinear) and norms_later(len(qkvz), step.prompt, form.activations):
            parts, squares = delta_decode_parts(*inputs)
            return self._sum(parts, form, residual, squares, layer.eps)
        advance = delta_prefill if step.prompt else delta_decode
        return self._sum(advance(*inputs), form, residual)

    def _total(self, partial: Tensor, added: Tensor | None, dtype: torch.dtype) -> Tensor:
        """All ranks' partial sums and what is added, rounded to a dtype."""
        if takes_wide(partial, self.peers, dtype):
            return exchange_wide(partial, added, self.peers)
        return exchange_sum(partial, added, self.peers, dtype)

    def _sum(
        self,
        x: Tensor,
        w: GpuLinear,
        added: Tensor | None,
        squares: Tensor | None = None,
        eps: float = 0.0,
    ) -> Tensor:
        """`added + x @ w.T`, the sum of all ranks' parts; squares: see `partial_product`."""
        dtype = x.dtype
        if added is None or not isinstance(w, TiledLinear) or not pushes(w, len(x), card_of(x)):
            return self._total(partial_product(x, w, squares, eps), added, dtype)
        y = added.new_empty((1, w.N), dtype=dtype)
        gemv_pushed(x, w, self.peers, squares, eps)
        sum_pushed(y, added, self.peers)
        return y


def by_rows(w: RankLinear) -> GpuLinear:
    """The form of a linear that needs no exchange."""
    if isinstance(w, PartialLinear | HeadRows):
        raise TypeError(f"{type(w).__name__} needs an exchange")
    return w


def partial_product(
    x: Tensor, w: GpuLinear, squares: Tensor | None = None, eps: float = 0.0
) -> Tensor:
    """`x @ w.T` as FP32 sums, which nothing has rounded: [M, K] to [M, N] float32.

    squares: of the heads of x, see `cuda.product`.
    """
    way: Any = choose_product(w, len(x), card_of(x), logits=True).way
    if isinstance(w, DenseLinear) and way == "cublas":
        return torch.mm(x, w.weight.T, out_dtype=torch.float32)
    return cuda.product(x, w, squares=squares, eps=eps, logits=True)
