"""Random numbers that depend on a seed and a position alone.

splitmix64 from a state that is itself the mixed seed: number p of a seed is
`mix(mix(seed + GOLDEN) + (p + 1) * GOLDEN)`, whose upper 53 bits make a number in [0, 1). Integers
wrap around at 64 bits, so the CPU, the GPU and the kernels agree in every bit.
"""

from torch import Tensor

GOLDEN = 0x9E3779B97F4A7C15
FIRST = 0xBF58476D1CE4E5B9
SECOND = 0x94D049BB133111EB


def uniforms(seeds: Tensor, positions: Tensor) -> Tensor:
    """Numbers in [0, 1) with 53 random bits.

    Args:
        seeds: [M] int64.
        positions: [M] int64 of the tokens to draw.

    Returns:
        [M] float64.
    """
    state = _mix(seeds + _signed(GOLDEN))
    bits = _mix(state + (positions + 1) * _signed(GOLDEN))
    return _shift(bits, 11).double() * 2.0**-53


def _mix(z: Tensor) -> Tensor:
    """Finalizer of splitmix64, a bijection of 64-bit integers."""
    z = (z ^ _shift(z, 30)) * _signed(FIRST)
    z = (z ^ _shift(z, 27)) * _signed(SECOND)
    return z ^ _shift(z, 31)


def _shift(z: Tensor, bits: int) -> Tensor:
    """Shift right, zeros from the left."""
    return (z >> bits) & ((1 << (64 - bits)) - 1)


def _signed(word: int) -> int:
    """The int64 of the same 64 bits."""
    return word - (1 << 64) if word >> 63 else word
