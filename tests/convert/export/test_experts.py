"""Mixtures of experts in every container: stacked names, values, and what cannot be held."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from lowbit.convert.export.export import export
from lowbit.formats.architectures.names import any_expert, expert_of
from lowbit.formats.errors import FormatError
from lowbit.formats.foreign.reader import open_native
from lowbit.formats.layout.packing import dequantize, unpack
from tests.convert.export.packed_folders import DENSE, int4_body, make_packed, mixed
from tests.oracle import dequantized_weights

Array = np.ndarray[Any, Any]
COUNT, INNER, SHARED = 3, 32, 64
SIZES = {"num_experts": COUNT, "num_experts_per_tok": 2, "moe_intermediate_size": INNER}


@pytest.fixture
def single_config() -> dict[str, Any]:
    return {**DENSE, **SIZES, "model_type": "qwen3_moe", "norm_topk_prob": True}


@pytest.fixture
def hybrid(hybrid_config: dict[str, Any]) -> dict[str, Any]:
    hybrid_config["text_config"] |= {
        **SIZES,
        "shared_expert_intermediate_size": SHARED,
        "model_type": "qwen3_5_moe_text",
    }
    return {**hybrid_config, "model_type": "qwen3_5_moe"}


def stacks(weights: Mapping[str, Tensor]) -> dict[str, Array]:
    """Weights by name, those of a layer's experts stacked under a name without a number."""
    found: dict[str, list[Array]] = {}
    for name in sorted(weights, key=lambda name: expert_of(name) or 0):
        found.setdefault(any_expert(name), []).append(weights[name].float().numpy())
    return {n: np.stack(w) if "*" in n else w[0] for n, w in found.items()}


def library_name(arch: gguf.MODEL_ARCH, blocks: int, name: str) -> str:
    """Name by gguf's own table; the multi-token layer is the block after the last."""
    plain = name.replace("language_model.", "").replace("experts.*.", "experts.")
    plain = plain.replace("mtp.layers.0", f"model.layers.{blocks - 1}")
    if plain.endswith("dt_bias"):
        plain = plain.replace("dt_bias", "dt_proj.bias")
    table = gguf.get_tensor_name_map(arch, blocks)
    found: str | None = table.get_name(plain, try_suffixes=(".weight", ".bias"))
    assert found is not None, name
    return found


def written(path: Path) -> tuple[dict[str, Array], dict[str, str]]:
    """Every tensor in FP32, and its type."""
    read = gguf.GGUFReader(path).tensors
    values = {
        t.name: gguf.quants.dequantize(t.data, t.tensor_type)
        .astype(np.float32)
        .reshape([int(size) for size in t.shape[::-1]])
        for t in read
    }
    return values, {t.name: t.tensor_type.name for t in read}


def keys_of(path: Path, wanted: str) -> dict[str, Any]:
    fields = gguf.GGUFReader(path).fields.items()
    return {name: field.contents() for name, field in fields if wanted in name}


def test_gguf_stacks_single_experts(tmp_path: Path, single_config: dict[str, Any]) -> None:
    packed = make_packed(tmp_path / "packed", single_config, mixed)
    done = export(packed, tmp_path / "out", "gguf")
    values, types = written(tmp_path / "out" / "out.gguf")
    want = {
        library_name(gguf.MODEL_ARCH.QWEN3MOE, 2, name): weight
        for name, weight in stacks(dequantized_weights(packed)).items()
    }
    assert values.keys() == want.keys()
    for name, weight in want.items():
        np.testing.assert_array_equal(values[name], weight, name)
    assert values["blk.1.ffn_down_exps.weight"].shape == (COUNT, 64, INNER)
    assert types["blk.1.ffn_down_exps.weight"] == "Q4_0"
    assert types["blk.1.ffn_gate_inp.weight"] == "F32"
    assert done.proof.linears == 2 * (4 + 3 * COUNT) + 1
    path = tmp_path / "out" / "out.gguf"
    assert keys_of(path, "architecture") == {"general.architecture": "qwen3moe"}
    assert keys_of(path, "expert") == {
        "qwen3moe.expert_count": COUNT,
        "qwen3moe.expert_used_count": 2,
        "qwen3moe.expert_feed_forward_length": INNER,
    }


