"""A conversion with a draft head: its rows, the folder around it, and what notices a change."""

import json
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from lowbit.convert import Recipe
from lowbit.convert.measure.build import measure_sizes
from lowbit.convert.measure.difference import difference
from lowbit.convert.measure.inspection import inspect
from lowbit.convert.original.progress import silent
from lowbit.convert.pipeline.conversion import prepare
from lowbit.convert.pipeline.existing import find_existing
from lowbit.convert.pipeline.folder import check_output
from lowbit.convert.pipeline.verification import verify_folder
from lowbit.convert.plan.plan import make_plan
from lowbit.convert.publish.upload import plan_upload
from lowbit.convert.quantize.session import CalibrationRequest
from lowbit.formats.draft_head import DRAFT_FILE, open_draft_head
from lowbit.formats.errors import FormatError, QuantizationError, ResourceError
from lowbit.formats.hub.locate import Location
from lowbit.formats.layout.packing import dequantize, pack, unpack
from lowbit.formats.layout.rtn import quantize
from lowbit.formats.layout.scheme import Scheme
from lowbit.formats.packed import open_packed
from lowbit.formats.safetensors.checkpoint import TensorInfo, open_checkpoint
from tests.conversions import convert
from tests.convert.edits import manifest_of
from tests.convert.fixture_types import Hashes
from tests.short_models import WHOLE_VOCABULARY, Shorten

ROWS = 600
RECIPE = Recipe(draft_vocabulary=ROWS)


@pytest.fixture(scope="module")
def hybrid(shorten: Shorten) -> Path:
    return shorten("tiny-qwen3.5", WHOLE_VOCABULARY)


