"""xPress drafters: their tensors, and what their config.json must say."""

from pathlib import Path
from typing import Any

import pytest

from lowbit.formats.architectures import (
    is_drafter,
    kind_of,
    read_config,
    tensor_table,
    unused,
)
from lowbit.formats.architectures.config import BlockDrafts
from lowbit.formats.architectures.xpress import XPressConfig
from lowbit.formats.errors import FormatError, UnsupportedModelError
from lowbit.formats.packed import open_packed
from tests.drafters import XPRESS, shapes, write_drafter

# Keys of the conversion for vLLM beside those of z-lab's DFlash for Qwen3-8B
PUBLISHED: dict[str, Any] = {
    "architectures": ["Qwen3XPressModel"],
    "attention_bias": False,
    "attention_dropout": 0.0,
    "auto_map": {"AutoModel": "dflash.DFlashDraftModel"},
    "block_size": 16,
    "dflash_config": {"mask_token_id": 151669, "target_layer_ids": [1, 9, 17, 25, 33]},
    "dtype": "bfloat16",
    "head_dim": 128,
    "hidden_act": "silu",
    "hidden_size": 4096,
    "intermediate_size": 12288,
    "layer_types": ["full_attention"] * 5,
    "max_position_embeddings": 40960,
    "max_window_layers": 5,
    "model_type": "qwen3",
    "num_attention_heads": 32,
    "num_hidden_layers": 5,
    "num_key_value_heads": 8,
    "num_target_layers": 36,
    "rms_norm_eps": 1e-6,
    "rope_scaling": None,
    "rope_theta": 1000000,
    "sample_from_anchor": False,
    "sliding_window": None,
    "tie_word_embeddings": False,
    "use_sliding_window": False,
    "vocab_size": 151936,
    "xpress_block_size": 16,
    "xpress_mlp_hidden": 512,
    "xpress_num_passes": 6,
    "xpress_rank": 256,
}


def test_the_table_has_the_tensors_of_the_authors_model(tmp_path: Path) -> None:
    table = {spec.name: spec for spec in tensor_table(XPRESS)}
    assert {name: spec.shape for name, spec in table.items()} == shapes(XPRESS)
    wide = [name for name in table if name.startswith("xpress_") and table[name].quantizable]
    assert wide == ["xpress_head.w2.weight"]
    write_drafter(tmp_path, base=XPRESS)
    assert len(open_packed(tmp_path).specs) == len(table)
    copies = unused(XPRESS, ["embed_tokens.weight", "lm_head.weight", "norm.weight"])
    assert {*copies} == {"embed_tokens.weight", "lm_head.weight"}


def test_a_published_config_is_read() -> None:
    config = read_config(PUBLISHED)
    assert isinstance(config, XPressConfig)
    assert config.blocks == BlockDrafts(16, 151669, (1, 9, 17, 25, 33), 1, 36)
    assert (config.rank, config.inner, config.passes) == (256, 512, 6)
    assert config.causal == (False,) * 5
    assert (kind_of(PUBLISHED), is_drafter(PUBLISHED)) == ("Qwen3XPressModel", True)
    fewer = {key: value for key, value in PUBLISHED.items() if not key.startswith("xpress_")}
    assert read_config(fewer) == config  # these are the defaults of vLLM


def test_a_head_takes_80_million_parameters() -> None:
    """The paper says 96 % of them with the vocabulary."""
    sizes = {}
    for name, shape in shapes(PUBLISHED).items():
        if name.startswith("xpress_head."):
            sizes[name] = 1
            for side in shape:
                sizes[name] *= side
    tables = sizes["xpress_head.w1.weight"] + sizes["xpress_head.w2.weight"]
    assert round(sum(sizes.values()) / 1e6) == 81
    assert tables > 0.95 * sum(sizes.values())


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"xpress_rank": 0}, "`xpress_rank` must be an integer from 1"),
        ({"xpress_rank": 100}, "`xpress_rank: 100` is not implemented"),
        ({"xpress_mlp_hidden": 8}, "`xpress_mlp_hidden: 8` is not implemented"),
        ({"xpress_num_passes": 0}, "`xpress_num_passes` must be an integer from 1 to 64, got 0"),
        ({"xpress_num_passes": "6"}, "`xpress_num_passes` must be"),
        ({"xpress_block_size": 16}, "`xpress_block_size: 16` beside `block_size: 8`"),
        ({"sample_from_anchor": True}, "`sample_from_anchor: true` is not implemented"),
        ({"model_type": "llama"}, 'Qwen3XPressModel with layers of `"llama"`'),
        (
            {"speculators_model_type": "xpress"},
            "Qwen3XPressModel in the layout of speculators .* is not implemented",
        ),
        ({"architectures": ["XPressDraftModel"]}, "class `XPressDraftModel` is not supported"),
    ],
)
def test_what_is_not_implemented_is_refused(changes: dict[str, Any], words: str) -> None:
    with pytest.raises(UnsupportedModelError, match=words):
        read_config(XPRESS | changes)


def test_a_mixer_of_another_block_is_refused(tmp_path: Path) -> None:
    write_drafter(tmp_path, base=XPRESS)
    text = (tmp_path / "config.json").read_text()
    text = text.replace('"block_size": 8', '"block_size": 7').replace(
        '"xpress_block_size": 8', '"xpress_block_size": 7'
    )
    (tmp_path / "config.json").write_text(text)
    with pytest.raises(FormatError, match=r"`xpress_head\.mix\.L`: expected shape"):
        open_packed(tmp_path)
