"""The section of a config.json that llm-compressor 0.14 wrote for W4A16 and its relatives."""

import json

import pytest

from lowbit.formats.layout.quantization_config import read_quantization_config
from lowbit.formats.layout.scheme import Scheme

WRITTEN = """
{"config_groups": {"group_0": {"format": "pack-quantized", "input_activations": null,
  "output_activations": null, "targets": ["Linear"], "weights": {"actorder": null,
  "block_structure": null, "dynamic": false, "group_size": 128, "num_bits": 4,
  "observer": "memoryless_minmax", "observer_kwargs": {}, "scale_dtype": null,
  "strategy": "group", "symmetric": true, "type": "int", "zp_dtype": null}}},
 "format": "pack-quantized", "global_compression_ratio": null, "ignore": ["lm_head"],
 "kv_cache_scheme": null, "quant_method": "compressed-tensors",
 "quantization_status": "compressed", "sparsity_config": {}, "transform_config": {},
 "version": "0.19.0"}
"""
ASYMMETRIC = {"symmetric": False, "zp_dtype": "torch.int8"}
ROWS = {"strategy": "channel", "group_size": None, "num_bits": 8}


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({}, Scheme(4, 128)),
        (ASYMMETRIC, Scheme(4, 128, symmetric=False)),
        (ROWS, Scheme(8, None)),
        ({"actorder": "static"}, Scheme(4, 128)),
        ({"actorder": "weight"}, Scheme(4, 128)),
    ],
)
def test_sections_of_llm_compressor(changes: dict[str, object], expected: Scheme) -> None:
    section = json.loads(WRITTEN)
    section["config_groups"]["group_0"]["weights"] |= changes
    config = read_quantization_config({"quantization_config": section})
    assert config is not None
    assert config.scheme_for("model.layers.0.mlp.up_proj") == expected
    assert config.scheme_for("lm_head") is None
