"""Heads of block drafters by plain FP32 torch: their tensors, and the drafts they choose."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import silu

Config = dict[str, Any]
Shapes = dict[str, tuple[int, ...]]
Weights = dict[str, Tensor]


@dataclass(frozen=True)
class Block:
    """A block of one sequence, and its target."""

    hidden: Tensor  # [size, h], after the final norm
    last: int  # the last known token
    head: Tensor  # [V, h] of the target
    embedding: Tensor  # [V, h] of the target


Drafts = tuple[list[int], Tensor]  # tokens, and the scores [k, V] that they are the best of


def xpress_shapes(config: Config) -> Shapes:
    """Tensors of an xPress head."""
    h, V, r = (config[key] for key in ("hidden_size", "vocab_size", "xpress_rank"))
    inner, size = config["xpress_mlp_hidden"], config["xpress_block_size"]
    found = {
        "w1.weight": (V, r),
        "down_h.weight": (r, h),
        "down_g.weight": (r, h),
        "in_proj.weight": (r, 3 * r),
        "mix.L": (r, size, size),
        "mlp.gate_proj.weight": (inner, r),
        "mlp.up_proj.weight": (inner, r),
        "mlp.down_proj.weight": (r, inner),
        "w2.weight": (V, r),
    }
    return {f"xpress_head.{name}": shape for name, shape in found.items()}


def xpress_drafts(config: Config, weights: Weights, block: Block) -> Drafts:
    """Refine the likeliest tokens of a block, place by place and channel by channel."""
    w = {name.removeprefix("xpress_head."): each for name, each in weights.items()}
    size, rank = len(block.hidden), config["xpress_rank"]
    logits = block.hidden @ block.head.T
    mean = block.hidden.mean(0)
    tokens = [block.last, *logits[1:].argmax(-1).tolist()]
    for _ in range(config["xpress_num_passes"]):
        inputs = torch.zeros(size, rank)
        for place in range(size):
            before = block.last if place == 0 else tokens[place - 1]
            parts = (
                w["down_h.weight"] @ block.hidden[place],
                w["down_g.weight"] @ mean,
                w["w1.weight"][before],
            )
            inputs[place] = w["in_proj.weight"] @ torch.cat(parts)
        refined = logits.clone()
        for place in range(size):
            x = inputs[place].clone()
            for other in range(place + 1):
                x += w["mix.L"][:, place, other] * inputs[other]
            gate = silu(w["mlp.gate_proj.weight"] @ x) * (w["mlp.up_proj.weight"] @ x)
            refined[place] += w["w2.weight"] @ (x + w["mlp.down_proj.weight"] @ gate)
        tokens = [block.last, *refined[1:].argmax(-1).tolist()]
    return tokens[1:], refined[1:]


def domino_shapes(config: Config) -> Shapes:
    """Tensors of a Domino head."""
    h, V, section = config["hidden_size"], config["vocab_size"], config["dflash_config"]
    state, embedded = section["gru_hidden_dim"], section["emb_dim"]
    return {
        "prefix_gru.weight_ih_l0": (3 * state, h),
        "prefix_gru.weight_hh_l0": (3 * state, state),
        "embed_proj.0.weight": (embedded, h + state),
        "embed_proj.2.weight": (V, embedded),
    }


def domino_drafts(config: Config, weights: Weights, block: Block) -> Drafts:
    """Run torch's own GRU over the tokens so far, again for every draft."""
    section = config["dflash_config"]
    h, state = config["hidden_size"], section["gru_hidden_dim"]
    gru = torch.nn.GRU(h, state, bias=False, batch_first=True)
    own = {name: weights[f"prefix_gru.{name}"] for name in ("weight_ih_l0", "weight_hh_l0")}
    gru.load_state_dict(own)
    first = 0 if section.get("shift_label") else 1
    tokens, found = [block.last], []
    for place, hidden in enumerate(block.hidden[first:]):
        scores = block.head @ hidden
        if place >= section.get("pure_draft_prefix_len", 0):
            states, _ = gru(block.embedding[torch.tensor(tokens)][None])
            inner = weights["embed_proj.0.weight"] @ torch.cat((hidden, states[0, -1]))
            scores = scores + weights["embed_proj.2.weight"] @ silu(inner)
        tokens.append(int(scores.argmax()))
        found.append(scores)
    return tokens[1:], torch.stack(found).detach()


SHAPES: dict[str, Callable[[Config], Shapes]] = {
    "DominoDraftModel": domino_shapes,
    "Qwen3XPressModel": xpress_shapes,
}
DRAFTS: dict[str, Callable[[Config, Weights, Block], Drafts]] = {
    "DominoDraftModel": domino_drafts,
    "Qwen3XPressModel": xpress_drafts,
}
