"""A naive head for multi-token prediction: the formulas written out, nothing kept between calls."""

from typing import Any

import torch
from torch import Tensor


def rms(x: Tensor, weight: Tensor) -> Tensor:
    return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + 1e-6) * (1 + weight)


def rotate(x: Tensor, config: dict[str, Any]) -> Tensor:
    """Rotary embedding of [columns, heads, D], column c at position c."""
    rope = config["rope_parameters"]
    D = int(config["head_dim"] * rope["partial_rotary_factor"])
    rates = rope["rope_theta"] ** (-torch.arange(0, D, 2, dtype=torch.float64) / D)
    angles = torch.arange(len(x), dtype=torch.float64)[:, None] * rates
    cos, sin = angles.cos()[:, None], angles.sin()[:, None]
    a, b, rest = x[..., : D // 2], x[..., D // 2 : D], x[..., D:]
    return torch.cat((a * cos - b * sin, b * cos + a * sin, rest), dim=-1)


def naive_head(w: dict[str, Tensor], config: dict[str, Any], ids: Tensor, states: Tensor) -> Tensor:
    """H' of the last of some columns, [h]: the formulas written out, nothing kept between calls."""
    p = "mtp.layers.0."
    e = rms(
        w["model.language_model.embed_tokens.weight"][ids], w["mtp.pre_fc_norm_embedding.weight"]
    )
    h = rms(states, w["mtp.pre_fc_norm_hidden.weight"])
    x = torch.cat((e, h), dim=-1) @ w["mtp.fc.weight"].T
    heads, kv, D = (
        config[key] for key in ("num_attention_heads", "num_key_value_heads", "head_dim")
    )
    y = rms(x, w[f"{p}input_layernorm.weight"])
    q, gate = (y @ w[f"{p}self_attn.q_proj.weight"].T).view(-1, heads, 2, D).unbind(2)
    k = (y @ w[f"{p}self_attn.k_proj.weight"].T).view(-1, kv, D)
    v = (y @ w[f"{p}self_attn.v_proj.weight"].T).view(-1, kv, D)
    q = rotate(rms(q, w[f"{p}self_attn.q_norm.weight"]), config)[-1]
    k = rotate(rms(k, w[f"{p}self_attn.k_norm.weight"]), config)
    out = []
    for head in range(heads):
        own = head // (heads // kv)
        weights = (k[:, own] @ q[head] * D**-0.5).softmax(0)
        out.append(weights @ v[:, own] * gate[-1, head].sigmoid())
    z = x[-1] + torch.cat(out) @ w[f"{p}self_attn.o_proj.weight"].T
    y = rms(z, w[f"{p}post_attention_layernorm.weight"])
    gated = torch.nn.functional.silu(y @ w[f"{p}mlp.gate_proj.weight"].T)
    z = z + (gated * (y @ w[f"{p}mlp.up_proj.weight"].T)) @ w[f"{p}mlp.down_proj.weight"].T
    return rms(z, w["mtp.norm.weight"])
