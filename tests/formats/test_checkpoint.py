"""Reading whole and sharded folders, against the safetensors library."""

import json
from collections.abc import Callable
from pathlib import Path

import pytest
import safetensors.torch
import torch
from torch import Tensor

from lowbit.formats.errors import CheckpointError
from lowbit.formats.hub.locate import locate
from lowbit.formats.safetensors.checkpoint import (
    DTYPES,
    Checkpoint,
    open_checkpoint,
    read_at,
    read_json,
)
from lowbit.formats.safetensors.header import read_header

TINY = Path(__file__).parents[2] / "examples/models/tiny-qwen3"


def some_tensors() -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(0)
    return {
        "a.weight": torch.randn(5, 3, generator=generator).bfloat16(),
        "b.weight": torch.randn(4, 2, 3, generator=generator),
        "c.bias": torch.randn(7, generator=generator).half(),
        "d.empty": torch.empty(0, 4),
        "e.scalar": torch.tensor(3.5, dtype=torch.float64),
        "f.codes": torch.arange(-6, 6, dtype=torch.int32).view(4, 3),
        "g.mask": torch.tensor([True, False, True]),
    }


def write_shards(folder: Path, shards: dict[str, dict[str, Tensor]], index: str | None) -> None:
    for file, tensors in shards.items():
        safetensors.torch.save_file(tensors, folder / file, metadata={"format": "pt"})
    if index is not None:
        weight_map = {name: file for file, tensors in shards.items() for name in tensors}
        (folder / index).write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))


def check_reads(checkpoint: Checkpoint, expected: dict[str, Tensor]) -> None:
    assert checkpoint.tensors.keys() == expected.keys()
    for name, tensor in expected.items():
        info = checkpoint.tensors[name]
        assert info.name == name
        assert info.shape == tensor.shape
        assert info.dtype == tensor.dtype
        assert info.nbytes == tensor.nbytes
        assert torch.equal(checkpoint.read(name), tensor)
        out = torch.empty_like(tensor)
        checkpoint.read_into(name, out)
        assert torch.equal(out, tensor)
        for start in range(len(tensor) if tensor.ndim else 0):
            rows = checkpoint.read_rows(name, start, len(tensor))
            assert torch.equal(rows, tensor[start:])
        if tensor.ndim:
            some = [len(tensor) - 1, 0] if len(tensor) else []
            assert torch.equal(checkpoint.read_some(name, some), tensor[some])


def split(tensors: dict[str, Tensor], files: list[str]) -> dict[str, dict[str, Tensor]]:
    names = list(tensors)
    return {
        file: {name: tensors[name] for name in names[i :: len(files)]}
        for i, file in enumerate(files)
    }


def test_single_file(folder: Path) -> None:
    tensors = some_tensors()
    write_shards(folder, {"model.safetensors": tensors}, None)
    checkpoint = open_checkpoint(folder)
    check_reads(checkpoint, tensors)
    assert checkpoint.config == {"model_type": "qwen3"}
    assert checkpoint.tensors["a.weight"].dtype_name == "BF16"
    assert checkpoint.tensors["b.weight"].row_bytes == 24


@pytest.mark.parametrize(
    ("files", "index"),
    [
        (["weights.safetensors"], None),
        (["model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors"], None),
        (["x.safetensors", "0.safetensors", "Ω b.safetensors"], "model.safetensors.index.json"),
        (["p1.safetensors", "p2.safetensors"], "weights.safetensors.index.json"),
    ],
    ids=["one-odd-name", "no-index", "odd-names", "odd-index"],
)
def test_shards(folder: Path, files: list[str], index: str | None) -> None:
    tensors = some_tensors()
    write_shards(folder, split(tensors, files), index)
    check_reads(open_checkpoint(folder), tensors)


def test_files_beside_the_index_are_not_read(folder: Path) -> None:
    tensors = some_tensors()
    write_shards(folder, {"s.safetensors": tensors}, "model.safetensors.index.json")
    write_shards(folder, {"other.safetensors": {"a.weight": torch.zeros(1)}}, None)
    check_reads(open_checkpoint(folder), tensors)


def test_links_are_followed(folder: Path, tmp_path: Path) -> None:
    tensors = some_tensors()
    (tmp_path / "blobs").mkdir()
    safetensors.torch.save_file(tensors, tmp_path / "blobs/0f3a")
    (folder / "model.safetensors").symlink_to(tmp_path / "blobs/0f3a")
    check_reads(open_checkpoint(folder), tensors)


def test_bundled_model_equals_the_safetensors_reader() -> None:
    expected = safetensors.torch.load_file(TINY / "model.safetensors")
    checkpoint = open_checkpoint(TINY)
    assert checkpoint.tensors.keys() == expected.keys()
    assert all(torch.equal(checkpoint.read(name), expected[name]) for name in expected)


