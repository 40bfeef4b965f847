"""The launches that the usual run compiles for a card; others are left to a release.

`make test-kernels LAUNCHES=WORD` draws others: what lands has been compiled before.
"""

import hashlib
import os
from collections.abc import Iterable

ONE_IN = 64  # launches of a kernel
OTHERS = (80, 86, 89, 120)  # they have the same kernels, which a word deals out to the four
PROCESSES = {90: 2}  # its whole workload is as long as those of three others


def draw() -> str:
    """Word that draws the launches: the same in every run, unless LAUNCHES is another."""
    return os.environ.get("LAUNCHES", "usual")


def shuffled(names: Iterable[str], seed: str) -> list[str]:
    """Names in an order that only the seed decides."""
    return sorted(names, key=lambda name: hashlib.sha256(f"{seed} {name}".encode()).digest())


def drawn_launches(names: list[str], capability: int, seed: str) -> set[str]:
    """Launches that the usual run compiles for a card: some of each kernel that is its own."""
    launches: dict[str, list[str]] = {}
    for name in names:
        launches.setdefault(name.split()[0], []).append(name)
    kernels = shuffled(launches, seed)
    if capability in OTHERS:
        kernels = kernels[OTHERS.index(capability) :: len(OTHERS)]
    return {name for kernel in kernels for name in shuffled(launches[kernel], seed)[::ONE_IN]}


def shares(names: list[str], capability: int, seed: str) -> list[list[str]]:
    """Launches of each part: those that the seed draws, then all others."""
    drawn = drawn_launches(names, capability, seed)
    taken = [name for name in names if name in drawn]
    left = [name for name in names if name not in drawn]
    count = PROCESSES.get(capability, 1)
    return [some[part::count] for some in (taken, left) for part in range(count)]