@pytest.fixture(scope="module")
def made(hybrid: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return convert(hybrid, tmp_path_factory.mktemp("made") / "out", RECIPE).folder


def _headers(folder: Path) -> tuple[Mapping[str, Any], Mapping[str, TensorInfo]]:
    checkpoint = open_checkpoint(folder)
    return checkpoint.config, checkpoint.tensors


@pytest.fixture
def copied(made: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(made, tmp_path / "copied"))


def test_rows_are_those_of_the_original_rounded(hybrid: Path, made: Path) -> None:
    head = open_draft_head(made, json.loads((made / "config.json").read_text()))
    assert head is not None
    assert len(head.ids) == ROWS
    source = load_file(hybrid / "model.safetensors")["model.language_model.embed_tokens.weight"]
    codes, scale = quantize(source[head.ids.long()], Scheme(4, 128))
    assert torch.equal(head.packed, pack(codes, 4))
    assert torch.equal(head.scale, scale)
    w = dequantize(unpack(head.packed, 4, 256), head.scale)
    error = (w - source[head.ids.long()].float()).norm() / w.norm()
    assert error < 0.12
    assert (json.loads((hybrid / "config.json").read_text())["text_config"]["eos_token_id"]) in (
        head.ids.tolist()
    )


@pytest.mark.commands
def test_rows_of_a_rotated_head_are_in_its_basis(
    tmp_path: Path, short: Path, short_text: Path
) -> None:
    from lowbit.convert.plan.method import Method

    recipe = Recipe(draft_vocabulary=200, method=Method.parse("gptq+rotate"), head="int8")
    request = CalibrationRequest(short_text, samples=1, length=16)
    folder = convert(short, tmp_path / "out", recipe, calibration=request).folder
    head = open_draft_head(folder, json.loads((folder / "config.json").read_text()))
    assert head is not None
    stored = load_file(folder / "model.safetensors")
    whole = dequantize(
        unpack(stored["lm_head.weight_packed"], 8, 256), stored["lm_head.weight_scale"]
    )[head.ids.long()]
    w = dequantize(unpack(head.packed, 4, 256), head.scale)
    assert (w - whole).norm() / whole.norm() < 0.12
    verify_folder(folder, str(short), silent)


def test_other_tools_load_the_folder_as_without(hybrid: Path, made: Path, tmp_path: Path) -> None:
    plain = convert(hybrid, tmp_path / "plain", Recipe()).folder
    assert (plain / "model.safetensors").read_bytes() == (made / "model.safetensors").read_bytes()
    assert (plain / "config.json").read_bytes() == (made / "config.json").read_bytes()
    assert [path.name for path in made.glob("*.safetensors")] == ["model.safetensors"]
    found = difference(plain, made, silent)
    assert (found.only_a, found.only_b, found.linears) == ((), (DRAFT_FILE,), ())


def test_what_lowbit_json_says(hybrid: Path, made: Path) -> None:
    manifest = manifest_of(made)
    assert manifest.draft_head is not None
    assert (manifest.draft_head.rows, manifest.draft_head.group_size) == (ROWS, 128)
    assert DRAFT_FILE in [file.name for file in manifest.files]
    result = verify_folder(made, str(hybrid), silent)
    assert (result.derived, result.unlisted) == (True, ())
    sizes, draft = (
        measure_sizes(open_packed(made), open_checkpoint(hybrid)),
        (made / DRAFT_FILE).stat().st_size,
    )
    assert sizes.folder_bytes == sum(f.size_bytes for f in manifest.files) + (
        (made / "lowbit.json").stat().st_size
    )
    assert sizes.source_bytes is not None
    plan = make_plan(*_headers(hybrid), RECIPE)
    assert plan.draft_bytes == draft
    entry = next(entry for entry in inspect(str(made)).entries if entry.name == "draft head")
    assert (entry.shape, entry.stored, entry.nbytes) == ((ROWS, 256), "INT4 g128", draft)
    parcel = plan_upload(open_packed(made), "me/model", silent)
    assert parcel.left_out == ()
    assert DRAFT_FILE in [item.name for item in parcel.items if item.is_weight]


@pytest.mark.commands
def test_the_same_command_again(hybrid: Path, made: Path, tmp_path: Path, hashes: Hashes) -> None:
    again = convert(hybrid, tmp_path / "again", RECIPE).folder
    assert (again / DRAFT_FILE).read_bytes() == (made / DRAFT_FILE).read_bytes()
    assert (again / "lowbit.json").read_bytes() == (made / "lowbit.json").read_bytes()

    def found(text: Path | None = None) -> bool:
        source, plan = open_checkpoint(hybrid), make_plan(*_headers(hybrid), RECIPE)
        location, cpu = Location(hybrid, None, None), torch.device("cpu")
        job = prepare(location, source, plan, cpu, CalibrationRequest(), text)
        result = find_existing(job, again, overwrite=False, progress=silent)
        return result is not None

    assert found()
    other = tmp_path / "other.txt"
    other.write_text("another text " * 100)
    assert not found(other)


@pytest.mark.commands
def test_counted_on_another_text(hybrid: Path, made: Path, tmp_path: Path) -> None:
    text = tmp_path / "other.txt"
    text.write_text("another text " * 100)
    folder = convert(hybrid, tmp_path / "out", RECIPE, draft_text=text).folder
    manifest = manifest_of(folder)
    assert manifest.draft_head is not None
    assert (manifest.draft_head.text, manifest.draft_head.coverage) == ("other.txt", 1.0)
    assert verify_folder(folder, str(hybrid), silent).derived
    assert difference(made, folder, silent).others == (DRAFT_FILE,)
    with pytest.raises(QuantizationError, match="counted for a draft head, and there is none"):
        convert(hybrid, tmp_path / "none", Recipe(), draft_text=text)


def test_replacing_and_going_on(hybrid: Path, copied: Path, tmp_path: Path) -> None:
    partial = copied.parent / f".{copied.name}.partial"
    folder = convert(hybrid, copied, Recipe(draft_vocabulary=50), overwrite=True).folder
    head = open_draft_head(folder, json.loads((folder / "config.json").read_text()))
    assert head is not None
    assert len(head.ids) == 50
    folder = convert(hybrid, copied, Recipe(), overwrite=True).folder
    assert not (folder / "draft").exists()
    assert not partial.exists()


def test_files_of_others_are_never_removed(copied: Path) -> None:
    check_output(copied, overwrite=True)
    (copied / "draft" / "notes.txt").write_text("mine")
    with pytest.raises(ResourceError, match=r"draft/notes\.txt` was not written by"):
        check_output(copied, overwrite=True)
    assert verify_folder(copied, None, silent).unlisted == ("draft/notes.txt",)


def test_changed_draft_heads_are_noticed(hybrid: Path, copied: Path) -> None:
    tensors = load_file(copied / DRAFT_FILE)
    metadata = {"format": "pt", "lowbit_draft_head": "1"}
    tensors["weight_packed"][3, 3] ^= 1
    save_file(tensors, copied / DRAFT_FILE, metadata)
    with pytest.raises(FormatError, match=r"draft/head\.safetensors"):
        verify_folder(copied, None, silent)
    tensors["ids"][3] = tensors["ids"][2]
    save_file(tensors, copied / DRAFT_FILE, metadata)
    with pytest.raises(FormatError, match=r"draft/head\.safetensors`: `ids` does not ascend"):
        verify_folder(copied, None, silent)
    (copied / DRAFT_FILE).unlink()
    with pytest.raises(FormatError, match=r"`draft/head\.safetensors` is missing"):
        verify_folder(copied, None, silent)


def test_an_unlisted_draft_head(hybrid: Path, made: Path, tmp_path: Path) -> None:
    plain = convert(hybrid, tmp_path / "plain", Recipe()).folder
    shutil.copytree(made / "draft", plain / "draft")
    with pytest.raises(FormatError, match=r"`draft/head\.safetensors` is not listed"):
        verify_folder(plain, None, silent)
