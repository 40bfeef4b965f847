"""DFlash2: DFlash's layers with convolutions, and a head that walks among candidates.

The likeliest tokens c of each place are candidates. With the hidden state h of a place after the
final norm and the token b before it, the score of a candidate is

    logit_c + sum over r of (before[b] * (projection h))_r * behind[c]_r        (r of the rank)
"""

from dataclasses import dataclass, replace
from typing import Generic, TypeVar

import torch
from torch import Tensor

from lowbit.formats.architectures.dflash2 import HEAD, DFlash2Config
from lowbit.runtime.backends.ops import DraftOps
from lowbit.runtime.models import dflash
from lowbit.runtime.models.block_head import Candidates, Choice
from lowbit.runtime.models.dflash import DFlash
from lowbit.runtime.weights.weights import Weights

W = TypeVar("W")  # what the backend keeps a linear as


@dataclass(frozen=True, slots=True)
class Selector(Generic[W]):
    """The head of a drafter."""

    ops: DraftOps[W]
    candidates: int  # tokens of a place
    multiplier: float  # of logits
    cap: float | None  # of logits after that, by tanh; None without
    projection: W  # [r, h]
    before: Tensor  # [V, r]
    behind: Tensor  # [V, r]

    def draft(self, hidden: Tensor, choice: Choice[W]) -> Tensor:
        """See `BlockHead.draft`; the first output of a block is no draft."""
        ops, own = self.ops, hidden[:, 1 : 1 + choice.drafts]
        found = choice.candidates(choice.logits(own), self.candidates)
        unary = self.unary(found)
        weights = ops.product(choice.normed(own), self.projection, logits=True)
        weights = weights.view(*own.shape[:2], -1)  # [B, k, r]
        behind = ops.embed(found.ids.flatten(), self.behind)
        behind = behind.view(*found.ids.shape, -1)  # [B, k, C, r]
        token, turns, drafts = choice.last, choice.in_turn(), []
        for place in range(choice.drafts):
            edges = ops.embed(token, self.before) * weights[:, place]
            weighed = unary[:, place] + (edges[:, None] * behind[:, place]).sum(dim=-1)
            token = turns.choose_among(place, found.columns[:, place], weighed)
            drafts.append(token)
        return torch.stack(drafts, dim=1)

    def unary(self, found: Candidates) -> Tensor:
        """Logits of the candidates of each place, [B, k, C]."""
        unary = found.logits * self.multiplier
        return unary if self.cap is None else (unary / self.cap).tanh() * self.cap


def build(config: DFlash2Config, weights: Weights[W], ops: DraftOps[W], context: int) -> DFlash[W]:
    """Read the weights of a checked checkpoint into a drafter for `context` positions."""
    drafter = dflash.build(config, weights, ops, context)
    head = Selector(
        ops=ops,
        candidates=config.candidates,
        multiplier=config.multiplier,
        cap=config.cap,
        projection=weights.linear(f"{HEAD}.hidden_projection"),
        before=weights.tensor(f"{HEAD}.predecessor_codebook"),
        behind=weights.tensor(f"{HEAD}.successor_codebook"),
    )
    return replace(drafter, head=head)
