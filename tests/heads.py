"""Heads of block drafters by plain FP32 torch: their tensors, and the drafts they choose."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import layer_norm, silu

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
    context: Tensor  # [h], after `hidden_norm`, of the position before the block


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


def convolution_shapes(config: Config) -> Shapes:
    """Tensors of the convolutions of all layers."""
    h, section = config["hidden_size"], config["dflash_config"]
    found: Shapes = {}
    taps, group = section["conv_kernel_size"], section["conv_group_size"]
    for layer in range(config["num_hidden_layers"]):
        for p in (f"layers.{layer}.{part}_conv" for part in ("attention", "mlp")):
            found[f"{p}.base_kernel"] = (2, taps, h)
            found[f"{p}.kernel_projection.weight"] = (2 * taps * (h // group), h)
    return found


def convolved(weights: Weights, p: str, given: Tensor, x: Tensor, side: int) -> Tensor:
    """A convolution over a block x [size, h], by taps that depend on its input `given`."""
    if f"{p}.base_kernel" not in weights:
        return x
    base = weights[f"{p}.base_kernel"][side]
    taps, h = base.shape
    own = given @ weights[f"{p}.kernel_projection.weight"].T
    own = own.view(len(x), 2, taps, -1)[:, side].repeat_interleave(h * taps * 2 // own.shape[1], 2)
    out = torch.zeros_like(x)
    for place in range(len(x)):
        for tap in range(min(taps, place + 1)):
            out[place] += (base[tap] + own[place, tap]) * x[place - tap]
    return out


def dflash2_shapes(config: Config) -> Shapes:
    """Tensors of a DFlash2 drafter beside those of DFlash."""
    h, V, section = config["hidden_size"], config["vocab_size"], config["dflash_config"]
    rank, p = section["selector_rank"], "candidate_selector"
    return {
        **convolution_shapes(config),
        f"{p}.hidden_projection.weight": (rank, h),
        f"{p}.predecessor_codebook": (V, rank),
        f"{p}.successor_codebook": (V, rank),
    }


def dflash2_drafts(config: Config, weights: Weights, block: Block) -> Drafts:
    """Walk from the last token, at each place to the best of its candidates."""
    section, token = config["dflash_config"], block.last
    w = {name.removeprefix("candidate_selector."): each for name, each in weights.items()}
    tokens, found = [], []
    for hidden in block.hidden[1:]:
        logits = block.head @ hidden * section.get("output_multiplier", 1.0)
        cap = section.get("final_logit_softcapping")
        logits = cap * torch.tanh(logits / cap) if cap else logits
        scores = torch.full_like(logits, -torch.inf)
        edge = w["predecessor_codebook"][token] * (w["hidden_projection.weight"] @ hidden)
        for id in logits.sort(descending=True).indices[: section["selector_top_k"]].tolist():
            scores[id] = logits[id] + edge @ w["successor_codebook"][id]
        token = int(scores.argmax())
        tokens.append(token)
        found.append(scores)
    return tokens, torch.stack(found)


def lilicorr_shapes(config: Config) -> Shapes:
    """Tensors of a LiLiCorr head, and of convolutions where there are some."""
    h, section = config["hidden_size"], config["dflash_config"]
    sizes = {key.removeprefix("lilicorr_"): each for key, each in section.items()}
    w, size = sizes["hidden_size"] or h, config["block_size"]
    inner, factor = int(w * sizes["mlp_ratio"]), sizes["factor_dim"]
    linears = {
        "pass_hidden_proj": (w, h),
        "feature_mlp.1": (w, 5),
        "feature_mlp.3": (w, w),
        "context_proj": (w, h),
        "factor_input_proj": (w, 3 * w),
        "out_head": (factor, w),
        "in_head": (factor, w),
        "anchor_out_head": (factor, w),
    }
    if w != h:
        linears["token_proj"] = (w, h)
    found: Shapes = {
        "feature_mlp.0.weight": (5,),
        "feature_mlp.0.bias": (5,),
        "slot_embedding": (1, 1, size - 1, 1, w),
        "rank_embedding": (1, 1, 1, sizes["candidate_topk"], w),
        "relative_slot_bias": (sizes["num_heads"], 2 * size - 1),
        "same_slot_bias": (sizes["num_heads"],),
        "output_norm.weight": (w,),
        "anchor_norm.weight": (w,),
    }
    for layer in range(sizes["num_layers"]):
        p = f"layers.{layer}"
        found |= {f"{p}.attn_norm.weight": (w,), f"{p}.mlp_norm.weight": (w,)}
        found |= {f"{p}.attn.in_proj_weight": (3 * w, w), f"{p}.attn.in_proj_bias": (3 * w,)}
        linears |= {f"{p}.attn.out_proj": (w, w)}
        linears |= {f"{p}.mlp.0": (inner, w), f"{p}.mlp.2": (w, inner)}
    for name, shape in linears.items():
        found |= {f"{name}.weight": shape, f"{name}.bias": shape[:1]}
    convolutions = convolution_shapes(config) if section.get("conv_kernel_size") else {}
    return {**convolutions, **{f"lilicorr.{name}": shape for name, shape in found.items()}}


def lilicorr_drafts(config: Config, weights: Weights, block: Block) -> Drafts:
    """Attend by torch's own module, to candidates one after the other; then walk."""
    w = {name.removeprefix("lilicorr."): each for name, each in weights.items()}
    section, h = config["dflash_config"], config["hidden_size"]
    count, heads = section["lilicorr_candidate_topk"], section["lilicorr_num_heads"]
    width, eps = section["lilicorr_hidden_size"] or h, config["rms_norm_eps"]

    def affine(name: str, x: Tensor) -> Tensor:
        return x @ w[f"{name}.weight"].T + w[f"{name}.bias"]

    def norm(name: str, x: Tensor) -> Tensor:
        return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + eps) * w[f"{name}.weight"]

    states, ids, places = [], [], []
    for slot, hidden in enumerate(block.hidden[1:]):
        logs = (block.head @ hidden).log_softmax(0)
        best = logs.sort(descending=True)
        for rank in range(count):
            log, id = best.values[rank], int(best.indices[rank])
            five = [log, log.exp(), log - best.values[0], rank / max(1, count - 1), rank == 0]
            gain, shift = (w[f"feature_mlp.0.{kind}"] for kind in ("weight", "bias"))
            given = layer_norm(torch.tensor(five), (5,), gain, shift)
            state = affine("feature_mlp.3", silu(affine("feature_mlp.1", given)))
            token = block.embedding[id]
            state = state + (token if width == h else affine("token_proj", token))
            state = state + affine("pass_hidden_proj", hidden)
            state = state + w["slot_embedding"][0, 0, slot, 0] + w["rank_embedding"][0, 0, 0, rank]
            states.append(state)
            ids.append(id)
            places.append(slot)
    x, at = torch.stack(states), torch.tensor(places)
    apart = at[:, None] - at[None]
    bias = w["relative_slot_bias"][:, apart + config["block_size"] - 1]
    bias = bias + w["same_slot_bias"][:, None, None] * (apart == 0)
    for layer in range(section["lilicorr_num_layers"]):
        p = f"layers.{layer}"
        attention = torch.nn.MultiheadAttention(width, heads, batch_first=True)
        names = ("in_proj_weight", "in_proj_bias", "out_proj.weight", "out_proj.bias")
        attention.load_state_dict({name: w[f"{p}.attn.{name}"] for name in names})
        normed = norm(f"{p}.attn_norm", x)[None]
        x = x + attention(normed, normed, normed, attn_mask=bias, need_weights=False)[0][0]
        x = x + affine(f"{p}.mlp.2", silu(affine(f"{p}.mlp.0", norm(f"{p}.mlp_norm", x))))
    x = norm("output_norm", x)
    anchor = norm("anchor_norm", affine("context_proj", block.context))
    beside = anchor.expand_as(x)
    both = silu(affine("factor_input_proj", torch.cat((x, beside, x * beside), dim=1)))

    def unit(name: str, x: Tensor) -> Tensor:
        vector = affine(name, x)
        length = vector.square().sum(-1, keepdim=True).sqrt()
        return vector / length.clamp(min=section["lilicorr_vector_eps"])

    behind, before = unit("anchor_out_head", anchor), unit("in_head", both)
    tokens, found = [], []
    for slot in range(len(block.hidden) - 1):
        some = slice(slot * count, (slot + 1) * count)
        scores = section["lilicorr_logit_scale"] * before[some] @ behind
        chosen = slot * count + int(scores.argmax())
        behind = unit("out_head", both[chosen])
        tokens.append(ids[chosen])
        found.append(
            torch.full((len(block.head),), -torch.inf).index_put((torch.tensor(ids[some]),), scores)
        )
    return tokens, torch.stack(found).detach()


SHAPES: dict[str, Callable[[Config], Shapes]] = {
    "DFlash2DraftModel": dflash2_shapes,
    "DominoDraftModel": domino_shapes,
    "LiLiCorrDraftModel": lilicorr_shapes,
    "Qwen3XPressModel": xpress_shapes,
}
DRAFTS: dict[str, Callable[[Config, Weights, Block], Drafts]] = {
    "DFlash2DraftModel": dflash2_drafts,
    "DominoDraftModel": domino_drafts,
    "LiLiCorrDraftModel": lilicorr_drafts,
    "Qwen3XPressModel": xpress_drafts,
}
