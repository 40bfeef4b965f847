"""AWQ files against the arithmetic of its GEMM kernels, written out in NumPy."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from transformers.quantizers.quantizers_utils import should_convert_module

from lowbit.convert.export.export import export
from lowbit.formats.errors import FormatError
from lowbit.formats.layout.scheme import Scheme
from tests.convert.export.packed_folders import int4_body, mixed
from tests.oracle import dequantized_weights

REVERSED = [0, 4, 1, 5, 2, 6, 3, 7]  # where AWQ's readers find column i of a word


def columns(words: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    nibbles = words.view(np.uint32)[..., None] >> np.arange(0, 32, 4, dtype=np.uint32) & 15
    spread: np.ndarray[Any, Any] = nibbles[..., REVERSED].reshape(len(words), -1)
    return spread.astype(np.float32)


def dequantized(tensors: dict[str, Any], module: str) -> np.ndarray[Any, Any]:
    s = tensors[f"{module}.scales"].numpy().astype(np.float32)
    u, z = (columns(tensors[f"{module}.{name}"].numpy()) for name in ("qweight", "qzeros"))
    group = len(u) // len(s)
    values: np.ndarray[Any, Any] = (u - z.repeat(group, axis=0)) * s.repeat(group, axis=0)
    return values.T


def test_values_are_those_of_the_packed_folder(tmp_path: Path, pack_hybrid: Any) -> None:
    packed = pack_hybrid(int4_body)
    done = export(packed, tmp_path / "out", "awq")
    written = load_file(tmp_path / "out" / "model.safetensors")
    compared = 0
    for name, weight in dequantized_weights(packed).items():
        module = name.removesuffix(".weight")
        if f"{module}.qweight" in written:
            np.testing.assert_array_equal(dequantized(written, module), weight.numpy())
            compared += 1
        else:
            assert torch.equal(written[name].float(), weight)
    assert compared == done.proof.linears == 3 * 6 + 7
    section = json.loads((tmp_path / "out" / "config.json").read_text())["quantization_config"]
    assert section == {
        "quant_method": "awq",
        "bits": 4,
        "group_size": 32,
        "zero_point": True,
        "version": "gemm",
        "modules_to_not_convert": [
            "linear_attn.in_proj_b",
            "linear_attn.in_proj_a",
            "lm_head",
            "visual",
            "mtp",
            "model.visual",
        ],
    }
    for name in written:  # transformers leaves as they are what has no codes, and nothing else
        module, _, kind = name.rpartition(".")
        if kind in ("qweight", "weight") and written[name].dim() == 2:
            converted = should_convert_module(module, section["modules_to_not_convert"])
            assert converted == (kind == "qweight") or "embed" in module, name


def test_golden_word(tmp_path: Path, pack_dense: Any) -> None:
    """Row i of the weight has code i: AWQ writes 0 2 4 6 1 3 5 7 from the lowest nibble on."""
    name = "model.layers.0.mlp.up_proj"

    def edit(tensors: dict[str, torch.Tensor]) -> None:
        words = tensors[f"{name}.weight_packed"]
        for row in range(8):
            words[row] = 0x11111111 * row

    packed = pack_dense(lambda spec: None if spec.role == "head" else Scheme(4, 32), edit)
    export(packed, tmp_path / "out", "awq")
    written = load_file(tmp_path / "out" / "model.safetensors")
    assert set(written[f"{name}.qweight"][:, 0].tolist()) == {0x75316420}
    assert set(written[f"{name}.qzeros"].flatten().tolist()) == {0x88888888 - 2**32}


def test_int8_is_refused_by_name(tmp_path: Path, pack_hybrid: Any) -> None:
    packed = pack_hybrid(mixed)
    with pytest.raises(FormatError, match=r"linear_attn.out_proj` .*INT8 g32, and AWQ holds INT4"):
        export(packed, tmp_path / "out", "awq")


def test_a_quantized_head_is_refused(tmp_path: Path, pack_dense: Any) -> None:
    packed = pack_dense(lambda spec: Scheme(4, 32))
    with pytest.raises(FormatError, match=r"`lm_head` \(INT4 g32, .*expect the head unq"):
        export(packed, tmp_path / "out", "awq")


def test_two_group_sizes_are_refused(tmp_path: Path, pack_dense: Any) -> None:
    packed = pack_dense(
        lambda spec: (
            None
            if spec.role == "head"
            else Scheme(4, None)
            if "down_proj" in spec.name
            else Scheme(4, 32)
        ),
    )
    with pytest.raises(FormatError, match=r"down_proj` .*INT4 row, .* one scheme .*INT4 g32"):
        export(packed, tmp_path / "out", "awq")
