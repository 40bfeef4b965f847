"""Folders of other tools are served as they are: llm-compressor, GPTQ, AWQ."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from lowbit.formats.architectures import tensor_table
from lowbit.formats.errors import FormatError
from lowbit.runtime import load
from lowbit.runtime.models.loader import open_model
from lowbit.runtime.weights.linear import Linear, PackedLinear
from lowbit.runtime.weights.weights import Weights
from tests.foreign_layouts import awq, draw, gptq
from tests.lanes import in_commands

if TYPE_CHECKING:
    from tests.runtime.conftest import PackedModel

ROOT = Path(__file__).parents[3]
BUNDLED = ROOT / "examples" / "models" / "tiny-qwen3"
IDS = [5, 17, 200, 3, 3, 250, 1]
UP = "model.layers.1.mlp.up_proj"


def linears(folder: Path, device: str = "cpu") -> dict[str, Linear]:
    """Every quantized linear as the runtime loads it, before the backend makes its own of it."""
    opened = open_model(folder)
    weights = Weights(opened.checkpoint, opened.schemes, device, torch.float32, lambda w, *_: w)
    return {m: weights.linear(m) for m, scheme in opened.schemes.items() if scheme is not None}


def write_compressed(folder: Path, weights: dict[str, Any], dtype: torch.dtype) -> Any:
    """Quantize a random Qwen3 with compressed-tensors' own scales, packer and config writer.

    Returns an FP32 model of the same shape.
    """
    from compressed_tensors.compressors import ModelCompressor
    from compressed_tensors.quantization import (
        QuantizationArgs,
        QuantizationConfig,
        QuantizationScheme,
        QuantizationStatus,
        apply_quantization_config,
    )
    from compressed_tensors.quantization.utils import calculate_qparams
    from transformers import Qwen3Config, Qwen3ForCausalLM

    torch.manual_seed(0)
    config = Qwen3Config(
        vocab_size=4096,
        hidden_size=64,
        intermediate_size=96,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=32,
        max_position_embeddings=256,
    )
    model = Qwen3ForCausalLM(config).to(dtype)
    scheme = QuantizationScheme(targets=["Linear"], weights=QuantizationArgs(**weights))
    apply_quantization_config(
        model, QuantizationConfig(config_groups={"group_0": scheme}, ignore=["lm_head"])
    )
    for module in model.modules():
        if hasattr(module, "weight_scale"):
            rows = module.weight.detach().float()
            groups = rows.view(len(rows), module.weight_scale.shape[1], -1)
            scale, zero = calculate_qparams(
                groups.amin(-1), groups.amax(-1), module.quantization_scheme.weights
            )
            module.weight_scale.data.copy_(scale)
            if hasattr(module, "weight_zero_point"):
                module.weight_zero_point.data.copy_(zero)
            module.quantization_status = QuantizationStatus.FROZEN
    compressor = ModelCompressor.from_pretrained_model(model)
    compressor.compress_model(model)
    model.save_pretrained(folder)
    compressor.update_config(folder)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(BUNDLED / name, folder)
    return Qwen3ForCausalLM(config).float()


def decompressed(folder: Path, weights: dict[str, Any]) -> dict[str, Tensor]:
    """Weights in FP32 by compressed-tensors' own reader, which rounds to the dtype of the scales.

    transformers would do, but for its loader, which takes packed zero points for misshapen ones.
    """
    from compressed_tensors.compressors import PackedQuantizationCompressor
    from compressed_tensors.quantization import QuantizationArgs, QuantizationScheme

    scheme = QuantizationScheme(targets=["Linear"], weights=QuantizationArgs(**weights))
    parts: dict[str, dict[str, Tensor]] = {}
    for name, tensor in load_file(folder / "model.safetensors").items():
        module, _, suffix = name.rpartition(".")
        wide = tensor.float() if tensor.is_floating_point() else tensor
        parts.setdefault(module, {})[suffix] = wide
    found = {}
    for module, tensors in parts.items():
        if "weight_packed" in tensors:
            tensors = PackedQuantizationCompressor.decompress(tensors, scheme)
        found[f"{module}.weight"] = tensors["weight"]
    return found


GROUPS = {"num_bits": 4, "strategy": "group", "group_size": 32}
COMPRESSED: dict[str, tuple[dict[str, Any], torch.dtype]] = {
    "int4-g32": (GROUPS | {"symmetric": True}, torch.bfloat16),
    "int4-g32-fp16": (GROUPS | {"symmetric": True}, torch.float16),
    "int3-g32": (GROUPS | {"num_bits": 3}, torch.bfloat16),
    "int2-g32": (GROUPS | {"num_bits": 2}, torch.float16),
    "int3-g32-asymmetric": (GROUPS | {"num_bits": 3, "symmetric": False}, torch.bfloat16),
    "int4-g32-asymmetric": (GROUPS | {"symmetric": False}, torch.bfloat16),
    "int4-channel-asymmetric": (
        {"num_bits": 4, "symmetric": False, "strategy": "channel"},
        torch.float16,
    ),
    "int8-channel": ({"num_bits": 8, "symmetric": True, "strategy": "channel"}, torch.bfloat16),
    "int8-g32": (GROUPS | {"num_bits": 8, "symmetric": True}, torch.bfloat16),
}


@in_commands("int4-g32", "int3-g32", "int8-channel")
@pytest.mark.slow
@pytest.mark.parametrize(("weights", "dtype"), COMPRESSED.values(), ids=COMPRESSED)
@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::UserWarning")
def test_compressed_tensors(tmp_path: Path, weights: dict[str, Any], dtype: torch.dtype) -> None:
    """Weights equal to compressed-tensors' own decompression bit for bit, logits to rounding."""
    model = write_compressed(tmp_path, weights, dtype)
    assert not (tmp_path / "lowbit.json").exists()
    theirs = decompressed(tmp_path, weights)
    found = linears(tmp_path)
    assert len(found) == 14
    for module, linear in found.items():
        assert torch.equal(linear.dequantized(), theirs[f"{module}.weight"])
    ours = load(tmp_path, device="cpu", dtype=torch.float32).logits(IDS)
    model.load_state_dict(theirs)
    with torch.no_grad():
        expected = model(torch.tensor([IDS])).logits[0]
    assert (ours - expected).abs().max() < 1e-4 * expected.abs().max()


