"""The file of the draft head: its bytes, and what its reader refuses."""

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from torch import Tensor

from lowbit.formats.draft_head import (
    DRAFT_FILE,
    draft_head_bytes,
    open_draft_head,
)
from lowbit.formats.errors import FormatError
from lowbit.formats.head_rows import PackedRows
from lowbit.formats.layout.packing import dequantize, pack, unpack
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
ROWS = 7
METADATA = {"format": "pt", "lowbit_draft_head": "1"}


def made(group_size: int | None = 32) -> tuple[PackedRows, Tensor]:
    w = torch.randn(ROWS, 96, generator=torch.Generator().manual_seed(1))
    scheme = Scheme(4, group_size)
    codes, scale = quantize(w, scheme)
    ids = torch.tensor([0, 3, 4, 17, 80, 200, 299], dtype=torch.int32)
    return PackedRows(ids, pack(codes, 4), scale, scheme), dequantize(codes, scale)


def write(folder: Path, content: bytes) -> None:
    path = folder / DRAFT_FILE
    path.parent.mkdir(exist_ok=True)
    path.write_bytes(content)


@pytest.mark.parametrize("group_size", [32, None])
def test_the_library_reads_what_was_written(tmp_path: Path, group_size: int | None) -> None:
    head, w = made(group_size)
    content = draft_head_bytes(head)
    assert content == draft_head_bytes(head)
    write(tmp_path, content)
    with safe_open(tmp_path / DRAFT_FILE, "pt") as file:
        assert file.metadata() == METADATA
        assert set(file.keys()) == {"ids", "weight_packed", "weight_scale"}
        assert torch.equal(file.get_tensor("ids"), head.ids)
    found = open_draft_head(tmp_path, CONFIG)
    assert found is not None
    assert found.scheme == Scheme(4, group_size)
    assert torch.equal(found.ids, head.ids)
    assert torch.equal(dequantize(unpack(found.packed, 4, 96), found.scale), w)


def test_none_at_all(tmp_path: Path) -> None:
    assert open_draft_head(tmp_path, CONFIG) is None
    (tmp_path / "draft").mkdir()
    assert open_draft_head(tmp_path, CONFIG) is None


Change = Callable[[dict[str, Tensor]], Any]


def ids(*values: int) -> Change:
    return lambda t: t.update(ids=torch.tensor(values, dtype=torch.int32))


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (ids(0, 3, 4, 17, 80, 200, 300), "`ids` holds 300, expected 0 to 299"),
        (ids(-1, 3, 4, 17, 80, 200, 299), "`ids` holds -1, expected 0 to 299"),
        (ids(0, 3, 17, 4, 80, 200, 299), "`ids` does not ascend: 4 follows 17"),
        (ids(0, 3, 3, 17, 80, 200, 299), "`ids` does not ascend: 3 follows 3"),
        (ids(0, 3), r"`weight_packed` is \[7, 12\], expected \[2, 12\] for 2 ids"),
        (lambda t: t.update(ids=t["ids"].long()), r"`ids` is I64 \[7\], expected int32"),
        (lambda t: t.update(ids=t["ids"][None]), r"`ids` is I32 \[1, 7\]"),
        (lambda t: t.pop("ids"), "`ids` is missing"),
        (lambda t: t.pop("weight_scale"), "`weight_scale` is missing"),
        (lambda t: t.update(weight=torch.zeros(2)), "`weight` is not known"),
        (
            lambda t: t.update(weight_packed=torch.zeros(7, 16, dtype=torch.int32)),
            r"`weight_packed` is \[7, 16\], expected \[7, 12\] for 7 ids and a hidden size of 96",
        ),
        (lambda t: t.update(weight_scale=t["weight_scale"].float()), "`weight_scale` is F32"),
        (
            lambda t: t.update(weight_scale=torch.ones(7, 5, dtype=torch.bfloat16)),
            r"`weight_scale` is \[7, 5\], expected 7 rows of groups that divide 96",
        ),
        (lambda t: t.update(weight_scale=t["weight_scale"][:3]), r"is \[3, 3\], expected 7 rows"),
        (lambda t: t.update(weight_scale=t["weight_scale"] * torch.inf), "not finite"),
        (lambda t: t.update({n: x[:0].clone() for n, x in t.items()}), "it has no rows"),
    ],
)
def test_tensors_that_are_refused(tmp_path: Path, change: Change, words: str) -> None:
    write(tmp_path, draft_head_bytes(made()[0]))
    tensors = load_file(tmp_path / DRAFT_FILE)
    change(tensors)
    save_file({n: x.contiguous() for n, x in tensors.items()}, tmp_path / DRAFT_FILE, METADATA)
    with pytest.raises(FormatError, match=f"`draft/head.safetensors`: .*{words}"):
        open_draft_head(tmp_path, CONFIG)


