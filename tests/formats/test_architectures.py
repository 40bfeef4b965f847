"""Tensor tables: against real headers, transformers' own models and published sizes."""

import math
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import Qwen3Config as TheirConfig
from transformers import Qwen3ForCausalLM

from lowbit.formats.architectures import SUPPORTED, is_tied, tensor_table
from lowbit.formats.architectures.dense import DenseConfig
from lowbit.formats.architectures.table import TensorSpec
from lowbit.formats.errors import UnsupportedModelError
from lowbit.formats.safetensors.checkpoint import open_checkpoint

TINY = Path(__file__).parents[2] / "examples/models/tiny-qwen3"


def config(
    h: int, inner: int, layers: int, heads: int, tied: bool, **changes: Any
) -> dict[str, Any]:
    """The config.json of a published Qwen3, keys that do not matter here left out."""
    return {
        "architectures": ["Qwen3ForCausalLM"],
        "attention_bias": False,
        "head_dim": 128,
        "hidden_act": "silu",
        "hidden_size": h,
        "intermediate_size": inner,
        "max_position_embeddings": 40960,
        "model_type": "qwen3",
        "num_attention_heads": heads,
        "num_hidden_layers": layers,
        "num_key_value_heads": 8,
        "rms_norm_eps": 1e-06,
        "rope_scaling": None,
        "rope_theta": 1000000,
        "sliding_window": None,
        "tie_word_embeddings": tied,
        "use_sliding_window": False,
        "vocab_size": 151936,
        **changes,
    }


QWEN3 = {
    "0.6B": config(1024, 3072, 28, 16, tied=True),
    "1.7B": config(2048, 6144, 28, 16, tied=True),
    "4B": config(2560, 9728, 36, 32, tied=True),
    "8B": config(4096, 12288, 36, 32, tied=False),
    "14B": config(5120, 17408, 40, 40, tied=False),
    "32B": config(5120, 25600, 64, 64, tied=False),
}
MILLIONS = {
    "0.6B": 596.0,
    "1.7B": 1720.6,
    "4B": 4022.5,
    "8B": 8190.7,
    "14B": 14768.3,
    "32B": 32762.1,
}


def stored(config: dict[str, Any]) -> list[TensorSpec]:
    """The tensors in the file: a tied head is not."""
    return [spec for spec in tensor_table(config) if spec.role != "head" or not is_tied(config)]


def test_bundled_model_has_exactly_the_tensors_of_the_table() -> None:
    checkpoint = open_checkpoint(TINY)
    expected = {spec.name: spec.shape for spec in stored(dict(checkpoint.config))}
    assert {name: info.shape for name, info in checkpoint.tensors.items()} == expected
    assert "lm_head.weight" not in expected
    assert tensor_table(checkpoint.config)[-1] == TensorSpec("lm_head.weight", (4096, 256), "head")


@pytest.mark.parametrize("size", MILLIONS)
def test_parameter_totals(size: str) -> None:
    total = sum(math.prod(spec.shape) for spec in stored(QWEN3[size]))
    assert round(total / 1e6, 1) == MILLIONS[size]


@pytest.mark.parametrize("tied", [True, False])
def test_equals_the_parameters_of_transformers(tied: bool) -> None:
    ours = config(96, 160, 3, 12, tied, head_dim=32, num_key_value_heads=4, vocab_size=50)
    with torch.device("meta"):
        model = Qwen3ForCausalLM(TheirConfig(**ours))
    theirs = {name: tuple(parameter.shape) for name, parameter in model.named_parameters()}
    assert {spec.name: spec.shape for spec in stored(ours)} == theirs
    linears = {
        f"{name}.weight" for name, m in model.named_modules() if isinstance(m, torch.nn.Linear)
    }
    assert {spec.name for spec in tensor_table(ours) if spec.quantizable} == linears


def test_order_is_that_of_the_forward_pass() -> None:
    names = [spec.name for spec in tensor_table(QWEN3["0.6B"])]
    assert len(set(names)) == len(names) == 2 + 28 * 11 + 1
    assert names[0] == "model.embed_tokens.weight"
    assert names[-2:] == ["model.norm.weight", "lm_head.weight"]
    assert names.index("model.layers.9.mlp.down_proj.weight") < names.index(
        "model.layers.10.input_layernorm.weight"
    )


def test_roles_and_fused_sets() -> None:
    table = tensor_table(QWEN3["1.7B"])
    assert Counter(spec.role for spec in table) == {
        "embedding": 1,
        "norm": 4 * 28 + 1,
        "attention": 4 * 28,
        "mlp": 3 * 28,
        "head": 1,
    }
    fused: dict[str, list[str]] = {}
    for spec in table:
        if spec.fused_set is not None:
            assert spec.quantizable
            fused.setdefault(spec.fused_set, []).append(spec.module)
    assert len(fused) == 2 * 28
    p = "model.layers.7"
    assert fused[f"{p}.self_attn.qkv"] == [f"{p}.self_attn.{x}_proj" for x in "qkv"]
    assert fused[f"{p}.mlp.gate_up"] == [f"{p}.mlp.gate_proj", f"{p}.mlp.up_proj"]


