"""`verify` passes on what was written and names whatever was changed since."""

import json
import shutil
import struct
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any, BinaryIO

import pytest
import torch
from safetensors.torch import load_file, save_file

from lowbit.convert.pipeline.origin import NAME_ANOTHER
from lowbit.convert.pipeline.verification import Verification, verify_folder
from lowbit.convert.plan.method import ABSMAX, Method
from lowbit.convert.plan.recipe import Override, Recipe
from lowbit.convert.quantize.session import CalibrationRequest
from lowbit.formats.errors import LowbitError
from lowbit.formats.files.reading import open_file
from lowbit.formats.safetensors import hashing
from lowbit.formats.safetensors.checkpoint import open_checkpoint
from lowbit.formats.safetensors.hashing import hash_file, hash_tensor
from tests.conversions import convert
from tests.convert.edits import edit_json, flip, manifest_of
from tests.convert.fixture_types import MakeModel

SHARDS = ["model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors"]
SCALE = "model.layers.1.mlp.up_proj.weight_scale"
SHAPE = "model.layers.1.mlp.up_proj.weight_shape"
Edit = Callable[[dict[str, Any]], object]


@pytest.fixture(scope="module")
def converted(tmp_path_factory: pytest.TempPathFactory, make_model: MakeModel) -> Path:
    """A folder with `source` and its conversion `out`."""
    folder = tmp_path_factory.mktemp("verify")
    source = make_model(folder / "source")
    (source / "LICENSE").write_text("do what you like")
    convert(source, folder / "out", Recipe(), max_shard_bytes=300_000)
    return folder


@pytest.fixture
def packed(converted: Path, tmp_path: Path) -> Path:
    """A copy to damage."""
    return Path(shutil.copytree(converted / "out", tmp_path / "packed"))


def verify(folder: Path, source: Path | None = None) -> Verification:
    return verify_folder(folder, str(source) if source else None, lambda *_: None)


def failure(folder: Path, source: Path | None = None) -> str:
    with pytest.raises(LowbitError) as caught:
        verify(folder, source)
    return str(caught.value)


def edit_header(path: Path, edit: Edit) -> None:
    """Rewrite a shard's header in place; it must not grow."""
    content = path.read_bytes()
    [length] = struct.unpack("<Q", content[:8])
    header = json.loads(content[8 : 8 + length])
    edit(header)
    raw = json.dumps(header, separators=(",", ":")).encode()
    assert len(raw) <= length
    path.write_bytes(content[:8] + raw.ljust(length) + content[8 + length :])


def test_fresh_conversion(packed: Path) -> None:
    assert sorted(path.name for path in packed.glob("*.safetensors")) == SHARDS
    result = verify(packed)
    assert result.files == len(list(packed.iterdir())) - 1
    assert result.tensors == len(open_checkpoint(packed).tensors)
    assert result.source_tensors is None
    assert result.unlisted == ()
    total = sum(path.stat().st_size for path in packed.iterdir())
    assert result.size_bytes == total


@pytest.mark.parametrize("tied", [False, True])
def test_a_packed_embedding_follows_from_the_source(
    make_model: MakeModel, tmp_path: Path, tied: bool
) -> None:
    source = make_model(tmp_path / "source", tie_word_embeddings=tied)
    convert(source, tmp_path / "out", Recipe(embedding="int8"))
    verify(tmp_path / "out", source)
    names = set(open_checkpoint(tmp_path / "out").tensors)
    assert "model.embed_tokens.weight" not in names
    assert ("lm_head.weight_packed" in names) is not tied
    flip(tmp_path / "out" / "model.safetensors", -1)
    with pytest.raises(LowbitError):
        verify(tmp_path / "out", source)


def test_files_nobody_listed_are_named(packed: Path) -> None:
    (packed / "quality.json").write_text("{}")
    (packed / "notes.txt").write_text("mine")
    assert verify(packed).unlisted == ("notes.txt", "quality.json")


def test_progress_ends_at_the_whole(packed: Path) -> None:
    seen: list[tuple[str, int, int]] = []
    verify_folder(packed, None, lambda *step: seen.append(step))
    assert seen == sorted(seen)
    assert seen[-1][1] == seen[-1][2]


