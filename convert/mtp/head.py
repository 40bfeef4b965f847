"""The head for multi-token prediction, in FP32, on columns of a sequence.

A column holds a hidden state H, after the trunk's final norm, and the token that follows it:
    x = fc(concat[norm_e(embedding of the token), norm_h(H)]),  y = layer(x),  H' = norm(y),
and H' times the model's own head gives the logits of the token after that one. Its position is that
of its H. A further draft is a column of the drafted token and H'.
"""

import copy
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import Tensor

from lowbit.convert.original.model import LayeredModel
from lowbit.convert.original.threads import Pool, for_each
from lowbit.convert.original.walk import HEAD_ROWS, HEAD_TOKENS, blocks
from lowbit.convert.original.weights import Weights
from lowbit.formats.architectures.names import (
    MTP_EMBEDDING_NORM,
    MTP_FC,
    MTP_HIDDEN_NORM,
    MTP_NORM,
    MTP_PREFIX,
)
from lowbit.formats.head_rows import PackedRows
from lowbit.formats.layout.packing import dequantize, unpack

LAYER = f"{MTP_PREFIX}layers.0."
NORMS = (MTP_EMBEDDING_NORM, MTP_HIDDEN_NORM, MTP_NORM)


@dataclass(frozen=True, slots=True)
class MtpHead:
    """A head for multi-token prediction, whole in memory."""

    norms: Mapping[str, torch.nn.Module]  # modules by the name of their weight
    fc: Tensor  # [h, 2h] float32
    layer: torch.nn.Module  # its decoder layer, transformers' own for full attention
    arguments: Mapping[str, Any]  # what the model passes to such a layer

    def joined(self, embeddings: Tensor, hidden: Tensor) -> Tensor:
        """Inputs of the layer: [..., h] embeddings of tokens and [..., h] states to [..., h]."""
        e, h = self.norms[MTP_EMBEDDING_NORM](embeddings), self.norms[MTP_HIDDEN_NORM](hidden)
        return torch.cat((e, h), dim=-1) @ self.fc.T

    def __call__(self, x: Tensor, positions: Tensor, allowed: Tensor) -> Tensor:
        """H' of columns: [columns, h] float32.

        Args:
            x: [columns, h] of `joined`.
            positions: [columns] int64, below the tokens of a window.
            allowed: [columns, columns] bool, True where a row may attend to a column.
        """
        cos, sin = (part[:, positions] for part in self.arguments["position_embeddings"])
        arguments = {
            **self.arguments,
            "position_embeddings": (cos, sin),
            "attention_mask": allowed[None, None],
            "position_ids": positions[None],
        }
        out = self.layer(x[None], **arguments)
        y = out[0] if isinstance(out, tuple) else out
        return cast(Tensor, self.norms[MTP_NORM](y[0]))


def chained(
    text: Tensor, starts: Tensor, inputs: Sequence[Tensor]
) -> tuple[Tensor, Tensor, Tensor]:
    """Columns of a window, and of some rounds behind their beginnings in it.

    Args:
        text: [columns, h] inputs of the layer at the columns of the text.
        starts: [rounds] columns at which the rounds begin.
        inputs: [rounds, h] inputs of every further column, in order; at least one.

    Returns:
        Inputs, positions and mask for `MtpHead`; the last columns are those of the last inputs.
    """
    columns = torch.arange(len(text), device=text.device)
    own = len(inputs)
    positions = torch.cat([columns, *(starts + 1 + n for n in range(own))])
    sees_text = (columns <= starts[:, None]).repeat(own, 1)
    same = torch.eye(len(starts), dtype=torch.bool, device=text.device)
    earlier = torch.ones(own, own, dtype=torch.bool, device=text.device).tril()
    sees_own = torch.kron(earlier, same)
    blind = torch.zeros(len(text), len(sees_own), dtype=torch.bool, device=text.device)
    upper = torch.cat((columns[:, None] >= columns, blind), dim=1)
    allowed = torch.cat((upper, torch.cat((sees_text, sees_own), dim=1)))
    return torch.cat([text, *inputs]), positions, allowed


def load_mtp_head(model: LayeredModel, device: torch.device) -> MtpHead | None:
    """The head of a checkpoint with its weights; None where it has none, or one of more layers.

    Raises:
        CheckpointError, FormatError: a weight is missing, of another shape, or breaks the layout.
    """
    tensors = model.weights.checkpoint.tensors
    own = {name for name in tensors if name.startswith(MTP_PREFIX)}
    if not own or any(name.startswith(f"{MTP_PREFIX}layers.1.") for name in own):
        return None
    number = _full_attention(model, own)
    h = model.hidden_size
    return MtpHead(
        norms={
            name: _filled(model.norm, model.weights, name[: -len("weight")], device)
            for name in NORMS
        },
        fc=model.weights.read(MTP_FC, (h, 2 * h), device),
        layer=_filled(model.layers[number], model.weights, LAYER, device),
        arguments=model.arguments[number],
    )


def _filled(
    module: torch.nn.Module, weights: Weights, prefix: str, device: torch.device
) -> torch.nn.Module:
    copied = copy.deepcopy(module).requires_grad_(False)
    values = {
        name: weights.read(f"{prefix}{name}", tuple(w.shape), device)
        for name, w in copied.state_dict().items()
    }
    copied.load_state_dict(values, assign=True)
    return copied


def _full_attention(model: LayeredModel, own: set[str]) -> int:
    """Number of a decoder layer with the same modules as the head's."""
    norms = {name.removeprefix(LAYER) for name in own if name.endswith("norm.weight")}
    for number, layer in enumerate(model.layers):
        if norms >= {name for name in layer.state_dict() if name.endswith("norm.weight")}:
            return number
    raise RuntimeError("no layer like that of the head")  # a bug: the table of tensors has it


def greedy_tokens(model: LayeredModel, states: Tensor, pool: Pool) -> Tensor:
    """The token that the model's head ranks first for every state.

    Args:
        states: [tokens, h] float32, after a final norm.

    Returns:
        [tokens] int64; of equal logits the first.
    """
    return _highest(model.weights.rows(model.head, HEAD_ROWS, states.device), states, pool)


def draft_tokens(head: PackedRows, states: Tensor, pool: Pool) -> Tensor:
    """The token that a draft head ranks first for every state, as `greedy_tokens` does."""
    ids = head.ids.to(states.device).long()
    return ids[_highest(_rows(head, states), states, pool)]


def _rows(head: PackedRows, states: Tensor) -> Iterator[tuple[int, Tensor]]:
    for part in blocks(len(head.ids), HEAD_ROWS):
        codes = unpack(head.packed[part].to(states.device), head.scheme.bits, states.shape[1])
        yield part.start, dequantize(codes, head.scale[part].to(states.device))


def _highest(rows: Iterable[tuple[int, Tensor]], states: Tensor, pool: Pool) -> Tensor:
    """Number of the row with the largest product with every state: [tokens] int64."""
    best = torch.full((len(states),), -torch.inf, device=states.device)
    winners = torch.zeros(len(states), dtype=torch.int64, device=states.device)
    for first, block in rows:

        def add(tokens: slice, block: Tensor = block, first: int = first) -> None:
            values, indices = (states[tokens] @ block.T).max(dim=1)
            higher = values > best[tokens]
            best[tokens] = torch.where(higher, values, best[tokens])
            winners[tokens] = torch.where(higher, indices + first, winners[tokens])

        for_each(pool, add, blocks(len(states), HEAD_TOKENS[states.device.type]))
    return winners
