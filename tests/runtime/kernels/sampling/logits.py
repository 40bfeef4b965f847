"""Logits and parameters for the tests of kernels that choose tokens."""

import torch
from torch import Tensor

from lowbit.runtime.state.sampling_params import SamplingParams

VOCABULARY = 3001  # three blocks, no multiple of 32; the logits have padding beyond
PADDED = 3100
STRICT = SamplingParams(
    repetition_penalty=1.3,
    presence_penalty=-0.7,
    frequency_penalty=0.3,
    logit_bias=((0, 3.0), (1023, -2.5), (1024, 0.1), (VOCABULARY - 1, 100.0)),
)


def some_logits(seed: int, M: int, steps: int = 1, V: int = VOCABULARY) -> list[Tensor]:
    """Logits with ties, zeros of both signs and padding that would always win."""
    generator = torch.Generator().manual_seed(seed)
    made = []
    for _ in range(steps):
        logits = torch.randn(M, V + 99, generator=generator) * 3
        logits[:, ::7] = (logits[:, ::7] * 2).round() / 2  # of either sign, zeros too
        logits[:, V:] = 1e9
        made.append(logits)
    return made
