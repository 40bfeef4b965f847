"""Unsupported files of other tools are refused by name before any weight is read."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from lowbit.formats.errors import CheckpointError, FormatError, LowbitError, QuantizationError
from lowbit.formats.foreign.reader import open_native
from tests.foreign_layouts import awq, draw, gptq

WriteFolder = Callable[[dict[str, Tensor], dict[str, Any]], Path]
P = "model.layers.0.mlp.up_proj"
GPTQ = {"quant_method": "gptq", "bits": 4, "group_size": 32}
AWQ = {"quant_method": "awq", "bits": 4, "group_size": 32, "version": "gemm"}
ROUND = {**GPTQ, "quant_method": "auto-round", "packing_format": "auto_round:auto_gptq"}
PARTS = ("qweight", "qzeros", "scales")

SECTIONS: list[tuple[dict[str, Any], str]] = [
    (GPTQ | {"bits": 3}, "config.json: GPTQ: 3-bit weights are not supported"),
    (GPTQ | {"bits": 2}, "2-bit weights are not supported"),
    (GPTQ | {"bits": "4"}, "config.json: GPTQ: bits is '4', group_size is 32"),
    (GPTQ | {"bits": None}, "bits is None"),
    (GPTQ | {"group_size": None}, "group_size is None"),
    (GPTQ | {"group_size": True}, "group_size is True"),
    (GPTQ | {"group_size": 0}, "group size must be positive, got 0"),
    (GPTQ | {"checkpoint_format": "marlin"}, "GPTQ checkpoint format `marlin` is not supported"),
    (GPTQ | {"checkpoint_format": "bitblas"}, "checkpoint format `bitblas`"),
    (GPTQ | {"checkpoint_format": ["gptq"]}, "checkpoint format `['gptq']`"),
    (GPTQ | {"format": "gptq_v3"}, "checkpoint format `gptq_v3`"),
    (GPTQ | {"is_marlin_format": True}, "checkpoint format `marlin`"),
    (GPTQ | {"pack_dtype": "int8"}, "pack_dtype `int8`, expected `int32`"),
    (GPTQ | {"dynamic": ["+:.*"]}, "`dynamic` is not an object of objects"),
    (GPTQ | {"dynamic": {"+:(": {"bits": 8}}}, "bad pattern `+:(`"),
    (GPTQ | {"dynamic": {"-:.*mlp": {}}}, f"`{P}` is packed, but `dynamic`"),
    (GPTQ | {"dynamic": {"+:.*mlp": None}}, "`dynamic` is not an object of objects"),
    (GPTQ | {"dynamic": {"+:.*mlp": {"bits": 3}}}, "config.json: `+:.*mlp`: 3-bit weights"),
    (GPTQ | {"dynamic": {"+:.*mlp": {"bits": 8}}}, "does not fit INT8 g32 of [32, 32]"),
    (GPTQ | {"bits": 8}, f"`{P}.scales`: shape [2, 32] does not fit INT8 g32 of [32, 32]"),
    (GPTQ | {"group_size": 64}, f"`{P}.scales`: shape [2, 32] does not fit INT4 g64 of [32, 64]"),
    (AWQ | {"version": "gemv"}, "config.json: AWQ version `gemv` is not supported"),
    (AWQ | {"version": "gemv_fast"}, "AWQ version `gemv_fast`"),
    (AWQ | {"version": "marlin"}, "AWQ version `marlin`"),
    (AWQ | {"version": 1}, "AWQ version `1`"),
    (AWQ | {"bits": 8}, "AWQ with 8 bits is not supported, only 4"),
    (AWQ | {"bits": 3}, "config.json: AWQ: 3-bit weights"),
    (ROUND | {"packing_format": "auto_round:fp8_static"}, "packing_format `auto_round:fp8_static`"),
    (ROUND | {"packing_format": None}, "packing_format `None`"),
    (ROUND | {"packing_format": []}, "packing_format `[]`"),
    (ROUND | {"data_type": "mx_fp"}, "of `mx_fp` is not supported"),
    (ROUND | {"act_bits": 8}, "`act_bits` is set, only weights may be quantized"),
    (ROUND | {"act_bits": "8"}, "`act_bits` is set"),
    (ROUND | {"extra_config": ["lm_head"]}, "`extra_config` is not an object of objects"),
    (ROUND | {"extra_config": {"lm_head": 4}}, "`extra_config` is not an object of objects"),
]


def refused(folder: Path, words: str, kind: type[LowbitError] = FormatError) -> LowbitError:
    with pytest.raises(kind) as caught:
        open_native(folder)
    assert words in str(caught.value)
    return caught.value


@pytest.mark.parametrize(("section", "words"), SECTIONS)
def test_unsupported_sections_are_refused(
    write_folder: WriteFolder, section: dict[str, Any], words: str
) -> None:
    layout = awq if section["quant_method"] == "awq" else gptq
    refused(write_folder(layout(P, draw(32, 64, 32)), section), words)


@pytest.mark.parametrize("section", [GPTQ, AWQ])
@pytest.mark.parametrize("missing", PARTS)
def test_missing_tensors(write_folder: WriteFolder, section: dict[str, Any], missing: str) -> None:
    layout = awq if section is AWQ else gptq
    tensors = layout(P, draw(32, 64, 32))
    del tensors[f"{P}.{missing}"]
    method = section["quant_method"]
    words = f"`{P}.{missing}` is missing"
    if missing == "qweight":
        words = f"config.json says `{method}`, but"
    refused(write_folder(tensors, section), words)


@pytest.mark.parametrize("section", [GPTQ, AWQ])
@pytest.mark.parametrize("part", PARTS)
@pytest.mark.parametrize("damage", ["rank", "dtype", "size"])
def test_misshapen_tensors(
    write_folder: WriteFolder, section: dict[str, Any], part: str, damage: str
) -> None:
    tensors = (awq if section is AWQ else gptq)(P, draw(32, 64, 32))
    name = f"{P}.{part}"
    whole = tensors[name]
    tensors[name] = {
        "rank": whole.flatten(),
        "dtype": whole.to(torch.int64),
        "size": torch.cat((whole, whole)),
    }[damage]
    words = "expected a matrix of " if damage != "size" else "does not fit INT4 g32 of"
    assert f"`{P}." in str(refused(write_folder(tensors, section), words))


def test_group_that_does_not_divide(write_folder: WriteFolder) -> None:
    folder = write_folder(gptq(P, draw(32, 64, 32)), GPTQ | {"group_size": 48})
    refused(folder, f"`{P}`: group size 48 does not divide K = 64", QuantizationError)


def test_activation_order_is_refused(write_folder: WriteFolder) -> None:
    tensors = gptq(P, draw(32, 64, 32))
    tensors[f"{P}.g_idx"] = tensors[f"{P}.g_idx"].flip(0)
    error = refused(write_folder(tensors, GPTQ | {"desc_act": True}), "act-order, `desc_act`")
    assert f"`{P}.g_idx`" in str(error)
    assert error.hint is not None


def test_zero_points_that_version_1_cannot_mean(write_folder: WriteFolder) -> None:
    """15 in a version 1 file means 16, which a mislabelled version 2 file would have."""
    q = draw(32, 64, 32)
    q.zeros[3, 1] = 15
    error = refused(write_folder(gptq(P, q, version=2), GPTQ), "a zero point of 16 has no 4-bit")
    assert f"`{P}.qzeros`" in str(error)
    assert "gptq_v2" in str(error.hint)


def test_zero_point_of_0_in_version_1(write_folder: WriteFolder) -> None:
    """GPTQModel subtracts from whole words: 0 becomes 15, and the next row's is off by one."""
    q = draw(32, 64, 32)
    q.zeros[3, 1] = 0
    tensors = gptq(P, q, version=2)
    tensors[f"{P}.qzeros"] -= 0x11111111
    error = refused(write_folder(tensors, GPTQ), "a zero point of 16 has no 4-bit")
    assert "a zero point of 0" in str(error.hint)


