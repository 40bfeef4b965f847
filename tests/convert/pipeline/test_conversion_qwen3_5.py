"""A hybrid model converted: every tensor accounted for, whatever its shape."""

import json
import shutil
from collections import Counter
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from lowbit.convert import Override, Recipe
from lowbit.convert.original.progress import silent
from lowbit.convert.pipeline.verification import verify_folder
from lowbit.formats.errors import FormatError, QuantizationError
from lowbit.formats.packed import open_packed
from tests.conversions import convert
from tests.convert.edits import manifest_of
from tests.convert.fixture_types import Hashes

ODD = {
    "model.visual.scalar": torch.tensor(1.5),
    "model.visual.scalar_int": torch.tensor(7),
    "model.visual.empty": torch.empty(0, 5),
    "model.visual.no_columns": torch.empty(3, 0, dtype=torch.bfloat16),
    "model.visual.flags": torch.tensor([True, False]),
    "model.visual.positions": torch.arange(10),
    "model.visual.bytes": torch.ones(4, 4).to(torch.float8_e4m3fn),
    "model.visual.wide": torch.full((2, 2), 1e300, dtype=torch.float64),
}


@pytest.fixture(scope="module")
def hybrid(short_hybrid: Path) -> Path:
    return short_hybrid


@pytest.fixture
def odd(hybrid: Path, tmp_path: Path) -> Path:
    """The bundled hybrid with vision tensors of shapes and dtypes that linears do not have."""
    folder = tmp_path / "odd"
    shutil.copytree(hybrid, folder)
    save_file(load_file(hybrid / "model.safetensors") | ODD, folder / "model.safetensors")
    return folder


def fates(folder: Path) -> dict[str, tuple[str, str]]:
    manifest = manifest_of(folder)
    return {row.name: (row.fate, row.reason) for row in manifest.source_tensors}


def test_every_source_tensor_is_in_the_manifest(hybrid: Path, tmp_path: Path) -> None:
    folder = convert(hybrid, tmp_path / "out", Recipe()).folder
    source, packed = (load_file(f / "model.safetensors") for f in (hybrid, folder))
    found = fates(folder)
    assert found.keys() == source.keys()
    assert Counter(fate for fate, _ in found.values()) == {
        "quantized": 3 + 4 + 2 * 3 + 8,
        "copied": 53 - 21,
    }
    copied = {name for name, (fate, _) in found.items() if fate == "copied"}
    assert all(torch.equal(packed[name], source[name]) for name in copied)
    assert {packed[name].dtype for name in copied} == {torch.bfloat16, torch.float32}
    assert found["model.visual.pos_embed.weight"] == ("copied", "vision tower: carried unchecked")
    assert found["mtp.fc.weight"] == ("quantized", "")
    assert found["mtp.norm.weight"] == ("copied", "norm: never quantized")
    gate = "model.language_model.layers.0.linear_attn.in_proj_a.weight"
    assert found[gate] == ("copied", "delta_gate: never quantized")
    assert verify_folder(folder, str(hybrid), silent).source_tensors == len(source)
    assert len(open_packed(folder).carried) == 11


def test_tensors_without_rows_or_dimensions(odd: Path, tmp_path: Path, hashes: Hashes) -> None:
    folder = convert(odd, tmp_path / "out", Recipe()).folder
    packed = load_file(folder / "model.safetensors")
    for name, tensor in ODD.items():
        assert packed[name].dtype == tensor.dtype
        assert packed[name].shape == tensor.shape
        assert packed[name].view(-1).view(torch.uint8).equal(tensor.view(-1).view(torch.uint8))
    assert verify_folder(folder, str(odd), silent).source_tensors == len(
        load_file(odd / "model.safetensors")
    )
    again = convert(odd, tmp_path / "again", Recipe(), max_shard_bytes=200_000).folder
    assert hashes(again)["config.json"] == hashes(folder)["config.json"]
    assert verify_folder(again, None, silent).tensors == len(packed)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("model.visual.scalar", torch.tensor(torch.nan)),
        ("model.visual.norm", torch.tensor([torch.inf])),
    ],
)
def test_damaged_vision_tensor_is_refused(
    odd: Path, tmp_path: Path, name: str, value: torch.Tensor
) -> None:
    tensors = load_file(odd / "model.safetensors")
    save_file(tensors | {name: value}, odd / "model.safetensors")
    with pytest.raises(QuantizationError, match=f"`{name}` holds"):
        convert(odd, tmp_path / "out", Recipe())


