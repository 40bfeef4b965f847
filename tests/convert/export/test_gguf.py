"""GGUF files as the `gguf` library reads them; the order of rows from the published formulas."""

from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from lowbit.convert.export.export import export
from lowbit.convert.export.gguf import copies
from lowbit.convert.export.gguf_file import GgufPlace
from lowbit.convert.export.proof import prove
from lowbit.convert.export.source import open_source
from lowbit.formats.errors import CheckpointError, FormatError
from lowbit.formats.layout.scheme import Scheme
from tests.convert.export.packed_folders import (
    DENSE,
    int4_body,
    make_original,
    make_packed,
    mixed,
)
from tests.oracle import dequantized_weights

Array = np.ndarray[Any, Any]


def tensors_of(path: Path) -> dict[str, Array]:
    """Every tensor in FP32, shapes in NumPy's order."""
    read = gguf.GGUFReader(path)
    return {
        t.name: gguf.quants.dequantize(t.data, t.tensor_type)
        .astype(np.float32)
        .reshape([int(size) for size in t.shape[::-1]])
        for t in read.tensors
    }


def types_of(path: Path) -> dict[str, str]:
    return {t.name: t.tensor_type.name for t in gguf.GGUFReader(path).tensors}


def keys_of(path: Path) -> dict[str, Any]:
    return {name: field.contents() for name, field in gguf.GGUFReader(path).fields.items()}


def tiled(weight: Array, first: int, key_heads: int, rows: int, axis: int = 0) -> Array:
    """Value heads from grouped to tiled order, from position `first` on."""
    moved = np.moveaxis(weight, axis, 0)
    head, rest = moved[:first], moved[first:]
    grouped = rest.reshape(key_heads, -1, rows, *rest.shape[1:])
    return np.moveaxis(np.concatenate([head, grouped.swapaxes(0, 1).reshape(rest.shape)]), 0, axis)


def test_a_dense_model(tmp_path: Path, pack_dense: Any) -> None:
    packed = pack_dense(mixed)
    done = export(packed, tmp_path / "out", "gguf")
    assert done.files == ("LICENSE", "out.gguf")
    path = tmp_path / "out" / "out.gguf"
    written, types, want = tensors_of(path), types_of(path), dequantized_weights(packed)
    names = {
        "token_embd": ("model.embed_tokens", "BF16"),
        "output_norm": ("model.norm", "F32"),
        "output": ("lm_head", "Q8_0"),
    }
    for i in range(2):
        names |= {
            f"blk.{i}.{theirs}": (f"model.layers.{i}.{ours}", kind)
            for theirs, ours, kind in (
                ("attn_norm", "input_layernorm", "F32"),
                ("attn_q", "self_attn.q_proj", "Q4_0"),
                ("attn_k", "self_attn.k_proj", "Q4_0"),
                ("attn_v", "self_attn.v_proj", "Q4_0"),
                ("attn_output", "self_attn.o_proj", "Q4_0"),
                ("attn_q_norm", "self_attn.q_norm", "F32"),
                ("attn_k_norm", "self_attn.k_norm", "F32"),
                ("ffn_norm", "post_attention_layernorm", "F32"),
                ("ffn_gate", "mlp.gate_proj", "Q4_0"),
                ("ffn_up", "mlp.up_proj", "Q4_0"),
                ("ffn_down", "mlp.down_proj", "Q4_0"),
            )
        }
    assert written.keys() == {f"{name}.weight" for name in names}
    for theirs, (ours, kind) in names.items():
        assert types[f"{theirs}.weight"] == kind
        np.testing.assert_array_equal(written[f"{theirs}.weight"], want[f"{ours}.weight"].numpy())
    assert done.proof.linears == 15
    assert done.proof.copied == 1  # the embedding


