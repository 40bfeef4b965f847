"""DFlash drafters: their tensors, and what their config.json must say."""

import json
from pathlib import Path
from typing import Any

import pytest

from lowbit.formats.architectures import is_drafter, kind_of, read_config, tensor_table
from lowbit.formats.architectures.config import BlockDrafts
from lowbit.formats.architectures.dflash import DFlashConfig
from lowbit.formats.errors import FormatError, UnsupportedModelError
from lowbit.formats.packed import open_packed
from tests.drafters import CONFIG, shapes, write_drafter

SECTION = CONFIG["dflash_config"]


def test_the_table_has_the_tensors_of_the_authors_model(tmp_path: Path) -> None:
    assert {spec.name: spec.shape for spec in tensor_table(CONFIG)} == shapes(CONFIG)
    write_drafter(tmp_path)
    assert len(open_packed(tmp_path).specs) == len(shapes(CONFIG))
    qkv = {s.fused_set for s in tensor_table(CONFIG) if s.name.startswith("layers.1.self_attn.")}
    assert "layers.1.self_attn.qkv" in qkv


def test_published_configs_are_read() -> None:
    """Both layouts of the keys: beside the section, as for Qwen3-8B, and inside, for Qwen3.5."""
    config = read_config(CONFIG)
    assert isinstance(config, DFlashConfig)
    assert config.block_drafts is not None
    assert config.blocks == BlockDrafts(8, 1000, (2, 0), target_depth=4)
    assert config.windows == (20, None)
    assert config.causal == (True, False)
    assert (kind_of(CONFIG), is_drafter(CONFIG)) == ("DFlashDraftModel", True)
    assert not is_drafter({**CONFIG, "architectures": ["Qwen3ForCausalLM"]})
    inside = {**CONFIG, "dflash_config": {**SECTION, "block_size": 16}}
    del inside["block_size"], inside["layer_types"], inside["sliding_window"]
    del inside["num_target_layers"]
    found = read_config({**inside, "is_causal": False})
    assert isinstance(found, DFlashConfig)
    assert found.blocks == BlockDrafts(16, 1000, (2, 0))
    assert found.windows == (None, None)
    assert found.causal == (False, False)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"block_size": 1}, "`block_size` must be an integer from 2 to 256, got 1"),
        ({"num_target_layers": 0}, "`num_target_layers` must be an integer from 1 to"),
        ({"dflash_config": [1]}, "`dflash_config` must be an object"),
        ({"dflash_config": {**SECTION, "mask_token_id": 4096}}, "`mask_token_id` must be .* 4095"),
        ({"dflash_config": {"mask_token_id": 1}}, "`target_layer_ids` must be a list of different"),
        ({"dflash_config": {**SECTION, "target_layer_ids": [4]}}, "from 0 to 3, got a list of 1"),
        ({"dflash_config": {**SECTION, "target_layer_ids": [1, 1]}}, "must be a list of different"),
        ({"dflash_config": {**SECTION, "output_multiplier": 2}}, "`output_multiplier: 2`"),
        ({"model_type": "gemma3"}, 'DFlashDraftModel with layers of `"gemma3"`'),
        ({"speculators_model_type": "dflash"}, "DFlashDraftModel in the layout of speculators"),
        ({"attention_bias": True}, "`attention_bias: true` is not implemented"),
        ({"sliding_window": None}, "config.json lacks `sliding_window`"),
        ({"use_sliding_window": False}, "`use_sliding_window: false` beside layers of"),
        ({"layer_types": ["full_attention"]}, "`layer_types` must be a list of 2"),
    ],
)
def test_what_is_not_implemented_is_refused(changes: dict[str, Any], words: str) -> None:
    with pytest.raises(UnsupportedModelError, match=words):
        read_config(CONFIG | changes)


def test_tensors_that_a_drafter_does_not_have_are_refused(tmp_path: Path) -> None:
    write_drafter(tmp_path)
    fewer = {**CONFIG, "num_hidden_layers": 1, "layer_types": ["full_attention"]}
    (tmp_path / "config.json").write_text(json.dumps(fewer))
    with pytest.raises(FormatError, match=r"`layers\.1\..* the architecture has no such tensor"):
        open_packed(tmp_path)
