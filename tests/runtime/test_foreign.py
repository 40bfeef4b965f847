"""Folders that compressed-tensors itself wrote, as llm-compressor does, are served as they are."""

import shutil
from pathlib import Path
from typing import Any

import pytest
import torch

import lowbit.runtime

ROOT = Path(__file__).parents[2]
BUNDLED = ROOT / "examples" / "models" / "tiny-qwen3"


def write_foreign(folder: Path, weights: dict[str, Any]) -> None:
    """Quantize a random Qwen3 with compressed-tensors' own scales, packer and config writer."""
    from compressed_tensors.compressors import ModelCompressor
    from compressed_tensors.quantization import (
        QuantizationArgs,
        QuantizationConfig,
        QuantizationScheme,
        QuantizationStatus,
        apply_quantization_config,
    )
    from compressed_tensors.quantization.utils import calculate_qparams
    from transformers import Qwen3Config, Qwen3ForCausalLM

    torch.manual_seed(0)
    config = Qwen3Config(
        vocab_size=4096,
        hidden_size=64,
        intermediate_size=96,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=32,
        max_position_embeddings=256,
    )
    model = Qwen3ForCausalLM(config).to(torch.bfloat16)
    scheme = QuantizationScheme(targets=["Linear"], weights=QuantizationArgs(**weights))
    apply_quantization_config(
        model, QuantizationConfig(config_groups={"group_0": scheme}, ignore=["lm_head"])
    )
    for module in model.modules():
        if hasattr(module, "weight_scale"):
            rows = module.weight.float()
            groups = rows.view(len(rows), module.weight_scale.shape[1], -1)
            scale, _ = calculate_qparams(
                groups.amin(-1), groups.amax(-1), module.quantization_scheme.weights
            )
            module.weight_scale.data.copy_(scale)
            module.quantization_status = QuantizationStatus.FROZEN
    compressor = ModelCompressor.from_pretrained_model(model)
    compressor.compress_model(model)
    model.save_pretrained(folder)
    compressor.update_config(folder)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(BUNDLED / name, folder)


@pytest.mark.slow
@pytest.mark.parametrize(
    "weights",
    [
        {"num_bits": 4, "symmetric": True, "strategy": "group", "group_size": 32},
        {"num_bits": 8, "symmetric": True, "strategy": "channel"},
    ],
    ids=["int4-g32", "int8-channel"],
)
@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::UserWarning")
def test_a_foreign_folder_gives_the_logits_of_transformers(
    tmp_path: Path, weights: dict[str, Any]
) -> None:
    from transformers import AutoModelForCausalLM

    write_foreign(tmp_path, weights)
    assert not (tmp_path / "lowbit.json").exists()
    ids = [5, 17, 4000, 3, 3, 250, 1]
    ours = lowbit.runtime.load(tmp_path, device="cpu", dtype=torch.float32).logits(ids)
    theirs = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.float32)
    with torch.no_grad():
        expected = theirs(torch.tensor([ids])).logits[0]
    assert (ours - expected).abs().max() < 1e-4 * expected.abs().max()