def test_metadata_of_a_dense_model(tmp_path: Path, pack_dense: Any) -> None:
    packed = pack_dense(mixed)
    export(packed, tmp_path / "out", "gguf")
    keys = keys_of(tmp_path / "out" / "out.gguf")
    expected = {
        "general.architecture": "qwen3",
        "general.file_type": 2,
        "qwen3.block_count": 2,
        "qwen3.context_length": 512,
        "qwen3.embedding_length": 64,
        "qwen3.feed_forward_length": 96,
        "qwen3.attention.head_count": 4,
        "qwen3.attention.head_count_kv": 2,
        "qwen3.attention.key_length": 32,
        "qwen3.attention.value_length": 32,
        "qwen3.rope.freq_base": 1000000.0,
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": "qwen2",
        "tokenizer.ggml.merges": ["h e", "t he"],
        "tokenizer.ggml.eos_token_id": 259,  # the tokenizer's, not config.json's
        "tokenizer.ggml.bos_token_id": 286,
        "tokenizer.ggml.add_bos_token": False,
        "tokenizer.chat_template": "{{ messages }}",
    }
    assert {key: keys[key] for key in expected} == expected
    assert keys["qwen3.attention.layer_norm_rms_epsilon"] == pytest.approx(1e-6)
    tokens, types = keys["tokenizer.ggml.tokens"], keys["tokenizer.ggml.token_type"]
    assert len(tokens) == len(types) == 288
    assert tokens[256:261] == ["he", "the", "<think>", "<|end|>", "[PAD260]"]
    kinds = gguf.TokenType
    assert types[256:261] == [
        *(kinds.NORMAL, kinds.NORMAL),
        *(kinds.USER_DEFINED, kinds.CONTROL, kinds.UNUSED),
    ]


def test_a_hybrid_model(tmp_path: Path, pack_hybrid: Any) -> None:
    packed = pack_hybrid(mixed)
    done = export(packed, tmp_path / "out", "gguf")
    path = tmp_path / "out" / "out.gguf"
    written, types = tensors_of(path), types_of(path)
    want = {name: w.numpy() for name, w in dequantized_weights(packed).items()}
    p = "model.language_model.layers.1.linear_attn"
    keys = 2 * 2 * 32
    for theirs, expected in {
        "attn_qkv.weight": tiled(want[f"{p}.in_proj_qkv.weight"], keys, 2, 32),
        "attn_gate.weight": tiled(want[f"{p}.in_proj_z.weight"], 0, 2, 32),
        "ssm_alpha.weight": tiled(want[f"{p}.in_proj_a.weight"], 0, 2, 1),
        "ssm_beta.weight": tiled(want[f"{p}.in_proj_b.weight"], 0, 2, 1),
        "ssm_conv1d.weight": tiled(want[f"{p}.conv1d.weight"][:, 0], keys, 2, 32),
        "ssm_a": -np.exp(tiled(want[f"{p}.A_log"], 0, 2, 1)),
        "ssm_dt.bias": tiled(want[f"{p}.dt_bias"], 0, 2, 1),
        "ssm_norm.weight": want[f"{p}.norm.weight"],
        "ssm_out.weight": tiled(want[f"{p}.out_proj.weight"], 0, 2, 32, axis=1),
        "attn_norm.weight": want["model.language_model.layers.1.input_layernorm.weight"] + 1,
        "post_attention_norm.weight": (
            want["model.language_model.layers.1.post_attention_layernorm.weight"] + 1
        ),
    }.items():
        if theirs == "ssm_a":
            np.testing.assert_allclose(written[f"blk.1.{theirs}"], expected, rtol=1e-6)
        else:
            np.testing.assert_array_equal(written[f"blk.1.{theirs}"], expected, theirs)
    for theirs, ours in {
        "blk.3.attn_q.weight": "model.language_model.layers.3.self_attn.q_proj.weight",
        "blk.4.attn_q.weight": "mtp.layers.0.self_attn.q_proj.weight",
        "blk.4.ffn_down.weight": "mtp.layers.0.mlp.down_proj.weight",
        "blk.4.nextn.eh_proj.weight": "mtp.fc.weight",
    }.items():
        np.testing.assert_array_equal(written[theirs], want[ours])
    for theirs, ours in {
        "output_norm.weight": "model.language_model.norm.weight",
        "blk.3.attn_k_norm.weight": "model.language_model.layers.3.self_attn.k_norm.weight",
        "blk.4.nextn.enorm.weight": "mtp.pre_fc_norm_embedding.weight",
        "blk.4.nextn.hnorm.weight": "mtp.pre_fc_norm_hidden.weight",
        "blk.4.nextn.shared_head_norm.weight": "mtp.norm.weight",
    }.items():
        np.testing.assert_array_equal(written[theirs], want[ours] + 1)
        assert types[theirs] == "F32"
    assert types["blk.1.ssm_out.weight"] == types["output.weight"] == "Q8_0"
    assert len(written) == len(want)
    assert done.dropped == ("the vision tower: llama.cpp wants it in a file of its own (mmproj)",)
    keys_found = keys_of(path)
    expected_keys = {
        "general.architecture": "qwen35",
        "qwen35.block_count": 5,
        "qwen35.nextn_predict_layers": 1,
        "qwen35.full_attention_interval": 4,
        "qwen35.attention.recurrent_layers": [True, True, True, False, False],
        "qwen35.rope.dimension_count": 8,
        "qwen35.rope.dimension_sections": [2, 1, 1, 0],
        "qwen35.ssm.conv_kernel": 4,
        "qwen35.ssm.state_size": 32,
        "qwen35.ssm.group_count": 2,
        "qwen35.ssm.time_step_rank": 6,
        "qwen35.ssm.inner_size": 192,
    }
    assert {key: keys_found[key] for key in expected_keys} == expected_keys


