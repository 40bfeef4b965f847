"""Some rows of a model's head as a linear of their own, and logits that some of them refine."""

from dataclasses import dataclass
from typing import Generic, TypeVar

from torch import Tensor

from lowbit.formats.activation_modes import Inputs
from lowbit.formats.head_rows import PackedRows
from lowbit.formats.layout.packing import WORD_BITS
from lowbit.runtime.backends.ops import Ops
from lowbit.runtime.weights.linear import PackedLinear
from lowbit.runtime.weights.weights import Weights

W = TypeVar("W")  # what the backend keeps a linear as


@dataclass(frozen=True, slots=True)
class SelectedRows(Generic[W]):
    """Rows of a model's head."""

    ids: Tensor  # [N] int64, token of every row, ascending
    head: W  # [N, h]


def selected_rows(
    rows: PackedRows | None, weights: Weights[W], inputs: Inputs = "exact"
) -> SelectedRows[W] | None:
    """Packed rows on the model's device; None without any."""
    if rows is None:
        return None
    packed = PackedLinear(
        codes=rows.packed.to(weights.device),
        scales=rows.scale.to(weights.device),
        bits=rows.scheme.bits,
        group_size=rows.scheme.group_size or rows.packed.shape[1] * WORD_BITS // rows.scheme.bits,
    )
    head = weights.prepare(packed, False, inputs)
    return SelectedRows(rows.ids.long().to(weights.device), head)


def head_logits(
    ops: Ops[W],
    hidden: Tensor,
    head: W,
    norm: Tensor,
    eps: float,
    frequent: SelectedRows[W] | None,
) -> Tensor:
    """Final norm and head, frequent rows in place of the head's own: [M, h] to [M, V] float32.

    Args:
        hidden: [M, h], before the norm.
        head: [V, h].
        frequent: rows in more bits, which every rank has whole; None without some.
    """
    logits = ops.product(hidden, head, norm=norm, eps=eps, logits=True)
    if frequent is None:
        return logits
    own = ops.product(hidden, frequent.head, norm=norm, eps=eps, logits=True)
    return logits.index_copy_(1, frequent.ids, own[:, : len(frequent.ids)])