@pytest.fixture
def make_foreign(make_model: "Callable[..., PackedModel]") -> Callable[..., tuple[Path, Path]]:
    """`make_foreign(layout, symmetric, bits)`: a GPTQ or AWQ folder, and its weights in FP32."""

    def make(layout: str, symmetric: bool = True, bits: int = 4) -> tuple[Path, Path]:
        foreign, plain = make_model(lambda role: None), make_model(lambda role: None)
        packed: dict[str, Tensor] = {}
        meaning: dict[str, Tensor] = {}
        for number, spec in enumerate(tensor_table(foreign.config)):
            if spec.quantizable and spec.role != "head":
                N, K = spec.shape
                q = draw(N, K, 32, bits, symmetric, seed=number)
                write = gptq if layout == "gptq" else awq
                packed |= write(spec.module, q)
                meaning[spec.name] = q.weight
        section: dict[str, Any] = {"quant_method": layout, "bits": bits, "group_size": 32}
        foreign.reconfigure(lambda config: config.update(quantization_config=section))

        def pack(tensors: dict[str, Tensor]) -> None:
            for name in meaning:
                del tensors[name]
            tensors.update(packed)

        foreign.rewrite(pack)
        plain.rewrite(lambda tensors: tensors.update(meaning))
        return foreign.folder, plain.folder

    return make


LAYOUTS = [("gptq", True, 4), ("gptq", True, 8), ("gptq", False, 4), ("awq", True, 4)]
LAYOUTS += [("awq", False, 4)]


