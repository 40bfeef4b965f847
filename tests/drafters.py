"""Random block drafters, and their hidden states by plain FP32 torch."""

import json
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from lowbit.formats.architectures import kind_of
from tests import heads
from tests.short_models import SHORT_VOCABULARY

CONFIG: dict[str, Any] = {
    "architectures": ["DFlashDraftModel"],
    "model_type": "qwen3",
    "dtype": "bfloat16",
    "vocab_size": 4096,
    "hidden_size": 256,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "hidden_act": "silu",
    "max_position_embeddings": 4096,
    "rms_norm_eps": 1e-6,
    "rope_theta": 10000.0,
    "attention_bias": False,
    "tie_word_embeddings": True,
    "use_sliding_window": True,
    "sliding_window": 20,
    "layer_types": ["sliding_attention", "full_attention"],
    "num_target_layers": 4,
    "block_size": 8,
    "dflash_config": {"mask_token_id": 1000, "target_layer_ids": [2, 0]},
}
# Keys as DeepSpec writes them: a copy of the target's config.json, and its own at the top.
DSPARK: dict[str, Any] = {
    **{key: value for key, value in CONFIG.items() if key != "dflash_config"},
    "architectures": ["Qwen3DSparkModel"],
    "attention_dropout": 0.0,
    "block_size": 7,
    "confidence_head_with_markov": True,
    "enable_confidence_head": True,
    "layer_types": ["full_attention"] * 2,
    "markov_head_type": "vanilla",
    "markov_rank": 64,
    "mask_token_id": 1000,
    "max_window_layers": 2,
    "num_anchors": 512,
    "sliding_window": None,
    "target_layer_ids": [0, 2],
    "tie_word_embeddings": False,
    "use_sliding_window": False,
}
# Keys as the authors' conversion for vLLM writes them, beside those of DFlash.
XPRESS: dict[str, Any] = {
    **CONFIG,
    "architectures": ["Qwen3XPressModel"],
    "sample_from_anchor": False,
    "xpress_block_size": 8,
    "xpress_mlp_hidden": 96,
    "xpress_num_passes": 3,
    "xpress_rank": 64,
}
# Keys of SpecForge; published files have the class of DFlash.
DOMINO: dict[str, Any] = {
    **CONFIG,
    "architectures": ["DFlashDraftModel"],
    "emb_dim": 64,
    "layer_types": ["full_attention"] * 2,
    "dflash_config": {
        **CONFIG["dflash_config"],
        "emb_dim": 64,
        "gru_hidden_dim": 96,
        "projector_type": "domino",
        "pure_draft_prefix_len": 1,
        "shift_label": True,
    },
}
# Keys of z-lab's DFlash2, all of them in the section.
DFLASH2: dict[str, Any] = {
    **{key: value for key, value in CONFIG.items() if key != "block_size"},
    "architectures": ["DFlash2DraftModel"],
    "is_causal": False,
    "layer_types": ["sliding_attention"] * 2,
    "dflash_config": {
        **CONFIG["dflash_config"],
        "block_size": 8,
        "conv_group_size": 16,
        "conv_kernel_size": 2,
        "selector_rank": 32,
        "selector_top_k": 16,
    },
}
# Keys of NVIDIA's export, of which no file is published.
LILICORR: dict[str, Any] = {
    **CONFIG,
    "architectures": ["LiLiCorrDraftModel"],
    "layer_types": ["full_attention"] * 2,
    "dflash_config": {
        **CONFIG["dflash_config"],
        "projector_type": "lilicorr",
        "lilicorr_enabled": True,
        "lilicorr_candidate_topk": 8,
        "lilicorr_hidden_size": 96,
        "lilicorr_num_layers": 2,
        "lilicorr_num_heads": 3,
        "lilicorr_mlp_ratio": 2.0,
        "lilicorr_factor_dim": 32,
        "lilicorr_vector_eps": 1e-6,
        "lilicorr_logit_scale": 10.0,
    },
}
KINDS: dict[str, dict[str, Any]] = {
    "dflash": CONFIG,
    "dspark": DSPARK,
    "xpress": XPRESS,
    "domino": DOMINO,
    "dflash2": DFLASH2,
    "lilicorr": LILICORR,
}


