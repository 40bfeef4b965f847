"""What a conversion writes: every tensor against a plain computation on the whole of it."""

import json
import math
import os
import re
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file
from torch import Tensor

from lowbit.convert import Conversion, Override, Recipe
from lowbit.convert.pipeline import stream
from lowbit.convert.plan.memory import block_elements, peak_estimate
from lowbit.convert.plan.method import ABSMAX
from lowbit.formats.architectures import is_tied, tensor_table
from lowbit.formats.errors import ResourceError
from lowbit.formats.layout import rtn
from lowbit.formats.layout.packing import pack
from lowbit.formats.machine.cores import core_count
from lowbit.formats.machine.memory import resident_bytes
from lowbit.formats.safetensors.checkpoint import open_checkpoint
from tests.conversions import convert
from tests.convert.fixture_types import Config, Hashes, MakeModel
from tests.lanes import in_commands

ODD_NAMES = ("weights-b.safetensors", "a.safetensors", "model-00001-of-00002.safetensors")

RECIPES = {
    "int4": Recipe(),
    "int8": Recipe("int8", 64),
    "mixed": Recipe("int8", 32, overrides=(Override("*.mlp.*", 4),)),
    "positive": Recipe(positive_scales=True, head="bf16"),
    "absmax-rows": Recipe(group_size=None, method=ABSMAX, head="int4"),
    "odd-bits": Recipe(overrides=(Override("*.self_attn.*", 3), Override("*.o_proj", 6))),
}


def load_all(folder: Path) -> dict[str, Tensor]:
    """Every tensor, as the safetensors library reads it."""
    return {
        name: tensor
        for path in folder.glob("*.safetensors")
        for name, tensor in load_file(path).items()
    }


def expected_tensors(source: Path, recipe: Recipe) -> dict[str, Tensor]:
    """The packed checkpoint by whole tensors."""
    config = json.loads((source / "config.json").read_text())
    read = load_all(source)
    table = tensor_table(config)
    schemes = recipe.schemes(table)
    expected = {}
    for spec in table:
        scheme = schemes.get(spec.module)
        tied_head = spec.role == "head" and is_tied(config)
        if scheme is None:
            if not tied_head:
                expected[spec.name] = read[spec.name]
            continue
        w = read["model.embed_tokens.weight" if tied_head else spec.name]
        codes, scale = rtn.quantize(w, scheme, recipe.rule)
        expected[f"{spec.module}.weight_packed"] = pack(codes, scheme.bits)
        expected[f"{spec.module}.weight_scale"] = scale
        expected[f"{spec.module}.weight_shape"] = torch.tensor(w.shape)
    return expected


def assert_same_tensors(found: dict[str, Tensor], expected: dict[str, Tensor]) -> None:
    assert found.keys() == expected.keys()
    for name, tensor in expected.items():
        assert found[name].dtype == tensor.dtype, name
        assert torch.equal(found[name], tensor), name


@pytest.fixture(scope="module")
def tiny_int4(tiny: Path, tmp_path_factory: pytest.TempPathFactory) -> Conversion:
    return convert(tiny, tmp_path_factory.mktemp("tiny") / "int4", Recipe())


def test_bundled_model(tiny: Path, tiny_int4: Conversion, hashes: Hashes) -> None:
    found = load_all(tiny_int4.folder)
    assert_same_tensors(found, expected_tensors(tiny, Recipe()))
    before, after = hashes(tiny), hashes(tiny_int4.folder)
    assert after.keys() - before.keys() == {"lowbit.json"}
    for name in ("tokenizer.json", "tokenizer_config.json", "generation_config.json"):
        assert after[name] == before[name]
    assert not tiny_int4.folder.with_name("int4.partial").exists()
    assert tiny_int4.resumed == 0


def test_config_of_the_result(tiny: Path, tiny_int4: Conversion) -> None:
    before = json.loads((tiny / "config.json").read_text())
    after = json.loads((tiny_int4.folder / "config.json").read_text())
    assert after.pop("quantization_config")["quant_method"] == "compressed-tensors"
    assert after == {**before, "tie_word_embeddings": False}


def test_shards_say_what_loaders_look_for(tiny_int4: Conversion) -> None:
    with safe_open(tiny_int4.folder / "model.safetensors", "pt") as file:
        assert file.metadata() == {"format": "pt"}


def test_quality_of_every_linear(tiny_int4: Conversion) -> None:
    names = [name for name, scheme in tiny_int4.plan.schemes.items() if scheme]
    assert [row.name for row in tiny_int4.weights] == names
    for row in tiny_int4.weights:
        low, high = (0.005, 0.008) if row.bits == 8 else (0.08, 0.11)
        assert low < row.relative_l2 < high, row
        assert row.cosine > 0.99