@pytest.mark.parametrize(("layout", "symmetric", "bits"), LAYOUTS)
def test_gptq_and_awq(
    make_foreign: Callable[..., tuple[Path, Path]], layout: str, symmetric: bool, bits: int
) -> None:
    """In FP32 the logits of the dequantized weights, bit for bit; in BF16 close to them."""
    folder, plain = make_foreign(layout, symmetric, bits)
    expected = load(plain, device="cpu", dtype=torch.float32).logits(IDS)
    assert torch.equal(load(folder, device="cpu", dtype=torch.float32).logits(IDS), expected)
    rounded = load(plain, device="cpu", dtype=torch.bfloat16).logits(IDS)
    assert torch.equal(load(folder, device="cpu", dtype=torch.bfloat16).logits(IDS), rounded)


@pytest.mark.parametrize(("layout", "symmetric", "bits"), LAYOUTS)
def test_what_kernels_get(
    make_foreign: Callable[..., tuple[Path, Path]], layout: str, symmetric: bool, bits: int
) -> None:
    """Codes as wide as stored, or 8 bits where there are zero points; scales as stored."""
    folder, plain = make_foreign(layout, symmetric, bits)
    meaning = load_file(plain / "model.safetensors")
    opened = open_model(folder)
    size = 0
    for module, linear in linears(folder).items():
        assert isinstance(linear, PackedLinear)
        assert (linear.bits, linear.group_size) == (bits if symmetric else 8, 32)
        assert linear.scales.dtype == torch.float16
        assert torch.equal(linear.dequantized(), meaning[f"{module}.weight"])
        size += linear.size_bytes
    dense = sum(
        2 * torch.Size(spec.shape).numel()
        for spec in opened.specs
        if opened.schemes.get(spec.module) is None
    )
    assert opened.weight_bytes("cuda", torch.bfloat16) == size + dense


@pytest.mark.gpu
@pytest.mark.parametrize(("layout", "symmetric", "bits"), LAYOUTS)
def test_a_gpu_gets_the_same_codes(
    make_foreign: Callable[..., tuple[Path, Path]], layout: str, symmetric: bool, bits: int
) -> None:
    folder, _ = make_foreign(layout, symmetric, bits)
    there = linears(folder, "cuda")
    for module, here in linears(folder).items():
        moved = there[module]
        assert isinstance(here, PackedLinear)
        assert isinstance(moved, PackedLinear)
        assert torch.equal(moved.codes.cpu(), here.codes)
        assert torch.equal(moved.scales.cpu(), here.scales)


def test_blocks_of_rows_join(
    make_foreign: Callable[..., tuple[Path, Path]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Reading a few rows at a time gives what reading all does."""
    for layout, symmetric, bits in LAYOUTS:
        folder, _ = make_foreign(layout, symmetric, bits)
        whole = linears(folder)
        with monkeypatch.context() as patch:
            patch.setattr("lowbit.runtime.weights.weights.DERIVED_BYTES", 32 * 9)
            parts = linears(folder)
        for module, linear in whole.items():
            part = parts[module]
            assert isinstance(linear, PackedLinear)
            assert isinstance(part, PackedLinear)
            assert torch.equal(part.codes, linear.codes)


def test_biases_of_zeros_are_no_biases(
    make_foreign: Callable[..., tuple[Path, Path]],
) -> None:
    """Old GPTQ writers give every linear a bias; one that is not zero is another architecture."""
    folder, _ = make_foreign("gptq")
    before = load(folder, device="cpu").logits(IDS)
    path = folder / "model.safetensors"
    tensors = load_file(path)
    save_file(tensors | {f"{UP}.bias": torch.zeros(96, dtype=torch.float16)}, path)
    assert torch.equal(load(folder, device="cpu").logits(IDS), before)
    save_file(tensors | {f"{UP}.bias": torch.ones(96, dtype=torch.float16)}, path)
    with pytest.raises(FormatError, match=f"`{UP}.bias`: the architecture has no such tensor"):
        load(folder, device="cpu")


def test_another_architecture_is_named(
    make_foreign: Callable[..., tuple[Path, Path]],
) -> None:
    folder, _ = make_foreign("awq")
    path = folder / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"intermediate_size": 128}))
    with pytest.raises(
        FormatError, match=r"weight_packed`: expected shape \[128, 8\], got \[96, 8\]"
    ):
        load(folder, device="cpu")