def shapes(config: dict[str, Any]) -> dict[str, tuple[int, ...]]:
    """Tensors of a drafter as its authors' model has them."""
    h, inner, D = (config[key] for key in ("hidden_size", "intermediate_size", "head_dim"))
    q, kv = (D * config[f"num_{name}_heads"] for name in ("attention", "key_value"))
    taken = len(config.get("dflash_config", config)["target_layer_ids"])
    found: dict[str, tuple[int, ...]] = {
        "fc": (h, taken * h),
        "hidden_norm": (h,),
        "norm": (h,),
    }
    for index in range(config["num_hidden_layers"]):
        layer = {
            "input_layernorm": (h,),
            "post_attention_layernorm": (h,),
            "self_attn.q_proj": (q, h),
            "self_attn.k_proj": (kv, h),
            "self_attn.v_proj": (kv, h),
            "self_attn.o_proj": (h, q),
            "self_attn.q_norm": (D,),
            "self_attn.k_norm": (D,),
            "mlp.gate_proj": (inner, h),
            "mlp.up_proj": (inner, h),
            "mlp.down_proj": (h, inner),
        }
        found |= {f"layers.{index}.{name}": shape for name, shape in layer.items()}
    kind = kind_of(config)
    own = {"Qwen3DSparkModel": dspark_shapes, **heads.SHAPES}.get(kind)
    more = {} if own is None else own(config)
    return {**{f"{name}.weight": shape for name, shape in found.items()}, **more}


def dspark_shapes(config: dict[str, Any]) -> dict[str, tuple[int, ...]]:
    """Tensors of a DSpark drafter beside those of DFlash."""
    h, V, rank = (config[key] for key in ("hidden_size", "vocab_size", "markov_rank"))
    found: dict[str, tuple[int, ...]] = {"embed_tokens.weight": (V, h), "lm_head.weight": (V, h)}
    if rank:
        found |= {f"markov_head.markov_{name}.weight": (V, rank) for name in ("w1", "w2")}
    if config["enable_confidence_head"]:
        found["confidence_head.proj.weight"] = (1, h + rank)
        found["confidence_head.proj.bias"] = (1,)
    return found


DECIDING = (  # weights of the token before
    "markov_head.markov_w1.weight",
    "xpress_head.w1.weight",
    "embed_proj.2.weight",
    "candidate_selector.predecessor_codebook",
    "candidate_selector.successor_codebook",
)


def write_drafter(
    folder: Path, seed: int = 0, base: dict[str, Any] = CONFIG, **changes: Any
) -> dict[str, Tensor]:
    """A random drafter in a folder; a value None leaves a key out. Its weights in FP32.

    One for a target of two layers has the vocabulary of shortened models.
    """
    config = {key: value for key, value in (base | changes).items() if value is not None}
    if config.get("num_target_layers") == 2:
        config["vocab_size"] = SHORT_VOCABULARY
    generator = torch.Generator().manual_seed(seed)
    weights = {}
    for name, shape in shapes(config).items():
        values = torch.randn(shape, generator=generator)
        scaled = 1 + 0.2 * values if len(shape) == 1 else values * shape[1] ** -0.5
        if name in DECIDING:
            scaled = 3 * values  # so that the token before decides
        weights[name] = scaled.bfloat16()
    folder.mkdir(parents=True, exist_ok=True)
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    (folder / "config.json").write_text(json.dumps(config))
    return {name: values.float() for name, values in weights.items()}


