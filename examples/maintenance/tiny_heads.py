"""Heads of tiny block drafters, which train_tiny_drafter.py trains on DFlash's layers.

Tensors have the names and shapes of published drafters. Each head learns with the right tokens in
the place of the drafts that it will see, as the authors of all of them train.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

DRAFTS = 7  # of a block
RANK, INNER, EMBEDDED, STATE = 64, 128, 64, 96
CANDIDATES, PASSES = 8, 6
CONV_TAPS, CONV_GROUP = 2, 16
WIDTH, DEPTH, HEADS, RATIO, FACTOR, SCALE = 128, 2, 4, 2, 64, 10.0  # of LiLiCorr
EPS = 1e-6


@dataclass(frozen=True)
class Blocks:
    """Blocks of texts behind a drafter's layers, and what is right."""

    hidden: Tensor  # [M, size, h], after the final norm
    right: Tensor  # [M, 1 + DRAFTS], the last known token and those behind it
    logits: Tensor  # [M, DRAFTS, V], by the target's head
    embedded: Tensor  # [M, 1 + DRAFTS, h], by the target's embedding
    embedding: Tensor  # [V, h] of the target
    context: Tensor  # [M, h], of the position before each block, after `hidden_norm`

    @property
    def own(self) -> Tensor:
        """Hidden states of the places of drafts: [M, DRAFTS, h]."""
        return self.hidden[:, -DRAFTS:]

    @property
    def before(self) -> Tensor:
        """Token before each draft: [M, DRAFTS]."""
        return self.right[:, :-1]

    def losses(self, logits: Tensor) -> Tensor:
        """Cross-entropy of each draft by logits [M, DRAFTS, V]: [M, DRAFTS]."""
        right = self.right[:, 1:]
        flat = functional.cross_entropy(logits.flatten(0, 1), right.flatten(), reduction="none")
        return flat.view(right.shape)


def linear(rows: int, columns: int, bias: bool = False, zero: bool = False) -> nn.Linear:
    """A random linear, or one of zeros."""
    made = nn.Linear(columns, rows, bias=bias)
    nn.init.normal_(made.weight, std=0.0 if zero else columns**-0.5)
    if bias:
        nn.init.zeros_(made.bias)
    return made


class Gain(nn.Module):
    """Gain of an RMS norm."""

    def __init__(self, size: int) -> None:
        """Gains of one."""
        super().__init__()
        self.weight = nn.Parameter(torch.ones(size))

    def forward(self, x: Tensor) -> Tensor:
        x = x.float()
        return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + EPS) * self.weight


