"""The file of frequent rows beside its record in lowbit.json."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file

from lowbit.formats.errors import FormatError
from lowbit.formats.frequent_rows import (
    FREQUENT_FILE,
    frequent_rows_bytes,
    frequent_rows_size,
    open_frequent_rows,
)
from lowbit.formats.head_rows import PackedRows
from lowbit.formats.layout.manifest import CountedRows, Manifest, Source
from lowbit.formats.layout.packing import pack
from lowbit.formats.layout.rtn import quantize
from lowbit.formats.layout.scheme import Scheme

HASH = "0" * 64
CONFIG: dict[str, Any] = {
    "model_type": "qwen3",
    "vocab_size": 300,
    "hidden_size": 96,
    "intermediate_size": 128,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 32,
    "max_position_embeddings": 64,
    "rms_norm_eps": 1e-6,
    "rope_theta": 10000,
    "tie_word_embeddings": False,
}
RECORD = CountedRows(5, 32, "a.txt", HASH, 5000, 0.97, 0.95)
METADATA = {"format": "pt", "lowbit_frequent_rows": "1"}


def manifest(record: CountedRows | None = RECORD) -> Manifest:
    source = Source(None, None, HASH, HASH)
    return Manifest("0", source, {}, (), (), (), frequent_rows=record)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    w = torch.randn(5, 96, generator=torch.Generator().manual_seed(1))
    codes, scale = quantize(w, Scheme(8, 32))
    ids = torch.tensor([0, 3, 17, 200, 299], dtype=torch.int32)
    content = frequent_rows_bytes(PackedRows(ids, pack(codes, 8), scale, Scheme(8, 32)))
    assert len(content) == frequent_rows_size(5, 96, Scheme(8, 32))
    (tmp_path / FREQUENT_FILE).parent.mkdir()
    (tmp_path / FREQUENT_FILE).write_bytes(content)
    return tmp_path


@pytest.mark.parametrize("beside", [manifest(), None], ids=["lowbit.json", "alone"])
def test_the_library_reads_the_same(folder: Path, beside: Manifest | None) -> None:
    found = open_frequent_rows(folder, CONFIG, beside)
    assert found is not None
    with safe_open(folder / FREQUENT_FILE, "pt") as file:
        assert file.metadata() == METADATA
        assert torch.equal(found.ids, file.get_tensor("ids"))
        assert torch.equal(found.packed, file.get_tensor("weight_packed"))
        assert torch.equal(found.scale, file.get_tensor("weight_scale"))
    assert found.scheme == Scheme(8, 32)


def test_a_folder_without_them(tmp_path: Path) -> None:
    assert open_frequent_rows(tmp_path, CONFIG, None) is None
    assert open_frequent_rows(tmp_path, CONFIG, manifest(None)) is None


@pytest.mark.parametrize(
    ("record", "words"),
    [
        (None, "has 5 rows in INT8 g32, lowbit.json says that it is missing"),
        (replace(RECORD, rows=6), "has 5 rows in INT8 g32, .* it has 6 rows in INT8 g32"),
        (replace(RECORD, group_size=None), "has 5 rows in INT8 g32, .* it has 5 rows in INT8"),
    ],
)
def test_other_rows_than_lowbit_json_states(
    folder: Path, record: CountedRows | None, words: str
) -> None:
    with pytest.raises(FormatError, match=f"`frequent/head.safetensors` {words}"):
        open_frequent_rows(folder, CONFIG, manifest(record))


def test_a_missing_file(tmp_path: Path) -> None:
    with pytest.raises(FormatError, match=r"is missing, lowbit\.json says that it has 5 rows"):
        open_frequent_rows(tmp_path, CONFIG, manifest())


def test_a_head_that_is_the_embedding(folder: Path) -> None:
    with pytest.raises(FormatError, match="the model's is its embedding"):
        open_frequent_rows(folder, {**CONFIG, "tie_word_embeddings": True}, manifest())


@pytest.mark.parametrize(
    ("ids", "words"),
    [
        ([0, 3, 17, 200, 300], "`ids` holds 300, expected 0 to 299"),
        ([0, 17, 3, 200, 299], "`ids` does not ascend: 3 follows 17"),
    ],
)
def test_ids_that_are_refused(folder: Path, ids: list[int], words: str) -> None:
    tensors = load_file(folder / FREQUENT_FILE)
    tensors["ids"] = torch.tensor(ids, dtype=torch.int32)
    save_file(tensors, folder / FREQUENT_FILE, METADATA)
    with pytest.raises(FormatError, match=f"`frequent/head.safetensors`: {words}"):
        open_frequent_rows(folder, CONFIG, manifest())


def test_a_draft_head_is_no_file_of_frequent_rows(folder: Path) -> None:
    metadata = {"format": "pt", "lowbit_draft_head": "1"}
    save_file(load_file(folder / FREQUENT_FILE), folder / FREQUENT_FILE, metadata)
    with pytest.raises(FormatError, match="`lowbit_frequent_rows` of its metadata is None"):
        open_frequent_rows(folder, CONFIG, manifest())