@in_commands(
    "mixed-torch.float16",
    "int8-torch.float32",
    "absmax-rows-torch.bfloat16",
    "positive-torch.bfloat16",
)
@pytest.mark.parametrize(
    ("recipe", "dtype"),
    [
        *((recipe, torch.bfloat16) for recipe in RECIPES),
        *zip(RECIPES, [torch.float16, torch.float32] * len(RECIPES), strict=False),
    ],
    ids=str,
)
def test_every_tensor(
    tmp_path: Path, make_model: MakeModel, recipe: str, dtype: torch.dtype
) -> None:
    source = make_model(tmp_path / "source", dtype, shards=ODD_NAMES)
    done = convert(source, tmp_path / "out", RECIPES[recipe], max_shard_bytes=150_000)
    shards = sorted(path.name for path in done.folder.glob("*.safetensors"))
    count = len(shards)
    assert count > 2
    assert shards == [f"model-{i:05d}-of-{count:05d}.safetensors" for i in range(1, count + 1)]
    assert all(
        (done.folder / name).stat().st_size <= 150_000 or len(load_file(done.folder / name)) == 1
        for name in shards
    )
    assert_same_tensors(load_all(done.folder), expected_tensors(source, RECIPES[recipe]))
    index = json.loads((done.folder / "model.safetensors.index.json").read_text())
    placed = {name: path for path in shards for name in load_file(done.folder / path)}
    assert index["weight_map"] == placed


def test_tied_model_with_a_stored_head(
    tmp_path: Path, make_model: MakeModel, small_config: Config
) -> None:
    def add_head(tensors: dict[str, Tensor]) -> None:
        tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"].clone()

    source = make_model(tmp_path / "source", edit=add_head, tie_word_embeddings=True)
    tied = convert(source, tmp_path / "tied", Recipe(head="bf16"))
    assert "lm_head.weight" not in load_all(tied.folder)
    assert json.loads((tied.folder / "config.json").read_text())["tie_word_embeddings"] is True
    fates = {row.name: (row.fate, row.reason) for row in tied.manifest.source_tensors}
    assert fates["lm_head.weight"] == ("dropped", "tied: the embedding is used")
    untied = convert(source, tmp_path / "untied", Recipe())
    assert_same_tensors(load_all(untied.folder), expected_tensors(source, Recipe()))


def test_manifest_accounts_for_everything(
    tmp_path: Path, make_model: MakeModel, hashes: Hashes
) -> None:
    source = make_model(tmp_path / "source", shards=ODD_NAMES)
    done = convert(source, tmp_path / "out", Recipe(), max_shard_bytes=150_000)
    manifest = done.manifest
    sources, outputs = open_checkpoint(source).tensors, load_all(done.folder)
    assert {row.name: row.shape for row in manifest.source_tensors} == {
        name: info.shape for name, info in sources.items()
    }
    assert {row.name: row.shape for row in manifest.tensors} == {
        name: tuple(tensor.shape) for name, tensor in outputs.items()
    }
    files = hashes(done.folder)
    assert {row.name: row.sha256 for row in manifest.files} == {
        name: digest for name, digest in files.items() if name != "lowbit.json"
    }
    for row in manifest.tensors:
        if row.name.endswith("_scale"):
            scale = outputs[row.name]
            assert (row.scale_min, row.scale_max) == (scale.min().item(), scale.max().item())
        else:
            assert (row.scale_min, row.scale_max) == (None, None)


def test_manifest_tells_nothing_of_the_machine(tiny_int4: Conversion) -> None:
    text = (tiny_int4.folder / "lowbit.json").read_text()
    assert str(tiny_int4.folder.parent) not in text
    assert os.uname().nodename not in text
    assert not re.search(r"/tmp|/home|cuda|cpu|thread|20\d\d-\d\d-\d\d|\d\d:\d\d:\d\d", text)


