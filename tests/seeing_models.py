"""Tiny random Qwen3.5 models with a vision tower, written as on the Hub."""

import json
from pathlib import Path
from typing import Any

import torch

TEXT: dict[str, Any] = {
    "vocab_size": 320,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 64,
    "max_position_embeddings": 512,
    "rms_norm_eps": 1e-6,
    "tie_word_embeddings": False,
    "attn_output_gate": True,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 32,
    "linear_value_head_dim": 32,
    "linear_conv_kernel_dim": 4,
    "layer_types": ["linear_attention", "full_attention"],
    "full_attention_interval": 2,
    "rope_parameters": {
        "rope_type": "default",
        "rope_theta": 10_000.0,
        "partial_rotary_factor": 0.25,
        "mrope_section": [3, 3, 2],
        "mrope_interleaved": True,
    },
}
VISION: dict[str, Any] = {
    "depth": 2,
    "hidden_size": 48,
    "intermediate_size": 80,
    "num_heads": 4,
    "in_channels": 3,
    "patch_size": 16,
    "temporal_patch_size": 2,
    "spatial_merge_size": 2,
    "out_hidden_size": 64,
    "num_position_embeddings": 36,
    "hidden_act": "gelu_pytorch_tanh",
    "deepstack_visual_indexes": [],
}
TOKENS = {"image_token_id": 310, "video_token_id": 311}
TOKENS |= {"vision_start_token_id": 312, "vision_end_token_id": 313}
PROCESSOR: dict[str, Any] = {  # as in the folders of Qwen3.5, with smaller limits of pixels
    "size": {"longest_edge": 200_000, "shortest_edge": 4096},
    "patch_size": 16,
    "temporal_patch_size": 2,
    "merge_size": 2,
    "image_mean": [0.5, 0.5, 0.5],
    "image_std": [0.5, 0.5, 0.5],
    "image_processor_type": "Qwen2VLImageProcessorFast",
}


def make_seeing(folder: Path, seed: int = 0, **vision: Any) -> Any:
    """Write a model with changes of its tower's config; the model of transformers in FP32.

    Weights are larger than fresh ones, so that every operation shows in the output.
    """
    from transformers import Qwen3_5Config, Qwen3_5ForConditionalGeneration

    generator = torch.Generator().manual_seed(seed)
    content = {"text_config": TEXT, "vision_config": VISION | vision, **TOKENS}
    model = Qwen3_5ForConditionalGeneration(Qwen3_5Config(**content)).to(torch.bfloat16)
    for name, parameter in model.named_parameters():
        if "visual" in name:
            noise = torch.randn(parameter.shape, generator=generator)
            fan_in = parameter[0].numel() if parameter.dim() > 1 else 4
            gain = "norm" in name and name.endswith("weight")
            parameter.data.copy_(1 + 0.3 * noise if gain else noise * 1.5 / fan_in**0.5)
    model.save_pretrained(folder)
    config = json.loads((folder / "config.json").read_text())
    config["vision_config"].pop("rope_parameters", None)  # published configs have none
    config["vision_config"] |= vision
    (folder / "config.json").write_text(json.dumps(config))
    (folder / "preprocessor_config.json").write_text(json.dumps(PROCESSOR))
    # `to` has rounded the frequencies of rotations too; reading the file makes them anew.
    return Qwen3_5ForConditionalGeneration.from_pretrained(folder, dtype=torch.float32).eval()
