"""A folder without lowbit.json: its gains tell whether its original has to be rotated."""

import json
import shutil
from collections.abc import Mapping
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from lowbit.convert.measure.pair import open_pair
from lowbit.convert.original.rotation import rotation_roles
from lowbit.formats.architectures.names import MTP_NORM, MTP_PREFIX


@pytest.fixture
def unit_gains(hybrid: Path) -> dict[str, torch.Tensor]:
    """The zero-centred weights of Qwen3.5's norms once the columns have taken them over."""
    config = json.loads((hybrid / "config.json").read_text())
    tensors = load_file(hybrid / "model.safetensors")
    roles = rotation_roles(config, tensors)
    return {n: torch.zeros_like(tensors[n]) for n, role in roles.items() if role.kind == "gain"}


@pytest.mark.parametrize(
    ("changed", "is_rotated"),
    [
        ({}, True),
        ({MTP_NORM: 0.25}, True),  # the MTP head was trained
        ({"model.language_model.norm.weight": 0.25}, False),
    ],
)
def test_gains_of_one_tell_a_rotated_folder(
    hybrid: Path,
    tmp_path: Path,
    unit_gains: dict[str, torch.Tensor],
    changed: Mapping[str, float],
    is_rotated: bool,
) -> None:
    assert any(name.startswith(MTP_PREFIX) for name in unit_gains)
    other = tmp_path / "other"
    shutil.copytree(hybrid, other)
    tensors = load_file(hybrid / "model.safetensors") | unit_gains
    for name, value in changed.items():
        tensors[name] = torch.full_like(tensors[name], value)
    tensors["lm_head.weight"] = tensors["model.language_model.embed_tokens.weight"].clone()
    save_file(tensors, other / "model.safetensors", metadata={"format": "pt"})
    config = json.loads((hybrid / "config.json").read_text())
    config["tie_word_embeddings"] = config["text_config"]["tie_word_embeddings"] = False
    (other / "config.json").write_text(json.dumps(config))
    pair = open_pair(hybrid, other)
    assert (pair.original.rotation is not None) == is_rotated
    assert pair.packed.rotation is None
