"""A broken or malicious checkpoint folder gives one CheckpointError that names the cause."""

import contextlib
import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import safetensors
import safetensors.torch
import torch
from hypothesis import given
from hypothesis import strategies as st

from lowbit.formats.errors import CheckpointError
from lowbit.formats.safetensors.checkpoint import MAX_CONFIG_BYTES, open_checkpoint
from lowbit.formats.safetensors.header import parse_header, read_header

WriteRaw = Callable[..., Path]
INDEX = "model.safetensors.index.json"


def entry(shape: Any = (2, 2), span: Any = (0, 8), dtype: Any = "BF16") -> dict[str, Any]:
    return {"dtype": dtype, "shape": shape, "data_offsets": span}


def refused(folder: Path, *words: str) -> CheckpointError:
    with pytest.raises(CheckpointError) as error:
        open_checkpoint(folder)
    for word in words:
        assert word in str(error.value)
    assert not str(error.value).endswith(".")
    return error.value


def test_missing_folder(tmp_path: Path) -> None:
    refused(tmp_path / "nowhere", f"`{tmp_path}/nowhere` does not exist")


def test_file_instead_of_a_folder(folder: Path) -> None:
    error = refused(folder / "config.json", "config.json` is not a folder")
    assert error.hint == "give the folder of the model"


def test_no_config(tmp_path: Path) -> None:
    refused(tmp_path, f"`{tmp_path}` is not a checkpoint: it has no config.json")


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (b"{", "is not valid JSON"),
        (b"\xff\xfe\x00", "is not valid JSON"),
        (b"[1]", "does not hold a JSON object"),
    ],
    ids=["cut", "bytes", "list"],
)
def test_bad_config(folder: Path, content: bytes, words: str) -> None:
    (folder / "config.json").write_bytes(content)
    refused(folder, "config.json`", words)


def test_config_that_is_too_long(folder: Path) -> None:
    os.truncate(folder / "config.json", MAX_CONFIG_BYTES + 1)
    refused(folder, "config.json` has", f"expected at most {MAX_CONFIG_BYTES}")


def test_no_safetensors(folder: Path) -> None:
    (folder / "pytorch_model.bin").write_bytes(b"x")
    error = refused(folder, "it holds no .safetensors file")
    assert error.hint is not None
    assert "convert .bin files" in error.hint


def test_a_folder_named_like_a_shard(folder: Path) -> None:
    (folder / "model.safetensors").mkdir()
    refused(folder, "it holds no .safetensors file")


class TestIndex:
    @pytest.fixture(autouse=True)
    def _shard(self, write_raw: WriteRaw) -> None:
        write_raw({"a": entry()}, bytes(8), "s1.safetensors")

    def write(self, folder: Path, weight_map: Any, file: str = INDEX) -> None:
        (folder / file).write_text(json.dumps({"weight_map": weight_map}))

    def test_names_a_missing_shard(self, folder: Path) -> None:
        self.write(folder, {"a": "s1.safetensors", "b": "s2.safetensors"})
        error = refused(folder, "the index names shard `s2.safetensors`, which is missing")
        assert error.hint == "download the missing shard"

    def test_places_a_tensor_in_a_shard_that_lacks_it(self, folder: Path) -> None:
        self.write(folder, {"a": "s1.safetensors", "b": "s1.safetensors"})
        refused(folder, "the index places `b` in `s1.safetensors`, which lacks it")

    def test_places_a_tensor_in_the_wrong_shard(self, folder: Path, write_raw: WriteRaw) -> None:
        write_raw({"b": entry()}, bytes(8), "s2.safetensors")
        self.write(folder, {"a": "s2.safetensors", "b": "s1.safetensors"})
        refused(folder, "the index places `a` in `s2.safetensors`, it is in `s1.safetensors`")

    def test_lacks_tensors_that_are_there(self, folder: Path, write_raw: WriteRaw) -> None:
        header = {"b": entry(span=(0, 8)), "c": entry(span=(8, 16)), "d": entry(span=(16, 24))}
        write_raw(header, bytes(24), "s2.safetensors")
        self.write(folder, {"a": "s1.safetensors", "b": "s2.safetensors"})
        refused(folder, "`c` is in `s2.safetensors` but not in the index (and 1 more)")

    def test_tensor_in_two_shards(self, folder: Path, write_raw: WriteRaw) -> None:
        write_raw({"a": entry()}, bytes(8), "s2.safetensors")
        refused(folder, "`a` is in both `s1.safetensors` and `s2.safetensors`")
        self.write(folder, {"a": "s1.safetensors", "b": "s2.safetensors"})
        refused(folder, "`a` is in both")

    def test_may_be_longer_than_a_config(self, folder: Path) -> None:
        self.write(folder, {"a": "s1.safetensors"})
        with (folder / INDEX).open("a") as file:
            file.write(" " * MAX_CONFIG_BYTES)
        assert open_checkpoint(folder).tensors.keys() == {"a"}

    @pytest.mark.parametrize(
        "file", ["../s1.safetensors", "/etc/passwd", "x/s1.safetensors", "./s1.safetensors", "."]
    )
    def test_points_outside(self, folder: Path, file: str) -> None:
        self.write(folder, {"a": file})
        refused(folder, INDEX, "`weight_map` must map tensor names to file names")

    @pytest.mark.parametrize("file", ["..", "", "a\0b", "x" * 5000, "config.json"])
    def test_names_nothing_that_could_be_a_shard(self, folder: Path, file: str) -> None:
        self.write(folder, {"a": file})
        refused(folder, "the index names shard", "which is missing")

    @pytest.mark.parametrize("weight_map", [None, [], "s1.safetensors", {"a": 1}, {"a": ["s1"]}])
    def test_is_not_a_map(self, folder: Path, weight_map: Any) -> None:
        self.write(folder, weight_map)
        refused(folder, "`weight_map` must map tensor names to file names")

    def test_is_not_json(self, folder: Path) -> None:
        (folder / INDEX).write_text("{")
        refused(folder, INDEX, "is not valid JSON")

    def test_several(self, folder: Path) -> None:
        for file in ("a.safetensors.index.json", "b.safetensors.index.json"):
            self.write(folder, {"a": "s1.safetensors"}, file)
        refused(folder, "holds several indexes: `a.safetensors.index.json`, `b.")