@pytest.mark.parametrize("name", ["LICENSE", "generation_config.json"])
@pytest.mark.parametrize("offset", [0, -1])
def test_flipped_byte_in_a_small_file(packed: Path, name: str, offset: int) -> None:
    flip(packed / name, offset)
    assert failure(packed).startswith(f"`{name}` is not what lowbit.json says")


@pytest.mark.parametrize("suffix", ["weight_packed", "weight_scale", "weight"])
def test_flipped_byte_in_a_tensor(packed: Path, suffix: str) -> None:
    tensors = open_checkpoint(packed).tensors
    info = next(info for name, info in tensors.items() if name.endswith(f".{suffix}"))
    flip(packed / info.file, info.offset + info.nbytes - 1)
    said = f"`{info.name}` in `{info.file}` is not what lowbit.json says (sha256 "
    assert failure(packed).startswith(said)


def test_every_shard_is_read_once(packed: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    opened: list[str] = []

    def counted(path: Path) -> BinaryIO:
        opened.append(path.name)
        return open_file(path)

    monkeypatch.setattr(hashing, "open_file", counted)
    verify_folder(packed, None, lambda *_: None)
    manifest = manifest_of(packed)
    assert sorted(opened) == sorted(file.name for file in manifest.files)


def test_flipped_byte_in_a_shape(packed: Path) -> None:
    info = open_checkpoint(packed).tensors[SHAPE]
    flip(packed / info.file, info.offset)
    assert failure(packed) == f"`{SHAPE}` holds [257, 128], expected [256, 128]"


def test_flipped_byte_in_a_header(packed: Path) -> None:
    edit_header(packed / SHARDS[0], lambda header: header["__metadata__"].update(format="tf"))
    assert failure(packed).startswith(f"`{SHARDS[0]}` is not what lowbit.json says (sha256")


@pytest.mark.parametrize("name", ["config.json", "model.safetensors.index.json"])
def test_reformatted_json(packed: Path, name: str) -> None:
    edit_json(packed / name, lambda content: None)
    assert failure(packed).startswith(f"`{name}` has ")


def test_changed_value_of_the_same_length(packed: Path) -> None:
    path = packed / "config.json"
    path.write_text(path.read_text().replace("1000000", "5000000"))
    assert failure(packed).startswith("`config.json` is not what lowbit.json says")


def change_a_scale(content: dict[str, Any]) -> None:
    row = next(row for row in content["tensors"] if row["name"].endswith("up_proj.weight_scale"))
    row["scale_max"] *= 2


def forget_a_scale(content: dict[str, Any]) -> None:
    row = next(row for row in content["tensors"] if row["name"].endswith("up_proj.weight_scale"))
    row["scale_min"] = row["scale_max"] = None


def change_a_source_hash(content: dict[str, Any]) -> None:
    row = content["source_tensors"][3]
    row["sha256"] = row["sha256"][::-1]


@pytest.mark.parametrize(
    ("edit", "message"),
    [
        (change_a_scale, "up_proj.weight_scale` has scales of "),
        (forget_a_scale, "lowbit.json says None to None"),
        (change_a_source_hash, "`weights_sha256` is not that of its `source_tensors`"),
    ],
)
def test_a_changed_manifest(
    packed: Path, edit: Callable[[dict[str, Any]], None], message: str
) -> None:
    edit_json(packed / "lowbit.json", edit)
    assert message in failure(packed)


@pytest.mark.parametrize("cut", [1, 10_000])
def test_truncated_shard(packed: Path, cut: int) -> None:
    path = packed / SHARDS[1]
    path.write_bytes(path.read_bytes()[:-cut])
    assert f"`{SHARDS[1]}` is cut short" in failure(packed)


@pytest.mark.parametrize("name", ["LICENSE", "generation_config.json"])
def test_missing_file(packed: Path, name: str) -> None:
    (packed / name).unlink()
    assert failure(packed) == f"`{name}` is missing from `{packed}`"


def test_missing_shard(packed: Path) -> None:
    (packed / SHARDS[1]).unlink()
    assert f"`{SHARDS[1]}`, which is missing" in failure(packed)


def test_extra_tensor(packed: Path) -> None:
    path = packed / SHARDS[1]
    save_file({**load_file(path), "model.extra": torch.zeros(4)}, path, {"format": "pt"})
    assert failure(packed).startswith(f"`model.extra` is in `{SHARDS[1]}` but not in the index")
    edit_json(
        packed / "model.safetensors.index.json",
        lambda index: index["weight_map"].update({"model.extra": SHARDS[1]}),
    )
    assert failure(packed) == "`model.extra`: the architecture has no such tensor"


def test_flipped_scale_dtype(packed: Path) -> None:
    file = open_checkpoint(packed).tensors[SCALE].file
    edit_header(packed / file, lambda header: header[SCALE].update(dtype="F16"))
    assert failure(packed) == (
        f"`{SCALE}`: F16 [256, 1] in `{file}`, lowbit.json says BF16 [256, 1] in `{file}`"
    )
    edit_header(packed / file, lambda header: header[SCALE].update(dtype="I16"))
    assert failure(packed) == (
        f"`{SCALE}`: expected dtype bfloat16 or float16 or float32, got int16"
    )


@pytest.mark.parametrize("version", [0, 2, "1", None])
def test_foreign_manifest_version(packed: Path, version: object) -> None:
    edit_json(packed / "lowbit.json", lambda content: content.update(format_version=version))
    assert f"format version {version}, this release reads 1" in failure(packed)


def test_no_manifest(packed: Path) -> None:
    (packed / "lowbit.json").unlink()
    assert failure(packed) == f"`{packed}` has no lowbit.json, nothing to verify against"


@pytest.mark.parametrize("name", ["config.json", "model.safetensors.index.json", *SHARDS])
def test_manifest_that_leaves_a_file_out(packed: Path, name: str) -> None:
    def drop(content: dict[str, Any]) -> None:
        content["files"] = [row for row in content["files"] if row["name"] != name]

    edit_json(packed / "lowbit.json", drop)
    assert failure(packed) == f"`{name}` is not listed in lowbit.json: no hash covers it"


def test_manifest_that_leaves_a_tensor_out(packed: Path) -> None:
    edit_json(packed / "lowbit.json", lambda content: content["tensors"].pop(0))
    assert failure(packed) == "`model.embed_tokens.weight` is only in the weights"


def test_plain_checkpoint_has_nothing_to_verify(converted: Path) -> None:
    assert "has no lowbit.json" in failure(converted / "source")


def test_original(converted: Path) -> None:
    result = verify(converted / "out", converted / "source")
    assert result.source_tensors == len(open_checkpoint(converted / "source").tensors)


def test_original_in_other_shards(converted: Path, tmp_path: Path, make_model: MakeModel) -> None:
    source = make_model(tmp_path / "source", shards=("x.safetensors", "y.safetensors"))
    assert verify(converted / "out", source).source_tensors == 25


def test_another_original(converted: Path, tmp_path: Path, make_model: MakeModel) -> None:
    other = make_model(tmp_path / "other", seed=1)
    assert "has other bytes than the original that was converted" in failure(
        converted / "out", other
    )


def test_original_with_another_config(
    converted: Path, tmp_path: Path, make_model: MakeModel
) -> None:
    other = make_model(tmp_path / "other", rope_theta=10000)
    with pytest.raises(LowbitError) as caught:
        verify(converted / "out", other)
    assert str(caught.value) == f"`config.json` in `{other}` is not that of the original"
    assert caught.value.hint == NAME_ANOTHER


@pytest.mark.parametrize("name", ["lm_head.weight", "model.extra.weight"])
def test_original_with_other_tensors(
    converted: Path, tmp_path: Path, make_model: MakeModel, name: str
) -> None:
    def rename(tensors: dict[str, Any]) -> None:
        tensors["model.extra.weight"] = tensors["lm_head.weight"].clone()
        del tensors["model.extra.weight" if name == "lm_head.weight" else "model.norm.weight"]
        if name == "lm_head.weight":
            del tensors[name]

    other = make_model(tmp_path / "other", edit=rename)
    assert f"`{name}`" in failure(converted / "out", other)


def test_original_of_another_dtype_with_the_same_bytes(converted: Path, tmp_path: Path) -> None:
    other = Path(shutil.copytree(converted / "source", tmp_path / "other"))
    name = "model.layers.0.mlp.up_proj.weight"
    edit_header(other / "model.safetensors", lambda header: header[name].update(dtype="F16"))
    assert failure(converted / "out", other) == (
        f"`{name}` in `{other}` is F16 [256, 128], the original BF16 [256, 128]"
    )


RECIPES = {
    "int4": Recipe(),
    "positive": Recipe(positive_scales=True, group_size=None, head="bf16"),
    "overrides": Recipe("int8", 64, overrides=(Override("*.down_proj", 3, 32),)),
    "absmax": Recipe(method=ABSMAX, head="int4"),
}


@pytest.mark.parametrize("recipe", RECIPES)
@pytest.mark.parametrize("model", ["small", "tiny"])
def test_bytes_follow_from_the_source(
    request: pytest.FixtureRequest, tmp_path: Path, model: str, recipe: str
) -> None:
    source: Path = request.getfixturevalue(model)
    if model == "tiny" and recipe != "int4":
        pytest.skip("one recipe will do for the larger model")
    convert(source, tmp_path / "out", RECIPES[recipe])
    before = sorted(path.name for path in tmp_path.iterdir())
    result = verify(tmp_path / "out", source)
    assert result.derived
    assert result.not_derived is None
    assert sorted(path.name for path in tmp_path.iterdir()) == before


def forge(folder: Path, name: str) -> None:
    """Change a tensor and every hash of it, as somebody would who wants to pass."""
    manifest = manifest_of(folder)
    shard = next(row.file for row in manifest.tensors if row.name == name)
    info = open_checkpoint(folder).tensors[name]
    flip(folder / shard, info.offset)
    info = open_checkpoint(folder).tensors[name]
    tensors = tuple(
        replace(row, sha256=hash_tensor(folder / shard, info)) if row.name == name else row
        for row in manifest.tensors
    )
    files = tuple(
        replace(row, sha256=hash_file(folder / shard)) if row.name == shard else row
        for row in manifest.files
    )
    forged = replace(manifest, tensors=tensors, files=files)
    (folder / "lowbit.json").write_bytes(forged.to_bytes())


@pytest.mark.parametrize("name", [SCALE, "model.layers.0.mlp.up_proj.weight_packed"])
def test_a_forged_tensor_does_not_follow(converted: Path, packed: Path, name: str) -> None:
    forge(packed, name)
    verify(packed)  # the hashes alone cannot tell
    said = failure(packed, converted / "source")
    assert said == f"`{name}` does not follow from the source by the recipe in lowbit.json"


def test_a_recipe_of_another_release(converted: Path, packed: Path) -> None:
    edit_json(packed / "lowbit.json", lambda content: content["recipe"].update(dither=True))
    assert "is not one of this release" in failure(packed, converted / "source")
    edit_json(packed / "lowbit.json", lambda content: content["recipe"].clear())
    assert "is not one of this release" in failure(packed, converted / "source")


@pytest.mark.commands
def test_calibrated_bytes_follow_on_the_same_machine(short: Path, tmp_path: Path) -> None:
    text = tmp_path / "text.txt"
    text.write_text("Once upon a time there was a cat who lived by the sea. " * 60)
    out = tmp_path / "out"
    request = CalibrationRequest(text, 8, 32)
    convert(short, out, Recipe(method=Method("gptq"), head="bf16"), calibration=request)
    unknown = verify(out, short)
    assert not unknown.derived
    assert unknown.not_derived == "it was calibrated on `text.txt`, which --calib would name"
    assert unknown.source_tensors is not None
    again = verify_folder(out, str(short), lambda *_: None, calib=text)
    assert again.derived
    text.write_text("Something else altogether, and long enough to calibrate on. " * 60)
    other = verify_folder(out, str(short), lambda *_: None, calib=text)
    assert not other.derived
    assert other.not_derived is not None
    assert other.not_derived.startswith("text sha256 is ")
    edit_json(
        out / "lowbit.json", lambda content: content["calibration"].update(torch_version="1.0")
    )
    text.write_text("Once upon a time there was a cat who lived by the sea. " * 60)
    elsewhere = verify_folder(out, str(short), lambda *_: None, calib=text)
    assert elsewhere.not_derived == f"torch version is {torch.__version__} here and was 1.0"