def test_gguf_of_a_hybrid_with_a_shared_expert(tmp_path: Path, hybrid: dict[str, Any]) -> None:
    """Experts of the multi-token layer are left in BF16: they are stacked as well."""
    packed = make_packed(tmp_path / "packed", hybrid, mixed)
    done = export(packed, tmp_path / "out", "gguf")
    path = tmp_path / "out" / "out.gguf"
    values, types = written(path)
    compared = 0
    for name, weight in stacks(dequantized_weights(packed)).items():
        if ".mlp." not in name:
            continue
        theirs = library_name(gguf.MODEL_ARCH.QWEN35MOE, 5, name)
        expected = weight[0] if name.endswith("shared_expert_gate.weight") else weight
        np.testing.assert_array_equal(values[theirs], expected, name)
        compared += 1
    assert compared == 5 * (3 + 3 + 2)
    assert types["blk.4.ffn_up_exps.weight"] == "BF16"
    assert types["blk.0.ffn_gate_inp_shexp.weight"] == "F32"
    mtp = 1 + (2 + 3 + 3 * COUNT) + 2
    assert done.proof.copied == 3 * 2 + mtp + 1  # in_proj_a and in_proj_b, MTP, the embedding
    assert keys_of(path, "architecture") == {"general.architecture": "qwen35moe"}
    assert keys_of(path, "expert_") == {
        "qwen35moe.expert_count": COUNT,
        "qwen35moe.expert_used_count": 2,
        "qwen35moe.expert_feed_forward_length": INNER,
        "qwen35moe.expert_shared_feed_forward_length": SHARED,
    }


def mlx_values(tensors: Mapping[str, Tensor], module: str) -> Array:
    """[E, N, K] by MLX's arithmetic, INT4."""
    words = tensors[f"{module}.weight"].view(torch.int32).numpy().view(np.uint32)
    s, b = (tensors[f"{module}.{name}"].float().numpy() for name in ("scales", "biases"))
    u = words[..., None] >> np.arange(0, 32, 4, dtype=np.uint32) & np.uint32(15)
    u = u.reshape(*words.shape[:-1], -1).astype(np.float32)
    group = u.shape[-1] // s.shape[-1]
    values: Array = u * s.repeat(group, axis=-1) + b.repeat(group, axis=-1)
    return values


@pytest.mark.parametrize("family", ["single_config", "hybrid"])
def test_mlx_stacks_experts(tmp_path: Path, request: pytest.FixtureRequest, family: str) -> None:
    config = request.getfixturevalue(family)
    packed = make_packed(tmp_path / "packed", config, mixed)
    export(packed, tmp_path / "out", "mlx")
    tensors = load_file(tmp_path / "out" / "model.safetensors")
    before = "language_model.model" if family == "hybrid" else "model"
    for name, weight in stacks(dequantized_weights(packed)).items():
        if name.startswith("model.") and ".experts." in name:
            module = name.replace("experts.*", "switch_mlp").removesuffix(".weight")
            module = module.replace("model.language_model", "model").replace("model", before, 1)
            np.testing.assert_array_equal(mlx_values(tensors, module), weight)
    assert f"{before}.layers.0.mlp.gate.weight" in tensors
    assert not [name for name in tensors if ".experts." in name]
    made = json.loads((tmp_path / "out" / "config.json").read_text())
    assert made["model_type"] == config["model_type"]
    text = made.get("text_config", made)
    assert text["num_experts"] == COUNT
    # mlx-lm's record of a Qwen3 mixture has no defaults for these.
    wanted = ("decoder_sparse_step", "mlp_only_layers", "norm_topk_prob", "rope_theta", "head_dim")
    assert family == "hybrid" or text.keys() >= {*wanted}