def hidden_by_torch(
    config: dict[str, Any], weights: dict[str, Tensor], hidden_taps: Tensor, block: Tensor
) -> Tensor:
    """Hidden states of a block behind a context, after the last norm, in plain FP32.

    Args:
        config: config.json.
        weights: by name.
        hidden_taps: [T, n * h] of the positions before the block.
        block: [b, h], embedded tokens.
    """
    T, D, eps = len(hidden_taps), config["head_dim"], config["rms_norm_eps"]
    groups = config["num_attention_heads"] // config["num_key_value_heads"]

    def norm(x: Tensor, name: str) -> Tensor:
        scale = torch.rsqrt(x.square().mean(-1, keepdim=True) + eps)
        return x * scale * weights[f"{name}.weight"]

    def rotate(x: Tensor, first: int) -> Tensor:
        places = torch.arange(first, first + x.shape[1], dtype=torch.float32)
        steps = config["rope_theta"] ** (-torch.arange(0, D, 2, dtype=torch.float32) / D)
        angle = torch.cat([places[:, None] * steps] * 2, dim=1)
        turned = torch.cat((-x[..., D // 2 :], x[..., : D // 2]), dim=-1)
        return x * angle.cos() + turned * angle.sin()

    def split(x: Tensor) -> Tensor:
        return x.view(len(x), -1, D).transpose(0, 1)

    context = norm(hidden_taps @ weights["fc.weight"].T, "hidden_norm")
    x = block
    ahead = torch.arange(T + len(x)) - torch.arange(T, T + len(x))[:, None]
    for index, kind in enumerate(config["layer_types"]):
        p = f"layers.{index}"

        def linear(x: Tensor, name: str, p: str = p) -> Tensor:
            return x @ weights[f"{p}.{name}.weight"].T

        given = norm(x, f"{p}.input_layernorm")
        normed = heads.convolved(weights, f"{p}.attention_conv", given, given, 0)
        both = torch.cat((context, normed))
        q = rotate(norm(split(linear(normed, "self_attn.q_proj")), f"{p}.self_attn.q_norm"), T)
        k = rotate(norm(split(linear(both, "self_attn.k_proj")), f"{p}.self_attn.k_norm"), 0)
        v = split(linear(both, "self_attn.v_proj"))
        scores = q @ k.repeat_interleave(groups, 0).transpose(1, 2) / D**0.5
        if kind == "sliding_attention":
            window = config["sliding_window"]
            causal = config.get("is_causal", True)
            unseen = (ahead > 0 if causal else ahead >= window) | (ahead <= -window)
            scores = scores.masked_fill(unseen, -torch.inf)
        mixed = scores.softmax(-1) @ v.repeat_interleave(groups, 0)
        out = linear(mixed.transpose(0, 1).flatten(1), "self_attn.o_proj")
        x = x + heads.convolved(weights, f"{p}.attention_conv", given, out, 1)
        given = norm(x, f"{p}.post_attention_layernorm")
        normed = heads.convolved(weights, f"{p}.mlp_conv", given, given, 0)
        gate = linear(normed, "mlp.gate_proj")
        out = linear(gate * gate.sigmoid() * linear(normed, "mlp.up_proj"), "mlp.down_proj")
        x = x + heads.convolved(weights, f"{p}.mlp_conv", given, out, 1)
    return norm(x, "norm")


def context_by_torch(config: dict[str, Any], weights: dict[str, Tensor], tap: Tensor) -> Tensor:
    """Context of a position [h] by outputs of the target there [n * h]."""
    x = weights["fc.weight"] @ tap
    return (
        x * torch.rsqrt(x.square().mean() + config["rms_norm_eps"]) * weights["hidden_norm.weight"]
    )


def text_model_of(folder: Path) -> Any:
    """The text part of a bundled Qwen3.5 by transformers, in FP32."""
    from transformers import AutoConfig, AutoModelForCausalLM

    content = json.loads((folder / "config.json").read_text())
    text = {**content["text_config"], "tie_word_embeddings": True}
    text.pop("dtype")
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model(**text), dtype=torch.float32)
    stored = {
        name.replace("model.language_model.", "model."): weight.float()
        for name, weight in load_file(folder / "model.safetensors").items()
    }
    own = {name: stored[name] for name in model.state_dict() if name in stored}
    model.load_state_dict(own, strict=False)
    model.tie_weights()
    return model.eval()
