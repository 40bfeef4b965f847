"""Short models: the linears of the real ones, by their config.json alone."""

import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch

from lowbit.formats.architectures import tensor_table
from lowbit.runtime.kernels.launch.linear import GemvLaunch
from lowbit.runtime.kernels.linear.tiles import TiledLinear, dequantized
from lowbit.runtime.lab.expected import open_headers
from lowbit.runtime.lab.tuning.short_model import (
    Linear,
    linears_of,
    new_short_runner,
    shortened,
    with_launches,
)
from lowbit.runtime.models.loader import OpenedModel
from tests.runtime.dense_embedding import dense_embedding

MODELS = Path(__file__).parents[4] / "examples" / "models"
DENSE: dict[str, Any] = {
    "architectures": ["Qwen3ForCausalLM"],
    "model_type": "qwen3",
    "vocab_size": 151936,
    "hidden_size": 5120,
    "intermediate_size": 17408,
    "num_hidden_layers": 40,
    "num_attention_heads": 40,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "max_position_embeddings": 40960,
    "rms_norm_eps": 1e-6,
    "rope_theta": 1000000,
    "tie_word_embeddings": False,
}
HYBRID: dict[str, Any] = {
    "architectures": ["Qwen3_5ForCausalLM"],
    "model_type": "qwen3_5_text",
    "vocab_size": 248320,
    "hidden_size": 5120,
    "intermediate_size": 17408,
    "num_hidden_layers": 64,
    "num_attention_heads": 24,
    "num_key_value_heads": 4,
    "head_dim": 256,
    "linear_num_key_heads": 16,
    "linear_num_value_heads": 48,
    "linear_key_head_dim": 128,
    "linear_value_head_dim": 128,
    "linear_conv_kernel_dim": 4,
    "full_attention_interval": 4,
    "max_position_embeddings": 262144,
    "rms_norm_eps": 1e-6,
    "rope_parameters": {
        "rope_type": "default",
        "rope_theta": 10000000,
        "partial_rotary_factor": 0.25,
    },
    "tie_word_embeddings": False,
}


def opened(config: dict[str, Any], folder: Path, quantize: Any = "int8") -> OpenedModel:
    path = folder / "config.json"
    path.write_text(json.dumps(config))
    return open_headers(str(path), quantize)[0]


def by_name(model: OpenedModel, least_bytes: int = 0) -> dict[str, Linear]:
    runner = new_short_runner(shortened(model, least_bytes), "meta", 2)
    return {each.name: each for each in linears_of(runner, model)}


def test_linears_of_14b(tmp_path: Path) -> None:
    found = by_name(opened(DENSE, tmp_path))
    assert {name: (each.calls, each.whole_calls) for name, each in found.items()} == {
        "INT8 151936x5120": (1, 1.0),
        "INT8 34816x5120 paired": (4, 40.0),
        "INT8 5120x17408": (4, 40.0),
        "INT8 7168x5120": (4, 40.0),
        "INT8 5120x5120": (4, 40.0),
    }
    assert found["INT8 5120x17408"].size == (8, 320, 272, False)
    table = [spec for spec in tensor_table(DENSE) if spec.quantizable]
    size = sum(math.prod(spec.shape) * (1 + 2 / 128) for spec in table)
    assert sum(each.size_bytes * each.whole_calls for each in found.values()) == size


def test_linears_of_27b(tmp_path: Path) -> None:
    """Three layers of linear attention to one of attention, as in the whole model."""
    found = by_name(opened(HYBRID, tmp_path))
    counts = {name: (each.calls, each.whole_calls) for name, each in found.items()}
    assert counts["INT8 16384x5120"] == (3, 48.0)
    assert counts["INT8 14336x5120"] == (1, 16.0)
    assert counts["INT8 5120x6144"] == (4, 64.0)
    assert counts["INT8 34816x5120 paired"] == (4, 64.0)


def test_as_many_layers_as_leave_the_cache(tmp_path: Path) -> None:
    model = opened(HYBRID, tmp_path)
    layer = sum(math.prod(spec.shape) for spec in model.specs if ".layers.0." in spec.name)
    counts = [
        shortened(model, least).config.num_hidden_layers
        for least in (0, 3 * layer, 5 * layer, 10**15)
    ]
    assert counts == [4, 4, 8, 64]


def test_a_model_of_few_layers_stays_whole() -> None:
    model, recipe = open_headers(str(MODELS / "tiny-qwen3"))
    assert recipe == "int4"
    short = shortened(model, 10**12)
    assert short.config == model.config
    assert short.checkpoint.tensors == dict(model.checkpoint.tensors)


@pytest.mark.parametrize("kind", ["", ".5", "-moe", ".5-moe"])
def test_launches_reach_every_linear_of_their_size(kind: str) -> None:
    model, _ = open_headers(str(MODELS / f"tiny-qwen3{kind}"))
    runner = new_short_runner(shortened(model, 0), "meta", 1)
    linears = linears_of(runner, model)
    assert linears
    tuned = ((1, GemvLaunch(1, 1, 4)),)
    for linear in linears:
        changed = with_launches(runner.decoder, {linear.size: tuned})
        runner.decoder, before = changed, runner.decoder
        sizes = {each.size: each.example.tuned for each in linears_of(runner, model)}
        runner.decoder = before
        assert sizes == {each.size: tuned if each is linear else () for each in linears}
        assert changed.config is before.config
        assert changed.embedding is before.embedding
    assert all(each.example.tuned == () for each in linears_of(runner, model))


def test_experts_are_not_among_them() -> None:
    model, _ = open_headers(str(MODELS / "tiny-qwen3-moe"))
    runner = new_short_runner(shortened(model, 0), "meta", 1)
    for linear in linears_of(runner, model):
        assert isinstance(linear.example, TiledLinear)
        assert linear.calls <= runner.decoder.config.num_hidden_layers


def test_weights_without_numbers_take_no_memory(tmp_path: Path) -> None:
    runner = new_short_runner(shortened(opened(DENSE, tmp_path), 0), "meta", 2)
    for linear in linears_of(runner, opened(DENSE, tmp_path)):
        assert linear.example.words.device == torch.device("meta")


@pytest.mark.parametrize("kind", ["", ".5", "-moe", ".5-moe"])
def test_random_weights_are_finite_and_have_all_codes(kind: str) -> None:
    """Of a model on a GPU; a CPU holds them as well."""
    model, _ = open_headers(str(MODELS / f"tiny-qwen3{kind}"))
    runner = new_short_runner(shortened(model, 0), "cpu", 2)
    for linear in linears_of(runner, model):
        values = dequantized(linear.example)
        assert bool(values.isfinite().all())
        assert len(set(values.flatten()[:4096].tolist())) > 16
        words = linear.example.words
        assert int(words.min()) < -(2**30)
        assert int(words.max()) > 2**30
    assert bool(dense_embedding(runner.decoder).isfinite().all())
    assert runner.inputs.step.block[1:5, :2].tolist() == [[100, 100], [1, 2], [1, 2], [1, 2]]
    assert len(set(runner.tables[1:].flatten().tolist())) == runner.tables[1:].numel()
