"""The tensor table of Qwen3.5: against real checkpoints' headers, transformers and known sizes."""

import gzip
import json
import math
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import Qwen3_5Config as TheirConfig
from transformers import Qwen3_5ForCausalLM, Qwen3_5ForConditionalGeneration
from transformers import Qwen3_5TextConfig as TheirTextConfig

from lowbit.formats.architectures import (
    is_carried,
    is_tied,
    never_quantized,
    part_of,
    tensor_table,
)
from lowbit.formats.architectures.qwen3_5 import Qwen35Config
from lowbit.formats.architectures.table import TensorSpec
from lowbit.formats.errors import UnsupportedModelError
from lowbit.formats.safetensors.checkpoint import open_checkpoint

ROOT = Path(__file__).parents[2]
TINY = ROOT / "examples/models/tiny-qwen3.5"
MODELS: dict[str, Any] = json.loads(
    gzip.decompress((ROOT / "tests/data/qwen3.5.json.gz").read_bytes())
)

# Parameters on the hub, and of the decoder and the multi-token prediction in millions.
TOTALS = {
    "0.8B": (873_438_784, 752.4, 20.5),
    "2B": (2_274_069_824, 1881.8, 60.8),
    "4B": (4_659_865_088, 4205.8, 120.6),
    "9B": (9_653_104_368, 8953.8, 243.3),
    "27B": (27_781_427_952, 26896.0, 424.7),
}


def config(size: str = "0.8B", **text: Any) -> dict[str, Any]:
    """The real config.json, values of its text_config replaced."""
    real: dict[str, Any] = MODELS[f"Qwen3.5-{size}"]["config"]
    return {**real, "text_config": {**real["text_config"], **text}}


def stored(config: dict[str, Any], names: tuple[str, ...] = ()) -> list[TensorSpec]:
    """The tensors in the file: a tied head is not."""
    table = tensor_table(config, names)
    return [spec for spec in table if spec.role != "head" or not is_tied(config)]


def tiny_config() -> dict[str, Any]:
    content: dict[str, Any] = json.loads((TINY / "config.json").read_text())
    return content


@pytest.mark.parametrize("size", TOTALS)
def test_equals_the_real_checkpoint(size: str) -> None:
    model = MODELS[f"Qwen3.5-{size}"]
    real = {name: (dtype, tuple(shape)) for name, (dtype, *shape) in model["tensors"].items()}
    vision = {name for name in real if is_carried(model["config"], name)}
    assert all(name.startswith("model.visual.") for name in vision)
    table = stored(model["config"], tuple(real))
    assert {spec.name: spec.shape for spec in table} == {
        name: shape for name, (_, shape) in real.items() if name not in vision
    }
    total, decoder, mtp = TOTALS[size]
    assert sum(math.prod(shape) for _, shape in real.values()) == total
    millions = {
        part: sum(
            math.prod(spec.shape) for spec in table if part_of(model["config"], spec.name) == part
        )
        / 1e6
        for part in ("decoder", "mtp")
    }
    assert {part: round(count, 1) for part, count in millions.items()} == {
        "decoder": decoder,
        "mtp": mtp,
    }
    wide = {name for name, (dtype, _) in real.items() if dtype == "F32"}
    assert wide == {
        spec.name for spec in table if spec.name.endswith(("A_log", "linear_attn.norm.weight"))
    }
    assert not any(spec.quantizable for spec in table if spec.name in wide)


def test_bundled_model_has_exactly_the_tensors_of_the_table() -> None:
    checkpoint = open_checkpoint(TINY)
    text = {n: i.shape for n, i in checkpoint.tensors.items() if "visual" not in n}
    assert {spec.name: spec.shape for spec in stored(dict(checkpoint.config))} == text


@pytest.mark.parametrize("nested", [True, False])
def test_equals_the_parameters_of_transformers(nested: bool) -> None:
    content = tiny_config()
    with torch.device("meta"):
        if nested:
            model: torch.nn.Module = Qwen3_5ForConditionalGeneration(TheirConfig(**content))
        else:
            content = content["text_config"]
            model = Qwen3_5ForCausalLM(TheirTextConfig(**content))
    parameters = model.named_parameters()
    theirs = {name: tuple(p.shape) for name, p in parameters if "visual" not in name}
    table = stored(content, tuple(theirs))  # neither has an MTP head
    assert {spec.name: spec.shape for spec in table} == theirs
    linears = {f"{n}.weight" for n, m in model.named_modules() if isinstance(m, torch.nn.Linear)}
    never = {f"{n}" for n in linears if n.endswith(("in_proj_a.weight", "in_proj_b.weight"))}
    ours = {spec.name for spec in tensor_table(content, tuple(theirs)) if spec.quantizable}
    assert ours == {name for name in linears - never if "visual" not in name}