def test_vision_left_out(hybrid: Path, tmp_path: Path) -> None:
    folder = convert(hybrid, tmp_path / "out", Recipe(drop_vision=True)).folder
    dropped = {name: row for name, row in fates(folder).items() if row[0] == "dropped"}
    assert set(dropped.values()) == {("dropped", "vision tower: as the recipe says")}
    assert len(dropped) == 11
    assert not any("visual" in name for name in load_file(folder / "model.safetensors"))
    before, after = (json.loads((f / "config.json").read_text()) for f in (hybrid, folder))
    assert after["architectures"] == before["architectures"]
    assert after["vision_config"] == before["vision_config"]
    verify_folder(folder, str(hybrid), silent)


def test_mtp_left_out(hybrid: Path, tmp_path: Path) -> None:
    folder = convert(hybrid, tmp_path / "out", Recipe(mtp="drop")).folder
    dropped = {name: row for name, row in fates(folder).items() if row[0] == "dropped"}
    assert set(dropped.values()) == {("dropped", "multi-token prediction: as the recipe says")}
    assert len(dropped) == 15
    assert not any("mtp" in name for name in load_file(folder / "model.safetensors"))
    config = json.loads((folder / "config.json").read_text())
    assert config["text_config"]["mtp_num_hidden_layers"] == 0
    verify_folder(folder, str(hybrid), silent)


def test_mtp_quantized_on_request(hybrid: Path, tmp_path: Path) -> None:
    done = convert(hybrid, tmp_path / "out", Recipe(overrides=(Override("mtp.*", 8),)))
    mtp = {
        name
        for name, (fate, _) in fates(done.folder).items()
        if name.startswith("mtp.") and fate == "quantized"
    }
    assert len(mtp) == 8
    assert "mtp.fc.weight" in mtp
    assert {row.bits for row in done.weights if row.name.startswith("mtp.")} == {8}
    packed = open_packed(done.folder)
    assert {str(s) for m, s in packed.schemes.items() if m.startswith("mtp.")} == {"INT8 g128"}


def test_shards_of_the_source_do_not_matter(hybrid: Path, tmp_path: Path, hashes: Hashes) -> None:
    tensors = load_file(hybrid / "model.safetensors")
    names = sorted(tensors, reverse=True)
    split = tmp_path / "split"
    shutil.copytree(hybrid, split)
    (split / "model.safetensors").unlink()
    for i in range(2):
        part = {name: tensors[name] for name in names[i::2]}
        save_file(part, split / f"model.safetensors-0000{i + 1}-of-00002.safetensors")
    one, two = (convert(f, tmp_path / f"out-{f.name}", Recipe()).folder for f in (hybrid, split))
    assert hashes(one) == hashes(two)


@pytest.mark.parametrize("what", ["mtp.fc.weight_packed", "model.language_model.norm.weight"])
def test_packed_folder_that_lacks_a_tensor(hybrid: Path, tmp_path: Path, what: str) -> None:
    folder = convert(hybrid, tmp_path / "out", Recipe()).folder
    tensors = load_file(folder / "model.safetensors")
    del tensors[what]
    save_file(tensors, folder / "model.safetensors")
    with pytest.raises(FormatError, match=f"`{what}` is missing"):
        open_packed(folder)
