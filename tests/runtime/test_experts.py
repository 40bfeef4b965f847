"""Mixtures of experts through the runtime, against transformers on the dequantized weights."""

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import pytest
import torch
from torch import Tensor

import lowbit.runtime as lowbit
from lowbit.formats.layout.scheme import Scheme

if TYPE_CHECKING:
    from tests.runtime.conftest import PackedModel

IDS = torch.randint(256, (83,), generator=torch.Generator().manual_seed(3)).tolist()
Make = Callable[..., "PackedModel"]
Reference = Callable[["PackedModel"], Any]

MODELS: dict[str, dict[str, Any]] = {
    "single": {"hybrid": False},
    "hybrid": {"hybrid": True},
    "single-8-of-40": {
        "hybrid": False,
        "num_experts": 40,
        "num_experts_per_tok": 8,
        "schemes": lambda role: Scheme(8, 32) if role == "expert" else None,
    },
    "hybrid-1-of-3-tied-dense": {
        "hybrid": True,
        "num_experts": 3,
        "num_experts_per_tok": 1,
        "tie_word_embeddings": True,
        "schemes": lambda role: None,
    },
    "hybrid-all": {"hybrid": True, "num_experts_per_tok": 6, "moe_intermediate_size": 96},
}


def hub_logits(hub: Any, ids: list[int]) -> Tensor:
    with torch.no_grad():
        logits: Tensor = hub(torch.tensor([ids])).logits[0]
    return logits


def distance(got: Tensor, expected: Tensor) -> float:
    return float((got.double() - expected.double()).abs().max() / expected.abs().max())


@pytest.mark.parametrize("name", MODELS)
def test_fp32_logits_match_transformers_whatever_the_chunks(
    name: str, make_experts: Make, reference: Reference, set_chunk: Callable[[int], None]
) -> None:
    packed = make_experts(**MODELS[name])
    expected = hub_logits(reference(packed), IDS)
    model = lowbit.load(packed.folder, device="cpu", dtype=torch.float32)
    for chunk in (512, 37, 7, 1):
        set_chunk(chunk)
        assert distance(model.logits(IDS), expected) < 1e-4


@pytest.mark.parametrize("hybrid", [False, True])
def test_bf16_is_no_further_off_than_transformers_in_bf16(
    hybrid: bool, make_experts: Make, reference: Reference
) -> None:
    packed = make_experts(hybrid)
    hub = reference(packed)
    right = hub_logits(hub, IDS).double()
    rounded = hub_logits(hub.bfloat16(), IDS).double()
    ours = lowbit.load(packed.folder, device="cpu").logits(IDS).double()
    print((ours - right).norm(), (rounded - right).norm())
    assert (ours - right).norm() < 1.25 * (rounded - right).norm()
