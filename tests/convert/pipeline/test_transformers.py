"""transformers and compressed-tensors load the packed folder and compute exactly what we mean."""

import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from lowbit.convert import Override, Recipe
from lowbit.convert.plan.method import ABSMAX
from tests.conversions import convert
from tests.convert.fixture_types import MakeModel
from tests.oracle import dequantized_weights

RECIPES = {
    "int4": Recipe(group_size=32),
    "int8": Recipe("int8", 64),
    "mixed": Recipe("int8", head="int4", overrides=(Override("*.mlp.*", 4),)),
    "positive": Recipe(positive_scales=True, head="bf16"),
    "absmax": Recipe(method=ABSMAX),
    "rows": Recipe("int8", group_size=None, overrides=(Override("*.mlp.*", 4),)),
    "layers-differ": Recipe(
        overrides=(Override("model.layers.0.mlp.*", 8), Override("model.layers.1.*.o_proj", 16))
    ),
}
LLAMA3 = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 128,
}
ARCHITECTURES: dict[str, dict[str, Any]] = {
    "qwen3": {},
    "qwen2.5": {
        "architectures": ["Qwen2ForCausalLM"],
        "model_type": "qwen2",
        "head_dim": 32,
        "tie_word_embeddings": True,
    },
    "llama3": {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "head_dim": 32,
        "rope_scaling": LLAMA3,
    },
}


@pytest.fixture(autouse=True)
def _foreign_warnings() -> Iterator[None]:
    """Warnings inside the two libraries are not ours to fail on."""
    with warnings.catch_warnings():
        warnings.simplefilter("default")
        yield


def logits_of(model: Any, ids: Tensor) -> Tensor:
    with torch.no_grad():
        logits: Tensor = model(ids).logits
    return logits


def assert_loads_exactly(folder: Path) -> None:
    from transformers import AutoConfig, AutoModelForCausalLM

    loaded, report = AutoModelForCausalLM.from_pretrained(
        folder, dtype=torch.float32, output_loading_info=True
    )
    assert not any(report.values()), report
    config = AutoConfig.from_pretrained(folder)
    del config.quantization_config
    plain = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    weights = dequantized_weights(folder)
    result = plain.load_state_dict(weights, strict=False)
    assert not result.unexpected_keys
    tied = ["lm_head.weight"] if config.tie_word_embeddings else []
    assert result.missing_keys == [] or result.missing_keys == tied
    assert (plain.lm_head.weight is plain.model.embed_tokens.weight) == bool(tied)
    ids = torch.arange(24).view(2, 12) * 13 % config.vocab_size
    expected = logits_of(plain, ids)
    assert expected.abs().max() > 0.1
    assert (logits_of(loaded, ids) - expected).abs().max().item() == 0.0


@pytest.mark.slow
def test_bundled_model(tmp_path: Path, tiny: Path) -> None:
    assert_loads_exactly(convert(tiny, tmp_path / "out", Recipe()).folder)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("architecture", "recipe"),
    [
        *(("qwen3", recipe) for recipe in RECIPES),
        *(("qwen2.5", recipe) for recipe in ("int4", "mixed", "rows")),
        *(("llama3", recipe) for recipe in ("int8", "positive", "layers-differ")),
    ],
)
def test_recipe(tmp_path: Path, make_model: MakeModel, architecture: str, recipe: str) -> None:
    source = make_model(tmp_path / "source", **ARCHITECTURES[architecture])
    done = convert(source, tmp_path / "out", RECIPES[recipe], max_shard_bytes=150_000)
    assert_loads_exactly(done.folder)


@pytest.mark.slow
@pytest.mark.parametrize("dtype", [torch.float16, torch.float32], ids=str)
def test_other_source_dtypes(tmp_path: Path, make_model: MakeModel, dtype: torch.dtype) -> None:
    source = make_model(tmp_path / "source", dtype, tie_word_embeddings=True)
    assert_loads_exactly(convert(source, tmp_path / "out", Recipe(head="bf16")).folder)
