"""Llama 3 and Qwen2.5 through the runtime, against transformers on the dequantized weights."""

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import pytest
import torch

import lowbit.runtime as lowbit
from lowbit.formats.architectures.rope import Llama3Rope
from lowbit.formats.layout.scheme import Scheme
from lowbit.runtime.state.rope import rope_tables
from tests.runtime.hub_logits import distance, error_ratio, hub_logits, in_bf16

if TYPE_CHECKING:
    from tests.runtime.conftest import PackedModel

IDS = torch.randint(256, (101,), generator=torch.Generator().manual_seed(3)).tolist()
# At these sizes some frequencies of head_dim 32 are kept, some are scaled, some in between.
LLAMA3: dict[str, Any] = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}
MODELS: dict[str, dict[str, Any]] = {
    "llama3": {"model_type": "llama", "rope_scaling": LLAMA3, "rms_norm_eps": 1e-5},
    "llama3-tied": {"model_type": "llama", "rope_scaling": LLAMA3, "tie_word_embeddings": True},
    "llama-unscaled": {"model_type": "llama", "rope_scaling": None, "head_dim": None},
    "qwen2.5": {"model_type": "qwen2", "head_dim": None},
    "qwen2.5-tied": {"model_type": "qwen2", "head_dim": None, "tie_word_embeddings": True},
}

Make = Callable[..., "PackedModel"]
Reference = Callable[["PackedModel"], Any]


def make_with_large_biases(make_model: Make, name: str) -> "PackedModel":
    packed = make_model(lambda role: Scheme(8 if role == "head" else 4, 32), **MODELS[name])

    def enlarge(tensors: dict[str, torch.Tensor]) -> None:
        for key, tensor in tensors.items():
            if key.endswith(".bias"):
                tensor *= 20  # as large as real ones: a forgotten bias must be seen
                packed.weights[key] = tensor.float()

    packed.rewrite(enlarge)
    return packed


@pytest.mark.parametrize("name", MODELS)
def test_fp32_logits_match_transformers(
    name: str, make_model: Make, reference: Reference, set_chunk: Callable[[int], None]
) -> None:
    packed = make_with_large_biases(make_model, name)
    expected = hub_logits(reference(packed), IDS)
    model = lowbit.load(packed.folder, device="cpu", dtype=torch.float32)
    for chunk in (512, 7, 1) if name == "qwen2.5" else (512, 7):
        set_chunk(chunk)
        assert distance(model.logits(IDS), expected) < 1e-4


def test_bf16_is_no_further_off_than_transformers_in_bf16(
    make_model: Make, reference: Reference
) -> None:
    packed = make_with_large_biases(make_model, "qwen2.5")
    hub = reference(packed)
    exact = hub_logits(hub, IDS)
    rounded = hub_logits(in_bf16(hub), IDS)
    ours = lowbit.load(packed.folder, device="cpu").logits(IDS)
    assert error_ratio(ours, rounded, exact) < 1.15  # 0.90; 0.94 with products in BF16


@pytest.mark.parametrize(
    "parameters",
    [
        LLAMA3,
        LLAMA3 | {"factor": 32.0, "original_max_position_embeddings": 8192},
        LLAMA3 | {"low_freq_factor": 2.0, "high_freq_factor": 2.5},
    ],
)
def test_scaled_frequencies_are_those_of_transformers(parameters: dict[str, Any]) -> None:
    from transformers import LlamaConfig
    from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

    config = LlamaConfig(
        head_dim=64,
        rope_parameters=parameters | {"rope_theta": 500000.0},
        max_position_embeddings=131072,
    )
    positions = torch.tensor([[0, 1, 77, 8191, 8192, 100_000]])
    cos, sin = LlamaRotaryEmbedding(config)(torch.zeros(1), positions)
    scaling = Llama3Rope(
        parameters["factor"],
        parameters["low_freq_factor"],
        parameters["high_freq_factor"],
        parameters["original_max_position_embeddings"],
    )
    rope = rope_tables(100_001, 64, 500000.0, "cpu", scaling)
    plain = rope_tables(100_001, 64, 500000.0, "cpu")
    # an angle of FP32 at position 100,000 is known to 1e5 * 2^-24
    torch.testing.assert_close(rope.cos[positions[0]], cos[0, :, :32], atol=0.01, rtol=0)
    torch.testing.assert_close(rope.sin[positions[0, :5]], sin[0, :5, :32], atol=1e-3, rtol=0)
    assert (plain.cos - rope.cos)[8191].abs().max() > 0.1


@pytest.mark.parametrize("name", ["llama3", "qwen2.5"])
def test_a_converted_checkpoint_runs(
    name: str, make_model: Make, reference: Reference, tmp_path: Any
) -> None:
    from lowbit.convert import Recipe
    from tests.conversions import convert

    source = make_model(lambda role: None, **MODELS[name], hidden_size=128)
    convert(source.folder, tmp_path / "out", Recipe("int4", group_size=32))
    model = lowbit.load(tmp_path / "out", device="cpu", dtype=torch.float32)
    exact = hub_logits(reference(source), IDS)
    assert 1e-4 < distance(model.logits(IDS), exact) < 0.5
