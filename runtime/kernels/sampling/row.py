"""Parameters of a row, its random number, and the end of every kernel that chooses its token.

The functions serve Gluon kernels too.
"""

import triton
import triton.language as tl

from lowbit.runtime.state import posted, sampler_rows, uniforms
from lowbit.runtime.state.sampling import MASS_BITS

KNOBS, WHOLE = tl.constexpr(6), tl.constexpr(4)  # columns of `SamplerRows.knobs` and `whole`
TEMPERATURE = tl.constexpr(sampler_rows.TEMPERATURE)
TOP_P = tl.constexpr(sampler_rows.TOP_P)
MIN_P = tl.constexpr(sampler_rows.MIN_P)
REPETITION = tl.constexpr(sampler_rows.REPETITION)
PRESENCE = tl.constexpr(sampler_rows.PRESENCE)
FREQUENCY = tl.constexpr(sampler_rows.FREQUENCY)
TOP_K = tl.constexpr(sampler_rows.TOP_K)
SEED = tl.constexpr(sampler_rows.SEED)
BIASES = tl.constexpr(sampler_rows.BIASES)
MASKED = tl.constexpr(sampler_rows.MASKED)
SCRATCH = tl.constexpr(sampler_rows.SCRATCH)
PLACES = tl.constexpr(posted.PLACES)
MASS = tl.constexpr(2.0**MASS_BITS)  # of the likeliest token
GOLDEN = tl.constexpr(uniforms.GOLDEN)
FIRST = tl.constexpr(uniforms.FIRST)
SECOND = tl.constexpr(uniforms.SECOND)
UNIT = tl.constexpr(2.0**-53)


@triton.jit
def uniform(seed, position):
    """A random float64 in [0, 1) of an int64 seed and the token's position; see `uniforms`."""
    z = _mixed(seed.to(tl.uint64) + GOLDEN)
    z = _mixed(z + (position.to(tl.uint64) + 1) * GOLDEN)
    return (z >> 11).to(tl.float64) * UNIT


@triton.jit
def _mixed(z):
    z = (z ^ (z >> 30)) * FIRST
    z = (z ^ (z >> 27)) * SECOND
    return z ^ (z >> 31)


@triton.jit
def rounded_masses(odds):
    """Odds relative to the likeliest token's as whole numbers up to MASS, still in float64."""
    return (odds * MASS + 4503599627370496.0) - 4503599627370496.0  # 2^52: halves to even


@triton.jit
def settle(
    m, row, position, token, largest, positions_ptr, token_ptr, slots_ptr, counts_ptr, R, V,
    COUNTED: tl.constexpr,
):  # fmt: skip
    """Store a row's token, leave it where the host reads it, and move the row on by one.

    largest: logit of the row; if it is not finite, the host gets -1. COUNTED: counts are kept.
    """
    ahead = position + 1
    finite = (largest > float("-inf")) & (largest < float("inf"))
    tl.store(slots_ptr + (ahead % PLACES) * R + row, tl.where(finite, token, -1))
    tl.store(token_ptr + m, token)
    tl.store(positions_ptr + m, tl.where(row != SCRATCH, ahead, position))
    if COUNTED:
        at = counts_ptr + row.to(tl.int64) * V + token
        tl.store(at, tl.load(at) + 1)
