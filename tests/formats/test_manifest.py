"""lowbit.json: the round trip, its literal bytes, and every malformed field refused by name."""

import dataclasses
import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lowbit.formats.errors import FormatError
from lowbit.formats.layout.manifest import (
    FORMAT_VERSION,
    MANIFEST_FILE,
    Calibration,
    CountedRows,
    Manifest,
    OutputFile,
    OutputTensor,
    Source,
    SourceTensor,
    is_rotated,
    json_bytes,
    read_manifest,
    weights_digest,
)

HASH = "ab" * 32


def manifest() -> Manifest:
    return Manifest(
        lowbit_version="0.1.0",
        source=Source("Qwen/Qwen3-0.6B", None, HASH, HASH),
        recipe={"name": "int4", "overrides": [["*.o_proj", 8]], "group_size": 128},
        source_tensors=(
            SourceTensor("lm_head.weight", "BF16", (8, 128), "quantized", "", HASH, 8, 128),
            SourceTensor("norm.weight", "BF16", (128,), "copied", "norm", HASH),
            SourceTensor("rotary", "F32", (), "dropped", "recomputed", HASH),
        ),
        tensors=(
            OutputTensor("lm_head.weight_packed", "I32", (8, 32), "model.safetensors", HASH),
            OutputTensor(
                "lm_head.weight_scale", "BF16", (8, 1), "model.safetensors", HASH, -0.5, 0.25
            ),
        ),
        files=(OutputFile("model.safetensors", 4096, HASH), OutputFile("a/b.txt", 0, HASH)),
    )


def content() -> dict[str, Any]:
    loaded: dict[str, Any] = json.loads(manifest().to_bytes())
    return loaded


def refused(folder: Path, changed: Any, *words: str) -> None:
    (folder / MANIFEST_FILE).write_text(json.dumps(changed))
    with pytest.raises(FormatError) as error:
        read_manifest(folder)
    for word in (MANIFEST_FILE, *words):
        assert word in str(error.value)


def test_round_trip(tmp_path: Path) -> None:
    (tmp_path / MANIFEST_FILE).write_bytes(manifest().to_bytes())
    read = read_manifest(tmp_path)
    assert read == manifest()
    assert read.to_bytes() == manifest().to_bytes()


def test_content() -> None:
    written = content()
    assert written["format_version"] == FORMAT_VERSION == 1
    assert list(written) == [
        "format_version",
        "lowbit_version",
        "source",
        "recipe",
        "source_tensors",
        "tensors",
        "files",
        "calibration",
        "draft_head",
        "mtp_training",
    ]
    assert [written[key] for key in ("calibration", "draft_head", "mtp_training")] == [None] * 3
    assert written["source_tensors"][0] == {
        "name": "lm_head.weight",
        "dtype": "BF16",
        "shape": [8, 128],
        "fate": "quantized",
        "reason": "",
        "sha256": HASH,
        "bits": 8,
        "group_size": 128,
    }
    assert manifest().to_bytes().endswith(b"\n}\n")


@pytest.mark.parametrize(
    ("method", "rotated"),
    [("gptq+rotate", True), ("gptq+rotate+autoround", True), ("gptq", False), (None, False)],
)
def test_a_method_that_rotates_is_known(method: str | None, rotated: bool) -> None:
    assert is_rotated(replace(manifest(), recipe={"method": method})) == rotated
    assert not is_rotated(None)


def test_folder_without_manifest(tmp_path: Path) -> None:
    assert read_manifest(tmp_path) is None


@pytest.mark.parametrize("raw", [b"", b"\xff", b"[" * 100_000, b"[]"])
def test_not_a_json_object(tmp_path: Path, raw: bytes) -> None:
    (tmp_path / MANIFEST_FILE).write_bytes(raw)
    with pytest.raises(FormatError, match=MANIFEST_FILE):
        read_manifest(tmp_path)


@pytest.mark.parametrize("version", [0, 2, "1", None, True, 1.0, [1]])
def test_foreign_version(tmp_path: Path, version: Any) -> None:
    refused(
        tmp_path,
        {**content(), "format_version": version},
        f"format version {version}, this release reads 1",
    )


def test_version_comes_before_everything_else(tmp_path: Path) -> None:
    refused(tmp_path, {"format_version": 7, "new": "layout"}, "format version 7")
    refused(tmp_path, {"lowbit_version": "0.1.0"}, "format version None")


