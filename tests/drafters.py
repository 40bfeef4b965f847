"""Random DFlash drafters, and their hidden states by plain FP32 torch."""

import json
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor

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
    "dflash_config": {"mask_token_id": 4000, "target_layer_ids": [2, 0]},
}


def shapes(config: dict[str, Any]) -> dict[str, tuple[int, ...]]:
    """Tensors of a drafter as its authors' model has them."""
    h, inner, D = (config[key] for key in ("hidden_size", "intermediate_size", "head_dim"))
    q, kv = (D * config[f"num_{name}_heads"] for name in ("attention", "key_value"))
    taps = len(config["dflash_config"]["target_layer_ids"])
    found: dict[str, tuple[int, ...]] = {"fc": (h, taps * h), "hidden_norm": (h,), "norm": (h,)}
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
    return {f"{name}.weight": shape for name, shape in found.items()}


def write_drafter(folder: Path, seed: int = 0, **changes: Any) -> dict[str, Tensor]:
    """A random drafter in a folder; a value None leaves a key out. Its weights in FP32."""
    config = {key: value for key, value in (CONFIG | changes).items() if value is not None}
    generator = torch.Generator().manual_seed(seed)
    weights = {}
    for name, shape in shapes(config).items():
        values = torch.randn(shape, generator=generator)
        scaled = 1 + 0.2 * values if len(shape) == 1 else values * shape[1] ** -0.5
        weights[name] = scaled.bfloat16()
    folder.mkdir(parents=True, exist_ok=True)
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    (folder / "config.json").write_text(json.dumps(config))
    return {name: values.float() for name, values in weights.items()}
