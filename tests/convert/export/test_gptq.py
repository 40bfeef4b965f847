"""GPTQ files against the arithmetic of GPTQ's own kernels, written out in NumPy."""

import json
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from lowbit.convert.export.export import export
from lowbit.formats.errors import FormatError
from lowbit.formats.layout.scheme import Scheme
from tests.convert.export.packed_folders import int4_body, mixed
from tests.oracle import dequantized_weights


def unpacked(words: np.ndarray[Any, Any], bits: int, axis: int) -> np.ndarray[Any, Any]:
    """Unsigned fields of int32 words, low bits first, spread along an axis."""
    fields = words.view(np.uint32)[..., None] >> np.arange(0, 32, bits, dtype=np.uint32)
    fields &= np.uint32(2**bits - 1)
    if axis == 1:
        return fields.reshape(len(words), -1)
    return np.moveaxis(fields, -1, 1).reshape(-1, words.shape[1])


def dequantized(tensors: dict[str, Any], module: str, bits: int) -> np.ndarray[Any, Any]:
    """W [N, K] float32 as GPTQ's checkpoint format v1 means it."""
    u = unpacked(tensors[f"{module}.qweight"], bits, axis=0).astype(np.float32)
    z = unpacked(tensors[f"{module}.qzeros"], bits, axis=1).astype(np.float32) + 1
    s = tensors[f"{module}.scales"].astype(np.float32)
    group = tensors[f"{module}.g_idx"]
    values: np.ndarray[Any, Any] = (u - z[group]) * s[group]
    return values.T


@pytest.mark.parametrize(
    "scheme", [Scheme(4, 32), Scheme(8, 32), Scheme(8, None)], ids=["int4", "int8", "row"]
)
def test_values_are_those_of_the_packed_folder(
    tmp_path: Path, pack_dense: Any, scheme: Scheme
) -> None:
    packed = pack_dense(lambda spec: None if spec.role == "head" else scheme)
    done = export(packed, tmp_path / "out", "gptq")
    written = load_plain(tmp_path / "out")
    for name, weight in dequantized_weights(packed).items():
        module = name.removesuffix(".weight")
        if f"{module}.qweight" in written:
            assert f"{module}.weight" not in written
            np.testing.assert_array_equal(dequantized(written, module, scheme.bits), weight.numpy())
    assert done.proof.linears == 14
    assert done.proof.largest_difference == 0.0
    assert done.proof.copied == 11  # norms, embedding, head
    config = json.loads((tmp_path / "out" / "config.json").read_text())["quantization_config"]
    assert config == {
        "quant_method": "gptq",
        "bits": scheme.bits,
        "group_size": scheme.group_size or -1,
        "desc_act": False,
        "sym": True,
        "checkpoint_format": "gptq",
        "pack_dtype": "int32",
        "lm_head": False,
    }


def load_plain(folder: Path) -> dict[str, Any]:
    """The integer and FP16 tensors of an export; NumPy has no BF16."""
    stored = load_file(folder / "model.safetensors")
    return {n: t.numpy() for n, t in stored.items() if t.dtype != torch.bfloat16}


