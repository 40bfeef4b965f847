"""Logits of transformers, in FP32 and in BF16, and how far others are from them."""

from typing import Any

import torch
from torch import Tensor


def hub_logits(hub: Any, ids: list[int]) -> Tensor:
    """Logits of a model of transformers after every token: [T, V]."""
    with torch.no_grad():
        logits: Tensor = hub(torch.tensor([ids], device=hub.device)).logits[0]
    return logits


def distance(got: Tensor, expected: Tensor) -> float:
    """Largest difference, as a share of the largest expected logit."""
    return float((got.double() - expected.double()).abs().max() / expected.abs().max())


def in_bf16(module: Any) -> Any:
    """Round a module of transformers, weights and buffers, to BF16 in place.

    Frequencies of rotations stay in FP32, as they do where transformers loads a model in BF16.
    `bfloat16()` alone rounds them too, which adds an error that grows with the position.
    """
    kept = {name: each for name, each in module.named_buffers() if name.endswith("inv_freq")}
    module.bfloat16()
    for name, frequencies in kept.items():
        owner, _, attribute = name.rpartition(".")
        setattr(module.get_submodule(owner), attribute, frequencies)
    return module


def error_ratio(ours: Tensor, rounded: Tensor, exact: Tensor) -> float:
    """Our error beside that of transformers in BF16, both by the norm over all logits."""
    off = [(each.double().cpu() - exact.double()).norm() for each in (ours, rounded)]
    return float(off[0] / off[1])
