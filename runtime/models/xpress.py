"""xPress: DFlash's layers, and a head that refines all drafts of a block several times.

With the hidden states h of a block after the final norm, g their mean, and the token b before each
place (the last known token at the first two), a pass adds to the logits of every place

    x = in_proj([down_h h, down_g g, w1 b])          (rank r)
    x = x + sum over j <= place of L[place, j] * x_j (each of r channels apart)
    x = x + down(silu(gate x) * up x)
    w2 x

and takes the tokens that it then chooses. A place sees those ahead of it alone, so with every pass
one draft more is what choosing one by one would give.
"""

from dataclasses import dataclass, replace
from typing import Generic, TypeVar

import torch
from torch import Tensor

from lowbit.formats.architectures.xpress import HEAD, XPressConfig
from lowbit.runtime.backends.ops import DraftOps
from lowbit.runtime.models import dflash
from lowbit.runtime.models.block_head import Choice
from lowbit.runtime.models.dflash import DFlash
from lowbit.runtime.weights.linear import MlpWeights
from lowbit.runtime.weights.weights import Weights

W = TypeVar("W")  # what the backend keeps a linear as


@dataclass(frozen=True, slots=True)
class Refiner(Generic[W]):
    """The head of a drafter; r is its rank, b the tokens of a block."""

    ops: DraftOps[W]
    passes: int
    down_hidden: W  # [r, h]
    down_mean: W  # [r, h]
    of_hidden: W  # [r, 2 * r], columns of `in_proj` for these two
    embedding: Tensor  # [V, r], of the token before
    of_token: W  # [r, r], columns of `in_proj` for it
    mix: Tensor  # [b, b, r] float32, of a place and those up to it: L, and one more of itself
    mlp: MlpWeights[W]  # [2 * m, r] and [r, m]
    output: W  # [N, r], see `Choice.logits`

    def draft(self, hidden: Tensor, choice: Choice[W]) -> Tensor:
        """See `BlockHead.draft`; the first output of a block is no draft."""
        k = choice.drafts
        logits = choice.logits(hidden[:, 1 : 1 + k])
        shared = self.shared(choice.normed(hidden).view(hidden.shape), 1 + k)
        last = choice.last[:, None].long()
        drafts = choice.guess(logits)
        for left in reversed(range(self.passes)):
            # The token before the last one is not at hand; the last one stands in for it.
            before = torch.cat((last, last, drafts[:, :-1]), dim=1)
            refined = logits + self.bias(before, shared)[..., : logits.shape[2]]
            drafts = choice.guess(refined) if left else choice.choose(refined)
        return drafts

    def shared(self, normed: Tensor, places: int) -> Tensor:
        """Part of all passes at the first places: [B, b, h] to [B, places, r] float32."""
        B, ops = len(normed), self.ops
        mean = normed.float().mean(dim=1).to(normed.dtype)
        hidden = ops.product(normed[:, :places].flatten(0, 1).contiguous(), self.down_hidden)
        block = ops.product(mean, self.down_mean)[:, None].expand(-1, places, -1)
        both = torch.cat((hidden.view(B, places, -1), block), dim=-1).flatten(0, 1)
        return ops.product(both, self.of_hidden, logits=True).view(B, places, -1)

    def bias(self, before: Tensor, shared: Tensor) -> Tensor:
        """Bias of the logits of all drafts: [B, k, N or more] float32.

        Args:
            before: [B, 1 + k] int64, the token before each place.
            shared: [B, 1 + k, r], see `shared`.
        """
        (B, places), ops, dtype = before.shape, self.ops, self.embedding.dtype
        tokens = ops.embed(before.flatten(), self.embedding)
        x = shared + ops.product(tokens, self.of_token, logits=True).view(shared.shape)
        x = (self.mix[1:places, :places] * x[:, None]).sum(dim=2).flatten(0, 1)  # [B * k, r]
        inner = ops.product(x.to(dtype), self.mlp.gate_up, swiglu=True)
        x = x + ops.product(inner, self.mlp.down, logits=True)
        return ops.product(x.to(dtype), self.output, logits=True).view(B, places - 1, -1)


def build(config: XPressConfig, weights: Weights[W], ops: DraftOps[W], context: int) -> DFlash[W]:
    """Read the weights of a checked checkpoint into a drafter for `context` positions."""
    drafter = dflash.build(config, weights, ops, context)
    fused, size = weights.tensor(f"{HEAD}.in_proj.weight"), config.blocks.size
    mix = weights.tensor(f"{HEAD}.mix.L", torch.float32).tril() + torch.eye(size).to(fused.device)
    head = Refiner(
        ops=ops,
        passes=config.passes,
        down_hidden=weights.linear(f"{HEAD}.down_h"),
        down_mean=weights.linear(f"{HEAD}.down_g"),
        of_hidden=weights.dense(fused[:, : 2 * config.rank].contiguous()),
        embedding=weights.tensor(f"{HEAD}.w1.weight"),
        of_token=weights.dense(fused[:, 2 * config.rank :].contiguous()),
        mix=mix.permute(1, 2, 0).contiguous(),
        mlp=MlpWeights(
            weights.linear(f"{HEAD}.mlp.gate_proj", f"{HEAD}.mlp.up_proj", paired=True),
            weights.linear(f"{HEAD}.mlp.down_proj"),
        ),
        output=weights.linear(f"{HEAD}.w2", head=True),
    )
    return replace(drafter, head=head)
