"""Rows of a head in a file of their own, in the widths that a kind of file may have."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from compressed_tensors.compressors.pack_quantized.helpers import unpack_from_int32
from safetensors import safe_open

from lowbit.formats.errors import FormatError
from lowbit.formats.head_rows import (
    PackedRows,
    RowsFile,
    head_rows_bytes,
    head_rows_size,
    open_head_rows,
)
from lowbit.formats.layout.packing import pack
from lowbit.formats.layout.rtn import quantize
from lowbit.formats.layout.scheme import Scheme

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
IDS = torch.tensor([0, 3, 4, 17, 80, 200, 299], dtype=torch.int32)


def kind(bits: int) -> RowsFile:
    return RowsFile("some/rows.safetensors", bits, "lowbit_some_rows", "3", "remove the folder")


def write(folder: Path, bits: int, group_size: int | None) -> torch.Tensor:
    """Random rows in the folder's file; the values [7, 96] that their codes stand for."""
    w = torch.randn(len(IDS), 96, generator=torch.Generator().manual_seed(bits))
    scheme = Scheme(bits, group_size)
    codes, scale = quantize(w, scheme)
    content = head_rows_bytes(kind(bits), PackedRows(IDS, pack(codes, bits), scale, scheme))
    assert head_rows_size(kind(bits), len(IDS), 96, scheme) == len(content)
    path = folder / kind(bits).name
    path.parent.mkdir()
    path.write_bytes(content)
    per_weight = scale.double().repeat_interleave(96 // scale.shape[1], 1)
    return codes.double() * per_weight


@pytest.mark.parametrize("bits", [4, 8])
@pytest.mark.parametrize("group_size", [32, None])
def test_other_libraries_read_the_rows(tmp_path: Path, bits: int, group_size: int | None) -> None:
    w = write(tmp_path, bits, group_size)
    with safe_open(tmp_path / kind(bits).name, "pt") as file:
        assert file.metadata() == {"format": "pt", "lowbit_some_rows": "3"}
        ids, packed, scale = map(file.get_tensor, ("ids", "weight_packed", "weight_scale"))
    codes = unpack_from_int32(packed, bits, torch.Size((len(IDS), 96)))
    assert torch.equal(ids, IDS)
    assert torch.equal(
        codes.double() * scale.double().repeat_interleave(96 // scale.shape[1], 1), w
    )
    found = open_head_rows(kind(bits), tmp_path, CONFIG)
    assert found is not None
    assert found.scheme == Scheme(bits, group_size)
    assert torch.equal(found.ids, ids)
    assert torch.equal(found.packed, packed)
    assert torch.equal(found.scale, scale)


def test_rows_of_other_bits_are_refused(tmp_path: Path) -> None:
    write(tmp_path, 8, 32)
    with pytest.raises(FormatError, match=r"is \[7, 24\], expected \[7, 12\] for 7 ids") as refused:
        open_head_rows(kind(4), tmp_path, CONFIG)
    assert refused.value.hint == "remove the folder"


@pytest.mark.parametrize(
    "other",
    [replace(kind(8), version="4"), replace(kind(8), version_key="lowbit_other_rows")],
    ids=["version", "key"],
)
def test_another_kind_of_file_is_refused(tmp_path: Path, other: RowsFile) -> None:
    write(tmp_path, 8, 32)
    with pytest.raises(FormatError, match=r"`some/rows.safetensors`: `.*` of its metadata is"):
        open_head_rows(other, tmp_path, CONFIG)


def test_a_folder_without_the_file(tmp_path: Path) -> None:
    assert open_head_rows(kind(8), tmp_path, CONFIG) is None