def test_rows_that_do_not_fill_words(write_folder: WriteFolder) -> None:
    tensors = awq(P, draw(32, 36, 36))
    refused(write_folder(tensors, AWQ | {"group_size": -1}), "does not fit INT4 row of [32, 36]")


def test_a_file_cut_short_while_it_is_read(write_folder: WriteFolder) -> None:
    q = draw(32, 64, 32)
    folder = write_folder(gptq(P, q), GPTQ)
    checkpoint = open_native(folder)
    path = folder / "model.safetensors"
    path.write_bytes(path.read_bytes()[:64])
    with pytest.raises(CheckpointError, match=f"`{path.name}` ends inside `{P}.qweight`"):
        checkpoint.read_rows(f"{P}.weight_packed", 1, 2)
    with pytest.raises(CheckpointError, match=f"`{path.name}` ends at byte 64"):
        checkpoint.read(f"{P}.weight_packed")


@pytest.mark.parametrize("section", [None, {"quant_method": "fp8"}, {}, [], "awq"])
def test_other_checkpoints_are_opened_unchanged(write_folder: WriteFolder, section: Any) -> None:
    checkpoint = open_native(write_folder(gptq(P, draw(32, 64, 32)), section))
    assert not checkpoint.derived
    assert checkpoint.config == {"quantization_config": section}