@pytest.mark.parametrize("model_type", ["llama", "qwen2"])
def test_other_dense_models(tmp_path: Path, model_type: str) -> None:
    rope = {
        "rope_type": "llama3",
        "rope_theta": 10000.0,
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 64,
    }
    config = {**DENSE, "model_type": model_type}
    config |= {"rope_parameters": rope} if model_type == "llama" else {"head_dim": 16}
    packed = make_packed(tmp_path / "packed", config, lambda spec: Scheme(4, 32))
    export(packed, tmp_path / "out", "gguf")
    path = tmp_path / "out" / "out.gguf"
    written, want = tensors_of(path), dequantized_weights(packed)
    for theirs, ours, heads in (("attn_q", "q_proj", 4), ("attn_k", "k_proj", 2)):
        name = f"model.layers.1.self_attn.{ours}"
        weight = want[f"{name}.weight"].numpy()
        if model_type == "llama":  # halves of a head become neighbours
            halves = weight.reshape(heads, 2, 16, 64)
            weight = halves.swapaxes(1, 2).reshape(weight.shape)
        else:
            bias = want[f"{name}.bias"].numpy()
            np.testing.assert_array_equal(written[f"blk.1.{theirs}.bias"], bias)
        np.testing.assert_array_equal(written[f"blk.1.{theirs}.weight"], weight)
    assert keys_of(path)["general.architecture"] == model_type
    if model_type == "llama":
        from transformers import LlamaConfig
        from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

        scaled, _ = ROPE_INIT_FUNCTIONS["llama3"](LlamaConfig(**config), torch.device("cpu"))
        plain = 1 / 10000.0 ** (torch.arange(0, 32, 2) / 32)
        np.testing.assert_allclose(
            written["rope_freqs.weight"], (plain / scaled).numpy(), rtol=1e-5
        )


@pytest.mark.parametrize("model_type", ["llama", "qwen3"])
def test_an_original_keeps_every_weight(tmp_path: Path, model_type: str) -> None:
    config = {**DENSE, "model_type": model_type}
    original = make_original(tmp_path / "original", config)
    done = export(original, tmp_path / "out", "gguf")
    path = tmp_path / "out" / "out.gguf"
    written, types = tensors_of(path), types_of(path)
    want = load_file(original / "model.safetensors")
    for name, part, heads in (
        ("token_embd", "embed_tokens", None),
        ("blk.1.ffn_down", "layers.1.mlp.down_proj", None),
        ("blk.1.attn_q", "layers.1.self_attn.q_proj", 4),
    ):
        weight = want[f"model.{part}.weight"].float().numpy()
        if model_type == "llama" and heads:
            weight = weight.reshape(heads, 2, 16, 64).swapaxes(1, 2).reshape(weight.shape)
        np.testing.assert_array_equal(written[f"{name}.weight"], weight)
        assert types[f"{name}.weight"] == "BF16"
    assert keys_of(path)["general.file_type"] == 32
    assert (done.proof.linears, done.proof.copied) == (0, 16)


