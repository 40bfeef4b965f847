"""Parameters of a row, its random number, and the end of every kernel that chooses its token.

The functions serve Gluon kernels too.
"""

import triton
import triton.language as tl

from lowbit.runtime.state import host_rings, sampler

KNOBS, WHOLE = tl.constexpr(6), tl.constexpr(4)  # columns of `SamplerRows.knobs` and `whole`
TEMPERATURE = tl.constexpr(sampler.TEMPERATURE)
TOP_P = tl.constexpr(sampler.TOP_P)
MIN_P = tl.constexpr(sampler.MIN_P)
TOP_K = tl.constexpr(sampler.TOP_K)
SEED = tl.constexpr(sampler.SEED)
SCRATCH = tl.constexpr(sampler.SCRATCH)
RING = tl.constexpr(host_rings.RING)
MASS = tl.constexpr(2.0**sampler.MASS_BITS)  # of the likeliest token
GOLDEN = tl.constexpr(sampler.GOLDEN)
FIRST = tl.constexpr(sampler.MIX_FIRST)
SECOND = tl.constexpr(sampler.MIX_SECOND)
UNIT = tl.constexpr(2.0**-53)


@triton.jit
def draw_parameters(row, knobs_ptr, whole_ptr):
    """Temperature, top_p, min_p, top_k and seed of a row; what is not used costs nothing."""
    knobs_ptr += row * KNOBS
    whole_ptr += row * WHOLE
    temperature = tl.load(knobs_ptr + TEMPERATURE)
    top_p = tl.load(knobs_ptr + TOP_P)
    min_p = tl.load(knobs_ptr + MIN_P)
    return temperature, top_p, min_p, tl.load(whole_ptr + TOP_K), tl.load(whole_ptr + SEED)


@triton.jit
def uniform(seed, position):
    """A random float64 in [0, 1) of an int64 seed and the token's position; see `state.sampler`."""
    z = _mixed(seed.to(tl.uint64) + GOLDEN)
    z = _mixed(z + (position.to(tl.uint64) + 1) * GOLDEN)
    return (z >> 11).to(tl.float64) * UNIT


@triton.jit
def _mixed(z):
    z = (z ^ (z >> 30)) * FIRST
    z = (z ^ (z >> 27)) * SECOND
    return z ^ (z >> 31)


@triton.jit
def add(a, b):
    """A sum, for scans."""
    return a + b


@triton.jit
def rounded_masses(odds):
    """Odds relative to the likeliest token's as whole numbers up to MASS, still in float64."""
    return (odds * MASS + 4503599627370496.0) - 4503599627370496.0  # 2^52: halves to even


@triton.jit
def settle(
    m, row, position, token, largest, positions_ptr, token_ptr, ring_ptr, counts_ptr, ids_ptr, R, V,
    COUNTED: tl.constexpr,
):  # fmt: skip
    """Store a row's token, leave it where the host reads it, and move the row on by one.

    largest: logit of the row; if it is not finite, the host gets -1. ids_ptr: tokens of columns,
    None where a column is a token. COUNTED: counts are kept.
    """
    if ids_ptr is not None:
        token = tl.load(ids_ptr + token)
    ahead = position + 1
    finite = (largest > float("-inf")) & (largest < float("inf"))
    tl.store(ring_ptr + (ahead % RING) * R + row, tl.where(finite, token, -1))
    tl.store(token_ptr + m, token)
    tl.store(positions_ptr + m, tl.where(row != SCRATCH, ahead, position))
    if COUNTED:
        at = counts_ptr + row.to(tl.int64) * V + token
        tl.store(at, tl.load(at) + 1)
