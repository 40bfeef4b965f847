"""The ops of a rank on a CPU: those of `backends.cpu`, with an exchange behind partial products.

Linears shared out by rows give the rank's heads and widths and need no exchange. Those shared out
by columns multiply in FP32, from the same codes; their partial sums are added in FP32 in the order
of the ranks, and rounded once as the product of a single rank is: of inputs in eight bits once the
residual has been added. So a result differs from a single rank's by the order of a sum in FP32
alone, before that rounding.
"""

from dataclasses import dataclass, replace
from typing import cast

from torch import Tensor

from lowbit.runtime.backends import cpu
from lowbit.runtime.backends.cpu_experts import mixture
from lowbit.runtime.backends.cpu_int8 import GroupedCodes
from lowbit.runtime.backends.cpu_linear import CpuLinear, Int8Rows, Planes, linear
from lowbit.runtime.backends.delta_rule import delta_net
from lowbit.runtime.backends.exchange import Exchange
from lowbit.runtime.state.delta import LayerStates
from lowbit.runtime.state.step import Step
from lowbit.runtime.weights.layers import DeltaLayer
from lowbit.runtime.weights.linear import DenseLinear, ExpertWeights
from lowbit.runtime.weights.share import (
    HEAD,
    PARTIAL_ENDS,
    HeadRows,
    HeadShare,
    PartialLinear,
    Share,
    widths_of,
)

RankLinear = CpuLinear | PartialLinear[CpuLinear] | HeadRows[CpuLinear]


def rank_form(module: str, form: RankLinear, share: Share, rows: HeadShare) -> RankLinear:
    """The form of a rank's part of a linear.

    Args:
        module: name of the linear, or of the first of those that are stacked.
        form: of the part, or of the whole embedding where that is the head.
        share: the rank.
        rows: rows of the head of every rank.
    """
    if module == HEAD:
        return _head_form(by_rows(form), share, rows)
    if not module.endswith(PARTIAL_ENDS):
        return form
    match form:
        case Planes():
            return PartialLinear(replace(form, scale_zero=form.scale_zero.float()))
        case Int8Rows():
            return PartialLinear(replace(form, scales=form.scales.float()))
        case DenseLinear():
            return PartialLinear(DenseLinear(form.weight.float()))
        case GroupedCodes():  # whose products are FP32
            return PartialLinear(form)
        case _:
            raise TypeError(f"{type(form).__name__} has no partial sums")


def _head_form(form: CpuLinear, share: Share, rows: HeadShare) -> HeadRows[CpuLinear]:
    widths = widths_of(rows)
    if isinstance(form, DenseLinear) and sum(widths) == form.N:  # the embedding
        form = DenseLinear(form.weight[slice(*rows[share.rank])])
    return HeadRows(form, widths)


@dataclass(frozen=True, slots=True)
class RankOps:
    """The ops of `Ops` over the parts of a rank; all ranks call the same in the same order."""

    exchange: Exchange

    embed = staticmethod(cpu.embed)
    rms_norm = staticmethod(cpu.rms_norm)
    attention = staticmethod(cpu.attention)
    choose = staticmethod(cpu.choose)
    log_probabilities = staticmethod(cpu.log_probabilities)
    accept = staticmethod(cpu.accept)
    place_drafts = staticmethod(cpu.place_drafts)
    head_input = staticmethod(cpu.head_input)
    store_hidden = staticmethod(cpu.store_hidden)

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
            y = self.exchange.total(_partial(x, w))
            y = y if isinstance(w.form, GroupedCodes) else y.to(x.dtype)
            return (y if added is None else added + y).to(x.dtype)
        form = w.form if isinstance(w, HeadRows) else w
        y = cpu.product(x, form, norm=norm, eps=eps, added=added, swiglu=swiglu, logits=logits)
        return self.exchange.side_by_side(y, w.widths) if isinstance(w, HeadRows) else y

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
        return cpu.two_products(x, by_rows(w), by_rows(small), norm, eps, few)

    def moe(
        self, x: Tensor, norm: Tensor, eps: float, experts: ExpertWeights[RankLinear]
    ) -> Tensor:
        """Add the output of a mixture of experts, each with a part of its width; see `Ops.moe`."""
        forms = cast("ExpertWeights[CpuLinear]", experts)  # but for `down`, which is read below
        total = self.exchange.total(mixture(x, norm, eps, forms, _partial))
        return (x.float() + total).to(x.dtype)

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
        return self.product(delta_net(qkvz, ba, layer, states, step), w, added=residual)


def by_rows(w: RankLinear) -> CpuLinear:
    """The form of a linear that needs no exchange."""
    if isinstance(w, PartialLinear | HeadRows):
        raise TypeError(f"{type(w).__name__} needs an exchange")
    return w


def _partial(x: Tensor, w: RankLinear) -> Tensor:
    """Partial sums of a product: [M, K] to [M, N] float32."""
    if not isinstance(w, PartialLinear):
        raise TypeError(f"{type(w).__name__} has no partial sums")
    return linear(x.float(), w.form)