def test_files_that_pass_and_files_that_do_not(tmp_path: Path, small: Path) -> None:
    passed = ["LICENSE", "chat_template.jinja", "merges.txt", "vocab.json"]
    left = ["pytorch_model.bin", "model.gguf", "tf_model.h5", ".gitattributes", "quality.json"]
    left += ["quality.html", "lowbit.json", "pytorch_model.bin.index.json", "model.onnx"]
    for name in (*passed, *left):
        (small / name).write_bytes(name.encode())
    (small / "README.md").write_text("the card of the original")
    (small / "original").mkdir()
    (small / "original" / "params.json").write_text("{}")
    done = convert(small, tmp_path / "out", Recipe())
    made = {"config.json", "generation_config.json", "lowbit.json", "model.safetensors"}
    card = "SOURCE_README.md"
    assert {path.name for path in done.folder.iterdir()} == made.union(passed, [card])
    assert (done.folder / card).read_text() == "the card of the original"
    assert card in {file.name for file in done.manifest.files}
    for name in passed:
        assert (done.folder / name).read_bytes() == name.encode()
    assert json.loads((done.folder / "lowbit.json").read_text())["format_version"] == 1


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory, make_model: MakeModel) -> tuple[Path, Path]:
    """A source, and its conversion with default settings."""
    folder = tmp_path_factory.mktemp("plain")
    source = make_model(folder / "source")
    convert(source, folder / "out", Recipe(), max_shard_bytes=200_000)
    return source, folder / "out"


def with_blocks(elements: int) -> Callable[[pytest.MonkeyPatch], None]:
    def change(monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(
            "lowbit.convert.pipeline.conversion.block_elements", lambda *_: elements
        )

    return change


def with_workers(count: int) -> Callable[[pytest.MonkeyPatch], None]:
    def change(monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(stream, "core_count", lambda: count)
        monkeypatch.setattr("lowbit.convert.pipeline.stream._rows", lambda info, elements: 50)

    return change


@in_commands("one-worker", "five-workers")
@pytest.mark.usefixtures("scales_anew")
@pytest.mark.parametrize(
    "change",
    [lambda _: None, with_blocks(3000), with_workers(1), with_workers(5)],
    ids=["again", "small-blocks", "one-worker", "five-workers"],
)
def test_same_bytes_whatever_the_blocks_and_threads(
    tmp_path: Path,
    plain: tuple[Path, Path],
    hashes: Hashes,
    monkeypatch: pytest.MonkeyPatch,
    change: Callable[[pytest.MonkeyPatch], None],
) -> None:
    source, before = plain
    change(monkeypatch)
    torch.set_num_threads(2)
    done = convert(source, tmp_path / "elsewhere", Recipe(), max_shard_bytes=200_000)
    assert hashes(done.folder) == hashes(before)
    assert torch.get_num_threads() == 2


def test_same_bytes_whatever_the_memory(
    tmp_path: Path, plain: tuple[Path, Path], hashes: Hashes
) -> None:
    source, before = plain
    least = peak_estimate(1 << 17, core_count())
    done = convert(source, tmp_path / "out", Recipe(), max_ram=least, max_shard_bytes=200_000)
    assert hashes(done.folder) == hashes(before)


def test_same_bytes_whatever_the_shards_of_the_source(
    tmp_path: Path, plain: tuple[Path, Path], make_model: MakeModel, hashes: Hashes
) -> None:
    source = make_model(tmp_path / "source", shards=ODD_NAMES)
    done = convert(source, tmp_path / "out", Recipe(), max_shard_bytes=200_000)
    assert hashes(done.folder) == hashes(plain[1])


def test_the_shape_of_shards_changes_no_tensor(tmp_path: Path, plain: tuple[Path, Path]) -> None:
    done = convert(plain[0], tmp_path / "out", Recipe())
    assert_same_tensors(load_all(done.folder), load_all(plain[1]))


@pytest.mark.gpu
def test_same_bytes_on_the_gpu(
    tmp_path: Path, tiny: Path, tiny_int4: Conversion, hashes: Hashes
) -> None:
    done = convert(tiny, tmp_path / "out", Recipe(), device="cuda")
    assert hashes(done.folder) == hashes(tiny_int4.folder)


def test_progress_ends_at_the_whole(tmp_path: Path, small: Path) -> None:
    seen: list[tuple[str, int, int]] = []
    convert(small, tmp_path / "out", Recipe(), progress=lambda *step: seen.append(step))
    for phase in ("convert", "verify"):
        steps = [(done, total) for name, done, total in seen if name == phase]
        assert steps == sorted(steps)
        assert len({total for _, total in steps}) == 1
        assert steps[-1][0] == steps[-1][1]


def test_memory_that_cannot_hold_a_block() -> None:
    device = torch.device("cpu")
    with pytest.raises(ResourceError, match="is too little") as caught:
        block_elements(resident_bytes(), 2, device)
    [advice] = re.findall(r"give at least ([\d.]+)GB", caught.value.hint or "")
    assert block_elements(int(float(advice) * 1e9), 2, device) >= 1 << 16
    most = block_elements(1 << 50, 2, device)
    assert block_elements(1 << 51, 2, device) == most
    assert math.log2(most).is_integer()
