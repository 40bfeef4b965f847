"""Tables of Qwen3, Llama 3 and Qwen2.5: against transformers' models, a file, published totals."""

import math
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

from lowbit.formats.architectures import SUPPORTED, is_tied, tensor_table
from lowbit.formats.architectures.dense import DenseConfig
from lowbit.formats.architectures.rope import Llama3Rope
from lowbit.formats.architectures.table import TensorSpec
from lowbit.formats.errors import UnsupportedModelError
from lowbit.formats.safetensors.checkpoint import open_checkpoint

TINY = Path(__file__).parents[2] / "examples/models/tiny-qwen3"
LLAMA3 = {
    "rope_type": "llama3",
    "factor": 32.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}


def config(model_type: str, *sizes: int, tied: bool, **changes: Any) -> dict[str, Any]:
    """The config.json of a published model, keys that do not matter here left out."""
    h, inner, layers, heads, kv_heads, vocabulary = sizes
    return {
        "model_type": model_type,
        "hidden_act": "silu",
        "hidden_size": h,
        "intermediate_size": inner,
        "max_position_embeddings": 131072,
        "num_attention_heads": heads,
        "num_hidden_layers": layers,
        "num_key_value_heads": kv_heads,
        "rms_norm_eps": 1e-5,
        "rope_theta": 500000.0,
        "tie_word_embeddings": tied,
        "vocab_size": vocabulary,
        **changes,
    }


def qwen3(*sizes: int, tied: bool) -> dict[str, Any]:
    return config("qwen3", *sizes, 8, 151936, tied=tied, head_dim=128, rope_theta=1000000)


LLAMA_1B = config("llama", 2048, 8192, 16, 32, 8, 128256, tied=True, head_dim=64)
PARAMETERS = {
    "Qwen3-0.6B": (qwen3(1024, 3072, 28, 16, tied=True), 596_049_920),
    "Qwen3-1.7B": (qwen3(2048, 6144, 28, 16, tied=True), 1_720_574_976),
    "Qwen3-4B": (qwen3(2560, 9728, 36, 32, tied=True), 4_022_468_096),
    "Qwen3-8B": (qwen3(4096, 12288, 36, 32, tied=False), 8_190_735_360),
    "Qwen3-14B": (qwen3(5120, 17408, 40, 40, tied=False), 14_768_307_200),
    "Qwen3-32B": (qwen3(5120, 25600, 64, 64, tied=False), 32_762_123_264),
    "Llama-3.2-1B": (LLAMA_1B, 1_235_814_400),
    "Llama-3.1-8B": (config("llama", 4096, 14336, 32, 32, 8, 128256, tied=False), 8_030_261_248),
    "Qwen2.5-0.5B": (config("qwen2", 896, 4864, 24, 14, 2, 151936, tied=True), 494_032_768),
    "Qwen2.5-7B": (config("qwen2", 3584, 18944, 28, 28, 4, 152064, tied=False), 7_615_616_512),
}
QWEN3 = PARAMETERS["Qwen3-8B"][0]


def stored(config: dict[str, Any]) -> list[TensorSpec]:
    """The tensors in the file: a tied head is not."""
    return [spec for spec in tensor_table(config) if spec.role != "head" or not is_tied(config)]


def test_bundled_model_has_exactly_the_tensors_of_the_table() -> None:
    checkpoint = open_checkpoint(TINY)
    expected = {spec.name: spec.shape for spec in stored(dict(checkpoint.config))}
    assert {name: info.shape for name, info in checkpoint.tensors.items()} == expected
    assert "lm_head.weight" not in expected
    assert tensor_table(checkpoint.config)[-1] == TensorSpec("lm_head.weight", (4096, 256), "head")


@pytest.mark.parametrize("model", PARAMETERS)
def test_parameter_totals_are_the_published_ones(model: str) -> None:
    hub_config, total = PARAMETERS[model]
    assert sum(math.prod(spec.shape) for spec in stored(hub_config)) == total


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("model_type", ["qwen3", "llama", "qwen2"])
def test_equals_the_parameters_of_transformers(model_type: str, tied: bool) -> None:
    size = {"head_dim": 32} if model_type == "qwen3" else {}
    ours = config(model_type, 96, 160, 3, 12, 4, 50, tied=tied, **size)
    kinds: dict[str, Any] = {
        "qwen3": (transformers.Qwen3ForCausalLM, transformers.Qwen3Config),
        "llama": (transformers.LlamaForCausalLM, transformers.LlamaConfig),
        "qwen2": (transformers.Qwen2ForCausalLM, transformers.Qwen2Config),
    }
    model_class, config_class = kinds[model_type]
    with torch.device("meta"):
        model = model_class(config_class(**ours))
    theirs = {name: tuple(parameter.shape) for name, parameter in model.named_parameters()}
    assert {spec.name: spec.shape for spec in stored(ours)} == theirs
    linears = {
        f"{name}.weight" for name, m in model.named_modules() if isinstance(m, torch.nn.Linear)
    }
    assert {spec.name for spec in tensor_table(ours) if spec.quantizable} == linears


