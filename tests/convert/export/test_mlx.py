"""MLX files against its affine arithmetic, in NumPy and where it is installed by MLX itself."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file

from lowbit.convert.export.export import export
from lowbit.formats.errors import FormatError
from lowbit.formats.layout.scheme import Scheme
from tests.convert.export.packed_folders import int4_body, mixed
from tests.oracle import dequantized_weights


def dequantized(tensors: dict[str, Any], module: str) -> np.ndarray[Any, Any]:
    words = tensors[f"{module}.weight"].view(torch.int32).numpy().view(np.uint32)
    s, b = (tensors[f"{module}.{name}"].float().numpy() for name in ("scales", "biases"))
    bits = 4 if module.count("lm_head") + module.count("out_proj") == 0 else 8
    u = words[:, :, None] >> np.arange(0, 32, bits, dtype=np.uint32) & np.uint32(2**bits - 1)
    u = u.reshape(len(words), -1).astype(np.float32)
    group = u.shape[1] // s.shape[1]
    values: np.ndarray[Any, Any] = u * s.repeat(group, axis=1) + b.repeat(group, axis=1)
    return values


def named(name: str) -> str:
    """mlx-lm's name of a Qwen3.5 tensor."""
    return "language_model." + name.replace("model.language_model.", "model.")


def test_values_are_those_of_the_packed_folder(tmp_path: Path, pack_hybrid: Any) -> None:
    packed = pack_hybrid(mixed)
    done = export(packed, tmp_path / "out", "mlx")
    file = tmp_path / "out" / "model.safetensors"
    with safe_open(file, "pt") as opened:
        assert opened.metadata() == {"format": "mlx"}
    written = load_file(file)
    linears = 0
    for name, weight in dequantized_weights(packed).items():
        module = named(name).removesuffix(".weight")
        if name.startswith("mtp."):
            assert named(name) not in written
        elif f"{module}.scales" in written:
            assert written[f"{module}.weight"].dtype == torch.uint32
            np.testing.assert_array_equal(dequantized(written, module), weight.numpy())
            linears += 1
        elif name.endswith("conv1d.weight"):
            assert torch.equal(written[named(name)].float(), weight.movedim(2, 1))
        elif name.endswith("norm.weight") and "linear_attn" not in name:
            assert torch.equal(written[named(name)], weight.to(torch.bfloat16) + 1)
        else:
            assert torch.equal(written[named(name)].float(), weight)
    assert linears == done.proof.linears == 26
    assert not [name for name in written if "visual" in name]
    assert [what.split(":")[0] for what in done.dropped] == [
        "the vision tower",
        "multi-token prediction",
    ]
    config = json.loads((tmp_path / "out" / "config.json").read_text())
    section = config["quantization"]
    assert config["quantization_config"] == section
    eight = {"group_size": 32, "bits": 8, "mode": "affine"}
    assert section.pop("bits") == 4
    assert section.pop("group_size") == 32
    assert section.pop("mode") == "affine"
    outs = {f"language_model.model.layers.{i}.linear_attn.out_proj": eight for i in range(3)}
    assert section == {**outs, "language_model.lm_head": eight}
    assert config["text_config"]["tie_word_embeddings"] is False


def test_wide_groups_repeat_their_scale(tmp_path: Path, pack_dense: Any) -> None:
    packed = pack_dense(lambda spec: None if spec.role == "head" else Scheme(4, None))
    export(packed, tmp_path / "out", "mlx")
    written = load_file(tmp_path / "out" / "model.safetensors")
    name = "model.layers.0.mlp.down_proj"  # rows of 96 = 3 groups of 32
    assert written[f"{name}.scales"].shape == (64, 3)
    np.testing.assert_array_equal(
        dequantized(written, name), dequantized_weights(packed)[f"{name}.weight"].numpy()
    )


def test_a_bias_that_overflows_is_refused(tmp_path: Path, pack_dense: Any) -> None:
    def edit(tensors: dict[str, torch.Tensor]) -> None:
        tensors["model.layers.0.mlp.up_proj.weight_scale"][0, 0] = 3e38

    packed = pack_dense(int4_body, edit)
    with pytest.raises(FormatError, match=r"`model.layers.0.mlp.up_proj`: the scale"):
        export(packed, tmp_path / "out", "mlx")


def test_scales_that_fp16_cannot_hold_stay(tmp_path: Path, pack_dense: Any) -> None:
    def edit(tensors: dict[str, torch.Tensor]) -> None:
        tensors["model.layers.0.mlp.up_proj.weight_scale"].mul_(1e-6)

    packed = pack_dense(int4_body, edit)
    assert export(packed, tmp_path / "out", "mlx").proof.largest_difference == 0.0


def test_irregular_layers_are_refused(tmp_path: Path, pack_hybrid: Any) -> None:
    full, linear = "full_attention", "linear_attention"
    packed = pack_hybrid(int4_body, layer_types=[full, linear, linear, full])
    with pytest.raises(FormatError, match="regular distances"):
        export(packed, tmp_path / "out", "mlx")


@pytest.mark.parametrize("bits", [4, 8])
def test_mlx_itself_reads_the_values(tmp_path: Path, pack_dense: Any, bits: int) -> None:
    mx = pytest.importorskip("mlx.core")
    packed = pack_dense(lambda spec: Scheme(bits, 32))
    export(packed, tmp_path / "out", "mlx")
    loaded = mx.load(str(tmp_path / "out" / "model.safetensors"))
    mx.set_default_device(mx.cpu)
    for name, weight in dequantized_weights(packed).items():
        module = name.removesuffix(".weight")
        if f"{module}.scales" not in loaded:
            continue
        scales, biases = (loaded[f"{module}.{x}"].astype(mx.float32) for x in ("scales", "biases"))
        made = mx.dequantize(loaded[f"{module}.weight"], scales, biases, group_size=32, bits=bits)
        np.testing.assert_array_equal(np.array(made), weight.numpy())
