"""transformers and compressed-tensors load the packed folder and compute exactly what we mean."""

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from lowbit.convert import Override, Recipe
from lowbit.convert.plan.method import ABSMAX
from tests.conversions import convert
from tests.convert.fixture_types import MakeModel
from tests.lanes import in_commands
from tests.oracle import dequantized_weights

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("foreign_warnings")]

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
MTP = (Override("mtp.*", 8),)
QWEN3_5 = {
    "int4": Recipe(),
    "mixed-tied": Recipe("int8", head="bf16", overrides=(Override("*.mlp.*", 4),)),
    "absmax": Recipe("int8", 64, method=ABSMAX, overrides=(Override("*.mlp.*", 4),)),
    "positive-mtp-as-stored": Recipe(positive_scales=True, head="int4", mtp="bf16"),
    "rows": Recipe("int8", group_size=None, overrides=(Override("*.mlp.*", 4),)),
    "no-vision-no-mtp": Recipe(drop_vision=True, mtp="drop"),
    "layers-differ": Recipe(
        overrides=(
            *(Override("*.layers.0.mlp.*", 8), Override("*.layers.1.*.o_proj", 16)),
            *(*MTP, Override("mtp.*.mlp.*", 4)),
        )
    ),
}


def logits_of(model: Any, vocabulary: int) -> Tensor:
    with torch.no_grad():
        logits: Tensor = model(torch.arange(48).view(2, 24) * 13 % vocabulary).logits
    return logits


def load(auto_class: str, folder: Path) -> tuple[Any, dict[str, Any]]:
    import transformers

    return getattr(transformers, auto_class).from_pretrained(  # type: ignore[no-any-return]
        folder, dtype=torch.float32, output_loading_info=True
    )


def assert_loads_exactly(folder: Path) -> Tensor:
    """Compare with a plain model that has W = q * s; the logits of both."""
    from transformers import AutoConfig, AutoModelForCausalLM

    loaded, report = load("AutoModelForCausalLM", folder)
    assert not any(report.values()), report
    config = AutoConfig.from_pretrained(folder)
    del config.quantization_config
    plain = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    weights = {
        name.replace("language_model.", ""): weight
        for name, weight in dequantized_weights(folder).items()
        if not name.startswith("mtp.")
    }
    result = plain.load_state_dict(weights, strict=False)
    tied = ["lm_head.weight"] if config.tie_word_embeddings else []
    assert result.unexpected_keys == []
    assert result.missing_keys == [] or result.missing_keys == tied
    assert (plain.lm_head.weight is plain.model.embed_tokens.weight) == bool(tied)
    expected = logits_of(plain, plain.config.vocab_size)
    assert expected.abs().max() > 0.1
    assert (logits_of(loaded, plain.config.vocab_size) - expected).abs().max().item() == 0.0
    return expected


def test_bundled_model(tmp_path: Path, tiny: Path) -> None:
    assert_loads_exactly(convert(tiny, tmp_path / "out", Recipe()).folder)


@in_commands("qwen2.5-mixed", "qwen2.5-rows", "llama3-positive", "llama3-layers-differ")
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


@pytest.mark.parametrize("dtype", [torch.float16, torch.float32], ids=str)
def test_other_source_dtypes(tmp_path: Path, make_model: MakeModel, dtype: torch.dtype) -> None:
    source = make_model(tmp_path / "source", dtype, tie_word_embeddings=True)
    assert_loads_exactly(convert(source, tmp_path / "out", Recipe(head="bf16")).folder)


@pytest.fixture(scope="module")
def own_gaps(short_hybrid: Path) -> set[str]:
    """Vision tensors that the bundled stand-in lacks before any conversion."""
    missing: set[str] = set(
        load("Qwen3_5ForConditionalGeneration", short_hybrid)[1]["missing_keys"]
    )
    assert missing
    return missing


@in_commands("int4", "absmax", "rows", "layers-differ", "mixed-tied")
@pytest.mark.parametrize("recipe", QWEN3_5)
def test_both_classes_of_qwen3_5(
    tmp_path: Path, short_hybrid: Path, own_gaps: set[str], recipe: str
) -> None:
    out, size = tmp_path / "out", 2_000_000
    folder = convert(short_hybrid, out, QWEN3_5[recipe], max_shard_bytes=size).folder
    expected = assert_loads_exactly(folder)
    assert expected.abs().max() > 1
    whole, report = load("Qwen3_5ForConditionalGeneration", folder)
    missing = set(report.pop("missing_keys"))
    assert not any(report.values()), report
    if recipe == "no-vision-no-mtp":
        assert missing > own_gaps
        assert all(name.startswith("model.visual.") for name in missing)
    else:
        assert missing == own_gaps
    assert (logits_of(whole, 1 << 30) - expected).abs().max().item() == 0.0


def test_f32_tensors_reach_the_model_in_full(tmp_path: Path, short_hybrid: Path) -> None:
    folder = convert(short_hybrid, tmp_path / "out", Recipe()).folder
    source = load_file(short_hybrid / "model.safetensors")
    packed = load_file(folder / "model.safetensors")
    text, _ = load("AutoModelForCausalLM", folder)
    found = dict(text.named_parameters())
    wide = [name for name, tensor in source.items() if tensor.dtype == torch.float32]
    assert len(wide) == 2
    for name in wide:
        assert packed[name].dtype == torch.float32
        assert torch.equal(packed[name], source[name])
        parameter = found[name.replace("language_model.", "")]
        assert parameter.dtype == torch.float32
        assert torch.equal(parameter, source[name])
    rates = torch.cat([source[name] for name in wide if name.endswith("A_log")])
    assert (rates != rates.bfloat16().float()).any()  # BF16 would not hold them