def test_order_is_that_of_the_forward_pass() -> None:
    names = [spec.name for spec in tensor_table(PARAMETERS["Qwen3-0.6B"][0])]
    assert len(set(names)) == len(names) == 2 + 28 * 11 + 1
    assert names[0] == "model.embed_tokens.weight"
    assert names[-2:] == ["model.norm.weight", "lm_head.weight"]
    assert names.index("model.layers.9.mlp.down_proj.weight") < names.index(
        "model.layers.10.input_layernorm.weight"
    )


def test_roles_and_fused_sets() -> None:
    table = tensor_table(PARAMETERS["Qwen3-1.7B"][0])
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


def test_biases_are_never_quantized() -> None:
    table = tensor_table(PARAMETERS["Qwen2.5-7B"][0])
    biases = [spec for spec in table if spec.name.endswith(".bias")]
    assert len(biases) == 3 * 28
    assert {spec.role for spec in biases} == {"bias"}
    assert not any(spec.quantizable for spec in biases)


def test_features_of_each_family() -> None:
    llama = DenseConfig.from_hf(LLAMA_1B | {"rope_scaling": LLAMA3})
    assert (llama.qk_norm, llama.qkv_bias, llama.head_dim) == (False, False, 64)
    assert llama.rope_scaling == Llama3Rope(32.0, 1.0, 4.0, 8192)
    qwen = DenseConfig.from_hf(PARAMETERS["Qwen2.5-7B"][0])
    assert (qwen.qk_norm, qwen.qkv_bias, qwen.head_dim) == (False, True, 128)
    assert qwen.rope_scaling is None


@pytest.mark.parametrize("model_type", ["mistral", "qwen2_moe", "", None, 3, ["qwen3"]])
def test_unknown_model_type_is_named(model_type: Any) -> None:
    with pytest.raises(UnsupportedModelError) as error:
        tensor_table({**QWEN3, "model_type": model_type})
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


NOT_NEEDED = ("hidden_act", "tie_word_embeddings", "model_type")


@pytest.mark.parametrize("key", [key for key in QWEN3 if key not in NOT_NEEDED])
def test_missing_key_is_named(key: str) -> None:
    for content in ({**QWEN3, key: None}, {n: v for n, v in QWEN3.items() if n != key}):
        if key == "num_key_value_heads" and key in content:
            continue  # null means as many as heads
        with pytest.raises(UnsupportedModelError, match=f"config.json lacks `{key}`"):
            tensor_table(content)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"num_key_value_heads": 5}, "num_attention_heads = 32 is not a multiple of num_key_value"),
        ({"hidden_act": "gelu"}, '`hidden_act: "gelu"` is not implemented'),
        ({"rope_parameters": {"rope_type": "llama3", "rope_theta": 1e6}}, "lacks `factor`"),
        (
            {"rope_parameters": {"partial_rotary_factor": 0.5}},
            "`partial_rotary_factor: 0.5` is not",
        ),
        ({"layer_types": ["sliding_attention"] * 36}, 'type "sliding_attention"'),
        ({"model_type": "llama", "mlp_bias": True}, "`mlp_bias: true` is not implemented"),
        ({"model_type": "llama", "attention_bias": True}, "`attention_bias: true` is not"),
        ({"rope_scaling": "yarn"}, '`rope_scaling` must be an object or null, got "yarn"'),
        ({"rope_scaling": [1]}, "`rope_scaling` must be an object or null, got a list of 1"),
    ],
)
def test_unsupported_values_are_named(changes: dict[str, Any], words: str) -> None:
    with pytest.raises(UnsupportedModelError) as error:
        tensor_table({**QWEN3, **changes})
    assert words in str(error.value)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"factor": None}, "lacks `factor`"),
        ({"factor": -8.0}, "`factor` must be a number from 1 to 1000000, got -8.0"),
        ({"low_freq_factor": 4.0}, "`low_freq_factor` 4 must be below `high_freq_factor` 4"),
        ({"low_freq_factor": 0.0}, "`low_freq_factor` must be a number above 0"),
        ({"original_max_position_embeddings": 8192.5}, "must be an integer from 1 to 16777216"),
    ],
)
def test_rope_factors_without_a_meaning_are_named(changes: dict[str, Any], words: str) -> None:
    with pytest.raises(UnsupportedModelError, match=words):
        DenseConfig.from_hf(LLAMA_1B | {"rope_scaling": LLAMA3 | changes})


def test_rope_theta_of_both_layouts() -> None:
    old = DenseConfig.from_hf(QWEN3)
    assert old.rope_theta == 1e6
    assert isinstance(old.rope_theta, float)
    new = {name: value for name, value in QWEN3.items() if not name.startswith("rope")}
    new["rope_parameters"] = {"rope_type": "default", "rope_theta": 1000000.0}
    assert DenseConfig.from_hf(new) == old


def test_is_tied() -> None:
    assert is_tied(LLAMA_1B)
    assert not is_tied(QWEN3)
    assert not is_tied({})