@pytest.mark.parametrize(
    "content",
    [b"", b"\x08", bytes(7), (9).to_bytes(8, "little") + bytes(8), b"\xff" * 64, b"PK" * 50],
    ids=["empty", "byte", "seven", "short", "huge", "zip"],
)
def test_no_complete_header(folder: Path, content: bytes) -> None:
    (folder / "model.safetensors").write_bytes(content)
    refused(
        folder, f"`model.safetensors` is not a safetensors file or is cut short: {len(content)}"
    )


def test_header_longer_than_any_library_reads(folder: Path) -> None:
    path = folder / "model.safetensors"
    path.write_bytes((100_000_001).to_bytes(8, "little"))
    with path.open("r+b") as file:
        file.truncate(100_000_100)  # sparse
    refused(folder, "hold no complete header")


@pytest.mark.parametrize("cut", [1, 8, 9, 20])
def test_cut_short(folder: Path, write_raw: WriteRaw, cut: int) -> None:
    path = write_raw({"a": entry((8, 2), (0, 32))}, bytes(32))
    size = path.stat().st_size
    path.write_bytes(path.read_bytes()[:-cut])
    error = refused(folder, f"is cut short: `a` ends at byte {size}, the file has {size - cut}")
    assert error.hint == "download or copy it again"