@pytest.mark.parametrize("metadata", [None, {"format": "pt"}, {"lowbit_draft_head": "2"}])
def test_another_version(tmp_path: Path, metadata: dict[str, str] | None) -> None:
    write(tmp_path, draft_head_bytes(made()[0]))
    save_file(load_file(tmp_path / DRAFT_FILE), tmp_path / DRAFT_FILE, metadata)
    with pytest.raises(FormatError, match=r"`lowbit_draft_head` of its metadata is .*expected '1'"):
        open_draft_head(tmp_path, CONFIG)


def test_another_model(tmp_path: Path) -> None:
    write(tmp_path, draft_head_bytes(made()[0]))
    with pytest.raises(FormatError, match=r"expected \[7, 16\] for 7 ids and a hidden size of 128"):
        open_draft_head(tmp_path, {**CONFIG, "hidden_size": 128})
    with pytest.raises(FormatError, match="`ids` holds 299, expected 0 to 298"):
        open_draft_head(tmp_path, {**CONFIG, "vocab_size": 299})


@pytest.mark.parametrize("length", [0, 5, 40, 200, -1])
def test_damaged_files(tmp_path: Path, length: int) -> None:
    write(tmp_path, draft_head_bytes(made()[0])[:length])
    with pytest.raises(FormatError, match=r"draft/head\.safetensors"):
        open_draft_head(tmp_path, CONFIG)


def test_header_that_is_no_object(tmp_path: Path) -> None:
    raw = json.dumps([1]).encode()
    write(tmp_path, len(raw).to_bytes(8, "little") + raw)
    with pytest.raises(FormatError, match="`lowbit_draft_head` of its metadata is None"):
        open_draft_head(tmp_path, CONFIG)


@pytest.mark.parametrize("what", ["file", "folder", "pipe", "directory", "dangling"])
def test_links_and_pipes(tmp_path: Path, what: str) -> None:
    import os

    folder, outside = tmp_path / "model", tmp_path / "outside"
    folder.mkdir()
    outside.mkdir()
    (outside / "head.safetensors").write_bytes(draft_head_bytes(made()[0]))
    if what == "folder":
        (folder / "draft").symlink_to(outside)
    else:
        (folder / "draft").mkdir()
        path = folder / DRAFT_FILE
        if what == "file":
            path.symlink_to(outside / "head.safetensors")
        elif what == "dangling":
            path.symlink_to(folder / "missing")
        elif what == "pipe":
            os.mkfifo(path)
        else:
            path.mkdir()
    with pytest.raises(FormatError, match=r"draft/head\.safetensors"):
        open_draft_head(folder, CONFIG)


def test_a_head_in_the_cache_of_the_hub(tmp_path: Path) -> None:
    blobs = tmp_path / "models--a--b" / "blobs"
    folder = tmp_path / "models--a--b" / "snapshots" / "abc"
    blobs.mkdir(parents=True)
    (folder / "draft").mkdir(parents=True)
    (blobs / ("0" * 64)).write_bytes(draft_head_bytes(made()[0]))
    (folder / DRAFT_FILE).symlink_to(Path("../../../blobs") / ("0" * 64))
    assert open_draft_head(folder, CONFIG) is not None


def test_rows_of_another_order_are_another_file() -> None:
    head, _ = made()
    assert draft_head_bytes(replace(head, ids=head.ids + 0)) == draft_head_bytes(head)
    assert draft_head_bytes(replace(head, ids=head.ids.flip(0))) != draft_head_bytes(head)
