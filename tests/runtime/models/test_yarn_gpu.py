"""YaRN on a GPU, whose kernels read the same tables: beside FP32 on a CPU, near and far."""

from collections.abc import Callable
from typing import Any

import pytest
import torch

import lowbit.runtime as lowbit
from lowbit.formats.layout.scheme import Scheme

pytestmark = pytest.mark.gpu

ORIGINAL = 200
IDS = torch.randint(256, (780,), generator=torch.Generator().manual_seed(5)).tolist()
YARN: dict[str, Any] = {
    "rope_type": "yarn",
    "factor": 4.0,
    "original_max_position_embeddings": ORIGINAL,
    "attention_factor": 2.0,  # a kernel that did without would be far off
}
SIZES: dict[str, Any] = {
    "hidden_size": 256,
    "intermediate_size": 512,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 64,
    "max_position_embeddings": ORIGINAL,
}
ROPES: dict[str, dict[str, Any]] = {
    "make_model": {"rope_scaling": YARN},
    "make_qwen3_5": {
        "rope_parameters": YARN | {"rope_theta": 10000.0, "partial_rotary_factor": 0.25}
    },
}


@pytest.mark.parametrize("make", ROPES)
def test_logits_are_as_far_off_as_those_of_bf16_on_a_cpu(
    make: str, request: pytest.FixtureRequest, set_chunk: Callable[[int], None]
) -> None:
    packed = request.getfixturevalue(make)(lambda role: Scheme(8, 128), **SIZES, **ROPES[make])
    exact = lowbit.load(packed.folder, device="cpu", dtype=torch.float32).logits(IDS).double()
    rounded = lowbit.load(packed.folder, device="cpu").logits(IDS).double() - exact
    model = lowbit.load(packed.folder, device="cuda")
    assert model.context == 4 * ORIGINAL
    for chunk in (1024, 100, 12, 1):  # the kernels of prompts, of drafts and of one token
        set_chunk(chunk)
        off = model.logits(IDS).cpu().double() - exact
        for part in (slice(ORIGINAL), slice(ORIGINAL, None)):
            assert off[part].norm() < 1.25 * rounded[part].norm()
