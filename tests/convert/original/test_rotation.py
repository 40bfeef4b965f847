"""The rotation is orthogonal, gives the same bits everywhere, and leaves the model as it is."""

import json
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import (
    AutoModelForCausalLM,
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedModel,
    Qwen2Config,
    Qwen2ForCausalLM,
    Qwen3_5ForCausalLM,
    Qwen3_5MoeForCausalLM,
    Qwen3_5MoeTextConfig,
    Qwen3_5TextConfig,
    Qwen3MoeConfig,
    Qwen3MoeForCausalLM,
)

from lowbit.convert.mtp.head import NORMS, load_mtp_head
from lowbit.convert.original.model import load_layered_model
from lowbit.convert.original.rotation import Rotation, rotated, rotation_roles
from lowbit.convert.original.weights import Weights, open_weights
from lowbit.convert.plan.method import Method
from lowbit.convert.plan.plan import make_plan
from lowbit.convert.plan.recipe import Recipe
from lowbit.formats.errors import QuantizationError

SIZES = {
    "vocab_size": 96,
    "hidden_size": 96,
    "intermediate_size": 160,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
}


@pytest.mark.parametrize("width", [1, 2, 64, 96, 160, 576, 896])
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


ROTATED = Recipe(method=Method.parse("gptq+rotate"))
HYBRID = {
    **SIZES,
    "head_dim": 32,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 16,
    "linear_value_head_dim": 16,
    "layer_types": ["linear_attention", "full_attention"],
}
EXPERTS = {"num_experts": 5, "num_experts_per_tok": 2, "moe_intermediate_size": 48}


def qwen3_moe() -> PreTrainedModel:
    config = Qwen3MoeConfig(**SIZES, **EXPERTS, head_dim=32, norm_topk_prob=True)
    return Qwen3MoeForCausalLM(config)


def qwen3_5(tied: bool) -> PreTrainedModel:
    return Qwen3_5ForCausalLM(Qwen3_5TextConfig(**HYBRID, tie_word_embeddings=tied))


def qwen3_5_moe() -> PreTrainedModel:
    config = Qwen3_5MoeTextConfig(**HYBRID, **EXPERTS, shared_expert_intermediate_size=64)
    return Qwen3_5MoeForCausalLM(config)


MODELS: dict[str, Callable[[], PreTrainedModel]] = {
    "llama": lambda: llama(tied=False),
    "tied llama": lambda: llama(tied=True),
    "llama with wide heads": lambda: llama(tied=False, head_dim=32),
    "qwen2": qwen2,
    "qwen3_moe": qwen3_moe,
    "qwen3_5": lambda: qwen3_5(tied=False),
    "tied qwen3_5": lambda: qwen3_5(tied=True),
    "qwen3_5_moe": qwen3_5_moe,
}


@torch.no_grad()
def logits(weights: Weights, folder: Path, ids: torch.Tensor) -> torch.Tensor:
    """Logits of transformers' model of the weights, written to a folder."""
    folder.mkdir()
    config = {**weights.checkpoint.config, "tie_word_embeddings": False, "dtype": "float32"}
    (folder / "config.json").write_text(json.dumps(config))
    names = {*weights.checkpoint.tensors, "lm_head.weight"}
    cpu = torch.device("cpu")
    state = {name: weights.read(name, weights.shape(name), cpu).contiguous() for name in names}
    save_file(state, folder / "model.safetensors", metadata={"format": "pt"})
    found: torch.Tensor = AutoModelForCausalLM.from_pretrained(folder).eval()(ids).logits
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
    found = logits(weights, tmp_path / "rotated", ids)
    assert (found - expected).abs().max() < 1e-5 * expected.abs().max()
    embedding = weights.read("model.embed_tokens.weight", (96, 96), torch.device("cpu"))
    assert not torch.equal(
        embedding,
        open_weights(tmp_path).read("model.embed_tokens.weight", (96, 96), torch.device("cpu")),
    )


