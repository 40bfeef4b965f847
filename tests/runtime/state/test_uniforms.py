"""Random numbers by seed and position: uniform, independent, and equal to splitmix64 in Python."""

import numpy as np
import pytest
import torch

from lowbit.runtime.state.uniforms import uniforms

WORD = 2**64 - 1
COUNT = 1 << 16


def mixed(z: int) -> int:
    """Finalizer of splitmix64 over Python's integers."""
    z = ((z ^ (z >> 30)) * 0xBF58476D1CE4E5B9) & WORD
    z = ((z ^ (z >> 27)) * 0x94D049BB133111EB) & WORD
    return z ^ (z >> 31)


def expected(seed: int, position: int) -> float:
    golden = 0x9E3779B97F4A7C15
    state = mixed((seed + golden) & WORD)
    return float((mixed((state + (position + 1) * golden) & WORD) >> 11) / 2**53)


def numbers(seeds: torch.Tensor, positions: torch.Tensor) -> np.ndarray:
    """Draws for a tensor of seeds and one of positions, either of which may have one element."""
    drawn: np.ndarray = uniforms(seeds + 0 * positions, positions + 0 * seeds).numpy()
    return drawn


@pytest.mark.parametrize("seed", [0, 1, 12345, 2**62, 2**63 - 1])
def test_they_are_splitmix64(seed: int) -> None:
    positions = torch.tensor([0, 1, 77, 262143, 2**31 - 1])
    drawn = numbers(torch.tensor([seed]), positions)
    assert drawn.tolist() == [expected(seed, int(p)) for p in positions]


def streams() -> dict[str, np.ndarray]:
    """Sequences that a request, or requests with neighbouring seeds, would draw."""
    many = torch.arange(COUNT)
    return {
        "positions": numbers(torch.tensor([7]), many),
        "seeds": numbers(many, torch.tensor([7])),
        "large seeds": numbers(2**63 - 1 - many, torch.tensor([0])),
        "both": numbers(many, many),
    }


@pytest.mark.parametrize("name", streams())
def test_they_are_uniform(name: str) -> None:
    drawn = streams()[name]
    assert drawn.min() >= 0
    assert drawn.max() < 1
    assert len(np.unique(drawn)) == COUNT
    for scale in (1, 2**20):  # the upper bits, and lower ones
        counts = np.bincount((drawn * scale % 1 * 256).astype(int), minlength=256)
        chi2 = float(((counts - COUNT / 256) ** 2 / (COUNT / 256)).sum())
        assert abs(chi2 - 255) < 5 * (2 * 255) ** 0.5


@pytest.mark.parametrize("name", streams())
@pytest.mark.parametrize("lag", [1, 2, 64])
def test_neighbours_are_independent(name: str, lag: int) -> None:
    drawn = streams()[name]
    first, second = drawn[:-lag], drawn[lag:]
    assert abs(np.corrcoef(first, second)[0, 1]) < 5 / COUNT**0.5
    pairs = np.bincount((first * 16).astype(int) * 16 + (second * 16).astype(int), minlength=256)
    mean = len(first) / 256
    assert abs(float(((pairs - mean) ** 2 / mean).sum()) - 255) < 5 * (2 * 255) ** 0.5


def test_two_seeds_are_independent_at_the_same_positions() -> None:
    many = torch.arange(COUNT)
    for one, other in ((0, 1), (1, 2), (5, 5 + 2**32), (0, 2**62)):
        pair = np.corrcoef(numbers(torch.tensor([one]), many), numbers(torch.tensor([other]), many))
        assert abs(pair[0, 1]) < 5 / COUNT**0.5
