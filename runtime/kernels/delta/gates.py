"""gates: how much a gated DeltaNet head writes (beta) and keeps (exp g) at a token.

beta = sigmoid(b),  g = decay * softplus(a + dt_bias)          with decay = -exp(A_log), so g <= 0
"""

import torch
from torch import Tensor

from lowbit.runtime.state.delta import DeltaWeights


def gates_ref(ba: Tensor, weights: DeltaWeights) -> tuple[Tensor, Tensor]:
    """The values `gates` approximates: beta and g, each [M, Hv] float64, of ba [M, 2 * Hv]."""
    b, a = ba.double().chunk(2, dim=-1)
    step = torch.nn.functional.softplus(a + weights.dt_bias.double(), threshold=1e9)
    return b.sigmoid(), weights.decay.double() * step