def test_head_size_that_transformers_misses_is_noted(tmp_path: Path) -> None:
    """transformers gives every dense Qwen3 in a GGUF file heads of 128 numbers."""
    small = make_original(tmp_path / "small", DENSE)
    [note] = export(small, tmp_path / "a", "gguf").notes
    assert "heads have 32 numbers" in note
    usual = make_original(tmp_path / "usual", {**DENSE, "head_dim": 128})
    assert export(usual, tmp_path / "b", "gguf").notes == ()


def test_reordered_rows_are_proven(tmp_path: Path) -> None:
    original = make_original(tmp_path / "original", {**DENSE, "model_type": "llama"})
    export(original, tmp_path / "out", "gguf")
    path = tmp_path / "out" / "out.gguf"
    read = gguf.GGUFReader(path)
    places = {
        t.name: GgufPlace(t.tensor_type.name, tuple(int(n) for n in t.shape[::-1]), t.data_offset)
        for t in read.tensors
    }
    source = open_source(original, originals=True)
    prove(source, [], lambda linear: [], copies(source, path, places), lambda count: None)
    with path.open("r+b") as file:
        file.seek(places["blk.0.attn_k.weight"].offset)
        file.write(b"\x01\x02")
    with pytest.raises(FormatError, match=r"layers\.0\.self_attn\.k_proj.* other bytes"):
        prove(source, [], lambda linear: [], copies(source, path, places), lambda count: None)


def test_blocks_are_those_of_the_library(tmp_path: Path, pack_dense: Any) -> None:
    """The exact bytes of a block: d = -0.5 in FP16, then low nibbles 0-15 and high 16-31."""
    name = "model.layers.0.mlp.up_proj"

    def edit(tensors: dict[str, torch.Tensor]) -> None:
        words = tensors[f"{name}.weight_packed"]
        words[:, 0::4], words[:, 1::4] = 0x76543210, -0x01234568  # codes 0..7, 8..15
        words[:, 2::4], words[:, 3::4] = -0x01234568, 0x76543210
        tensors[f"{name}.weight_scale"].fill_(-0.5)

    packed = pack_dense(lambda spec: Scheme(4, 32), edit)
    export(packed, tmp_path / "out", "gguf")
    read = gguf.GGUFReader(tmp_path / "out" / "out.gguf")
    (tensor,) = [t for t in read.tensors if t.name == "blk.0.ffn_up.weight"]
    assert bytes(tensor.data[0, :18]).hex() == "00b8" + "8091a2b3c4d5e6f7" + "08192a3b4c5d6e7f"


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"linear_value_head_dim": 64}, "linear heads of 32 and 64"),
        ({"mtp_num_hidden_layers": 2}, "2 layers of multi-token prediction"),
    ],
)
def test_sizes_unknown_to_llama_cpp_are_refused(
    tmp_path: Path, pack_hybrid: Any, change: dict[str, Any], message: str
) -> None:
    packed = pack_hybrid(int4_body, **change)
    with pytest.raises(FormatError, match=message):
        export(packed, tmp_path / "out", "gguf")


def test_heads_unknown_to_llama_cpp_are_refused(tmp_path: Path, pack_dense: Any) -> None:
    packed = pack_dense(int4_body, model_type="qwen2")
    with pytest.raises(FormatError, match=r"4 heads of 32: .* add up to hidden_size = 64"):
        export(packed, tmp_path / "out", "gguf")


def test_groups_below_a_block_are_refused(tmp_path: Path, pack_dense: Any) -> None:
    packed = pack_dense(lambda spec: Scheme(4, 16))
    with pytest.raises(FormatError, match="INT4 g16 with rows of 64: GGUF scales blocks of 32"):
        export(packed, tmp_path / "out", "gguf")


def test_a_model_without_tokenizer_is_refused(tmp_path: Path, pack_dense: Any) -> None:
    packed = pack_dense(mixed)
    (packed / "tokenizer.json").unlink()
    with pytest.raises(CheckpointError, match=r"has no tokenizer.json, which a GGUF file needs"):
        export(packed, tmp_path / "out", "gguf")
    assert not (tmp_path / "out.partial").exists()
