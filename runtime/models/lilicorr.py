"""LiLiCorr: DFlash's layers, and a head that attends to candidates of all places.

The likeliest tokens of each place are candidates, P = places * C of them. Each is a state

    token_proj e + pass_proj h + features(log p, p, log p - top, rank, first) + slot + rank     [w]

of its embedding e, its place's hidden state h after the final norm, and its log-probability. Layers
of attention over all P states and of an MLP follow. With the anchor a, a projection of the context
at the position before the block, every state s gives two vectors of length one,

    out, in = out_head f, in_head f       with f = silu(factor_proj [s, a, s * a])

and the score of a candidate is the scaled product of its `in` and the `out` of the token before it;
at the first place, of the anchor's.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Generic, TypeVar

import torch
from torch import Tensor
from torch.nn import functional

from lowbit.formats.architectures.lilicorr import HEAD, LiLiCorrConfig
from lowbit.runtime.backends.ops import DraftOps
from lowbit.runtime.models import dflash
from lowbit.runtime.models.block_head import Choice
from lowbit.runtime.models.dflash import DFlash
from lowbit.runtime.weights.weights import Weights

W = TypeVar("W")  # what the backend keeps a linear as
LEAST_LOG = -100.0  # log-probability of a candidate that is no token: features stay finite


@dataclass(frozen=True, slots=True)
class Affine(Generic[W]):
    """A linear with a bias."""

    weight: W  # [N, K]
    bias: Tensor  # [N]

    def of(self, ops: DraftOps[W], x: Tensor) -> Tensor:
        """Product of x [M, K]: [M, N]."""
        return ops.product(x, self.weight, added=self.bias)


@dataclass(frozen=True, slots=True)
class LatticeLayer(Generic[W]):
    """A layer of attention over all candidates, and an MLP."""

    attention_norm: Tensor  # [w]
    qkv: Affine[W]  # [3 * w, w]
    out: Affine[W]  # [w, w]
    mlp_norm: Tensor  # [w]
    up: Affine[W]  # [i, w]
    down: Affine[W]  # [w, i]


@dataclass(frozen=True, slots=True)
class Features:
    """A small MLP of a candidate's five features: a norm, and two linears."""

    norm: tuple[Tensor, Tensor]  # [5] gain and bias
    first: tuple[Tensor, Tensor]  # [w, 5] and [w]
    second: tuple[Tensor, Tensor]  # [w, w] and [w]

    def of(self, logs: Tensor) -> Tensor:
        """States of candidates by log-probabilities [..., C], best first: [..., C, w]."""
        count, dtype = logs.shape[-1], self.norm[0].dtype
        ranks = torch.arange(count, device=logs.device)
        share, top = (ranks / max(1, count - 1), (ranks == 0).float())
        five = (logs, logs.exp(), logs - logs[..., :1], share, top)
        stacked = torch.stack([each.expand_as(logs) for each in five], dim=-1).to(dtype)
        x = functional.layer_norm(stacked, stacked.shape[-1:], *self.norm)
        return functional.linear(functional.silu(functional.linear(x, *self.first)), *self.second)


