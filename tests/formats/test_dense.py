"""The tables of Llama 3 and Qwen2.5 against transformers' models and published totals."""

import math
from typing import Any

import pytest
import torch

from lowbit.formats.architectures import is_tied, tensor_table
from lowbit.formats.architectures.dense import DenseConfig
from lowbit.formats.architectures.rope import Llama3Rope
from lowbit.formats.architectures.table import TensorSpec
from lowbit.formats.errors import UnsupportedModelError

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


LLAMA_1B = config("llama", 2048, 8192, 16, 32, 8, 128256, tied=True, head_dim=64)
PARAMETERS = {
    "Llama-3.2-1B": (LLAMA_1B, 1_235_814_400),
    "Llama-3.1-8B": (config("llama", 4096, 14336, 32, 32, 8, 128256, tied=False), 8_030_261_248),
    "Qwen2.5-0.5B": (config("qwen2", 896, 4864, 24, 14, 2, 151936, tied=True), 494_032_768),
    "Qwen2.5-7B": (config("qwen2", 3584, 18944, 28, 28, 4, 152064, tied=False), 7_615_616_512),
}


def stored(config: dict[str, Any]) -> list[TensorSpec]:
    """The tensors in the file: a tied head is not."""
    return [spec for spec in tensor_table(config) if spec.role != "head" or not is_tied(config)]


@pytest.mark.parametrize("model", PARAMETERS)
def test_parameter_totals_are_the_published_ones(model: str) -> None:
    hub_config, total = PARAMETERS[model]
    assert sum(math.prod(spec.shape) for spec in stored(hub_config)) == total


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("model_type", ["llama", "qwen2"])
def test_equals_the_parameters_of_transformers(model_type: str, tied: bool) -> None:
    import transformers

    ours = config(model_type, 96, 160, 3, 12, 4, 50, tied=tied)
    kinds: dict[str, Any] = {
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


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"factor": None}, "lacks `factor`"),
        ({"factor": -8.0}, "`factor` must be a number from 1 to 1000000, got -8.0"),
        ({"low_freq_factor": 4.0}, "`low_freq_factor` 4 must be below `high_freq_factor` 4"),
        ({"low_freq_factor": 0.0}, "`low_freq_factor` must be a number above 0"),
        ({"original_max_position_embeddings": 8192.5}, "must be an integer from 1 to 16777216"),
        ({"original_max_position_embeddings": 0}, "must be an integer from 1 to 16777216, got 0"),
    ],
)
def test_rope_factors_without_a_meaning_are_named(changes: dict[str, Any], words: str) -> None:
    with pytest.raises(UnsupportedModelError, match=words):
        DenseConfig.from_hf(LLAMA_1B | {"rope_scaling": LLAMA3 | changes})
