"""The rotation is orthogonal, gives the same bits everywhere, and leaves the model as it is."""

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from transformers import (
    AutoModelForCausalLM,
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedModel,
    Qwen2Config,
    Qwen2ForCausalLM,
)

from lowbit.convert.original.rotation import Rotation, rotated, rotation_roles
from lowbit.convert.original.weights import Weights, open_weights

SIZES = {
    "vocab_size": 96,
    "hidden_size": 96,
    "intermediate_size": 160,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
}


@pytest.mark.parametrize("width", [1, 2, 64, 96, 576, 896, 2560])
def test_orthogonal(width: int) -> None:
    R = rotated(torch.eye(width)).double()
    assert (R @ R.T - torch.eye(width, dtype=torch.float64)).abs().max() < 1e-6
    if width > 2:  # every channel is spread over all others of its power of two, and beyond
        assert R.abs().max() < 2 / (width & -width) ** 0.5


def test_a_loud_channel_is_spread() -> None:
    x = torch.zeros(1, 896)
    x[0, 3] = 1000
    assert rotated(x).abs().max() < 1000 * 1.5 / 896**0.5


def test_same_bits_by_rows_and_by_columns(tiny: Path) -> None:
    weights = open_weights(tiny)
    rotation = Rotation(
        weights.checkpoint, rotation_roles(weights.checkpoint.config, weights.checkpoint.tensors)
    )
    cpu = torch.device("cpu")
    for name in ("mlp.gate_proj", "mlp.down_proj"):
        full = f"model.layers.1.{name}.weight"
        whole = rotation.whole(full, cpu)
        for start, raw in weights.checkpoint.rows(full, 37):
            part = rotation.rows(full, start, raw, cpu)
            assert torch.equal(part, whole[start : start + len(raw)])
    w = weights.checkpoint.read("model.layers.1.mlp.down_proj.weight").float()
    assert torch.equal(whole.T, rotated(w.T.contiguous()))


@pytest.mark.gpu
@pytest.mark.parametrize("width", [64, 96, 896, 4096])
def test_same_bits_on_a_gpu(width: int) -> None:
    x = torch.randn(50, width, generator=torch.Generator().manual_seed(0))
    assert torch.equal(rotated(x.cuda()).cpu(), rotated(x))


def random_gains(model: PreTrainedModel) -> PreTrainedModel:
    """Norms and biases that a mistake would not leave alone."""
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.endswith(("norm.weight", "bias")):
                parameter.uniform_(0.5, 2)
    return model


def llama(tied: bool, **fields: int) -> PreTrainedModel:
    return LlamaForCausalLM(LlamaConfig(**SIZES, tie_word_embeddings=tied, **fields))


def qwen2() -> PreTrainedModel:
    return Qwen2ForCausalLM(Qwen2Config(**SIZES, tie_word_embeddings=False))


MODELS: dict[str, Callable[[], PreTrainedModel]] = {
    "llama": lambda: llama(tied=False),
    "tied llama": lambda: llama(tied=True),
    "llama with wide heads": lambda: llama(tied=False, head_dim=32),
    "qwen2": qwen2,
}


@torch.no_grad()
def logits(weights: Weights, model: PreTrainedModel, ids: torch.Tensor) -> torch.Tensor:
    """Logits of transformers' model with weights read through a rotation."""
    model.config.tie_word_embeddings = False
    turned = type(model)(model.config).eval()
    cpu = torch.device("cpu")
    state = {
        name: weights.read(name, tuple(value.shape), cpu)
        for name, value in turned.state_dict().items()
    }
    turned.load_state_dict(state)
    found: torch.Tensor = turned(ids).logits
    return found


@torch.no_grad()
@pytest.mark.parametrize("name", list(MODELS))
def test_logits_stay(tmp_path: Path, name: str) -> None:
    torch.manual_seed(0)
    model = random_gains(MODELS[name]()).eval()
    model.save_pretrained(tmp_path)
    ids = torch.randint(0, 96, (2, 30))
    expected = model(ids).logits
    weights = open_weights(tmp_path)
    weights = weights.rotated()
    found = logits(weights, model, ids)
    assert (found - expected).abs().max() < 1e-5 * expected.abs().max()
    embedding = weights.read("model.embed_tokens.weight", (96, 96), torch.device("cpu"))
    assert not torch.equal(
        embedding,
        open_weights(tmp_path).read("model.embed_tokens.weight", (96, 96), torch.device("cpu")),
    )


@torch.no_grad()
def test_logits_of_the_bundled_model_stay(tiny: Path) -> None:
    model = AutoModelForCausalLM.from_pretrained(tiny, dtype=torch.float32).eval()
    ids = torch.randint(0, 512, (2, 64), generator=torch.Generator().manual_seed(0))
    expected = model(ids).logits
    weights = open_weights(tiny)
    found = logits(weights.rotated(), model, ids)
    assert (found - expected).abs().max() < 1e-5 * expected.abs().max()
