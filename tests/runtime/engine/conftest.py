"""A small Qwen3.5 for prompts with images, transformers beside it, and the chunks that run."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import lowbit.runtime as lowbit
from lowbit.runtime.engine.chunks import Chunks
from lowbit.runtime.state.step import StepPlan
from tests.runtime.conftest import PackedModel
from tests.runtime.image_prompts import Hub, hub_of
from tests.short_models import Shorten


@pytest.fixture(scope="session")
def short_hybrid(shorten: Shorten) -> Path:
    """The bundled Qwen3.5 with one layer of each kind."""
    return shorten("tiny-qwen3.5")


@pytest.fixture
def small(make_qwen3_5: Callable[..., PackedModel]) -> PackedModel:
    """Attention in two layers of three, so that what the first rotates matters to the second."""
    kinds = ["full_attention", "linear_attention", "full_attention"]
    more = {"mtp_num_hidden_layers": 1, "max_position_embeddings": 512}
    return make_qwen3_5(layer_types=kinds, **more)


@pytest.fixture
def hub(small: PackedModel) -> Hub:
    return hub_of(small)


@pytest.fixture
def fresh(small: PackedModel) -> Callable[..., lowbit.Model]:
    """`fresh(**options)`: the model with an empty cache."""

    def load(**options: Any) -> lowbit.Model:
        defaults: dict[str, Any] = {"dtype": torch.float32, "context": 400, "max_sequences": 4}
        return lowbit.load(small.folder, device="cpu", **defaults | options)

    return load


@pytest.fixture
def packs(monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, ...]]:
    """Chunks that run, by the tokens of their sequences."""
    found: list[tuple[int, ...]] = []
    run = Chunks.run

    def noted(chunks: Chunks, plan: StepPlan, *given: Any) -> Tensor:
        found.append(tuple(span.count for span in plan.spans))
        return run(chunks, plan, *given)

    monkeypatch.setattr(Chunks, "run", noted)
    return found