def refused(changes: dict[str, Any], words: str) -> None:
    with pytest.raises(UnsupportedModelError) as error:
        tensor_table({**QWEN3["8B"], **changes})
    assert words in str(error.value)


@pytest.mark.parametrize("model_type", ["mistral", "qwen2_moe", "phi3", "", None, 3, ["qwen3"]])
def test_unknown_model_type_is_named(model_type: Any) -> None:
    with pytest.raises(UnsupportedModelError) as error:
        tensor_table({**QWEN3["8B"], "model_type": model_type})
    assert f"model_type `{model_type}` is not supported" in str(error.value)
    assert error.value.hint == f"supported: {', '.join(SUPPORTED)}"


@pytest.mark.parametrize("model_type", ["qwen4_exp", "qwen4_exp_text"])
def test_a_known_family_is_refused_with_what_it_would_need(model_type: str) -> None:
    with pytest.raises(UnsupportedModelError) as error:
        tensor_table({"model_type": model_type, "text_config": {"hc_count": 4}})
    said = str(error.value)
    assert said.startswith(f"config.json: model_type `{model_type}` is not implemented: ")
    for part in ("hyper-connections", "sparse attention", "n-gram embeddings"):
        assert part in said
    assert error.value.hint == f"supported: {', '.join(SUPPORTED)}"


def test_config_without_model_type() -> None:
    with pytest.raises(UnsupportedModelError, match="model_type `None`"):
        tensor_table({})


REQUIRED = (
    "head_dim",
    "hidden_size",
    "intermediate_size",
    "max_position_embeddings",
    "num_attention_heads",
    "num_hidden_layers",
    "rms_norm_eps",
    "rope_theta",
    "vocab_size",
)


@pytest.mark.parametrize("key", REQUIRED)
def test_missing_key_is_named(key: str) -> None:
    refused({key: None}, f"config.json lacks `{key}`")
    without = {name: value for name, value in QWEN3["8B"].items() if name != key}
    with pytest.raises(UnsupportedModelError, match=f"config.json lacks `{key}`"):
        tensor_table(without)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"num_key_value_heads": 5}, "num_attention_heads = 32 is not a multiple of num_key_value"),
        ({"hidden_act": "gelu"}, '`hidden_act: "gelu"` is not implemented'),
        ({"attention_bias": True}, "`attention_bias: true` is not implemented"),
        ({"use_sliding_window": True}, "`use_sliding_window: true` is not implemented"),
        ({"rope_scaling": {"type": "linear", "factor": 2.0}}, "rope scaling `linear`"),
        ({"rope_scaling": {"rope_type": "dynamic", "factor": 2.0}}, "rope scaling `dynamic`"),
        ({"rope_scaling": {"type": "longrope"}}, "rope scaling `longrope`"),
        ({"rope_parameters": {"rope_type": "llama3", "rope_theta": 1e6}}, "lacks `factor`"),
        (
            {"rope_parameters": {"partial_rotary_factor": 0.5}},
            "`partial_rotary_factor: 0.5` is not",
        ),
        ({"layer_types": ["sliding_attention"] * 36}, 'type "sliding_attention"'),
        ({"model_type": "llama", "mlp_bias": True}, "`mlp_bias: true` is not implemented"),
        ({"model_type": "llama", "attention_bias": True}, "`attention_bias: true` is not"),
        ({"model_type": "qwen2", "use_sliding_window": True}, "`use_sliding_window: true` is"),
        ({"rope_parameters": {"rope_type": "su"}, "rope_scaling": None}, "rope scaling `su`"),
        ({"rope_scaling": "yarn"}, '`rope_scaling` must be an object or null, got "yarn"'),
        ({"rope_scaling": [1]}, "`rope_scaling` must be an object or null, got a list of 1"),
    ],
)
def test_unsupported_values_are_named(changes: dict[str, Any], words: str) -> None:
    refused(changes, words)


def test_rope_theta_of_both_layouts() -> None:
    old = DenseConfig.from_hf(QWEN3["8B"])
    assert old.rope_theta == 1e6
    assert isinstance(old.rope_theta, float)
    new = {name: value for name, value in QWEN3["8B"].items() if not name.startswith("rope")}
    new["rope_parameters"] = {"rope_type": "default", "rope_theta": 1000000.0}
    assert DenseConfig.from_hf(new) == old


def test_is_tied() -> None:
    assert is_tied(QWEN3["0.6B"])
    assert not is_tied(QWEN3["8B"])
    assert not is_tied({})
