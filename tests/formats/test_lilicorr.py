"""LiLiCorr drafters: their tensors, and what their config.json must say."""

from pathlib import Path
from typing import Any

import pytest

from lowbit.formats.architectures import is_drafter, kind_of, read_config, tensor_table
from lowbit.formats.architectures.config import BlockDrafts
from lowbit.formats.architectures.dflash import Convolutions
from lowbit.formats.architectures.lilicorr import LiLiCorrConfig
from lowbit.formats.errors import UnsupportedModelError
from lowbit.formats.packed import open_packed
from tests.drafters import LILICORR, shapes, write_drafter

SECTION = LILICORR["dflash_config"]
CONVOLVED = {"conv_kernel_size": 2, "conv_group_size": 16, "lilicorr_hidden_size": 0}


@pytest.mark.parametrize("changes", [{}, CONVOLVED | {"lilicorr_num_heads": 4}], ids=str)
def test_the_table_has_the_tensors_that_vllm_reads(tmp_path: Path, changes: dict[str, Any]) -> None:
    raw = LILICORR | {"dflash_config": SECTION | changes}
    table = {spec.name: spec for spec in tensor_table(raw)}
    assert {name: spec.shape for name, spec in table.items()} == shapes(raw)
    assert not any(spec.quantizable for name, spec in table.items() if "lilicorr" in name)
    assert ("lilicorr.token_proj.weight" in table) == (not changes)
    write_drafter(tmp_path, base=raw)
    assert len(open_packed(tmp_path).specs) == len(table)


def test_a_config_is_read() -> None:
    config = read_config(LILICORR)
    assert isinstance(config, LiLiCorrConfig)
    assert config.blocks == BlockDrafts(8, 1000, (2, 0), 1, 4, keeps_context=True)
    assert (config.candidates, config.width, config.depth, config.heads) == (8, 96, 2, 3)
    assert (config.inner, config.factor, config.vector_eps, config.scale) == (192, 32, 1e-6, 10.0)
    assert config.convolutions is None
    assert (kind_of(LILICORR), is_drafter(LILICORR)) == ("LiLiCorrDraftModel", True)
    convolved = SECTION | CONVOLVED | {"lilicorr_num_heads": 4}
    found = read_config(LILICORR | {"dflash_config": convolved})
    assert isinstance(found, LiLiCorrConfig)
    assert (found.width, found.convolutions) == (256, Convolutions(2, 16))
    none = SECTION | {"conv_kernel_size": 0, "conv_group_size": 0}
    assert read_config(LILICORR | {"dflash_config": none}) == config


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"lilicorr_enabled": False}, "`lilicorr_enabled: false` is not implemented"),
        ({"lilicorr_candidate_topk": 17}, "`lilicorr_candidate_topk` must be .* 1 to 16, got 17"),
        ({"lilicorr_hidden_size": 100}, "`lilicorr_hidden_size: 100` is not implemented"),
        ({"lilicorr_num_heads": 5}, "width 96 with 5 heads"),
        ({"lilicorr_mlp_ratio": 0}, "`lilicorr_mlp_ratio` must be a number above 0"),
        ({"lilicorr_mlp_ratio": 1.1}, "an MLP of width 105 is not implemented"),
        ({"lilicorr_factor_dim": 31}, "`lilicorr_factor_dim: 31` is not implemented"),
        ({"lilicorr_logit_scale": float("inf")}, "`lilicorr_logit_scale` must be a number"),
        ({"conv_kernel_size": 2}, "lacks `conv_group_size`"),
        ({"projector_type": "dflash2"}, '`projector_type: "dflash2"` is not implemented'),
    ],
)
def test_what_is_not_implemented_is_refused(changes: dict[str, Any], words: str) -> None:
    with pytest.raises(UnsupportedModelError, match=words):
        read_config(LILICORR | {"dflash_config": SECTION | changes})


@pytest.mark.parametrize("key", [key for key in SECTION if key.startswith("lilicorr_")])
def test_keys_of_the_head_must_be_there(key: str) -> None:
    fewer = {name: value for name, value in SECTION.items() if name != key}
    if key == "lilicorr_enabled":
        read_config(LILICORR | {"dflash_config": fewer})
        return
    with pytest.raises(UnsupportedModelError, match=f"lacks `{key}`"):
        read_config(LILICORR | {"dflash_config": fewer})