@pytest.mark.parametrize("name", sorted(DTYPES))
def test_every_dtype(folder: Path, name: str) -> None:
    data = torch.arange(48, dtype=torch.uint8)
    tensor = (data % 2 if name == "BOOL" else data).view(DTYPES[name]).view(2, -1)
    safetensors.torch.save_file({"x": tensor}, folder / "model.safetensors")
    checkpoint = open_checkpoint(folder)
    assert checkpoint.tensors["x"].dtype_name == name
    read = checkpoint.read("x")
    assert read.dtype == tensor.dtype
    assert torch.equal(read.view(torch.uint8), tensor.view(torch.uint8))


@pytest.mark.parametrize("rows", [1, 2, 3, 5, 100])
def test_blocks_of_rows(folder: Path, rows: int) -> None:
    tensors = some_tensors()
    write_shards(folder, {"model.safetensors": tensors}, None)
    blocks = list(open_checkpoint(folder).rows("a.weight", rows))
    assert [start for start, _ in blocks] == list(range(0, 5, rows))
    assert all(len(block) <= rows for _, block in blocks)
    assert torch.equal(torch.cat([block for _, block in blocks]), tensors["a.weight"])


@pytest.mark.parametrize(
    "make",
    [
        lambda: torch.empty(5, 4, dtype=torch.bfloat16),
        lambda: torch.empty(5, 3, dtype=torch.float16),
        lambda: torch.empty(3, 5, dtype=torch.bfloat16).T,
    ],
    ids=["size", "dtype", "strided"],
)
def test_read_into_refuses_another_buffer(folder: Path, make: Callable[[], Tensor]) -> None:
    write_shards(folder, {"model.safetensors": some_tensors()}, None)
    out = make()
    with pytest.raises(CheckpointError, match=r"`a.weight`: BF16 \[5, 3\] does not fit a buffer"):
        open_checkpoint(folder).read_into("a.weight", out)


def test_read_into_fills_part_of_a_larger_tensor(folder: Path) -> None:
    tensors = some_tensors()
    write_shards(folder, {"model.safetensors": tensors}, None)
    fused = torch.zeros(9, 3, dtype=torch.bfloat16)
    open_checkpoint(folder).read_into("a.weight", fused[2:7])
    assert torch.equal(fused[2:7], tensors["a.weight"])
    assert not fused[:2].any()
    assert not fused[7:].any()


def test_file_cut_after_its_header_was_read(folder: Path) -> None:
    write_shards(folder, {"model.safetensors": some_tensors()}, None)
    checkpoint = open_checkpoint(folder)
    last = max(checkpoint.tensors.values(), key=lambda info: info.offset + info.nbytes)
    path = folder / "model.safetensors"
    path.write_bytes(path.read_bytes()[:-1])
    with pytest.raises(CheckpointError, match=r"`model.safetensors` ends at byte \d+, expected"):
        checkpoint.read(last.name)


def test_read_at(tmp_path: Path) -> None:
    path = tmp_path / "bytes"
    path.write_bytes(bytes(range(16)))
    out = torch.zeros(2, dtype=torch.int16)
    read_at(path, 3, out)
    assert out.tolist() == [0x0403, 0x0605]
    read_at(path, 16, torch.zeros(0))


def test_header_alone(folder: Path) -> None:
    tensors = some_tensors()
    safetensors.torch.save_file(tensors, folder / "model.safetensors")
    infos = read_header(folder / "model.safetensors")
    data = (folder / "model.safetensors").read_bytes()
    for name, info in infos.items():
        raw = data[info.offset : info.offset + info.nbytes]
        assert raw == bytes(tensors[name].reshape(-1).view(torch.uint8).tolist())


def test_json_file(tmp_path: Path) -> None:
    path = tmp_path / "config.json"
    path.write_text('{"a": [1, null]}')
    assert read_json(path) == {"a": [1, None]}


@pytest.mark.parametrize("config", [True, False])
def test_a_folder_of_gguf_names_what_runs_it(tmp_path: Path, config: bool) -> None:
    file = tmp_path / "a model.gguf"
    file.touch()
    if config:
        (tmp_path / "config.json").write_text("{}")
    with pytest.raises(CheckpointError, match="is in the GGUF format") as caught:
        open_checkpoint(tmp_path)
    assert caught.value.hint == f"llama.cpp runs it: llama-cli -m '{file}'"
    with pytest.raises(CheckpointError, match=r"a model.gguf` is in the GGUF format"):
        locate(str(file))


def test_a_folder_of_mlx_names_what_runs_it(tmp_path: Path) -> None:
    quantization = {"bits": 4, "group_size": 128, "mode": "affine"}
    (tmp_path / "config.json").write_text(json.dumps({"quantization": quantization}))
    with pytest.raises(CheckpointError, match="is packed for MLX") as caught:
        open_checkpoint(tmp_path)
    assert caught.value.hint == f"mlx-lm runs it: mlx_lm.chat --model {tmp_path}"
