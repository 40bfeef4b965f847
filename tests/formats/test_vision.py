"""Sizes and tensors of vision towers, against published checkpoints and transformers."""

import gzip
import json
from pathlib import Path
from typing import Any

import pytest
import torch

from lowbit.formats.architectures import read_vision, vision_prefix
from lowbit.formats.architectures.vision import vision_shapes
from lowbit.formats.errors import UnsupportedModelError
from tests.seeing_models import TEXT, TOKENS, VISION

DATA = Path(__file__).parents[1] / "data/qwen3.5.json.gz"
MODELS: dict[str, Any] = json.loads(gzip.decompress(DATA.read_bytes()))
PUBLISHED = [name for name, model in MODELS.items() if "vision_config" in model["config"]]
CONFIG: dict[str, Any] = {
    "model_type": "qwen3_5",
    "tie_word_embeddings": False,
    "text_config": {**TEXT, "tie_word_embeddings": False},
    "vision_config": VISION,
    **TOKENS,
}


@pytest.mark.parametrize("name", PUBLISHED)
def test_published_towers_have_exactly_the_tensors_of_the_table(name: str) -> None:
    config = MODELS[name]["config"]
    found = read_vision(config)
    assert found is not None
    assert (found.image_token_id, found.vision_start_token_id) == (248056, 248053)
    assert found.vision_end_token_id == 248054
    assert (found.grid_side, found.rope_theta) == (48, 10_000)
    assert found.patch_shape == (3, 2, 16, 16)
    assert found.head_dim == (64 if found.hidden_size < 1152 else 72)
    assert found.merged_size == 4 * found.hidden_size
    stored = MODELS[name].get("tensors")
    if stored is not None:  # one has a config alone
        prefix = vision_prefix(config, stored)
        assert prefix == "model.visual."
        tower = {key: tuple(shape) for key, (_, *shape) in stored.items() if "visual" in key}
        assert {prefix + key: shape for key, shape in vision_shapes(found).items()} == tower


def test_equals_the_parameters_of_transformers() -> None:
    from transformers import Qwen3_5VisionConfig
    from transformers.models.qwen3_5.modeling_qwen3_5 import Qwen3_5VisionModel

    changes = {"spatial_merge_size": 3, "temporal_patch_size": 1, "patch_size": 14}
    found = read_vision(CONFIG | {"vision_config": VISION | changes})
    assert found is not None
    with torch.device("meta"):
        theirs = Qwen3_5VisionModel(Qwen3_5VisionConfig(**VISION | changes))
    shapes = {name: tuple(p.shape) for name, p in theirs.named_parameters()}
    assert vision_shapes(found) == shapes


def test_models_without_a_tower() -> None:
    assert read_vision({k: v for k, v in CONFIG.items() if k != "vision_config"}) is None
    assert read_vision(CONFIG["text_config"] | {"model_type": "qwen3_5_text"}) is None
    assert vision_prefix(CONFIG, ["model.language_model.norm.weight"]) is None
    assert vision_prefix({"model_type": "unheard"}, ["model.visual.x"]) is None
    assert vision_prefix(CONFIG, ["lm_head.weight", "visual.pos_embed.weight"]) == "visual."


ROPES: list[tuple[dict[str, Any], float]] = [
    ({}, 10_000),
    ({"rope_parameters": None}, 10_000),
    ({"rope_parameters": {"rope_type": "axial", "rope_theta": 500.0}}, 500),
    ({"rope_parameters": {"rope_type": "default", "rope_theta": 500.0}}, 500),
    ({"rope_theta": 700.0}, 700),
    ({"rope_theta": 700.0, "rope_parameters": {"rope_type": "axial"}}, 700),
]


@pytest.mark.parametrize(("rope", "theta"), ROPES)
def test_the_base_of_rotations_is_that_of_transformers(rope: dict[str, Any], theta: float) -> None:
    from transformers import Qwen3_5VisionConfig

    found = read_vision(CONFIG | {"vision_config": VISION | rope})
    theirs = Qwen3_5VisionConfig(**json.loads(json.dumps(VISION | rope)))
    assert found is not None
    assert found.rope_theta == theirs.rope_parameters["rope_theta"] == theta


INNER: list[tuple[str, Any, str]] = [
    ("depth", None, "lacks `depth`"),
    ("depth", 0, "`depth` must be an integer from 1"),
    ("hidden_size", 50, "`hidden_size` 50 must be `num_heads` 4 times a multiple of 4"),
    ("num_heads", 8, "`hidden_size` 48 must be `num_heads` 8 times a multiple of 4"),
    ("num_position_embeddings", 37, "`num_position_embeddings` 37 is no square"),
    ("out_hidden_size", 65, "`out_hidden_size` is 65, the decoder's hidden_size is 64"),
    ("hidden_act", "gelu", '`hidden_act` "gelu" is not implemented'),
    ("in_channels", 4, "`in_channels` 4 is not implemented"),
    ("deepstack_visual_indexes", [1], "`deepstack_visual_indexes` a list of 1 is not implemented"),
    ("patch_size", [16, 16], "`patch_size` must be an integer"),
    ("rope_parameters", {"rope_type": "yarn"}, 'rope type "yarn" is not implemented'),
    ("rope_parameters", [1], "`rope_parameters` must be an object, got a list of 1"),
    ("rope_parameters", "axial", '`rope_parameters` must be an object, got "axial"'),
    ("rope_parameters", {"rope_theta": -1}, "`rope_theta` must be"),
]


@pytest.mark.parametrize(("key", "value", "words"), INNER)
def test_bad_values_are_named(key: str, value: Any, words: str) -> None:
    with pytest.raises(UnsupportedModelError, match=words) as caught:
        read_vision(CONFIG | {"vision_config": VISION | {key: value}})
    assert str(caught.value).startswith("config.json: `vision_config`")


@pytest.mark.parametrize(
    ("key", "value", "words"),
    [
        ("vision_config", [], "`vision_config` must be an object, got a list of 0"),
        ("image_token_id", None, "config.json lacks `image_token_id`"),
        ("image_token_id", 320, "`image_token_id` must be an integer from 0 to 319, got 320"),
        ("vision_end_token_id", "313", "`vision_end_token_id` must be"),
    ],
)
def test_bad_outer_values_are_named(key: str, value: Any, words: str) -> None:
    with pytest.raises(UnsupportedModelError, match=words):
        read_vision(CONFIG | {key: value})