def test_golden_words(tmp_path: Path, pack_dense: Any) -> None:
    """Words go over unchanged; the zero points of checkpoint format v1 are one less."""
    word = 0x76543210
    name = "model.layers.0.mlp.up_proj"

    def edit(tensors: dict[str, torch.Tensor]) -> None:
        tensors[f"{name}.weight_packed"].fill_(word)
        tensors[f"{name}.weight_scale"].fill_(-0.5)

    packed = pack_dense(lambda spec: None if spec.role == "head" else Scheme(4, 32), edit)
    export(packed, tmp_path / "out", "gptq")
    written = load_plain(tmp_path / "out")
    assert set(written[f"{name}.qweight"].flat) == {word}
    assert set(written[f"{name}.qzeros"].flat) == {0x77777777}
    assert written[f"{name}.qweight"].shape == (64 // 8, 96)
    assert written[f"{name}.g_idx"].tolist() == [0] * 32 + [1] * 32
    first = dequantized(written, name, 4)[0, :8]
    assert first.tolist() == [4.0, 3.5, 3.0, 2.5, 2.0, 1.5, 1.0, 0.5]


def test_a_head_of_another_precision_is_refused(tmp_path: Path, pack_dense: Any) -> None:
    packed = pack_dense(mixed)
    with pytest.raises(FormatError, match=r"1 of 15 linears: `lm_head` \(INT8 g32,") as caught:
        export(packed, tmp_path / "out", "gptq")
    assert caught.value.hint == (
        "--dequantize writes it as a plain matrix, rounded to BF16, 18.43 kB more; convert with "
        "--lm-head bf16; or export to mlx or gguf"
    )
    assert not (tmp_path / "out").exists()
    assert not (tmp_path / "out.partial").exists()


def test_config_names_a_quantized_head(tmp_path: Path, pack_dense: Any) -> None:
    packed = pack_dense(lambda spec: Scheme(8, 32))
    done = export(packed, tmp_path / "out", "gptq")
    config = json.loads((tmp_path / "out" / "config.json").read_text())["quantization_config"]
    assert config["lm_head"] is True
    assert "transformers does not" in done.notes[0]
    assert "lm_head.qweight" in load_plain(tmp_path / "out")


def test_config_names_unquantized_linears_for_every_reader(
    tmp_path: Path, pack_hybrid: Any
) -> None:
    packed = pack_hybrid(
        lambda spec: None if "layers.1.mlp.down_proj" in spec.name else int4_body(spec)
    )
    export(packed, tmp_path / "out", "gptq")
    config = json.loads((tmp_path / "out" / "config.json").read_text())["quantization_config"]
    patterns = [pattern.removeprefix("-:") for pattern in config["dynamic"]]
    (endings,) = config["modules_in_block_to_quantize"]
    written = load_plain(tmp_path / "out")
    stored = [
        n for n in dequantized_weights(packed) if n.endswith("_proj.weight") or "in_proj" in n
    ]
    assert len(stored) > 20
    for name in stored:
        module = name.removesuffix(".weight")
        quantized = f"{module}.qweight" in written
        assert any(re.match(p, module) for p in patterns) != quantized, module
        if not module.startswith("mtp."):
            assert any(module.endswith(e) for e in endings) == quantized, module


@pytest.mark.parametrize(
    "value", [1e-6, 70000.0, float("nan")], ids=["subnormal", "too large", "nan"]
)
def test_a_scale_that_fp16_cannot_hold_is_refused_by_name(
    tmp_path: Path, pack_dense: Any, value: float
) -> None:
    def edit(tensors: dict[str, torch.Tensor]) -> None:
        tensors["model.layers.1.mlp.down_proj.weight_scale"][3, 2] = value

    packed = pack_dense(int4_body, edit)
    with pytest.raises(FormatError, match=r"`model.layers.1.mlp.down_proj` .* row 3, group 2"):
        export(packed, tmp_path / "out", "gptq")


def test_the_library_reads_the_same_tensors(tmp_path: Path, pack_dense: Any) -> None:
    """Header, alignment and dtypes hold for the safetensors library; names are GPTQ's."""
    packed = pack_dense(int4_body)
    export(packed, tmp_path / "out", "gptq", max_shard_bytes=20_000)
    index = json.loads((tmp_path / "out" / "model.safetensors.index.json").read_text())
    shards = set(index["weight_map"].values())
    assert len(shards) > 3
    qweights = [n for n in index["weight_map"] if n.endswith(".qweight")]
    assert len(qweights) == 14
    one = index["weight_map"]["model.layers.0.mlp.up_proj.qweight"]
    loaded = load_file(tmp_path / "out" / one)
    assert loaded["model.layers.0.mlp.up_proj.qweight"].dtype == torch.int32