def test_order_roles_and_fused_sets() -> None:
    table = tensor_table(config("4B"))
    names = [spec.name for spec in table]
    assert len(set(names)) == len(names)
    assert names[0] == "model.language_model.embed_tokens.weight"
    head = names.index("lm_head.weight")
    assert names[head - 1] == "model.language_model.norm.weight"
    assert all(name.startswith("mtp.") for name in names[head + 1 :])
    assert Counter(spec.role for spec in table) == {
        "embedding": 1,
        "head": 1,
        "norm": 32 * 2 + 24 + 8 * 2 + 1 + (2 + 4 + 1),
        "attention": 8 * 4,
        "mlp": 32 * 3,
        "delta_in": 24 * 2,
        "delta_gate": 24 * 2,
        "delta_state": 24 * 3,
        "delta_out": 24,
        "mtp": 8,
    }
    fused: dict[str, list[str]] = {}
    for spec in table:
        if spec.fused_set is not None:
            fused.setdefault(spec.fused_set, []).append(spec.module.rpartition(".")[2])
    assert len(fused) == 8 + 32 + 2 * 24 + 2
    p = "model.language_model.layers.0"
    assert fused[f"{p}.linear_attn.in_proj_qkvz"] == ["in_proj_qkv", "in_proj_z"]
    assert fused[f"{p}.linear_attn.in_proj_ba"] == ["in_proj_b", "in_proj_a"]
    assert fused["mtp.layers.0.self_attn.qkv"] == ["q_proj", "k_proj", "v_proj"]
    quantizable = {spec.role for spec in table if spec.quantizable}
    assert quantizable == {"attention", "mlp", "head", "delta_in", "delta_out", "mtp"}


def test_prefix_and_mtp_are_those_of_the_checkpoint() -> None:
    hub = [spec.name for spec in tensor_table(config())]
    plain = [name.replace("model.language_model.", "model.") for name in hub]
    assert [spec.name for spec in tensor_table(config(), plain)] == plain
    trunk = [name for name in plain if not name.startswith("mtp.")]
    assert [spec.name for spec in tensor_table(config()["text_config"], trunk)] == trunk
    assert [spec.name for spec in tensor_table(config(mtp_num_hidden_layers=0))] == [
        name for name in hub if not name.startswith("mtp.")
    ]


def test_parts_and_linears_that_are_never_quantized() -> None:
    content = config()
    vision, mtp = "model.visual.blocks.0.attn.qkv.weight", "mtp.layers.0.mlp.up_proj.weight"
    assert [part_of(content, name) for name in (vision, mtp, "lm_head.weight")] == [
        "vision",
        "mtp",
        "decoder",
    ]
    assert part_of({"model_type": "qwen3"}, vision) == "decoder"
    gates = "re:.*linear_attn[.]in_proj_[ab]$"
    assert never_quantized(content, [vision, mtp]) == ("re:.*visual.*", gates)
    assert never_quantized(content, [mtp]) == (gates,)
    assert never_quantized({"model_type": "qwen3"}, [vision]) == ()


def test_later_dense_models_have_the_same_table() -> None:
    later = MODELS["Qwen3.6-27B"]["config"]
    assert tensor_table(later) == tensor_table(config("27B"))
    assert Qwen35Config.from_hf(later) == Qwen35Config.from_hf(config("27B"))


def test_defaults_of_absent_keys() -> None:
    bare = {k: v for k, v in config()["text_config"].items() if k != "layer_types"}
    del bare["rope_parameters"], bare["full_attention_interval"], bare["hidden_act"]
    bare["rope_theta"] = 10000000
    parsed = Qwen35Config.from_hf({"text_config": bare, "tie_word_embeddings": True})
    assert parsed == Qwen35Config.from_hf(config())
    assert (parsed.rope_theta, parsed.rotary_dim) == (1e7, 64)
    assert [i for i, kind in enumerate(parsed.layer_types) if kind == "full_attention"] == [
        *range(3, 24, 4)
    ]


def test_irregular_layer_types_are_used() -> None:
    kinds = ["full_attention", "linear_attention", "full_attention"]
    names = [s.name for s in tensor_table(config(num_hidden_layers=3, layer_types=kinds))]
    assert "model.language_model.layers.0.self_attn.q_proj.weight" in names
    assert "model.language_model.layers.1.linear_attn.A_log" in names
    assert "model.language_model.layers.2.self_attn.q_proj.weight" in names


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"linear_num_value_heads": 24}, "linear_num_value_heads = 24 is not a multiple"),
        ({"num_key_value_heads": 3}, "num_attention_heads = 8 is not a multiple"),
        ({"attn_output_gate": False}, "`attn_output_gate: false`"),
        ({"mtp_use_dedicated_embeddings": True}, "`mtp_use_dedicated_embeddings: true`"),
        ({"num_experts": 8}, "`num_experts: 8` is not implemented"),
        ({"rope_parameters": {"rope_type": "llama3"}}, "rope scaling `llama3`"),
        (
            {"rope_parameters": {"partial_rotary_factor": 0.3, "rope_theta": 1e7}, "head_dim": 64},
            "`partial_rotary_factor` 0.3 of `head_dim` 64 rotates 19 dimensions",
        ),
        ({"rope_parameters": {"partial_rotary_factor": 0.25}}, "config.json lacks `rope_theta`"),
        ({"rope_parameters": {"rope_theta": 1e7, "mrope_section": [11, 11]}}, "list of 3 counts"),
        ({"layer_types": ["sliding_attention"] * 24}, 'layer type "sliding_attention"'),
    ],
)
def test_unsupported_values_are_named(changes: dict[str, Any], words: str) -> None:
    with pytest.raises(UnsupportedModelError) as caught:
        tensor_table(config(**changes))
    assert words in str(caught.value)