@pytest.mark.parametrize("target", ["gguf", "mlx"])
def test_plain_experts_are_stacked_as_they_are(
    tmp_path: Path, single_config: dict[str, Any], target: Any
) -> None:
    def choose(spec: Any) -> Any:
        return None if spec.role == "expert" else int4_body(spec)

    packed = make_packed(tmp_path / "packed", single_config, choose)
    done = export(packed, tmp_path / "out", target)
    assert done.proof.linears == 2 * 4
    want = stacks(dequantized_weights(packed))["model.layers.1.mlp.experts.*.down_proj.weight"]
    if target == "gguf":
        found = written(tmp_path / "out" / "out.gguf")[0]["blk.1.ffn_down_exps.weight"]
    else:
        tensors = load_file(tmp_path / "out" / "model.safetensors")
        found = tensors["model.layers.1.mlp.switch_mlp.down_proj.weight"].float().numpy()
    np.testing.assert_array_equal(found, want)

    def widen(tensors: dict[str, Tensor]) -> None:
        name = "model.layers.1.mlp.experts.2.down_proj.weight"
        tensors[name] = tensors[name].float()

    packed = make_packed(tmp_path / "wide", single_config, choose, widen)
    with pytest.raises(FormatError, match=r"layers.1.mlp.experts.2.down_proj.weight` is F32, .*0."):
        export(packed, tmp_path / "again", target)


@pytest.mark.parametrize("target", ["gptq", "awq"])
def test_gptq_and_awq_name_experts_one_by_one(
    tmp_path: Path, hybrid: dict[str, Any], target: Any
) -> None:
    packed = make_packed(tmp_path / "packed", hybrid, int4_body)
    done = export(packed, tmp_path / "out", target)
    assert any("the experts are stored one by one" in note for note in done.notes)
    want, made = dequantized_weights(packed), open_native(tmp_path / "out")
    for number in range(COUNT):
        module = f"model.language_model.layers.1.mlp.experts.{number}.down_proj"
        codes = unpack(made.read(f"{module}.weight_packed"), 4, INNER)
        values = dequantize(codes, made.read(f"{module}.weight_scale"))
        assert torch.equal(values, want[f"{module}.weight"])
    section = json.loads((tmp_path / "out" / "config.json").read_text())["quantization_config"]
    left = " ".join(section.get("modules_to_not_convert", section.get("dynamic", ())))
    for name in ("mlp.gate", "mlp.shared_expert_gate"):
        assert name in left.replace("[.]", ".")


@pytest.mark.parametrize(
    ("plain", "words"),
    [
        ("down_proj", "`mlp.experts.*.gate_proj` of layers 0-1 (engines fuse experts, whose"),
        ("experts", ""),
    ],
    ids=["some", "all"],
)
def test_experts_are_quantized_all_or_none(
    tmp_path: Path, single_config: dict[str, Any], plain: str, words: str
) -> None:
    def choose(spec: Any) -> Any:
        return None if spec.role == "expert" and plain in spec.name else int4_body(spec)

    packed = make_packed(tmp_path / "packed", single_config, choose)
    if words:
        with pytest.raises(FormatError) as caught:
            export(packed, tmp_path / "out", "awq")
        assert words in str(caught.value)
        assert str(caught.value).count("experts.") == 2
    export(packed, tmp_path / "out", "awq", dequantize=True)
    section = json.loads((tmp_path / "out" / "config.json").read_text())["quantization_config"]
    assert section["modules_to_not_convert"] == ["mlp.gate", "mlp.experts", "lm_head"]


def test_shares_that_are_not_normed(tmp_path: Path, single_config: dict[str, Any]) -> None:
    """llama.cpp norms those of Qwen3's experts whatever the file says; mlx-lm reads the key."""
    packed = make_packed(tmp_path / "packed", {**single_config, "norm_topk_prob": False}, int4_body)
    with pytest.raises(FormatError, match="`norm_topk_prob: false`, and llama"):
        export(packed, tmp_path / "gguf", "gguf")
    export(packed, tmp_path / "mlx", "mlx")
    assert json.loads((tmp_path / "mlx" / "config.json").read_text())["norm_topk_prob"] is False
