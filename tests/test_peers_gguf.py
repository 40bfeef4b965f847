"""llama.cpp as a peer: importance, its file and records, and weights read back from GGUF."""

import argparse
import ctypes
from pathlib import Path
from types import ModuleType
from typing import Any

import gguf
import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from lowbit.convert.export.export import export
from lowbit.runtime.text.tokenizer import load_tokenizer
from tests.convert.export.packed_folders import DENSE, make_original, make_packed, mixed
from tests.load_script import ROOT, load_script
from tests.oracle import dequantized_weights

LLAMA = {**DENSE, "model_type": "llama", "architectures": ["LlamaForCausalLM"]}
QWEN2 = {**DENSE, "model_type": "qwen2", "architectures": ["Qwen2ForCausalLM"], "head_dim": 16}


class Record(ctypes.Structure):
    """llama.cpp's llama_model_imatrix_data."""

    _fields_ = [
        ("name", ctypes.c_char_p),
        ("data", ctypes.POINTER(ctypes.c_float)),
        ("size", ctypes.c_size_t),
    ]


@pytest.fixture(autouse=True)
def siblings(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(ROOT / "examples" / "benchmarks"))


@pytest.fixture
def peers() -> ModuleType:
    return load_script("peers_gguf")


def transformer(folder: Path) -> Any:
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)


@pytest.mark.parametrize("config", [LLAMA, QWEN2], ids=["llama", "qwen2"])
@pytest.mark.parametrize("tied", [False, True])
def test_an_exported_original_reads_back_equal(
    tmp_path: Path, config: dict[str, Any], tied: bool
) -> None:
    original = make_original(tmp_path / "original", {**config, "tie_word_embeddings": tied})
    export(original, tmp_path / "bf16", "gguf")
    logits = load_script("peers_logits")
    model, changed = logits.load(original, tmp_path / "bf16", "cpu")
    assert changed == 0
    stored = load_file(original / "model.safetensors")
    for name, parameter in model.named_parameters():
        assert torch.equal(parameter, stored[name].float()), name


def test_quantized_blocks_become_their_values(tmp_path: Path) -> None:
    packed = make_packed(tmp_path / "packed", LLAMA, mixed)
    original = make_original(tmp_path / "original", LLAMA)
    export(packed, tmp_path / "gguf", "gguf")
    model, changed = load_script("peers_logits").load(original, tmp_path / "gguf", "cpu")
    want = dequantized_weights(packed)
    for name, parameter in model.named_parameters():
        assert torch.equal(parameter, want[name].float()), name
    assert changed == 15


def test_importance_is_the_mean_square_of_inputs(tmp_path: Path, peers: ModuleType) -> None:
    original = make_original(tmp_path / "original", LLAMA)
    windows = torch.arange(5 * 8).view(5, 8)
    sums, tokens = peers.measure_importance(original, windows)
    assert tokens == 40
    assert len(sums) == 14  # seven of each layer; the head has none
    model = transformer(original).model
    with torch.inference_mode():
        first = model.layers[0].input_layernorm(model.embed_tokens(windows)).view(40, 64).double()
    want = first.square().sum(0)
    for name in ("attn_q", "attn_k", "attn_v"):
        torch.testing.assert_close(sums[f"blk.0.{name}.weight"], want, rtol=1e-6, atol=0)
    assert sums["blk.1.ffn_down.weight"].shape == (96,)


def test_importance_file_is_that_of_llama_imatrix(tmp_path: Path, peers: ModuleType) -> None:
    """Keys and tensors as llama.cpp's tools/imatrix writes them."""
    path = tmp_path / "imatrix.gguf"
    sums = {"blk.0.ffn_up.weight": torch.tensor([8.0, 2.0, 4.0], dtype=torch.float64)}
    peers.write_importance(path, sums, 2048, "text.txt", 512)
    read = gguf.GGUFReader(path)
    keys = {name: field.contents() for name, field in read.fields.items()}
    assert keys["general.type"] == "imatrix"
    assert keys["imatrix.datasets"] == ["text.txt"]
    assert (keys["imatrix.chunk_count"], keys["imatrix.chunk_size"]) == (4, 512)
    tensors = {tensor.name: tensor for tensor in read.tensors}
    assert sorted(tensors) == ["blk.0.ffn_up.weight.counts", "blk.0.ffn_up.weight.in_sum2"]
    found = tensors["blk.0.ffn_up.weight.in_sum2"]
    assert found.shape.tolist() == [3, 1]  # GGUF's order, columns first
    assert found.data.dtype == np.float32
    assert tensors["blk.0.ffn_up.weight.counts"].data.flatten().tolist() == [2048.0]
    [(name, means)] = peers.read_importance(path).items()
    assert name == "blk.0.ffn_up.weight"
    assert (means * 2048).tolist() == [8.0, 2.0, 4.0]