@pytest.mark.parametrize(
    ("name", "made", "part"),
    [
        ("draft_head", CountedRows(1000, 128, "a.txt", HASH, 5000, 0.97, 0.95), "tokens"),
        (
            "calibration",
            Calibration("stories.txt", HASH, 256, 512, False, "cpu", 2, "2.13.0", "5.23.0"),
            "threads",
        ),
    ],
)
def test_records_that_a_file_may_have(tmp_path: Path, name: str, made: Any, part: str) -> None:
    with_record = replace(manifest(), **{name: made})
    (tmp_path / MANIFEST_FILE).write_bytes(with_record.to_bytes())
    assert read_manifest(tmp_path) == with_record
    changed = json.loads(with_record.to_bytes())
    del changed[name][part]
    refused(tmp_path, changed, name, part)
    without = content()
    del without[name]
    refused(tmp_path, without, f"missing keys ['{name}']")


def test_frequent_rows_have_a_key_where_there_are_some(tmp_path: Path) -> None:
    assert "frequent_rows" not in content()
    made = CountedRows(4096, 128, "a.txt", HASH, 5000, 0.97, 0.95)
    with_rows = replace(manifest(), frequent_rows=made)
    (tmp_path / MANIFEST_FILE).write_bytes(with_rows.to_bytes())
    assert read_manifest(tmp_path) == with_rows
    changed = json.loads(with_rows.to_bytes())
    del changed["frequent_rows"]["rows"]
    refused(tmp_path, changed, "frequent_rows", "rows")


PARTS: list[Callable[[dict[str, Any]], dict[str, Any]]] = [
    lambda whole: whole,
    lambda whole: whole["source"],
    lambda whole: whole["source_tensors"][1],
    lambda whole: whole["tensors"][0],
    lambda whole: whole["files"][0],
]


@pytest.mark.parametrize("part", PARTS)
def test_every_key_is_required_and_no_other_is_known(
    tmp_path: Path, part: Callable[[dict[str, Any]], dict[str, Any]]
) -> None:
    for key in part(content()).keys() - {
        *("format_version", "calibration", "draft_head", "mtp_training")
    }:
        changed = content()
        del part(changed)[key]
        refused(tmp_path, changed, key)
    changed = content()
    part(changed)["colour"] = "red"
    refused(tmp_path, changed, "unknown keys ['colour']")


@pytest.mark.parametrize(
    ("part", "key", "value"),
    [
        (0, "lowbit_version", None),
        (0, "recipe", "int4"),
        (0, "files", ["model.safetensors"]),
        (1, "repo", 1),
        (2, "shape", [1.0]),
        (2, "shape", {"0": 128}),
        (2, "fate", "eaten"),
        (2, "bits", True),
        (3, "scale_min", "0"),
        (4, "size_bytes", 4096.0),
    ],
)
def test_wrong_types(tmp_path: Path, part: int, key: str, value: Any) -> None:
    changed = content()
    PARTS[part](changed)[key] = value
    refused(tmp_path, changed, key)


@pytest.mark.parametrize("name", ["../model.safetensors", "a/../../b", "/etc/passwd", "", "."])
def test_files_outside_the_folder(tmp_path: Path, name: str) -> None:
    for part, key in ((4, "name"), (3, "file")):
        changed = content()
        PARTS[part](changed)[key] = name
        refused(tmp_path, changed, f"file `{name}` is not inside the folder")


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=3),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=2), inner),
    max_leaves=4,
)


@given(data=st.data())
def test_any_value_anywhere_is_read_or_refused(
    tmp_path_factory: pytest.TempPathFactory, data: st.DataObject
) -> None:
    changed = content()
    place = data.draw(st.sampled_from(PARTS))(changed)
    place[data.draw(st.sampled_from(sorted(place)))] = data.draw(JSON)
    folder = tmp_path_factory.getbasetemp()
    (folder / MANIFEST_FILE).write_text(json.dumps(changed))
    try:
        read = read_manifest(folder)
    except FormatError:
        return
    assert read is not None
    assert json.loads(read.to_bytes()).keys() == changed.keys()


def test_weights_digest_depends_on_everything_but_order() -> None:
    rows = manifest().source_tensors
    digest = weights_digest(rows)
    assert digest == weights_digest(reversed(rows))
    assert len(digest) == 64
    changes: list[dict[str, Any]] = [
        {"name": "x"},
        {"dtype": "F16"},
        {"shape": (128, 8)},
        {"sha256": "cd" * 32},
    ]
    for change in changes:
        assert weights_digest([dataclasses.replace(rows[0], **change), *rows[1:]]) != digest
    # What became of a tensor is no part of what it was.
    assert weights_digest([dataclasses.replace(rows[0], fate="copied"), *rows[1:]]) == digest
    assert weights_digest(rows[1:]) != digest


def test_json_bytes() -> None:
    assert json_bytes({"b": "ä", "a": [1]}) == '{\n  "b": "ä",\n  "a": [\n    1\n  ]\n}\n'.encode()
