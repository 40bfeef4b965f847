"""Launches worth a trial on a card, the likeliest first.

A rough model of the card orders those for one token: what the busiest multiprocessor reads, and how
much of it is in flight. It knows neither caches nor neighbours, so it only decides what is tried at
all. Of the launches that trials found for 65 linears on an H200, 56 are among its first ten.
"""

import itertools
import math
from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace

from lowbit.runtime.kernels.launch.card import REGISTERS, RESERVED, Card
from lowbit.runtime.kernels.launch.linear import MOST_PARTS, MOST_ROUNDS, GemvLaunch
from lowbit.runtime.kernels.launch.tuned import MOST_SUMS
from lowbit.runtime.kernels.linear.program import staged_bytes

WARPS = (4, 8)
WARP_GROUPS = (1, 2, 4, 8)
TILES = (1, 2, 4)
SPLITS = (2, 4)
LEAST_BUSY = 0.9  # of the multiprocessors' time, with programs that share tiles
MOST_SHARING = 2  # launches of a linear that are tried
JOIN_STEPS = 33  # that a multiprocessor reads in the microsecond in which sums are handed on
MOST_AHEAD = 8  # steps of all tiles that a warp has in flight: registers for more are not left
STEP_BYTES = 1024  # of a tile
STEP_REGISTERS = 9  # of a thread, for words and scales
OWN_REGISTERS = 44  # beside steps in flight
IN_FLIGHT = 64 << 10  # bytes on their way to a multiprocessor, with which the memory is busy
MOST_WHOLE = 8  # programs of a multiprocessor; of more the last ones do not matter
CAPS = (None, 80, 96, 128, 168)
SHARED = (16, 32, 48)  # KB


