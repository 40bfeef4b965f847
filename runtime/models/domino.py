"""Domino: DFlash's layers, and a bias of each draft by all tokens of the block before it.

A gated recurrent unit reads the embeddings of the last known token and of each draft:

    r, z = sigmoid(W_ir e + W_hr s), sigmoid(W_iz e + W_hz s)
    n = tanh(W_in e + r * (W_hn s))
    s = (1 - z) * n + z * s                      (0 before the last known token)

A draft with the hidden state h after the final norm gets the bias `output silu(inner [h, s])`.
"""

from dataclasses import dataclass, replace
from typing import Generic, TypeVar

import torch
from torch import Tensor
from torch.nn.functional import silu

from lowbit.formats.architectures.domino import DominoConfig
from lowbit.runtime.backends.ops import DraftOps
from lowbit.runtime.models import dflash
from lowbit.runtime.models.block_head import Choice
from lowbit.runtime.models.dflash import DFlash
from lowbit.runtime.weights.weights import Weights

W = TypeVar("W")  # what the backend keeps a linear as


@dataclass(frozen=True, slots=True)
class Recurrent(Generic[W]):
    """The head of a drafter; s is the width of its state, e that of the bias before the head."""

    ops: DraftOps[W]
    first: int  # place in a block whose output is the first draft
    pure: int  # drafts without a bias
    of_token: W  # [3 * s, h], gates r, z and n of an embedding
    of_state: W  # [3 * s, s]
    inner_hidden: W  # [e, h]
    inner_state: W  # [e, s]
    output: W  # [N, e], see `Choice.logits`

    def draft(self, hidden: Tensor, choice: Choice[W]) -> Tensor:
        """See `BlockHead.draft`."""
        ops, k = self.ops, choice.drafts
        own = hidden[:, self.first : self.first + k]
        logits, turns = choice.logits(own), choice.in_turn()
        inner = ops.product(choice.normed(own), self.inner_hidden, logits=True)  # [B * k, e]
        inner = inner.view(*own.shape[:2], -1)
        before, state, drafts = choice.last, None, []
        for place in range(k):
            state = self.read(choice.embed(before), state)
            scores = logits[:, place]
            if place >= self.pure:
                bias = self.bias(inner[:, place], state)
                scores = scores + bias[:, : scores.shape[1]]
            before = turns.choose(place, scores)
            drafts.append(before)
        return torch.stack(drafts, dim=1)

    def read(self, embedded: Tensor, state: Tensor | None) -> Tensor:
        """State [B, s] behind a token's embedding [B, h]; None is a state of zeros."""
        given = self.ops.product(embedded, self.of_token, logits=True)
        if state is None:
            _, z, n = given.chunk(3, dim=1)
            return ((1 - z.sigmoid()) * n.tanh()).to(embedded.dtype)
        kept, gates = self.ops.product(state, self.of_state, logits=True), 2 * state.shape[1]
        r, z = (given[:, :gates] + kept[:, :gates]).sigmoid().chunk(2, dim=1)
        n = torch.addcmul(given[:, gates:], r, kept[:, gates:]).tanh()
        return torch.addcmul(n, z, state - n).to(embedded.dtype)

    def bias(self, inner: Tensor, state: Tensor) -> Tensor:
        """Bias of the logits: [B, N or more] float32.

        Args:
            inner: [B, e] float32, part of a hidden state.
            state: [B, s], behind the token before.
        """
        inner = inner + self.ops.product(state, self.inner_state, logits=True)
        return self.ops.product(silu(inner).to(state.dtype), self.output, logits=True)


def build(config: DominoConfig, weights: Weights[W], ops: DraftOps[W], context: int) -> DFlash[W]:
    """Read the weights of a checked checkpoint into a drafter for `context` positions."""
    drafter, h = dflash.build(config, weights, ops, context), config.hidden_size
    inner = weights.tensor("embed_proj.0.weight")
    head = Recurrent(
        ops=ops,
        first=config.blocks.first,
        pure=config.pure,
        of_token=weights.dense(weights.tensor("prefix_gru.weight_ih_l0")),
        of_state=weights.dense(weights.tensor("prefix_gru.weight_hh_l0")),
        inner_hidden=weights.dense(inner[:, :h].contiguous()),
        inner_state=weights.dense(inner[:, h:].contiguous()),
        output=weights.linear("embed_proj.2", head=True),
    )
    return replace(drafter, head=head)
