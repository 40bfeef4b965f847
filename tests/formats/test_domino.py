"""Domino drafters: their tensors, and what their config.json must say."""

from pathlib import Path
from typing import Any

import pytest

from lowbit.formats.architectures import is_drafter, kind_of, read_config, tensor_table
from lowbit.formats.architectures.config import BlockDrafts
from lowbit.formats.architectures.domino import DominoConfig
from lowbit.formats.errors import FormatError, UnsupportedModelError
from lowbit.formats.packed import open_packed
from tests.drafters import DOMINO, shapes, write_drafter

SECTION = DOMINO["dflash_config"]
# SpecForge's configs/qwen3-8b-domino.json, whose emb_dim also stands at the top
PUBLISHED: dict[str, Any] = {
    **DOMINO,
    "architectures": ["DominoDraftModel"],
    "auto_map": {"AutoModel": "domino.DominoDraftModel"},
    "block_size": 16,
    "emb_dim": 256,
    "head_dim": 128,
    "hidden_size": 4096,
    "intermediate_size": 12288,
    "layer_types": ["full_attention"] * 5,
    "num_attention_heads": 32,
    "num_hidden_layers": 5,
    "num_key_value_heads": 8,
    "num_target_layers": 36,
    "vocab_size": 151936,
    "dflash_config": {
        "emb_dim": 256,
        "gru_hidden_dim": 1024,
        "mask_token_id": 151669,
        "projector_type": "domino",
        "pure_draft_prefix_len": 1,
        "shift_label": True,
        "target_layer_ids": [1, 9, 17, 25, 33],
    },
}


def test_the_table_has_the_tensors_of_the_authors_model(tmp_path: Path) -> None:
    table = {spec.name: spec for spec in tensor_table(DOMINO)}
    assert {name: spec.shape for name, spec in table.items()} == shapes(DOMINO)
    head = [
        name for name in table if name.startswith(("prefix", "embed")) if table[name].quantizable
    ]
    assert head == ["embed_proj.2.weight"]
    write_drafter(tmp_path, base=DOMINO)
    assert len(open_packed(tmp_path).specs) == len(table)


def test_published_shapes() -> None:
    """Those that readers of Huang2020/Qwen3-8B-Domino-b16 list."""
    found = shapes(PUBLISHED)
    assert found["fc.weight"] == (4096, 20480)
    assert found["prefix_gru.weight_ih_l0"] == (3072, 4096)
    assert found["prefix_gru.weight_hh_l0"] == (3072, 1024)
    assert found["embed_proj.0.weight"] == (256, 5120)
    assert found["embed_proj.2.weight"] == (151936, 256)


@pytest.mark.parametrize("name", ["DominoDraftModel", "DFlashDraftModel"])
def test_a_published_config_is_read(name: str) -> None:
    """Both its own class and that of DFlash with a projector name it."""
    raw = PUBLISHED | {"architectures": [name]}
    config = read_config(raw)
    assert isinstance(config, DominoConfig)
    assert config.blocks == BlockDrafts(16, 151669, (1, 9, 17, 25, 33), 0, 36)
    assert (config.blocks.drafts, config.embedded, config.state, config.pure) == (16, 256, 1024, 1)
    assert (kind_of(raw), is_drafter(raw)) == ("DominoDraftModel", True)
    older = {key: value for key, value in raw["dflash_config"].items() if key != "emb_dim"}
    assert read_config(raw | {"dflash_config": older}) == config  # as SGLang reads it


def test_outputs_of_a_config_without_a_shift_are_those_of_dflash() -> None:
    fewer = {key: SECTION[key] for key in SECTION if key not in ("shift_label",)}
    config = read_config(DOMINO | {"dflash_config": fewer})
    assert isinstance(config, DominoConfig)
    assert (config.blocks.first, config.blocks.drafts) == (1, 7)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"gru_hidden_dim": 0}, "`gru_hidden_dim` must be an integer from 1"),
        ({"gru_hidden_dim": 100}, "`gru_hidden_dim: 100` is not implemented"),
        ({"emb_dim": 40}, "`emb_dim: 40` is not implemented"),
        ({"shift_label": 1}, "`shift_label` must be true or false, got 1"),
        ({"pure_draft_prefix_len": -1}, "`pure_draft_prefix_len` must be an integer from 0"),
        ({"pure_draft_prefix_len": 9}, "`pure_draft_prefix_len: 9` of the 8 drafts of a block"),
        ({"output_multiplier": 2}, "`output_multiplier: 2` is not implemented"),
    ],
)
def test_what_is_not_implemented_is_refused(changes: dict[str, Any], words: str) -> None:
    with pytest.raises(UnsupportedModelError, match=words):
        read_config(DOMINO | {"dflash_config": SECTION | changes})


@pytest.mark.parametrize("section", [None, [], "domino", {"projector_type": ["domino"]}])
def test_the_kind_of_an_unchecked_config_is_found(section: Any) -> None:
    assert kind_of(DOMINO | {"dflash_config": section}) == "DFlashDraftModel"


def test_another_projector_under_its_class_is_refused() -> None:
    changes = {"architectures": ["DominoDraftModel"]}
    with pytest.raises(
        UnsupportedModelError, match='`projector_type: "dflash"` is not implemented'
    ):
        read_config(DOMINO | changes | {"dflash_config": SECTION | {"projector_type": "dflash"}})
    fewer = {key: value for key, value in SECTION.items() if key != "gru_hidden_dim"}
    with pytest.raises(UnsupportedModelError, match="lacks `gru_hidden_dim`"):
        read_config(DOMINO | changes | {"dflash_config": fewer})


def test_a_unit_with_biases_is_refused(tmp_path: Path) -> None:
    from safetensors.torch import load_file, save_file

    write_drafter(tmp_path, base=DOMINO)
    tensors = load_file(tmp_path / "model.safetensors")
    tensors["prefix_gru.bias_ih_l0"] = tensors["norm.weight"].clone()
    save_file(tensors, tmp_path / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(FormatError, match=r"`prefix_gru\.bias_ih_l0`.* no such tensor"):
        open_packed(tmp_path)
