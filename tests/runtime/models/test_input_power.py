"""Scales weighted by the power of the inputs, at load; oracles: transformers and FP64 errors."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
import torch
from click.testing import CliRunner
from torch import Tensor, nn

from lowbit.formats.errors import QuantizationError
from lowbit.formats.safetensors.checkpoint import Checkpoint
from lowbit.runtime import load
from lowbit.runtime.cli.main import main
from lowbit.runtime.models.input_power import TEXTS, calibration_ids, input_power
from lowbit.runtime.models.loader import load_decoder, open_model
from lowbit.runtime.text.tokenizer import load_tokenizer
from tests.short_models import Shorten

if TYPE_CHECKING:
    from tests.runtime.conftest import PackedModel

MODELS = Path(__file__).parents[3] / "examples" / "models"
IDS = torch.randint(256, (150,), generator=torch.Generator().manual_seed(3)).tolist()

Make = Callable[..., "PackedModel"]


def dense(role: str) -> None:
    return None


def expected_power(hub: nn.Module, ids: list[int]) -> dict[str, Tensor]:
    """Mean square of every linear's input in transformers."""
    power: dict[str, Tensor] = {}

    def note(name: str) -> Callable[..., None]:
        def hook(module: nn.Module, inputs: tuple[Tensor, ...]) -> None:
            power[name] = inputs[0][0].double().square().mean(0)

        return hook

    for name, module in hub.named_modules():
        if isinstance(module, nn.Linear):
            module.register_forward_pre_hook(note(name))
    with torch.no_grad():
        hub(torch.tensor([ids]))
    return power


@pytest.mark.parametrize("family", ["make_model", "make_qwen3_5"])
def test_power_is_that_of_transformers(
    family: str, request: pytest.FixtureRequest, reference: Callable[["PackedModel"], Any]
) -> None:
    model = request.getfixturevalue(family)(dense)
    expected = expected_power(reference(model), IDS)
    power = input_power(open_model(model.folder), IDS, "cpu", torch.float32)
    linears = {spec.module for spec in open_model(model.folder).specs if spec.quantizable}
    assert linears - {"lm_head"} <= power.keys()
    for name in linears - {"lm_head"}:
        torch.testing.assert_close(power[name].double(), expected[name], rtol=1e-3, atol=1e-6)


@pytest.fixture
def uneven(make_model: Make) -> "PackedModel":
    """A BF16 model some of whose channels are far stronger than others."""
    model = make_model(dense, hidden_size=128, intermediate_size=256, head_dim=32)

    def strengthen(tensors: dict[str, Tensor]) -> None:
        for name, tensor in tensors.items():
            if name.endswith("layernorm.weight"):
                tensor[::16] *= 8

    model.rewrite(strengthen)
    return model


def output_errors(folder: Path, power: dict[str, Tensor] | None) -> dict[str, float]:
    """Sum over a linear's weights of power times squared error, in FP64."""
    seen = power or input_power(open_model(folder), IDS, "cpu", torch.float32)
    quantized = open_model(folder, "int4", 32, power=power)
    exact = open_model(folder)
    errors = {}
    for module, scheme in quantized.schemes.items():
        if scheme is not None and scheme.bits == 4:
            w = exact.checkpoint.read(f"{module}.weight").double()
            made = dequantized(quantized.checkpoint, module, 4)
            errors[module] = float(((made - w).square() * seen[module].double()).sum())
    return errors


