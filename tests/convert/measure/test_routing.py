"""Shares of tokens that keep their experts."""

from pathlib import Path

import pytest
import torch

from lowbit.convert import Recipe
from lowbit.convert.measure.measure import measure_logits
from lowbit.convert.measure.pair import open_pair
from lowbit.convert.measure.routing import RoutingSums, shares
from lowbit.convert.texts.evaluation import Text
from tests.conversions import convert
from tests.short_models import Shorten

CONFIG = {
    "model_type": "qwen3_moe",
    "num_experts": 8,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 32,
    "norm_topk_prob": True,
    "hidden_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "max_position_embeddings": 64,
    "rms_norm_eps": 1e-6,
    "rope_theta": 1e6,
    "vocab_size": 100,
}


def test_order_does_not_matter_and_one_other_expert_does() -> None:
    a = torch.tensor([[0, 1], [2, 3], [4, 5], [6, 7]])
    b = torch.tensor([[1, 0], [2, 3], [4, 6], [0, 1]])
    assert shares(a, b) == (0.5, 5 / 8)


def test_layers_and_bf16_are_told_apart() -> None:
    sums = RoutingSums(CONFIG)
    windows = torch.zeros(2, 4, dtype=torch.int64)
    for layer in range(2):
        routes = sums.new(windows, noisy=1)
        assert routes.original is not None
        assert routes.packed is not None
        assert routes.rounded is not None
        routes.original[...] = torch.tensor([0, 1])
        routes.packed[...] = torch.tensor([1, 0])
        routes.packed[1, 0] = torch.tensor([1, 2 - 2 * layer])
        routes.rounded[...] = torch.tensor([0, 1 + layer])
        sums.add(routes)
    found = sums.finish()
    assert found is not None
    assert (found.experts, found.chosen, found.tokens) == (8, 2, 8)
    assert found.by_layer == (7 / 8, 1.0)
    assert (found.same_set, found.same_experts) == (15 / 16, 31 / 32)
    assert found.same_set_bf16 == 0.5


def test_a_dense_model_has_none() -> None:
    dense = {**CONFIG, "model_type": "qwen3", "intermediate_size": 96, "head_dim": 32}
    for key in ("num_experts", "num_experts_per_tok"):
        del dense[key]
    sums = RoutingSums(dense)
    routes = sums.new(torch.zeros(2, 4, dtype=torch.int64), noisy=1)
    sums.add(routes)
    assert routes.cut(1) == (None, None)
    assert sums.finish() is None


@pytest.mark.commands
def test_a_report_compares_routes_and_outputs_of_experts(
    tmp_path: Path, stories: str, shorten: Shorten
) -> None:
    source = shorten("tiny-qwen3-moe")
    folder = convert(source, tmp_path / "out", Recipe()).folder
    found = measure_logits(
        open_pair(source, folder), [Text("stories", "stories.txt", stories[:12_000])]
    )
    routing = found.logits.routing
    assert routing is not None
    assert len(routing.by_layer) == 2
    assert 0.8 < routing.same_set < routing.same_experts < 1
    assert routing.same_set_bf16 is not None
    assert routing.same_set_bf16 > routing.same_set
    layer = "model.layers.0.mlp.experts.*"
    assert 0.02 < found.output_errors[f"{layer}.down_proj"] < 0.2
    assert len(found.output_errors) == 2 * (4 + 3)
