"""The random number of a seed and a position, in kernels; see `state.uniforms`."""

import triton
import triton.language as tl
from triton.experimental import gluon

from lowbit.runtime.state import uniforms

GOLDEN = tl.constexpr(uniforms.GOLDEN)
FIRST = tl.constexpr(uniforms.FIRST)
SECOND = tl.constexpr(uniforms.SECOND)
UNIT = tl.constexpr(2.0**-53)


def _uniform(seed, position):
    """A float64 in [0, 1) of an int64 seed and the position of the token to draw."""
    z = seed.to(tl.uint64) + GOLDEN
    z = (z ^ (z >> 30)) * FIRST
    z = (z ^ (z >> 27)) * SECOND
    z = z ^ (z >> 31)
    z = z + (position.to(tl.uint64) + 1) * GOLDEN
    z = (z ^ (z >> 30)) * FIRST
    z = (z ^ (z >> 27)) * SECOND
    z = z ^ (z >> 31)
    return (z >> 11).to(tl.float64) * UNIT


uniform = triton.jit(_uniform)
uniform_gluon = gluon.jit(_uniform)