def dequantized(checkpoint: Checkpoint, module: str, bits: int) -> Tensor:
    from lowbit.formats.layout.packing import dequantize, unpack

    packed, scale = (checkpoint.read(f"{module}.weight_{part}") for part in ("packed", "scale"))
    codes = unpack(packed, bits, packed.shape[1] * 32 // bits)
    return dequantize(codes, scale).double()


def test_weighted_scales_lower_the_error_of_every_output(uneven: "PackedModel") -> None:
    power = input_power(open_model(uneven.folder), IDS, "cpu", torch.float32)
    searched, weighted = (output_errors(uneven.folder, given) for given in (None, power))
    assert searched.keys() == weighted.keys()
    assert all(weighted[name] <= searched[name] * (1 + 1e-6) for name in searched)
    assert sum(weighted.values()) < 0.97 * sum(searched.values())


def test_weights_are_read_once_and_one_at_a_time(
    uneven: "PackedModel", monkeypatch: pytest.MonkeyPatch
) -> None:
    reads: list[str] = []
    whole = Checkpoint.read_into

    def read_into(self: Checkpoint, name: str, out: Tensor) -> None:
        reads.append(name)
        whole(self, name, out)

    monkeypatch.setattr(Checkpoint, "read_into", read_into)
    input_power(open_model(uneven.folder), IDS, "cpu", torch.bfloat16)
    linears = [name for name in reads if "_proj" in name]
    assert len(linears) == len(set(linears)) > 10
    assert "lm_head.weight" not in reads


def test_power_that_is_not_finite_is_refused(
    uneven: "PackedModel", monkeypatch: pytest.MonkeyPatch
) -> None:
    def overflow(tensors: dict[str, Tensor]) -> None:
        tensors["model.layers.0.self_attn.v_proj.weight"][:] = 3e38

    uneven.rewrite(overflow)
    with pytest.raises(QuantizationError, match="is NaN or infinite on the calibration text"):
        input_power(open_model(uneven.folder), IDS, "cpu", torch.bfloat16)


def test_text_is_bounded(uneven: "PackedModel") -> None:
    data = Path(__file__).parents[3] / "runtime" / "models" / "data"
    assert sorted(TEXTS) == sorted(path.name for path in data.iterdir())
    assert sum((data / name).stat().st_size for name in TEXTS) < 10_000
    opened = open_model(uneven.folder)
    ids = calibration_ids(load_tokenizer(uneven.folder), opened)
    assert len(ids) == opened.config.max_position_embeddings == 256


def test_command_says_what_it_measures(shorten: Shorten) -> None:
    options = ("--quantize", "int4", "--method", "weighted", "--device", "cpu", "--context", "64")
    command = ["generate", str(shorten("tiny-qwen3")), "Once", "--max-new-tokens", "2", *options]
    done = CliRunner().invoke(main, command)
    assert done.exit_code == 0, done.output
    assert "weighted: measuring the inputs of every linear on a bundled text" in done.stderr
    assert "quantized at load: int4 weighted, " in done.stderr


@pytest.mark.gpu
@pytest.mark.parametrize("name", ["tiny-qwen3", "tiny-qwen3.5"])
def test_power_on_a_gpu_is_that_of_the_cpu(name: str) -> None:
    opened = open_model(MODELS / name)
    ids = calibration_ids(load_tokenizer(MODELS / name), opened)
    on_cpu = input_power(opened, ids, "cpu", torch.bfloat16)
    on_gpu = input_power(opened, ids, "cuda", torch.bfloat16)
    assert on_cpu.keys() == on_gpu.keys()
    for module, power in on_gpu.items():
        assert power.device.type == "cuda"
        difference = (power.cpu() - on_cpu[module]).norm() / on_cpu[module].norm()
        assert difference < 0.02, module


@pytest.mark.gpu
@pytest.mark.parametrize("name", ["tiny-qwen3", "tiny-qwen3.5"])
def test_weighted_on_a_gpu(name: str) -> None:
    model = load(MODELS / name, device="cuda", context=64, quantize="int4", method="weighted")
    made = model.generate("Once upon", raw=True, max_new_tokens=8)
    assert len(made.token_ids) == 8
    plain = load_decoder(open_model(MODELS / name), "cuda", torch.bfloat16, 64)
    packed = model.engine.decoder.config
    assert replace(plain.config, tie_word_embeddings=packed.tie_word_embeddings) == packed