class Convolution(nn.Module):
    """Convolutions over the tokens of a block, before and behind a part of a layer."""

    def __init__(self, h: int) -> None:
        """Each token sees itself alone."""
        super().__init__()
        base = torch.zeros(2, CONV_TAPS, h)
        base[:, 0] = 1
        self.base_kernel = nn.Parameter(base)
        self.kernel_projection = linear(2 * CONV_TAPS * (h // CONV_GROUP), h, zero=True)

    def forward(self, given: Tensor, x: Tensor, side: int, size: int) -> Tensor:
        """Convolve x [B, blocks * size, h] by taps that depend on `given`, of the same shape."""
        own = self.kernel_projection(given).view(*x.shape[:2], 2, CONV_TAPS, -1)[:, :, side]
        taps = self.base_kernel[side] + own.repeat_interleave(CONV_GROUP, dim=-1)
        shifted = x.view(x.shape[0], -1, size, x.shape[2])
        out: Tensor = taps[:, :, 0] * x
        for tap in range(1, CONV_TAPS):
            shifted = functional.pad(shifted, (0, 0, 1, 0))[:, :, :size]
            out = out + taps[:, :, tap] * shifted.flatten(1, 2)
        return out


class Head(nn.Module):
    """Head of a drafter."""

    def losses(self, blocks: Blocks) -> Tensor:
        """Loss of each draft: [M, DRAFTS]."""
        raise NotImplementedError


class Plain(Head):
    """DFlash has none."""

    def losses(self, blocks: Blocks) -> Tensor:
        return blocks.losses(blocks.logits)


class DSpark(Head):
    """A bias by the token before."""

    def __init__(self, h: int, vocabulary: int) -> None:
        """No bias yet."""
        super().__init__()
        self.markov_head = nn.ModuleDict(
            {
                "markov_w1": nn.Embedding(vocabulary, RANK),
                "markov_w2": linear(vocabulary, RANK, zero=True),
            }
        )

    def losses(self, blocks: Blocks) -> Tensor:
        head = self.markov_head
        return blocks.losses(blocks.logits + head["markov_w2"](head["markov_w1"](blocks.before)))


class Mix(nn.Module):
    """Weights of a place for those up to it, by channel."""

    def __init__(self, size: int) -> None:
        """A place sees itself alone."""
        super().__init__()
        self.L = nn.Parameter(torch.zeros(RANK, size, size))


class XPress(Head):
    """A bias by all places up to a draft, their hidden states and the tokens before them."""

    def __init__(self, h: int, vocabulary: int) -> None:
        """No bias yet."""
        super().__init__()
        mlp = {
            "gate_proj": linear(INNER, RANK),
            "up_proj": linear(INNER, RANK),
            "down_proj": linear(RANK, INNER, zero=True),
        }
        self.xpress_head = nn.ModuleDict(
            {
                "down_h": linear(RANK, h),
                "down_g": linear(RANK, h),
                "w1": nn.Embedding(vocabulary, RANK),
                "in_proj": linear(RANK, 3 * RANK),
                "mix": Mix(1 + DRAFTS),
                "mlp": nn.ModuleDict(mlp),
                "w2": linear(vocabulary, RANK, zero=True),
            }
        )

    def losses(self, blocks: Blocks) -> Tensor:
        head = self.xpress_head
        before = torch.cat((blocks.right[:, :1], blocks.before), dim=1)
        mean = blocks.hidden.mean(dim=1, keepdim=True).expand_as(blocks.hidden)
        parts = head["down_h"](blocks.hidden), head["down_g"](mean), head["w1"](before)
        inputs = head["in_proj"](torch.cat(parts, dim=-1))
        mix: Any = head["mix"]
        x = inputs + torch.einsum("rij,mjr->mir", mix.L.tril(), inputs)
        mlp: Any = head["mlp"]
        x = x + mlp["down_proj"](functional.silu(mlp["gate_proj"](x)) * mlp["up_proj"](x))
        return blocks.losses(blocks.logits + head["w2"](x[:, 1:]))


class Domino(Head):
    """A bias by a recurrent unit that reads all tokens before a draft."""

    def __init__(self, h: int, vocabulary: int) -> None:
        """No bias yet."""
        super().__init__()
        self.prefix_gru = nn.GRU(h, STATE, bias=False, batch_first=True)
        last = linear(vocabulary, EMBEDDED, zero=True)
        self.embed_proj = nn.Sequential(linear(EMBEDDED, h + STATE), nn.SiLU(), last)

    def losses(self, blocks: Blocks) -> Tensor:
        states, _ = self.prefix_gru(blocks.embedded[:, :-1])
        bias = self.embed_proj(torch.cat((blocks.own, states), dim=-1))
        return blocks.losses(blocks.logits + bias)


class Selector(nn.Module):
    """Products of a token and the one before it, weighed by a hidden state."""

    def __init__(self, h: int, vocabulary: int) -> None:
        """No product yet."""
        super().__init__()
        self.hidden_projection = linear(RANK, h)
        self.predecessor_codebook = nn.Parameter(torch.randn(vocabulary, RANK))
        self.successor_codebook = nn.Parameter(torch.zeros(vocabulary, RANK))


class DFlash2(Head):
    """A walk among candidates; all tokens are candidates here."""

    def __init__(self, h: int, vocabulary: int) -> None:
        """No weights of edges yet."""
        super().__init__()
        self.candidate_selector = Selector(h, vocabulary)

    def losses(self, blocks: Blocks) -> Tensor:
        own = self.candidate_selector
        edges = own.predecessor_codebook[blocks.before] * own.hidden_projection(blocks.own)
        biased = blocks.losses(blocks.logits + edges @ own.successor_codebook.T)
        return biased + blocks.losses(blocks.logits) / 4  # which choose the candidates


class LiLiCorr(Head):
    """A walk by products of vectors of candidates, which attend to those of all places."""

    def __init__(self, h: int, vocabulary: int) -> None:
        """Random weights."""
        super().__init__()
        w, layer = WIDTH, range(DEPTH)
        self.lilicorr = nn.ModuleDict(
            {
                "token_proj": linear(w, h, bias=True),
                "pass_hidden_proj": linear(w, h, bias=True),
                "feature_mlp": nn.Sequential(
                    nn.LayerNorm(5), linear(w, 5, bias=True), nn.SiLU(), linear(w, w, bias=True)
                ),
                "context_proj": linear(w, h, bias=True),
                "layers": nn.ModuleList(LatticeLayer() for _ in layer),
                "factor_input_proj": linear(w, 3 * w, bias=True),
                **{
                    name: linear(FACTOR, w, bias=True)
                    for name in ("out_head", "in_head", "anchor_out_head")
                },
                "output_norm": Gain(w),
                "anchor_norm": Gain(w),
            }
        )
        own: Any = self.lilicorr
        own.slot_embedding = nn.Parameter(torch.zeros(1, 1, DRAFTS, 1, w))
        own.rank_embedding = nn.Parameter(torch.zeros(1, 1, 1, CANDIDATES, w))
        own.relative_slot_bias = nn.Parameter(torch.zeros(HEADS, 2 * (1 + DRAFTS) - 1))
        own.same_slot_bias = nn.Parameter(torch.zeros(HEADS))

    def losses(self, blocks: Blocks) -> Tensor:
        logs, ids = blocks.logits.log_softmax(-1).topk(CANDIDATES, dim=-1)  # [M, DRAFTS, C]
        first, pairs = self.scores(blocks, logs, ids)
        hits = ids == blocks.right[:, 1:, None]  # one of each place at most
        found, at = hits.any(-1), hits.int().argmax(-1)  # [M, DRAFTS]
        behind = pairs.take_along_dim(at[:, :-1, None, None], dim=2)[:, :, 0]
        scores = torch.cat((first[:, None], behind), dim=1)  # behind the right token before
        chosen = functional.cross_entropy(scores.flatten(0, 1), at.flatten(), reduction="none")
        known = torch.cat((found[:, :1], found[:, 1:] & found[:, :-1]), dim=1)
        return chosen.view(at.shape) * known + blocks.losses(blocks.logits) / 4

    def scores(self, blocks: Blocks, logs: Tensor, ids: Tensor) -> tuple[Tensor, Tensor]:
        """Scores of the first candidates [M, C], and of those behind each [M, DRAFTS - 1, C, C]."""
        own: Any = self.lilicorr
        x = self.states(blocks, logs, ids)
        anchor = own["anchor_norm"](own["context_proj"](blocks.context))  # [M, w]
        beside = anchor[:, None].expand_as(x)
        both = functional.silu(own["factor_input_proj"](torch.cat((x, beside, x * beside), dim=-1)))

        def unit(name: str, given: Tensor) -> Tensor:
            return functional.normalize(own[name](given), dim=-1, eps=EPS)

        shape = *ids.shape, FACTOR
        before, behind = (unit(name, both).view(shape) for name in ("in_head", "out_head"))
        start = unit("anchor_out_head", anchor)
        first = (start[:, None] * before[:, 0]).sum(-1)
        return SCALE * first, SCALE * behind[:, :-1] @ before[:, 1:].transpose(2, 3)

    def states(self, blocks: Blocks, logs: Tensor, ids: Tensor) -> Tensor:
        """States of candidates behind the layers: [M, DRAFTS * C, w]."""
        own: Any = self.lilicorr
        ranks = torch.arange(CANDIDATES)
        given = (logs, logs.exp(), logs - logs[..., :1], ranks / (CANDIDATES - 1), ranks == 0)
        five = torch.stack([each.expand_as(logs).float() for each in given], dim=-1)
        x = own["token_proj"](blocks.embedding[ids]) + own["feature_mlp"](five)
        x = x + own["pass_hidden_proj"](blocks.own)[:, :, None]
        x = (x + (own.slot_embedding + own.rank_embedding)[0]).flatten(1, 2)
        at = torch.arange(DRAFTS).repeat_interleave(CANDIDATES)
        apart = at[:, None] - at
        bias = own.relative_slot_bias[:, apart + DRAFTS] + own.same_slot_bias[:, None, None] * (
            apart == 0
        )
        for layer in own["layers"]:
            x = layer(x, bias)
        found: Tensor = own["output_norm"](x)
        return found


class LatticeLayer(nn.Module):
    """A layer of attention over all candidates, and an MLP."""

    def __init__(self) -> None:
        """Random weights."""
        super().__init__()
        self.attn_norm, self.mlp_norm = Gain(WIDTH), Gain(WIDTH)
        self.attn = nn.MultiheadAttention(WIDTH, HEADS, batch_first=True)
        up, down = (linear(*sizes, bias=True) for sizes in MLP_SIZES)
        self.mlp = nn.Sequential(up, nn.SiLU(), down)

    def forward(self, x: Tensor, bias: Tensor) -> Tensor:
        """States x [M, n, w] by a bias [heads, n, n] of attention."""
        normed = self.attn_norm(x)
        mask = bias.repeat(len(x), 1, 1)
        x = x + self.attn(normed, normed, normed, attn_mask=mask, need_weights=False)[0]
        out: Tensor = x + self.mlp(self.mlp_norm(x))
        return out


MLP_SIZES = ((RATIO * WIDTH, WIDTH), (WIDTH, RATIO * WIDTH))
Config = dict[str, Any]
Changes = Callable[[Config], Config]


def in_section(name: str, **keys: Any) -> Changes:
    """Another class of drafter, with more keys in DFlash's section."""

    def changed(config: Config) -> Config:
        section = {**config["dflash_config"], **keys}
        return {**config, "architectures": [name], "dflash_config": section}

    return changed


def dspark_config(config: Config) -> Config:
    """config.json as DeepSpec writes it: all keys at the top."""
    section = config["dflash_config"]
    rest = {key: value for key, value in config.items() if key != "dflash_config"}
    return {
        **rest,
        **section,
        "architectures": ["Qwen3DSparkModel"],
        "block_size": DRAFTS,
        "confidence_head_with_markov": False,
        "enable_confidence_head": False,
        "markov_head_type": "vanilla",
        "markov_rank": RANK,
    }


def xpress_config(config: Config) -> Config:
    """config.json as the authors' conversion for vLLM writes it."""
    return {
        **config,
        "architectures": ["Qwen3XPressModel"],
        "sample_from_anchor": False,
        "xpress_block_size": 1 + DRAFTS,
        "xpress_mlp_hidden": INNER,
        "xpress_num_passes": PASSES,
        "xpress_rank": RANK,
    }


def domino_config(config: Config) -> Config:
    """config.json as SpecForge writes it, with DFlash's class; published ones shift the label."""
    keys: Config = {
        "emb_dim": EMBEDDED,
        "gru_hidden_dim": STATE,
        "projector_type": "domino",
        "pure_draft_prefix_len": 0,
        "shift_label": False,
    }
    return in_section("DFlashDraftModel", **keys)(config)


@dataclass(frozen=True)
class Kind:
    """A kind of drafter."""

    head: Callable[[int, int], Head]  # by width of the target and its vocabulary
    config: Changes  # config.json by that of DFlash
    first: int = 1  # place in a block whose output is the first draft
    convolved: bool = False  # its layers have convolutions

    @property
    def size(self) -> int:
        """Tokens of a block."""
        return self.first + DRAFTS


KINDS: Mapping[str, Kind] = {
    "dflash": Kind(lambda h, vocabulary: Plain(), lambda config: config),
    "dspark": Kind(DSpark, dspark_config, first=0),
    "xpress": Kind(XPress, xpress_config),
    "domino": Kind(Domino, domino_config),
    "dflash2": Kind(
        DFlash2,
        in_section(
            "DFlash2DraftModel",
            conv_kernel_size=CONV_TAPS,
            conv_group_size=CONV_GROUP,
            selector_rank=RANK,
            selector_top_k=16,
        ),
        convolved=True,
    ),
    "lilicorr": Kind(
        LiLiCorr,
        in_section(
            "LiLiCorrDraftModel",
            projector_type="lilicorr",
            lilicorr_enabled=True,
            lilicorr_candidate_topk=CANDIDATES,
            lilicorr_hidden_size=WIDTH,
            lilicorr_num_layers=DEPTH,
            lilicorr_num_heads=HEADS,
            lilicorr_mlp_ratio=float(RATIO),
            lilicorr_factor_dim=FACTOR,
            lilicorr_vector_eps=EPS,
            lilicorr_logit_scale=SCALE,
        ),
    ),
}
