"""Experts as modules of their own compute what transformers' fused ones do."""

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch

from lowbit.convert.original.experts import Experts, recorded_routes
from lowbit.convert.original.model import load_layered_model
from lowbit.convert.original.walk import load_layer
from lowbit.convert.original.weights import open_weights

CPU = torch.device("cpu")
MODELS = Path(__file__).parents[3] / "examples/models"


def theirs(folder: Path) -> Any:
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("kind", "changes"),
    [
        ("tiny-qwen3-moe", {}),
        ("tiny-qwen3-moe", {"norm_topk_prob": False}),
        ("tiny-qwen3.5-moe", {}),
    ],
)
@torch.no_grad()
def test_a_layer_equals_transformers(kind: str, changes: dict[str, Any], tmp_path: Path) -> None:
    folder, T = tmp_path / "model", 16
    shutil.copytree(MODELS / kind, folder)
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | changes))
    model = load_layered_model(open_weights(folder), T, CPU)
    original = theirs(folder).model.layers
    hidden = torch.randn(2, T, model.hidden_size, generator=torch.Generator().manual_seed(3))
    for number, layer in enumerate(original):
        own = load_layer(model, number, CPU)
        assert isinstance(own.module.get_submodule("mlp.experts"), Experts)
        with recorded_routes(own.module) as last_route:
            found = own(hidden)
            route = last_route()
        expected = layer(hidden, **model.arguments[number])
        assert (found - expected).abs().max() < 2e-6 * expected.abs().max()
        chosen = layer.mlp.gate(layer.post_attention_layernorm(hidden))[2]
        assert route is not None
        assert route.shape == chosen.shape == (2 * T, 2)


def test_a_dense_layer_has_no_routes(tiny: Path) -> None:
    model = load_layered_model(open_weights(tiny), 8, CPU)
    layer = load_layer(model, 0, CPU)
    with torch.no_grad(), recorded_routes(layer.module) as last_route:
        layer(torch.randn(1, 8, model.hidden_size))
        assert last_route() is None