@pytest.mark.parametrize(
    ("header", "words"),
    [
        ("{", "not valid JSON"),
        ("", "not valid JSON"),
        ("[" * 100_000, "not valid JSON"),
        (b"\xff\xff", "not valid JSON"),
        ('{"a": 1}'.encode("utf-16"), "not valid JSON"),
        ('{"__metadata__": ' + "1" * 5000 + "}", "not valid JSON"),
        ('{"a": {}, "a": {}}', "not valid JSON: the key `a` stands twice"),
        ('{"a": {"dtype": "I8", "dtype": "U8"}}', "the key `dtype` stands twice"),
        ([], "the header is not a JSON object"),
        (None, "the header is not a JSON object"),
        ({"a": 3}, "`a`: the header entry is not an object"),
        ({"a": {}}, "`a`: dtype `None` is not known"),
        ({"a": entry(dtype="BF17")}, "`a`: dtype `BF17` is not known"),
        ({"a": entry(dtype="bf16")}, "`a`: dtype `bf16` is not known"),
        ({"a": entry(dtype=["BF16"])}, "`a`: dtype `['BF16']` is not known"),
        ({"a": entry(shape=4)}, "`a`: shape 4 is not a list of sizes"),
        ({"a": entry(shape=None)}, "`a`: shape None is not a list of sizes"),
        ({"a": entry(shape=[-2, -2])}, "`a`: shape [-2, -2] is not a list of sizes"),
        ({"a": entry(shape=[2.0, 2])}, "`a`: shape [2.0, 2] is not a list of sizes"),
        ({"a": entry(shape=["2", 2])}, "`a`: shape ['2', 2] is not a list of sizes"),
        ({"a": entry(shape=[True, 4])}, "`a`: shape [True, 4] is not a list of sizes"),
        ({"a": entry(shape=[1] * 1000)}, "is not a list of sizes"),
        ({"a": entry(shape=[10**4000, 10**4000])}, "is not a list of sizes"),
        ({"a": entry(shape=[2**63])}, "is not a list of sizes"),
        ({"a": entry(shape=[2**62, 2**62])}, "data_offsets give 8"),
        ({"a": entry(span=None)}, "`a`: data_offsets None is not a pair of offsets"),
        ({"a": entry(span=[0])}, "`a`: data_offsets [0] is not a pair"),
        ({"a": entry(span=[0, 8, 16])}, "is not a pair of offsets"),
        ({"a": entry(span=[-8, 0])}, "`a`: data_offsets [-8, 0] is not a pair"),
        ({"a": entry(span=[False, 8])}, "`a`: data_offsets [False, 8] is not a pair"),
        ({"a": entry(span=[8, 0])}, "needs 8 bytes, data_offsets give -8"),
        ({"a": entry(shape=[3])}, "`a`: BF16 [3] needs 6 bytes, data_offsets give 8"),
        ({"a": entry(span=[2**62, 2**62 + 8])}, "cut short: `a` ends at byte"),
        ({"a": entry(), "b": entry()}, "`b` starts at byte"),
        ({"a": entry(), "b": entry(span=[4, 12])}, "`b` starts at byte"),
        ({"a": entry(span=[1, 9])}, "`a` starts at byte"),
        ({"a": entry(), "b": entry(span=[9, 17])}, "`b` starts at byte"),
        ({"a": entry()}, "has 16 bytes that no tensor names"),
        ({}, "has 24 bytes that no tensor names"),
    ],
    ids=lambda value: value[:40] if isinstance(value, str) else None,
)
def test_malformed_header(folder: Path, write_raw: WriteRaw, header: Any, words: str) -> None:
    write_raw(header, bytes(24))
    refused(folder, "`model.safetensors`", words)


def test_tensors_of_no_bytes_may_share_an_offset(folder: Path, write_raw: WriteRaw) -> None:
    header = {"a": entry([0, 7], [8, 8]), "b": entry(), "c": entry([0], [8, 8])}
    write_raw(header, bytes(8))
    assert open_checkpoint(folder).tensors["a"].nbytes == 0


def valid_file() -> bytes:
    tensors = {"x.weight": torch.arange(6.0).view(2, 3), "y": torch.ones(3, dtype=torch.bfloat16)}
    return safetensors.torch.save(tensors, metadata={"format": "pt"})


@given(data=st.data())
def test_mutated_files_are_read_alike_or_refused(
    tmp_path_factory: pytest.TempPathFactory, data: st.DataObject
) -> None:
    content = bytearray(valid_file())
    end = 8 + int.from_bytes(content[:8], "little")
    for _ in range(data.draw(st.integers(1, 3))):
        place = data.draw(st.integers(0, end - 1))
        byte = data.draw(
            st.sampled_from(b'0123456789-.,:[]{}"eE\\u \x00\xff') | st.integers(0, 255)
        )
        content[place] = byte
    content = content[: data.draw(st.just(len(content)) | st.integers(0, len(content)))]
    path = tmp_path_factory.getbasetemp() / "mutated.safetensors"
    path.write_bytes(content)
    try:
        tensors = read_header(path)
    except CheckpointError:
        return
    theirs = dict(safetensors.deserialize(bytes(content)))  # type: ignore[no-untyped-call]
    assert {name: list(info.shape) for name, info in tensors.items()} == {
        name: info["shape"] for name, info in theirs.items()
    }
    for name, info in tensors.items():
        assert content[info.offset : info.offset + info.nbytes] == theirs[name]["data"]


JSON = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**70), 2**70) | st.floats() | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=3), inner),
    max_leaves=5,
)


@given(
    header=JSON
    | st.dictionaries(
        st.sampled_from(["a", "__metadata__"]),
        st.fixed_dictionaries(
            {
                "dtype": st.sampled_from(["BF16", "F32"]) | JSON,
                "shape": st.lists(st.integers(0, 4), max_size=3) | JSON,
                "data_offsets": st.lists(st.integers(0, 64), min_size=2, max_size=2) | JSON,
            }
        ),
    ),
    size=st.integers(0, 400),
)
def test_any_json_is_read_or_refused(header: Any, size: int) -> None:
    with contextlib.suppress(CheckpointError):
        parse_header(json.dumps(header).encode(), "f.safetensors", size)