@dataclass(frozen=True, slots=True)
class Lattice(Generic[W]):
    """The head of a drafter; b is the size of a block, n = b - 1 its places."""

    ops: DraftOps[W]
    config: LiLiCorrConfig
    context_norm: Tensor  # [h], `hidden_norm` of the drafter
    token: Affine[W] | None  # [w, h]; None where w is h
    hidden: Affine[W]  # [w, h]
    anchor: Affine[W]  # [w, h]
    features: Features
    places: Tensor  # [n, C, w], what place and rank add to a state
    bias: Tensor  # [heads, n * C, n * C], of attention by distance
    layers: Sequence[LatticeLayer[W]]
    norm: Tensor  # [w]
    anchor_norm: Tensor  # [w]
    factor: Affine[W]  # [w, 3 * w]
    behind: Affine[W]  # [f, w], `out_head`
    before: Affine[W]  # [f, w], `in_head`
    behind_anchor: Affine[W]  # [f, w]

    def draft(self, hidden: Tensor, choice: Choice[W]) -> Tensor:
        """See `BlockHead.draft`; the first output of a block is no draft."""
        own = hidden[:, 1:]  # all places, since a candidate sees those of all
        logits = choice.logits(own)
        found = choice.candidates(logits, self.config.candidates)
        ids = found.ids
        logs = (found.logits - logits.logsumexp(dim=-1, keepdim=True)).clamp(min=LEAST_LOG)
        first, pairs = self.scores(ids, logs, choice.normed(own), choice)
        turns, drafts, scores = choice.in_turn(), [], first
        for place in range(choice.drafts):
            token = turns.choose_among(place, found.columns[:, place], scores)
            drafts.append(token)
            if place + 1 < choice.drafts:
                at = (ids[:, place] == token[:, None]).int().argmax(dim=1)
                scores = pairs[:, place].take_along_dim(at[:, None, None], dim=1)[:, 0]
        return torch.stack(drafts, dim=1)

    def scores(
        self, ids: Tensor, logs: Tensor, normed: Tensor, choice: Choice[W]
    ) -> tuple[Tensor, Tensor]:
        """Scores of the first candidates [B, C], and of all behind each [B, n - 1, C, C].

        Args:
            ids: [B, n, C].
            logs: [B, n, C] float32, log-probabilities.
            normed: [B * n, h].
            choice: has the context before each block, and the embedding.
        """
        if choice.context is None:
            raise ValueError("the drafter's context is not kept")
        ops, eps = self.ops, self.config.rms_norm_eps
        x = self._states(logs, normed, choice.embed(ids.flatten()))
        context = ops.rms_norm(choice.context, self.context_norm, eps)
        anchor = ops.rms_norm(self.anchor.of(ops, context), self.anchor_norm, eps)  # [B, w]
        beside = anchor.repeat_interleave(len(x) // len(ids), dim=0)
        both = functional.silu(self.factor.of(ops, torch.cat((x, beside, x * beside), dim=-1)))
        behind = self._unit(self.behind, both).view(*ids.shape, -1)
        before = self._unit(self.before, both).view(*ids.shape, -1)
        start = self._unit(self.behind_anchor, anchor)
        first = (start[:, None] * before[:, 0]).sum(dim=-1)
        pairs = behind[:, :-1] @ before[:, 1:].transpose(2, 3)
        return self.config.scale * first, self.config.scale * pairs

    def _states(self, logs: Tensor, normed: Tensor, embedded: Tensor) -> Tensor:
        """States of all candidates behind the layers: [B * n * C, w]."""
        (B, n, C), ops, eps = logs.shape, self.ops, self.config.rms_norm_eps
        token = embedded if self.token is None else self.token.of(ops, embedded)
        x = token.view(B, n, C, -1) + self.hidden.of(ops, normed).view(B, n, 1, -1)
        x = (x + self.features.of(logs) + self.places).flatten(0, 2)
        for layer in self.layers:
            x = x + layer.out.of(ops, self._mixed(layer, x, B))
            inner = layer.up.of(ops, ops.rms_norm(x, layer.mlp_norm, eps))
            x = x + layer.down.of(ops, functional.silu(inner))
        return ops.rms_norm(x, self.norm, eps)

    def _mixed(self, layer: LatticeLayer[W], x: Tensor, B: int) -> Tensor:
        """Attention of a layer over all candidates of each block: [B * n * C, w]."""
        normed = self.ops.rms_norm(x, layer.attention_norm, self.config.rms_norm_eps)
        qkv = layer.qkv.of(self.ops, normed).view(B, len(x) // B, 3, self.config.heads, -1)
        q, k, v = qkv.permute(2, 0, 3, 1, 4)  # [B, heads, n * C, d] each
        mixed = functional.scaled_dot_product_attention(q, k, v, attn_mask=self.bias[None])
        return mixed.transpose(1, 2).reshape(x.shape)

    def _unit(self, w: Affine[W], x: Tensor) -> Tensor:
        """Vectors of length one, in float32: [M, f]."""
        found = w.of(self.ops, x).float()
        return functional.normalize(found, dim=-1, eps=self.config.vector_eps)


def build(config: LiLiCorrConfig, weights: Weights[W], ops: DraftOps[W], context: int) -> DFlash[W]:
    """Read the weights of a checked checkpoint into a drafter for `context` positions."""
    drafter = dflash.build(config, weights, ops, context)

    def tensor(name: str) -> Tensor:
        return weights.tensor(f"{HEAD}.{name}")

    def affine(name: str) -> Affine[W]:
        return Affine(weights.dense(tensor(f"{name}.weight")), tensor(f"{name}.bias"))

    def layer(p: str) -> LatticeLayer[W]:
        inner = weights.dense(tensor(f"{p}.attn.in_proj_weight"))
        return LatticeLayer(
            attention_norm=tensor(f"{p}.attn_norm.weight"),
            qkv=Affine(inner, tensor(f"{p}.attn.in_proj_bias")),
            out=affine(f"{p}.attn.out_proj"),
            mlp_norm=tensor(f"{p}.mlp_norm.weight"),
            up=affine(f"{p}.mlp.0"),
            down=affine(f"{p}.mlp.2"),
        )

    def pair(name: str) -> tuple[Tensor, Tensor]:
        return tensor(f"feature_mlp.{name}.weight"), tensor(f"feature_mlp.{name}.bias")

    same = config.width == config.hidden_size
    head = Lattice(
        ops=ops,
        config=config,
        context_norm=drafter.hidden_norm,
        token=None if same else affine("token_proj"),
        hidden=affine("pass_hidden_proj"),
        anchor=affine("context_proj"),
        features=Features(pair("0"), pair("1"), pair("3")),
        places=(tensor("slot_embedding") + tensor("rank_embedding"))[0, 0],
        bias=_distances(config, tensor("relative_slot_bias"), tensor("same_slot_bias")),
        layers=[layer(f"layers.{index}") for index in range(config.depth)],
        norm=tensor("output_norm.weight"),
        anchor_norm=tensor("anchor_norm.weight"),
        factor=affine("factor_input_proj"),
        behind=affine("out_head"),
        before=affine("in_head"),
        behind_anchor=affine("anchor_out_head"),
    )
    return replace(drafter, head=head)


def _distances(config: LiLiCorrConfig, relative: Tensor, same: Tensor) -> Tensor:
    """Bias of attention between candidates [heads, n * C, n * C], by the places of both."""
    last = config.blocks.size - 1
    places = torch.arange(last, device=relative.device).repeat_interleave(config.candidates)
    apart = places[:, None] - places
    return relative[:, apart + last] + same[:, None, None] * (apart == 0)
