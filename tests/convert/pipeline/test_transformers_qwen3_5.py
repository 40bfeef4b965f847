"""Both classes of transformers load a converted Qwen3.5 and compute exactly what we mean."""

import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from lowbit.convert import Override, Recipe
from lowbit.convert.plan.method import ABSMAX
from tests.conversions import convert
from tests.oracle import dequantized_weights

MTP = (Override("mtp.*", 8),)
RECIPES = {
    "int4": Recipe(),
    "mixed-tied": Recipe("int8", head="bf16", overrides=(Override("*.mlp.*", 4),)),
    "mtp": Recipe(overrides=(*MTP, Override("mtp.*.mlp.*", 4))),
    "mtp-as-stored": Recipe(mtp="bf16"),
    "no-mtp": Recipe(mtp="drop"),
    "absmax": Recipe("int8", 64, method=ABSMAX, overrides=(Override("*.mlp.*", 4),)),
    "positive": Recipe(positive_scales=True, head="int4"),
    "rows": Recipe("int8", group_size=None, overrides=(Override("*.mlp.*", 4),)),
    "no-vision": Recipe(drop_vision=True),
    "layers-differ": Recipe(
        overrides=(Override("*.layers.0.mlp.*", 8), Override("*.layers.1.*.o_proj", 16), *MTP)
    ),
}
IDS = torch.arange(48).view(2, 24) * 13


@pytest.fixture(autouse=True)
def _foreign_warnings() -> Iterator[None]:
    """Warnings inside the two libraries are not ours to fail on."""
    with warnings.catch_warnings():
        warnings.simplefilter("default")
        yield


def text_weights(folder: Path) -> dict[str, Tensor]:
    """W = q * s of the decoder in FP32, named as in a text-only model."""
    return {
        name.replace("language_model.", ""): weight
        for name, weight in dequantized_weights(folder).items()
        if not name.startswith("mtp.")
    }


def logits_of(model: Any) -> Tensor:
    with torch.no_grad():
        logits: Tensor = model(IDS).logits
    return logits


def load(auto_class: str, folder: Path) -> tuple[Any, dict[str, Any]]:
    import transformers

    return getattr(transformers, auto_class).from_pretrained(  # type: ignore[no-any-return]
        folder, dtype=torch.float32, output_loading_info=True
    )


@pytest.fixture(scope="module")
def own_gaps(short_hybrid: Path) -> set[str]:
    """Vision tensors that the bundled stand-in lacks before any conversion."""
    missing: set[str] = set(
        load("Qwen3_5ForConditionalGeneration", short_hybrid)[1]["missing_keys"]
    )
    assert missing
    return missing


@pytest.mark.slow
@pytest.mark.parametrize("recipe", RECIPES)
def test_loads_exactly(tmp_path: Path, short_hybrid: Path, own_gaps: set[str], recipe: str) -> None:
    from transformers import AutoConfig, AutoModelForCausalLM

    out, size = tmp_path / "out", 2_000_000
    folder = convert(short_hybrid, out, RECIPES[recipe], max_shard_bytes=size).folder
    weights = text_weights(folder)
    config = AutoConfig.from_pretrained(folder)
    del config.quantization_config
    plain = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    result = plain.load_state_dict(weights, strict=False)
    tied = ["lm_head.weight"] if recipe == "mixed-tied" else []
    assert (result.missing_keys, result.unexpected_keys) == (tied, [])
    assert (plain.lm_head.weight is plain.model.embed_tokens.weight) == bool(tied)
    expected = logits_of(plain)
    assert expected.abs().max() > 1

    text, report = load("AutoModelForCausalLM", folder)
    assert not any(report.values()), report
    assert (logits_of(text) - expected).abs().max().item() == 0.0

    whole, report = load("Qwen3_5ForConditionalGeneration", folder)
    missing = set(report.pop("missing_keys"))
    assert not any(report.values()), report
    if recipe == "no-vision":
        assert missing > own_gaps
        assert all(name.startswith("model.visual.") for name in missing)
    else:
        assert missing == own_gaps
    assert (logits_of(whole) - expected).abs().max().item() == 0.0


@pytest.mark.slow
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