def test_records_are_closed_by_one_without_a_name(peers: ModuleType) -> None:
    importance = {"a": torch.tensor([1.0, 2.0]), "b": torch.tensor([3.0, 5.0], dtype=torch.float64)}
    records = peers.importance_records(importance, Record)
    found = [(r.name, [r.data[n] for n in range(r.size)]) for r in records]
    assert found == [(b"a", [1.0, 2.0]), (b"b", [3.0, 5.0]), (None, [])]


def test_llama_cpp_quantizes_an_export(tmp_path: Path, peers: ModuleType) -> None:
    pytest.importorskip("llama_cpp")
    original = make_original(tmp_path / "original", {**LLAMA, "intermediate_size": 128})
    whole = peers.export_bf16(original, tmp_path / "original.bf16")
    sums, tokens = peers.measure_importance(original, torch.arange(64).view(2, 32))
    importance = {name: total.float() / tokens for name, total in sums.items()}
    peers.quantize(whole, tmp_path / "out.gguf", "IQ4_NL", importance)
    types = {t.name: t.tensor_type.name for t in gguf.GGUFReader(tmp_path / "out.gguf").tensors}
    assert types["blk.0.ffn_up.weight"] == "IQ4_NL"


def test_a_type_that_llama_cpp_lacks_is_named(
    tmp_path: Path, peers: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(__import__("sys").modules, "llama_cpp", ModuleType("llama_cpp"))
    with pytest.raises(SystemExit, match=r"llama\.cpp has no type Q9_Z"):
        peers.quantize(tmp_path / "a.gguf", tmp_path / "b.gguf", "Q9_Z", {})


def test_bytes_of_a_gguf_file_are_those_of_its_weights(tmp_path: Path) -> None:
    original = make_original(tmp_path / "original", LLAMA)
    export(original, tmp_path / "bf16", "gguf")
    bench = load_script("bench_real_models")
    vectors = sum(
        t.numel() for t in load_file(original / "model.safetensors").values() if t.dim() == 1
    )
    weights = sum(t.numel() for t in load_file(original / "model.safetensors").values())
    assert bench.size(tmp_path / "bf16") == 2 * weights + 2 * vectors  # vectors are F32
    assert bench.size(original) == (original / "model.safetensors").stat().st_size


def test_options_of_a_method_and_of_one_with_a_size() -> None:
    bench = load_script("bench_real_models")
    arguments = argparse.Namespace(recipe="int4", lm_head="int8", bits=["*.o_proj=8"])
    plain = bench.ours(arguments, "gptq+rotate", 64)
    assert plain == [
        *("--recipe", "int4", "--lm-head", "int8", "--method", "gptq+rotate"),
        *("--group-size", "64", "--bits", "*.o_proj=8"),
    ]
    chosen = bench.ours(arguments, "gptq+rotate@142MB", 64)
    assert chosen == ["--method", "gptq+rotate", "--target-size", "142MB"]
    assert bench.ours(arguments, "default", 64) == ["--effort", "default"]


def test_noise_stays_within_the_step_of_a_block() -> None:
    """Rounding to the grid again gives the weights that the noise was added to."""
    models = load_script("real_models")
    generator = torch.Generator().manual_seed(1)
    codes = torch.randint(0, 16, (8, 64), generator=generator).float()
    steps = torch.rand(8, 4, generator=generator).repeat_interleave(16, 1) + 0.1
    low = torch.rand(8, 4, generator=generator).repeat_interleave(16, 1) - 1
    values = codes * steps + low
    moved = values + models.noise(values, generator)
    assert torch.equal(((moved - low) / steps).round(), codes)
    spread = (moved - values) / steps
    assert spread.abs().max() <= 0.5 + 1e-4
    assert abs(spread.square().mean() - 1 / 12) < 0.01
    flat = torch.ones(2, 32)
    assert models.noise(flat, generator).count_nonzero() == 0


def test_a_rebuilt_llama_has_a_tokenizer_of_bytes(tmp_path: Path) -> None:
    """As SmolLM2's own files have it; transformers 5.17 makes one of Llama 2's kind of its GGUF."""
    from transformers import AutoConfig

    config = {**LLAMA, "eos_token_id": 1, "max_position_embeddings": 64}
    export(make_original(tmp_path / "original", config), tmp_path / "bf16", "gguf")
    [file] = (tmp_path / "bf16").glob("*.gguf")
    found = AutoConfig.from_pretrained(file.parent, gguf_file=file.name)
    load_script("real_models").tokenizer(file, found).save_pretrained(tmp_path / "rebuilt")
    tokenizer = load_tokenizer(tmp_path / "rebuilt")
    text = "It's 12345, naïve 日本語"
    ids = tokenizer.encode(text)
    assert tokenizer.decode(ids) == text
    assert b"".join(map(tokenizer.token_bytes, ids)) == text.encode()