def for_one(
    bits: int,
    tiles: int,
    steps: int,
    K: int,
    card: Card,
    most: int,
    fits: Callable[[GemvLaunch], bool] = lambda launch: True,
) -> list[GemvLaunch]:
    """Launches for one token, each late and, where kernels overlap, early; `most` at most.

    Args:
        fits: tells if one may be tried.
    """

    def likeliest(launches: Iterable[GemvLaunch], most: int) -> list[GemvLaunch]:
        fitting = (launch for launch in launches if fits(launch))
        return sorted(fitting, key=lambda it: _cost(it, tiles, steps, K, card))[:most]

    # Linears behind a norm, whose programs need all of x, have more rows than columns.
    sharing = _sharing(bits, tiles, steps, card) if 16 * tiles <= K else ()
    found = likeliest([*_late(tiles, steps, card), *likeliest(sharing, MOST_SHARING)], most)
    times = (False, True) if card.overlaps else (False,)
    return [replace(it, early=early) for it in found[: most // len(times)] for early in times]


def _late(tiles: int, steps: int, card: Card) -> Iterator[GemvLaunch]:
    """Launches that leave few multiprocessors and few steps idle."""
    for warps in WARPS:
        for warp_groups in (each for each in WARP_GROUPS if each <= warps):
            share = -(-steps // (warps // warp_groups))  # steps of a warp
            for rows in TILES:
                if (
                    rows * warp_groups > 1
                    and tiles / (rows * warp_groups) < 0.9 * card.multiprocessors
                ):
                    continue
                depths = {share, -(-share // 2), -(-share // 3), -(-share // 4), 3, 4}
                fitting = [d for d in depths if d <= share and d * rows <= MOST_AHEAD]
                fitting.sort(key=lambda d: (-(-share // d) * d, -d))  # the fewest idle steps first
                for depth in fitting[:3]:
                    yield GemvLaunch(rows, depth, warps, warp_groups=warp_groups)


def _sharing(bits: int, tiles: int, steps: int, card: Card) -> Iterator[GemvLaunch]:
    """Launches whose programs share tiles, in rounds: as many programs as have room at once."""
    for warps, warp_groups, split in itertools.product(WARPS, (1, 2), SPLITS):
        plain = GemvLaunch(1, 1, warps, warp_groups=warp_groups, split=split)
        share = -(-steps // plain.parts)
        depth = -(-share // -(-share // MOST_AHEAD))
        if plain.parts > MOST_PARTS or not plain.shares(bits):
            continue
        for together in range(max(1, 8 // warps), 16 // warps + 1):  # programs
            room = together * card.multiprocessors
            rounds = -(-tiles * split // (warp_groups * room))
            registers = min(255, REGISTERS // (32 * warps * together) // 8 * 8)
            if tiles * split / (warp_groups * room * rounds) >= LEAST_BUSY:
                yield replace(plain, steps=depth, rounds=rounds, registers=registers)


def _cost(launch: GemvLaunch, tiles: int, steps: int, K: int, card: Card) -> float:
    """Steps of tiles that the busiest multiprocessor reads, more where few are in flight."""
    programs = tiles / launch.program_tiles * launch.split
    each = programs / card.multiprocessors  # programs of a multiprocessor
    if each <= MOST_WHOLE:
        each = math.ceil(math.ceil(programs) / card.multiprocessors)
    depth = min(launch.steps, steps) * launch.tiles
    room = min(
        card.threads // (32 * launch.warps),
        REGISTERS // (32 * launch.warps * (OWN_REGISTERS + STEP_REGISTERS * depth)),
        (card.shared_bytes + RESERVED) // (3 * K // launch.split + launch.sums_bytes(1)),
    )
    together = max(1, min(math.ceil(each), room))
    flight = together * launch.warps * depth * STEP_BYTES
    read = each * launch.program_tiles * -(-steps // launch.split) * max(1.0, IN_FLIGHT / flight)
    return read + (JOIN_STEPS if launch.split > 1 else 0)


def several(tokens: int, tiles: int, steps: int, one: GemvLaunch, card: Card) -> list[GemvLaunch]:
    """Launches for several tokens, of as many parts as the one of a lone token.

    Args:
        tokens: a power of two from 2 to GEMV_TOKENS.
        one: launch of a lone token.
    """
    found: dict[GemvLaunch, None] = {}
    share = -(-steps // one.parts)  # steps of a warp

    def add(depths: tuple[int, ...], programs: int, launch: GemvLaunch) -> None:
        if not launch.warp_groups:
            return
        most = launch.warp_groups * launch.tiles * card.multiprocessors * programs
        rounds = min(MOST_ROUNDS[tokens], -(-tiles // most))
        for depth in depths:
            candidate = replace(launch, steps=depth, rounds=rounds, early=True)
            if depth <= share and candidate.sums_bytes(tokens) <= MOST_SUMS:
                found[candidate] = None

    for warps in (8, 16):
        plain = GemvLaunch(1, 1, warps, registers=128, warp_groups=warps // one.parts)
        for programs in (1, 2) if warps == 8 else (1,):
            add((1, 2, 4), programs, plain)
            add((1, 2), programs, replace(plain, tiles=2))
    add((1, 2), 1, GemvLaunch(2, 1, 8, registers=255, warp_groups=8 // one.parts))
    if tokens > 16:
        add((1,), 1, GemvLaunch(1, 1, 8, registers=255, warp_groups=8 // one.parts))
        add((1,), 2, GemvLaunch(1, 1, 8, registers=255, warp_groups=8 // one.parts))
    return list(found)


def capped(launch: GemvLaunch, card: Card) -> Iterator[GemvLaunch]:
    """Variants of a launch with registers capped, which they are up to Hopper."""
    caps = CAPS if card.capability < (10, 0) else ()
    return (replace(launch, registers=registers) for registers in caps)


def spread(launch: GemvLaunch, K: int, card: Card) -> Iterator[GemvLaunch]:
    """Variants with fewer programs at a time on a multiprocessor, where kernels overlap."""
    needed = staged_bytes(K, 1, normed=True) + launch.sums_bytes(1)
    wider = (replace(launch, shared=kb) for kb in SHARED if card.overlaps)
    return (each for each in wider if each.spread_bytes(card.shared_bytes) > needed)
