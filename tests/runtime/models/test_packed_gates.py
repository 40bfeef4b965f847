"""Qwen3.5 folders in which every linear is packed, the two small ones of the gates included.

llm-compressor and AutoRound write them where all linears are targets. Written here with the packer
of compressed-tensors and in GPTQ's layout; expected are transformers' logits on what
compressed-tensors, or the definition of GPTQ, makes of the codes.
"""

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from lowbit.formats.errors import FormatError
from lowbit.formats.foreign.reader import open_native
from lowbit.runtime import load
from lowbit.runtime.models.loader import open_model
from tests.foreign_layouts import draw, gptq
from tests.lanes import in_commands
from tests.short_models import Shorten

IDS = [5, 17, 200, 3, 3, 250, 1]
FILE = "model.safetensors"
IGNORED = ["lm_head", "re:.*visual.*"]
SYMMETRIC = {"num_bits": 4, "strategy": "group", "group_size": 32, "symmetric": True}
SCHEMES: dict[str, dict[str, Any]] = {
    "int4-g32": SYMMETRIC,
    "int4-g32-asymmetric": SYMMETRIC | {"symmetric": False},
    "int8-row": {"num_bits": 8, "strategy": "channel", "symmetric": True},
}


@pytest.fixture(scope="module")
def many_heads(shorten: Shorten, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model with 16 value heads of 16 numbers: GPTQ and zero points need eight rows at least."""
    folder = tmp_path_factory.mktemp("heads") / "model"
    shutil.copytree(shorten("tiny-qwen3.5"), folder)
    config = json.loads((folder / "config.json").read_text())
    config["text_config"] |= {"linear_num_value_heads": 16, "linear_value_head_dim": 16}
    (folder / "config.json").write_text(json.dumps(config))
    tensors = load_file(folder / FILE)
    for name, tensor in tensors.items():
        if name.endswith(("A_log", "dt_bias", "in_proj_a.weight", "in_proj_b.weight")):
            tensors[name] = torch.cat([tensor, tensor * 0.9, tensor * 0.8, tensor * 1.1])
        elif name.endswith("linear_attn.norm.weight"):
            tensors[name] = tensor[:16].clone()
    save_file(tensors, folder / FILE, {"format": "pt"})
    return folder


def is_linear(name: str, tensor: Tensor) -> bool:
    return tensor.dim() == 2 and ".layers." in name


def compressed(weight: Tensor, weights: dict[str, Any]) -> tuple[dict[str, Tensor], Tensor]:
    """Packed tensors of a weight by compressed-tensors, and the weight that they stand for."""
    from compressed_tensors.compressors import PackedQuantizationCompressor
    from compressed_tensors.quantization import QuantizationArgs, QuantizationScheme
    from compressed_tensors.quantization.utils import calculate_qparams

    args = QuantizationArgs(**weights)
    scheme = QuantizationScheme(targets=["Linear"], weights=args)
    groups = weight.float().view(len(weight), -1, weights.get("group_size", weight.shape[1]))
    scale, zero = calculate_qparams(groups.amin(-1), groups.amax(-1), args)
    state = {"weight": weight.float(), "weight_scale": scale}
    if not weights["symmetric"]:
        state["weight_zero_point"] = zero
    packed = PackedQuantizationCompressor.compress(state, scheme)
    wide = PackedQuantizationCompressor.decompress(dict(packed), scheme)["weight"]
    return packed, wide.float()


def make_folders(
    source: Path, folder: Path, section: dict[str, Any], layout: str
) -> tuple[Path, Path]:
    """A packed folder without MTP head, and one with the weights that it stands for in FP32."""
    packed, plain = folder / "packed", folder / "plain"
    for path in (packed, plain):
        shutil.copytree(source, path)
    tensors = {n: t for n, t in load_file(source / FILE).items() if not n.startswith("mtp.")}
    wide, stored = {n: t.float() for n, t in tensors.items()}, dict(tensors)
    for number, (name, tensor) in enumerate(tensors.items()):
        if not is_linear(name, tensor):
            continue
        module = name.removesuffix(".weight")
        del stored[name]
        if layout == "gptq":
            drawn = draw(tensor.shape[0], tensor.shape[1], 32, seed=number)
            stored |= gptq(module, drawn)
            wide[name] = drawn.weight
        else:
            parts, wide[name] = compressed(tensor, section["config_groups"]["g"]["weights"])
            stored |= {f"{module}.{suffix}": part for suffix, part in parts.items()}
    save_file({n: t.contiguous() for n, t in stored.items()}, packed / FILE)
    save_file({n: t.contiguous() for n, t in wide.items()}, plain / FILE, {"format": "pt"})
    config = json.loads((source / "config.json").read_text())
    (packed / "config.json").write_text(json.dumps(config | {"quantization_config": section}))
    return packed, plain


def compressed_section(weights: dict[str, Any]) -> dict[str, Any]:
    return {
        "quant_method": "compressed-tensors",
        "format": "pack-quantized",
        "ignore": IGNORED,
        "config_groups": {"g": {"targets": ["Linear"], "weights": weights}},
    }


def expected_logits(folder: Path) -> Tensor:
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    with torch.no_grad():
        logits: Tensor = model(torch.tensor([IDS])).logits[0]
    return logits


def agree(packed: Path, plain: Path) -> None:
    gates = [name for name in open_native(packed).tensors if "in_proj_a" in name]
    assert gates
    assert all(name.endswith(".weight") for name in gates)
    ours = load(packed, device="cpu", dtype=torch.float32).logits(IDS)
    expected = expected_logits(plain)
    assert (ours - expected).abs().max() < 1e-4 * expected.abs().max()


@in_commands("int4-g32")
@pytest.mark.slow
@pytest.mark.parametrize("weights", SCHEMES.values(), ids=SCHEMES)
@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::UserWarning")
def test_compressed_tensors(tmp_path: Path, many_heads: Path, weights: dict[str, Any]) -> None:
    section = compressed_section(weights)
    agree(*make_folders(many_heads, tmp_path, section, "compressed"))


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::UserWarning")
def test_auto_round_in_the_layout_of_gptq(tmp_path: Path, many_heads: Path) -> None:
    section = {
        "quant_method": "auto-round",
        "packing_format": "auto_round:auto_gptq",
        "bits": 4,
        "group_size": 32,
    }
    agree(*make_folders(many_heads, tmp_path, section, "gptq"))


class TestHostile:
    @pytest.fixture
    def packed(self, tmp_path: Path, many_heads: Path) -> Path:
        section = compressed_section(SYMMETRIC)
        return make_folders(many_heads, tmp_path, section, "compressed")[0]

    def damage(self, folder: Path, suffix: str, new: Tensor | None) -> str:
        tensors = load_file(folder / FILE)
        name = next(name for name in tensors if name.endswith(f"in_proj_a.{suffix}"))
        del tensors[name]
        save_file(tensors | ({} if new is None else {name: new}), folder / FILE)
        return name

    @pytest.mark.parametrize(
        ("suffix", "new"),
        [
            ("weight_scale", None),
            ("weight_shape", None),
            ("weight_scale", torch.ones(16, 3)),
            ("weight_scale", torch.ones(16, 8, dtype=torch.int32)),
            ("weight_packed", torch.ones(16, 31, dtype=torch.int32)),
            ("weight_packed", torch.ones(16, 32, dtype=torch.int64)),
            ("weight_shape", torch.tensor([16, 0])),
            ("weight_shape", torch.tensor([16])),
            ("weight_shape", torch.tensor([16.0, 256.0])),
            ("weight_shape", torch.tensor([8, 256])),
        ],
    )
    def test_tensors_that_do_not_fit(self, packed: Path, suffix: str, new: Tensor | None) -> None:
        name = self.damage(packed, suffix, new)
        with pytest.raises(FormatError) as caught:
            open_model(packed)
        assert name.rpartition(".")[0] in str(caught.value)

    def test_config_that_ignores_them(self, packed: Path) -> None:
        config = json.loads((packed / "config.json").read_text())
        config["quantization_config"]["ignore"].append("re:.*in_proj_a$")
        (packed / "config.json").write_text(json.dumps(config))
        with pytest.raises(FormatError, match=r"in_proj_a` is packed, but config\.json leaves it"):
            open_model(packed)
