"""Heads of block drafters: how drafts are chosen by the hidden states of a block.

A head is built on DFlash's layers, and `architectures` of config.json names it.
"""

from dataclasses import dataclass
from typing import Any, Generic, Protocol, TypeVar

import torch
from torch import Tensor
from torch.nn.functional import pad

from lowbit.runtime.backends.ops import DraftOps
from lowbit.runtime.models.draft_output import DraftOutput
from lowbit.runtime.state.sampler import SamplerRows
from lowbit.runtime.thresholds import PACKED_TOKENS
from lowbit.runtime.weights.table import Table

W = TypeVar("W")  # what the backend keeps a linear as


@dataclass(frozen=True, slots=True)
class Choice(Generic[W]):
    """Chooses k drafts of each of B sequences, by their sampling parameters.

    A draft is drawn with the random number of its position, as the token itself will be.
    """

    ops: DraftOps[W]
    output: DraftOutput[W]  # norm of the drafter, head of its target
    embedding: Table  # [V, h] of the target
    sampler: SamplerRows
    rows: Tensor  # [B] int32, of the sequences
    positions: Tensor  # [B, k] int32 of the tokens behind which drafts stand
    last: Tensor  # [B] int32, the last token of each sequence
    ring: Tensor  # for what `Ops.choose` leaves to the host
    # [B, h], context of the position before each block (`DFlash.read`), where it is kept
    context: Tensor | None = None

    @property
    def drafts(self) -> int:
        """Drafts of each sequence, k."""
        return self.positions.shape[1]

    def logits(self, hidden: Tensor) -> Tensor:
        """Logits by hidden states [B, n, h] before the norm: [B, n, N] float32.

        N is V, or the number of rows that drafts are chosen from; heads that add to logits have
        read the same rows (`Weights.head_rows`).
        """
        flat = hidden.flatten(0, 1).contiguous()
        # For more tokens a GPU would widen the whole head in memory.
        parts = [self.output.logits(part) for part in torch.split(flat, PACKED_TOKENS)]
        logits = parts[0] if len(parts) == 1 else torch.cat(parts)
        return logits.view(*hidden.shape[:2], -1)[..., : self.output.candidates]

    def normed(self, hidden: Tensor) -> Tensor:
        """Hidden states after the norm: [B, n, h] to [B * n, h]."""
        flat = hidden.flatten(0, 1).contiguous()
        return self.ops.rms_norm(flat, self.output.norm, self.output.eps)

    def candidates(self, logits: Tensor, count: int) -> "Candidates":
        """The C = `count` likeliest real tokens of each place by logits [B, k, N].

        Where N is smaller, the rest has logits of -inf and is never chosen.
        """
        # rows of a draft head are real tokens; a head over all of them may have more columns
        some = logits if self.output.rows is not None else logits[..., : self.sampler.vocabulary]
        last = some.shape[-1] - 1
        if last + 1 < count:
            some = pad(some, (0, count - 1 - last), value=-torch.inf)
        values, columns = some.topk(count, dim=-1)
        ids = self.output.ids_of(columns.clamp(max=last).flatten()).view(columns.shape)
        return Candidates(values, columns, ids)

    def embed(self, ids: Tensor) -> Tensor:
        """Embeddings of tokens in the target: [M] to [M, h]."""
        return self.ops.embed(ids, self.embedding)

    def in_turn(self) -> "Turns[W]":
        """Choose draft by draft, each by logits that may depend on the one before."""
        return Turns(self, self.rows.contiguous(), self.positions.T.contiguous())

    def choose(self, logits: Tensor) -> Tensor:
        """Choose all drafts by logits [B, k, N]: [B, k] int64. Once for each round."""
        if not self.sampler.shape.adjusted:
            return self.guess(logits)
        turns = self.in_turn()  # a row whose tokens are counted stands in a choice once
        chosen = [turns.choose(place, logits[:, place]) for place in range(self.drafts)]
        return torch.stack(chosen, dim=1)

    def guess(self, logits: Tensor) -> Tensor:
        """Guess all drafts by logits [B, k, N] that better ones follow: [B, k] int64.

        As they are chosen, but the likeliest tokens where tokens are counted.
        """
        B, k = logits.shape[:2]
        if self.sampler.shape.adjusted:
            return self.output.ids_of(logits.argmax(dim=-1).flatten()).view(B, k)
        rows = self.rows[:, None].expand(-1, k).flatten().contiguous()
        positions = self.positions.flatten().clone()  # moved on by choosing
        drafts = torch.empty(B * k, dtype=torch.int64, device=logits.device)
        some = logits.flatten(0, 1)
        self.output.choose_by(some, self.sampler, rows, positions, drafts, self.ring)
        return drafts.view(B, k)


@dataclass(frozen=True, slots=True)
class Turns(Generic[W]):
    """Chooses the drafts of each sequence one after the other."""

    choice: Choice[W]
    rows: Tensor  # [B] int32
    positions: Tensor  # [k, B] int32, moved on by choosing

    def choose(self, place: int, logits: Tensor) -> Tensor:
        """Choose the drafts at a place by logits [B, N]: [B] int64. Once for each place."""
        token = torch.empty(len(logits), dtype=torch.int64, device=logits.device)
        choice = self.choice
        at = self.rows, self.positions[place]
        choice.output.choose_by(logits.contiguous(), choice.sampler, *at, token, choice.ring)
        return token

    def choose_among(self, place: int, columns: Tensor, scores: Tensor) -> Tensor:
        """Choose the drafts at a place among columns [B, C] of logits by scores: [B] int64."""
        shape = len(columns), max(self.choice.output.candidates, columns.shape[1])
        logits = torch.full(shape, -torch.inf, device=columns.device)
        return self.choose(place, logits.scatter_(1, columns, scores))


@dataclass(frozen=True, slots=True)
class Candidates:
    """The likeliest tokens of each place, the best first."""

    logits: Tensor  # [B, k, C]
    columns: Tensor  # [B, k, C] int64, of logits
    ids: Tensor  # [B, k, C] int64


class BlockHead(Protocol):
    """The part of a drafter that chooses its drafts, beside DFlash's layers."""

    def draft(self, hidden: Tensor, choice: Choice[Any]) -> Tensor:
        """Choose drafts by the hidden states of blocks.

        Args:
            hidden: [B, size, h] of whole blocks, before the final norm.

        Returns:
            [B, k] int64.
        """