def mtp_logits(weights: Weights, states: torch.Tensor, text: torch.Tensor) -> torch.Tensor:
    """Logits of a second draft.

    Args:
        weights: of a model with a head for multi-token prediction.
        states: [tokens, h] of the trunk before the final norm's gain, in the original's basis.
        text: [tokens] int64, what follows.
    """
    cpu = torch.device("cpu")
    model = load_layered_model(weights, len(text), cpu)
    head = load_mtp_head(model, cpu)
    assert head is not None
    norm = "model.language_model.norm.weight"
    z = states / states.square().mean(-1, keepdim=True).sqrt()
    z = z if weights.rotation is None else rotated(z)
    h = z * (1 + weights.read(norm, (256,), cpu))
    embeddings = weights.read(model.embedding, (4096, 256), cpu)[text]
    columns = torch.arange(len(text))
    for _ in range(2):
        h = head(head.joined(embeddings, h), columns, columns[:, None] >= columns)
    return h @ weights.read(model.head, (4096, 256), cpu).T


@torch.no_grad()
def test_logits_of_the_bundled_model_stay(tiny: Path, tmp_path: Path) -> None:
    model = AutoModelForCausalLM.from_pretrained(tiny, dtype=torch.float32).eval()
    ids = torch.randint(0, 512, (2, 64), generator=torch.Generator().manual_seed(0))
    expected = model(ids).logits
    weights = open_weights(tiny)
    found = logits(weights.rotated(), tmp_path / "rotated", ids)
    assert (found - expected).abs().max() < 1e-5 * expected.abs().max()


@torch.no_grad()
def test_drafts_of_a_rotated_model_stay(tmp_path: Path, tiny: Path) -> None:
    """Gains of both last norms and of MTP's own are far from one, and from each other."""
    shutil.copytree(tiny.parent / "tiny-qwen3.5", tmp_path / "model")
    file = tmp_path / "model" / "model.safetensors"
    tensors = load_file(file)
    torch.manual_seed(0)
    for name in ("model.language_model.norm.weight", *NORMS):
        spread = torch.randn(tensors[name].shape).mul(0.2).exp()
        tensors[name] = (spread - 1).to(tensors[name])
    save_file(tensors, file, metadata={"format": "pt"})
    weights = open_weights(file.parent)
    states, text = torch.randn(200, 256), torch.randint(0, 4096, (200,))
    original, turned = (mtp_logits(w, states, text) for w in (weights, weights.rotated()))
    cosine = torch.cosine_similarity(original, turned, dim=-1)
    assert cosine.mean() > 0.997  # 0.9989; below 0.989 without any one of the factors


def test_images_are_written_in_the_other_basis(tmp_path: Path, tiny: Path) -> None:
    """The last linear of a vision tower, as real ones have it, writes rotated rows and bias."""
    shutil.copytree(tiny.parent / "tiny-qwen3.5", tmp_path / "model")
    file = tmp_path / "model" / "model.safetensors"
    name = "model.visual.merger.linear_fc2"
    weight, bias = torch.randn(256, 128), torch.randn(256)
    more = {f"{name}.weight": weight, f"{name}.bias": bias}
    save_file({**load_file(file), **more}, file, metadata={"format": "pt"})
    weights, cpu = open_weights(file.parent).rotated(), torch.device("cpu")
    x = torch.randn(5, 128)
    found = x @ weights.read(f"{name}.weight", (256, 128), cpu).T
    found = found + weights.read(f"{name}.bias", (256,), cpu)
    assert torch.allclose(found, rotated(x @ weight.T + bias), atol=1e-4)
    plan = make_plan(weights.checkpoint.config, weights.checkpoint.tensors, ROTATED)
    fates = {step.source.name: step.fate for step in plan.steps}
    assert fates[f"{name}.weight"] == fates[f"{name}.bias"] == "rotated"
    assert fates["model.visual.merger.norm.weight"] == "copied"


def test_an_unknown_vision_tower_is_not_rotated(tiny: Path) -> None:
    source = open_weights(tiny.parent / "tiny-qwen3.5").checkpoint
    with pytest.raises(QuantizationError, match="vision tower has no `merger"):
        make_plan(source.config, source.tensors, ROTATED)
    make_plan(source.config, source.tensors, replace(ROTATED, drop_vision=True))
