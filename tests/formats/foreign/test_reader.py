"""GPTQ, AWQ and AutoRound folders: native tensors have exactly the weights of the files."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from lowbit.formats.foreign.reader import open_native
from lowbit.formats.layout.quantization_config import read_quantization_config
from lowbit.formats.layout.scheme import Scheme
from lowbit.formats.safetensors.checkpoint import Checkpoint
from tests.foreign_layouts import Quantized, awq, draw, gptq

WriteFolder = Callable[[dict[str, Tensor], dict[str, Any]], Path]
WeightOf = Callable[[Checkpoint, str, slice], Tensor]
P = "model.layers.0.mlp.up_proj"
DTYPES = [torch.float16, torch.bfloat16, torch.float32]


def gptq_section(q: Quantized, **keys: Any) -> dict[str, Any]:
    """The section as GPTQModel and transformers write it."""
    K, groups = q.codes.shape[1], q.zeros.shape[1]
    return {
        "quant_method": "gptq",
        "bits": q.bits,
        "group_size": -1 if groups == 1 else K // groups,
        "desc_act": False,
        "sym": True,
        "lm_head": False,
        "checkpoint_format": "gptq",
        "pack_dtype": "int32",
        "meta": {"quantizer": ["gptqmodel:7.7.0"], "damp_percent": 0.05},
        **keys,
    }


def awq_section(q: Quantized, **keys: Any) -> dict[str, Any]:
    """The section as AutoAWQ writes it."""
    K, groups = q.codes.shape[1], q.zeros.shape[1]
    return {
        "quant_method": "awq",
        "backend": "autoawq",
        "bits": 4,
        "group_size": -1 if groups == 1 else K // groups,
        "zero_point": True,
        "version": "gemm",
        "modules_to_not_convert": None,
        **keys,
    }


def scheme(checkpoint: Checkpoint, module: str = P) -> Scheme | None:
    config = read_quantization_config(checkpoint.config)
    assert config is not None
    return config.scheme_for(module)


def same(ours: Tensor, theirs: Tensor) -> None:
    """Assert that values are equal in FP32; zeros of both signs count as equal."""
    assert ours.dtype == theirs.dtype == torch.float32
    assert torch.equal(ours, theirs)


@pytest.mark.parametrize("group", [32, 128, 256], ids=["g32", "g128", "row"])
@pytest.mark.parametrize("symmetric", [True, False], ids=["symmetric", "asymmetric"])
@pytest.mark.parametrize("bits", [4, 8])
@pytest.mark.parametrize("version", [1, 2])
def test_gptq(
    write_folder: WriteFolder,
    weight_of: WeightOf,
    version: int,
    bits: int,
    symmetric: bool,
    group: int,
) -> None:
    q = draw(40, 256, group, bits, symmetric)
    section = gptq_section(q, checkpoint_format="gptq" if version == 1 else "gptq_v2")
    checkpoint = open_native(write_folder(gptq(P, q, version), section))
    expected = Scheme(bits, None if group == 256 else group, symmetric)
    assert scheme(checkpoint) == expected
    same(weight_of(checkpoint, P, slice(None)), q.weight)
    assert not any(name.endswith((".qweight", ".g_idx")) for name in checkpoint.tensors)


@pytest.mark.parametrize("group", [32, 128, 256], ids=["g32", "g128", "row"])
@pytest.mark.parametrize("symmetric", [True, False], ids=["symmetric", "asymmetric"])
def test_awq(write_folder: WriteFolder, weight_of: WeightOf, symmetric: bool, group: int) -> None:
    q = draw(48, 256, group, symmetric=symmetric)
    checkpoint = open_native(write_folder(awq(P, q), awq_section(q)))
    assert scheme(checkpoint) == Scheme(4, None if group == 256 else group, symmetric)
    same(weight_of(checkpoint, P, slice(None)), q.weight)


@pytest.mark.parametrize("layout", [gptq, awq])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(("start", "stop"), [(0, 1), (3, 21), (8, 16), (7, 40), (39, 40)])
def test_any_range_of_rows(
    write_folder: WriteFolder,
    weight_of: WeightOf,
    layout: Callable[[str, Quantized], dict[str, Tensor]],
    dtype: torch.dtype,
    start: int,
    stop: int,
) -> None:
    q = draw(40, 64, 32, symmetric=False, dtype=dtype)
    section = gptq_section(q) if layout is gptq else awq_section(q)
    checkpoint = open_native(write_folder(layout(P, q), section))
    assert checkpoint.tensors[f"{P}.weight_scale"].dtype == dtype
    same(weight_of(checkpoint, P, slice(start, stop)), q.weight[start:stop])


def test_a_buffer_is_filled_like_one_from_a_native_file(write_folder: WriteFolder) -> None:
    q = draw(40, 64, 32)
    checkpoint = open_native(write_folder(gptq(P, q), gptq_section(q)))
    out = torch.empty(40, 8, dtype=torch.int32)
    checkpoint.read_into(f"{P}.weight_packed", out)
    assert torch.equal(out, checkpoint.read(f"{P}.weight_packed"))
    blocks = dict(checkpoint.rows(f"{P}.weight_packed", 16))
    assert list(blocks) == [0, 16, 32]
    assert torch.equal(torch.cat(list(blocks.values())), out)


def test_act_order_with_groups_in_order_is_no_act_order(
    write_folder: WriteFolder, weight_of: WeightOf
) -> None:
    q = draw(32, 64, 32)
    checkpoint = open_native(write_folder(gptq(P, q), gptq_section(q, desc_act=True)))
    same(weight_of(checkpoint, P, slice(None)), q.weight)


def test_files_without_group_index_or_version(
    write_folder: WriteFolder, weight_of: WeightOf
) -> None:
    q = draw(32, 64, 32)
    section = gptq_section(q)
    del section["checkpoint_format"], section["pack_dtype"]
    checkpoint = open_native(write_folder(gptq(P, q, ordered=False), section))
    same(weight_of(checkpoint, P, slice(None)), q.weight)


def test_one_asymmetric_linear_makes_all_asymmetric(
    write_folder: WriteFolder, weight_of: WeightOf
) -> None:
    even, uneven = draw(32, 64, 32), draw(32, 64, 32, symmetric=False, seed=1)
    tensors = gptq("a", even) | gptq("b", uneven)
    checkpoint = open_native(write_folder(tensors, gptq_section(even)))
    assert scheme(checkpoint, "a") == scheme(checkpoint, "b") == Scheme(4, 32, symmetric=False)
    same(weight_of(checkpoint, "a", slice(None)), even.weight)
    same(weight_of(checkpoint, "b", slice(None)), uneven.weight)


def test_dynamic_overrides(write_folder: WriteFolder, weight_of: WeightOf) -> None:
    """The first pattern that matches the start of a name wins; `+:` may be left out."""
    parts = {
        "model.layers.0.mlp.up_proj": draw(32, 128, 64, 8),
        "model.layers.1.mlp.up_proj": draw(32, 128, 32),
        "model.layers.2.mlp.up_proj": draw(32, 128, 128),
        "lm_head": draw(64, 128, 64, 8),
    }
    dynamic = {
        r"-:.*self_attn": {},
        r"+:model\.layers\.0\.": {"bits": 8, "group_size": 64},
        r"model\.layers\.1\.": {"group_size": 32, "desc_act": True},
        r"+:model\.layers\.": {"group_size": -1},
        r"+:lm_head": {"bits": 8, "group_size": 64},
    }
    tensors: dict[str, Tensor] = {}
    for module, q in parts.items():
        tensors |= gptq(module, q)
    section = gptq_section(draw(32, 128, 64), group_size=16, dynamic=dynamic)
    checkpoint = open_native(write_folder(tensors, section))
    found = {module: str(scheme(checkpoint, module)) for module in parts}
    assert list(found.values()) == ["INT8 g64", "INT4 g32", "INT4 row", "INT8 g64"]
    assert scheme(checkpoint, "model.layers.0.self_attn.q_proj") is None
    for module, q in parts.items():
        same(weight_of(checkpoint, module, slice(None)), q.weight)


@pytest.mark.parametrize(
    ("packing", "layout", "version"),
    [
        ("auto_round:auto_gptq", "gptq", 1),
        ("auto_round:gptqmodel", "gptq", 2),
        ("auto_round", "gptq", 2),
        ("auto_round:auto_awq", "awq", 0),
    ],
)
def test_auto_round(
    write_folder: WriteFolder, weight_of: WeightOf, packing: str, layout: str, version: int
) -> None:
    q = draw(32, 64, 32, symmetric=False)
    tensors = gptq(P, q, version, ordered=False) if layout == "gptq" else awq(P, q)
    section = {
        "quant_method": "auto-round",
        "packing_format": packing,
        "bits": 4,
        "group_size": 32,
        "sym": True,
        "data_type": "int",
        "block_name_to_quantize": "model.layers",
        "extra_config": {"lm_head": {"bits": 16}},
    }
    checkpoint = open_native(write_folder(tensors, section))
    same(weight_of(checkpoint, P, slice(None)), q.weight)


def test_auto_round_overrides(write_folder: WriteFolder, weight_of: WeightOf) -> None:
    q, wide = draw(32, 64, 32), draw(32, 64, 64, 8)
    section = gptq_section(q) | {
        "quant_method": "auto-round",
        "packing_format": "auto_round:auto_gptq",
        "extra_config": {"model.b": {"bits": 8, "group_size": -1}, "model.c": {"bits": 16}},
    }
    tensors = gptq("model.a", q) | gptq("model.b", wide)
    checkpoint = open_native(write_folder(tensors, section))
    same(weight_of(checkpoint, "model.a", slice(None)), q.weight)
    same(weight_of(checkpoint, "model.b", slice(None)), wide.weight)
