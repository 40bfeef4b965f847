"""DFlash2 drafters: their tensors, and what their config.json must say."""

from pathlib import Path
from typing import Any

import pytest

from lowbit.formats.architectures import is_drafter, kind_of, read_config, tensor_table
from lowbit.formats.architectures.config import BlockDrafts
from lowbit.formats.architectures.dflash import Convolutions
from lowbit.formats.architectures.dflash2 import DFlash2Config
from lowbit.formats.errors import UnsupportedModelError
from lowbit.formats.packed import open_packed
from tests.drafters import DFLASH2, shapes, write_drafter

SECTION = DFLASH2["dflash_config"]
# z-lab's tests hold the config.json and the header of a published drafter of another family
PUBLISHED: dict[str, Any] = {
    **DFLASH2,
    "attention_dropout": 0.0,
    "head_dim": 128,
    "hidden_size": 6656,
    "intermediate_size": 19968,
    "layer_types": ["sliding_attention"] * 5,
    "max_position_embeddings": 131072,
    "max_window_layers": 5,
    "num_attention_heads": 32,
    "num_hidden_layers": 5,
    "num_key_value_heads": 8,
    "num_target_layers": 52,
    "rms_norm_eps": 1e-05,
    "rope_parameters": {"rope_theta": 500000.0, "rope_type": "default"},
    "sliding_window": 2048,
    "tie_word_embeddings": False,
    "use_cache": False,
    "vocab_size": 202048,
    "dflash_config": {
        "block_size": 16,
        "conv_group_size": 16,
        "conv_kernel_size": 2,
        "final_logit_softcapping": 20.0,
        "mask_token_id": 201818,
        "output_multiplier": 0.19611613513818404,
        "selector_rank": 256,
        "selector_top_k": 16,
        "target_layer_ids": [1, 13, 25, 37, 49],
    },
}
del PUBLISHED["rope_theta"]


def test_the_table_has_the_tensors_of_the_authors_model(tmp_path: Path) -> None:
    table = {spec.name: spec for spec in tensor_table(DFLASH2)}
    assert {name: spec.shape for name, spec in table.items()} == shapes(DFLASH2)
    own = [name for name in table if "_conv" in name or name.startswith("candidate")]
    assert len(own) == 2 * 4 + 3
    assert not any(table[name].quantizable for name in own)
    write_drafter(tmp_path, base=DFLASH2)
    assert len(open_packed(tmp_path).specs) == len(table)


def test_published_shapes() -> None:
    found = {spec.name: spec.shape for spec in tensor_table(PUBLISHED)}
    assert found["candidate_selector.hidden_projection.weight"] == (256, 6656)
    assert found["candidate_selector.predecessor_codebook"] == (202048, 256)
    assert found["candidate_selector.successor_codebook"] == (202048, 256)
    assert found["fc.weight"] == (6656, 33280)
    for part in ("attention", "mlp"):
        assert found[f"layers.4.{part}_conv.base_kernel"] == (2, 2, 6656)
        assert found[f"layers.4.{part}_conv.kernel_projection.weight"] == (1664, 6656)
    assert len(found) == 6 + 5 * 15
    assert found == shapes(PUBLISHED)


def test_a_published_config_is_read() -> None:
    config = read_config(PUBLISHED)
    assert isinstance(config, DFlash2Config)
    assert config.blocks == BlockDrafts(16, 201818, (1, 13, 25, 37, 49), 1, 52)
    assert config.convolutions == Convolutions(taps=2, group=16)
    assert (config.rank, config.candidates, config.cap) == (256, 16, 20.0)
    assert config.multiplier == 0.19611613513818404
    assert config.windows == (2048,) * 5
    assert config.causal == (False,) * 5
    assert (kind_of(PUBLISHED), is_drafter(PUBLISHED)) == ("DFlash2DraftModel", True)
    plain = read_config(DFLASH2)
    assert isinstance(plain, DFlash2Config)
    assert (plain.multiplier, plain.cap) == (1.0, None)
    none = DFLASH2 | {"dflash_config": SECTION | {"final_logit_softcapping": 0.0}}
    assert read_config(none) == plain


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"conv_kernel_size": 0}, "`conv_kernel_size` must be an integer from 1 to 16, got 0"),
        ({"conv_group_size": 24}, "`conv_group_size: 24` does not divide hidden_size = 256"),
        ({"selector_rank": 20}, "`selector_rank: 20` is not implemented"),
        ({"selector_top_k": 65}, "`selector_top_k` must be an integer from 1 to 64, got 65"),
        ({"output_multiplier": 0}, "`output_multiplier` must be a number above 0"),
        ({"final_logit_softcapping": -1}, "`final_logit_softcapping` must be a number from 0"),
        ({"input_embedding_scale": 2.0}, "`input_embedding_scale: 2.0` is not implemented"),
        ({"projector_type": "dflash"}, '`projector_type: "dflash"` is not implemented'),
        ({"speculators_model_type": "dflash2"}, "DFlash2DraftModel in the layout of speculators"),
    ],
)
def test_what_is_not_implemented_is_refused(changes: dict[str, Any], words: str) -> None:
    with pytest.raises(UnsupportedModelError, match=words):
        read_config(DFLASH2 | {"dflash_config": SECTION | changes})


@pytest.mark.parametrize("key", ["conv_kernel_size", "selector_rank", "selector_top_k"])
def test_keys_without_a_default_must_be_there(key: str) -> None:
    fewer = {name: value for name, value in SECTION.items() if name != key}
    with pytest.raises(UnsupportedModelError, match=f"lacks `{key}`"):
        read_config(DFLASH2 | {"dflash_config": fewer})
