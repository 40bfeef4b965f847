"""gates: how much a gated DeltaNet head writes (beta) and keeps (exp g) at a token.

beta = sigmoid(b),  g = decay * softplus(a + dt_bias)          with decay = -exp(A_log), so g <= 0
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from lowbit.runtime.state.delta import DeltaWeights


def gates_ref(ba: Tensor, weights: DeltaWeights) -> tuple[Tensor, Tensor]:
    """The values `gates` approximates: beta and g, each [M, Hv] float64, of ba [M, 2 * Hv]."""
    b, a = ba.double().chunk(2, dim=-1)
    step = torch.nn.functional.softplus(a + weights.dt_bias.double(), threshold=1e9)
    return b.sigmoid(), weights.decay.double() * step


@triton.jit
def gates(b, a, decay, dt_bias):
    """Beta and g in FP32, of scalars or a block of tokens."""
    x = a.to(tl.float32) + dt_bias
    # log(1 + e) with the digits of e that 1 + e drops given back: small steps are long memories.
    e = tl.exp(-tl.abs(x))
    whole = 1.0 + e
    log1p = tl.where(whole == 1.0, e, tl.log(whole) * (e / tl.maximum(whole - 1.0, 1e-9)))
    return tl.sigmoid(b.to(tl.float32)), decay * (tl.maximum(x, 0.0) + log1p)
