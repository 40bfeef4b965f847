"""Shards written by their layout, read by the safetensors library."""

import json
from pathlib import Path

import pytest
import safetensors
import safetensors.torch
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from lowbit.formats.errors import FormatError
from lowbit.formats.layout.packing import PACKED, SCALE, SHAPE, pack
from lowbit.formats.layout.rtn import quantize
from lowbit.formats.layout.scheme import Scheme
from lowbit.formats.safetensors.checkpoint import DTYPES, open_checkpoint
from lowbit.formats.safetensors.header import METADATA_KEY, parse_header
from lowbit.formats.safetensors.shards import ALIGNMENT, Shard, index_json, lay_out

GOLDEN = Path(__file__).parents[1] / "golden/tiny-int4.hex"
Spec = tuple[str, torch.dtype, tuple[int, ...]]


def raw_bytes(tensor: Tensor) -> bytes:
    return bytes(tensor.contiguous().view(-1).view(torch.uint8).tolist())


def file_bytes(shard: Shard, tensors: dict[str, Tensor]) -> bytes:
    """A file as the converter writes it: the header, then every tensor at its offset."""
    content = bytearray(shard.size)
    content[: len(shard.header)] = shard.header
    for info in shard.tensors:
        content[info.offset : info.offset + info.nbytes] = raw_bytes(tensors[info.name])
    return bytes(content)


def specs(tensors: dict[str, Tensor]) -> list[Spec]:
    return [(name, tensor.dtype, tuple(tensor.shape)) for name, tensor in tensors.items()]


def some_tensors() -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(0)
    tensors: dict[str, Tensor] = {}
    for i in range(6):
        module = f"model.layers.{i}.mlp.up_proj"
        tensors[f"{module}.norm"] = torch.randn(5, generator=generator).bfloat16()
        codes = torch.randint(-128, 128, (3, 7), dtype=torch.int8, generator=generator)
        tensors[f"{module}.{PACKED}"] = pack(codes, 8)
        tensors[f"{module}.{SHAPE}"] = torch.tensor([3, 7])
        tensors[f"{module}.odd"] = codes
    return tensors


def test_single_file_loads(tmp_path: Path) -> None:
    tensors = some_tensors()
    (shard,) = lay_out(specs(tensors), 10**9)
    assert shard.file == "model.safetensors"
    path = tmp_path / shard.file
    path.write_bytes(file_bytes(shard, tensors))
    loaded = safetensors.torch.load_file(path)
    assert loaded.keys() == tensors.keys()
    assert all(torch.equal(loaded[name], tensors[name]) for name in tensors)
    with safetensors.safe_open(path, "pt") as file:
        assert file.metadata() == {"format": "pt"}


@pytest.mark.parametrize("limit", [400, 700, 1500])
def test_shards_and_index_load(tmp_path: Path, limit: int) -> None:
    tensors = some_tensors()
    shards = lay_out(specs(tensors), limit)
    assert len(shards) > 1
    for i, shard in enumerate(shards, 1):
        assert shard.file == f"model-{i:05d}-of-{len(shards):05d}.safetensors"
        (tmp_path / shard.file).write_bytes(file_bytes(shard, tensors))
    (tmp_path / "config.json").write_text("{}")
    index = index_json(shards)
    assert index["metadata"] == {"total_size": sum(tensor.nbytes for tensor in tensors.values())}
    assert list(index["weight_map"]) == sorted(tensors)
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps(index))
    for name, file in index["weight_map"].items():
        with safetensors.safe_open(tmp_path / file, "pt") as opened:
            assert torch.equal(opened.get_tensor(name), tensors[name])
    checkpoint = open_checkpoint(tmp_path)
    assert all(torch.equal(checkpoint.read(name), tensors[name]) for name in tensors)


SPECS = st.lists(
    st.tuples(
        st.text(st.characters(exclude_categories=["Cs"]), min_size=1, max_size=12).filter(
            lambda name: name != METADATA_KEY
        ),
        st.sampled_from(sorted(DTYPES.values(), key=str)),
        st.lists(st.integers(0, 9), max_size=8).map(tuple),
    ),
    min_size=1,
    max_size=12,
    unique_by=lambda spec: spec[0],
)


@given(tensors=SPECS, limit=st.integers(1, 5000))
def test_layout_is_sound(tensors: list[Spec], limit: int) -> None:
    shards = lay_out(tensors, limit)
    assert lay_out(tensors, limit) == shards
    assert sorted(info.name for shard in shards for info in shard.tensors) == sorted(
        name for name, _, _ in tensors
    )
    for shard in shards:
        assert shard.size <= limit or len(shard.tensors) == 1
        assert len(shard.header) % ALIGNMENT == 0
        parsed = parse_header(shard.header[8:], shard.file, shard.size)
        assert parsed == {info.name: info for info in shard.tensors}
        assert all(info.offset % info.dtype.itemsize == 0 for info in shard.tensors)


def test_a_tensor_cannot_take_the_place_of_metadata() -> None:
    with pytest.raises(FormatError, match="`__metadata__`"):
        lay_out([("a", torch.int8, (1,)), ("__metadata__", torch.int8, (1,))], 1000)


def test_shards_are_filled_in_order() -> None:
    tensors: list[Spec] = [(f"t{i}", torch.int8, (1000,)) for i in range(10)]
    shards = lay_out(tensors, 3700)
    assert [[info.name for info in shard.tensors] for shard in shards] == [
        ["t0", "t1", "t2"],
        ["t3", "t4", "t5"],
        ["t6", "t7", "t8"],
        ["t9"],
    ]


def test_tensor_above_the_limit_stands_alone() -> None:
    tensors: list[Spec] = [
        ("small", torch.int8, (10,)),
        ("large", torch.int32, (4096, 1000)),
        ("last", torch.int8, (10,)),
    ]
    assert [[info.name for info in shard.tensors] for shard in lay_out(tensors, 10_000)] == [
        ["small"],
        ["large"],
        ["last"],
    ]


def test_wide_dtypes_come_first() -> None:
    tensors: list[Spec] = [
        ("a", torch.int8, (3,)),
        ("b", torch.bfloat16, (3,)),
        ("c", torch.int64, (2,)),
        ("d", torch.int32, (5,)),
        ("e", torch.int8, (3,)),
    ]
    (shard,) = lay_out(tensors, 10_000)
    assert [info.name for info in shard.tensors] == ["c", "d", "b", "a", "e"]


def golden_file() -> bytes:
    """Two rows of 64 weights whose codes can be checked by hand, packed as INT4 g32."""
    w = torch.arange(-64.0, 64.0).view(2, 64) / 8
    codes, scale = quantize(w, Scheme(4, 32))
    tensors = {
        f"lm_head.{PACKED}": pack(codes, 4),
        f"lm_head.{SCALE}": scale,
        f"lm_head.{SHAPE}": torch.tensor([2, 64]),
    }
    (shard,) = lay_out(specs(tensors), 10**9)
    return file_bytes(shard, tensors)


def test_golden_file() -> None:
    """A changed byte here is a new version of the format, or a new quantizer."""
    assert golden_file() == bytes.fromhex(GOLDEN.read_text())
