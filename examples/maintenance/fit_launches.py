"""Fit a model of the card to times of launches, and say how far its choices can be trusted.

Run: python examples/maintenance/fit_launches.py [FILE ...]
The time of a launch is a sum of seven terms, each a count times a cost in microseconds; least
squares of relative errors find the costs. Tables show how well a card is predicted from another,
and a linear from the others; then the time that three ways to choose a launch lose: the model,
fitted to other linears of another card, the launch tables, and the order of `lowbit-run tune`.
`FILE`s are like `examples/data/launches.json`, the default, which is of an H100 and an H200.
"""

import json
import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from itertools import groupby
from pathlib import Path

import click
import numpy as np

from lowbit.runtime.kernels.codec import CODECS
from lowbit.runtime.kernels.launch.card import OLDER_REGISTERS, REGISTERS, RESERVED
from lowbit.runtime.kernels.launch.card import Card as LaunchCard
from lowbit.runtime.kernels.launch.linear import GemvLaunch, gemv_launch, measured
from lowbit.runtime.kernels.linear.program import blocks_of, shared_bytes
from lowbit.runtime.lab.tuning.candidates import (
    MOST_AHEAD,
    OWN_REGISTERS,
    STEP_REGISTERS,
    TILES,
    WARPS,
    for_one,
)

MEASURED = Path(__file__).parents[1] / "data" / "launches.json"
COLUMNS = (
    *(
        "bits",
        "N",
        "K",
        "paired",
        "normed",
        "tiles",
        "steps",
        "warps",
        "early",
        "cap",
        "warp_groups",
    ),
    *("shared", "programmatic", "registers", "spilled", "table", "us"),
)
TERMS = ("start", "norm", "staging", "reading", "uneven", "waiting", "multiplying")
SCALES = 1.03  # bytes of a weight in groups of 128, for one of its codes
ROBUST = 0.08  # relative errors from here on count less than their square
MOST = 99  # launches of a linear
LIKE = 0.9  # of the bandwidth that a maker states, a plain read reaches
# Multiprocessors, threads and KB of shared memory of each, GB/s as the maker states them.
OTHERS = {
    "A100 40 GB": (108, 2048, 164, 1555),
    "A100 80 GB": (108, 2048, 164, 2039),
    "RTX 3090": (82, 1536, 100, 936),
    "A10": (72, 1536, 100, 600),
    "RTX 4060": (24, 1536, 100, 272),
    "RTX 4090": (128, 1536, 100, 1008),
    "L4": (58, 1536, 100, 300),
    "L40S": (142, 1536, 100, 864),
}


CAPABILITY = {228: (9, 0), 164: (8, 0), 100: (8, 9)}  # by KB of shared memory


@dataclass(frozen=True)
class Multiprocessors:
    """Multiprocessors of a card, and what one has room for: threads, and bytes of shared memory."""

    count: int
    threads: int
    shared: int


@dataclass(frozen=True)
class Card:
    """A GPU: its multiprocessors, and bytes a microsecond of a plain read."""

    name: str
    parts: Multiprocessors
    read: float


@dataclass(frozen=True)
class Linear:
    bits: int
    N: int
    K: int
    paired: bool
    normed: bool

    @property
    def tiles(self) -> int:
        return -(-self.N // 16)

    @property
    def steps(self) -> int:
        return -(-self.K // CODECS[self.bits].STEP_K)


@dataclass(frozen=True)
class Trial:
    """A launch of a linear, what its code needs, and microseconds on some cards."""

    linear: Linear
    launch: GemvLaunch
    programmatic: bool  # each kernel may start before the one ahead of it ends
    registers: int  # of a thread
    spilled: int  # bytes of a thread
    table: bool  # the launch tables had this launch when it was timed
    us: tuple[float, ...]  # of a kernel, by card


def read_file(path: Path) -> tuple[list[Card], list[Trial]]:
    """Cards of a file, and its launches."""
    content = json.loads(path.read_text())
    cards = []
    for each in content["cards"]:
        sizes = each["multiprocessors"], each["threads"], each["shared"]
        cards.append(Card(each["name"], Multiprocessors(*sizes), each["read"] / 1e6))
    trials = []
    for row in content["rows"]:
        it = dict(zip(content["columns"], row, strict=True))
        linear = Linear(it["bits"], it["N"], it["K"], bool(it["paired"]), bool(it["normed"]))
        launch = GemvLaunch(
            it["tiles"],
            it["steps"],
            it["warps"],
            bool(it["early"]),
            it["cap"],
            it["warp_groups"],
            it["shared"],
        )
        needs = it["registers"], it["spilled"], bool(it["table"])
        trials.append(Trial(linear, launch, bool(it["programmatic"]), *needs, tuple(it["us"])))
    return cards, trials


def joined(files: Iterable[Path]) -> tuple[list[Card], list[Trial]]:
    """All cards, and the launches that were timed on each of them."""
    cards: list[Card] = []
    found: dict[tuple[Linear, GemvLaunch, bool], Trial] = {}
    for path in files:
        more, trials = read_file(path)
        for trial in trials:
            key = trial.linear, trial.launch, trial.programmatic
            before = found.get(key, replace(trial, us=()))
            found[key] = replace(before, us=before.us + trial.us)
        cards += more
    return cards, [it for it in found.values() if len(it.us) == len(cards) and None not in it.us]


def terms_of(trial: Trial, card: Card) -> list[float]:
    """Counts of TERMS, as many as a launch takes of each."""
    launch, linear, parts = trial.launch, trial.linear, card.parts
    own = -(-linear.steps // launch.parts)  # steps of a warp
    depth = min(launch.steps, own)
    programs = -(-linear.tiles // launch.program_tiles)
    each = -(-programs // parts.count)  # of the busiest multiprocessor
    needed = shared_bytes(linear.K, launch, 1, linear.normed)
    if trial.programmatic:
        needed = max(needed, launch.spread_bytes(parts.shared - RESERVED))
    threads = 32 * launch.warps
    room = min(
        parts.threads // threads,
        REGISTERS // (threads * (-(-trial.registers // 8) * 8)),
        parts.shared // (needed + RESERVED),
    )
    together = max(1, min(each, room))
    waves = -(-each // max(1, room))
    busiest = each * launch.program_tiles * linear.steps
    flight = together * launch.warps * depth * launch.tiles
    codes = linear.tiles * linear.steps * 1024 * SCALES
    return [
        1.0,
        float(linear.normed),
        -(-blocks_of(linear.K) // launch.warps) * waves,  # blocks of x that a warp makes digits
        codes / card.read,
        busiest * 1024 * parts.count / card.read,  # were all multiprocessors as busy
        busiest / flight,  # loads, one after the other
        own * launch.tiles * waves,
    ]


def fitted(trials: Sequence[Trial], card: Card, number: int) -> np.ndarray:
    """Costs of the terms, none below zero.

    number: of the card, among those of the trials.
    """
    us = np.array([trial.us[number] for trial in trials])
    numbers = np.array([terms_of(trial, card) for trial in trials]) / us[:, None]
    weights, costs = np.ones(len(us)), np.zeros(numbers.shape[1])
    for _ in range(12):
        kept = list(range(numbers.shape[1]))
        while True:
            root = np.sqrt(weights)[:, None]
            found = np.linalg.lstsq(numbers[:, kept] * root, root[:, 0], rcond=None)[0]
            if (found >= 0).all():
                break
            kept.pop(int(np.argmin(found)))
        costs = np.zeros(numbers.shape[1])
        costs[kept] = found
        weights = 1 / np.maximum(1, np.abs(numbers @ costs - 1) / ROBUST)
    return costs


def predicted(trials: Sequence[Trial], card: Card, costs: np.ndarray) -> np.ndarray:
    found: np.ndarray = np.array([terms_of(trial, card) for trial in trials]) @ costs
    return found


def by_linear(trials: Iterable[Trial]) -> list[list[Trial]]:
    ordered = sorted(trials, key=lambda trial: repr(trial.linear))
    return [list(some) for _, some in groupby(ordered, key=lambda trial: trial.linear)]


def table_of(linear: Linear, programmatic: bool) -> GemvLaunch:
    found = gemv_launch(linear.bits, linear.tiles, linear.steps, 1, linear.paired)
    return found if programmatic else replace(found, early=False, shared=0)


def order_of(linear: Linear, card: Card) -> dict[tuple[int, ...], int]:
    """The place of a launch among those that `lowbit-run tune` tries."""
    kind = LaunchCard(CAPABILITY[card.parts.shared >> 10], card.parts.count)
    count = MOST * (2 if kind.overlaps else 1)
    found = for_one(linear.bits, linear.tiles, linear.steps, linear.K, kind, count)
    ordered = [launch for launch in found if not launch.early]
    return {share_of(launch): n for n, launch in enumerate(filter(is_simple, ordered))}


def share_of(launch: GemvLaunch) -> tuple[int, ...]:
    return launch.tiles, launch.steps, launch.warps, launch.warp_groups


def is_simple(launch: GemvLaunch) -> bool:
    """Tell if programs take tiles alone, and once: the model knows no others."""
    return launch.rounds == launch.split == 1


def is_plain(launch: GemvLaunch) -> bool:
    """Tell if `lowbit-run tune` tries a launch before others with the same share."""
    return launch.registers in (None, OLDER_REGISTERS) and not launch.shared and not launch.early


def costs_of_choices(
    groups: Sequence[Sequence[Trial]], card: Card, number: int, model: Callable[..., np.ndarray]
) -> dict[str, list[float]]:
    """Time of the launch that is chosen for each linear, over the fastest, less one."""
    found: dict[str, list[float]] = {"model": [], "tables": [], "order of tune": [], "slowest": []}
    for group in groups:
        us = [trial.us[number] for trial in group]
        order = order_of(group[0].linear, card)
        places = [order.get(share_of(it.launch), MOST) - is_plain(it.launch) / 2 for it in group]
        model_us = model(group)
        picks = {
            "model": int(np.argmin(model_us)),
            "tables": next(n for n, trial in enumerate(group) if trial.table),
            "order of tune": int(np.argmin(places)),
            "slowest": int(np.argmax(us)),
        }
        for name, pick in picks.items():
            found[name].append(us[pick] / min(us) - 1)
    return found


def show_errors(cards: Sequence[Card], trials: Sequence[Trial]) -> None:
    """Costs of the terms, and how far each card is from what they predict."""
    costs = [fitted(trials, card, number) for number, card in enumerate(cards)]
    print(f"| fitted to | {' | '.join(TERMS)} |\n|{'---|' * (1 + len(TERMS))}")
    for card, found in zip(cards, costs, strict=True):
        print(f"| {card.name} | {' | '.join(f'{cost:.2f}' for cost in found)} |")
    print("\n| fitted to | predicted | median error | 90th percentile | worst | within 10 % |")
    print("|---|---|---|---|---|---|")
    for number, card in enumerate(cards):
        errors = {
            other.name: errors_of(trials, card, number, costs[n]) for n, other in enumerate(cards)
        }
        errors[f"{card.name}, other linears"] = np.concatenate(
            [
                errors_of(group, card, number, fitted(without(trials, group), card, number))
                for group in by_linear(trials)
            ]
        )
        for name, error in errors.items():
            print(
                f"| {name} | {card.name} | {np.median(error):.1%} | {np.percentile(error, 90):.1%} "
                f"| {error.max():.1%} | {np.mean(error < math.log(1.1)):.0%} |"
            )


def errors_of(trials: Sequence[Trial], card: Card, number: int, costs: np.ndarray) -> np.ndarray:
    """Logarithms of predicted times over measured ones, without their signs."""
    us = np.array([trial.us[number] for trial in trials])
    found: np.ndarray = np.abs(np.log(predicted(trials, card, costs) / us))
    return found


def without(trials: Sequence[Trial], group: Sequence[Trial]) -> list[Trial]:
    """Launches of all linears but one."""
    return [trial for trial in trials if trial.linear != group[0].linear]


def show_choices(cards: Sequence[Card], trials: Sequence[Trial]) -> None:
    """Losses of the ways to choose a launch, on each card."""
    print("\n| chosen for | by | slower than the fastest, mean | worst |\n|---|---|---|---|")
    for number, card in enumerate(cards):
        other = (number + 1) % len(cards)

        def model(group: Sequence[Trial], card: Card = card, other: int = other) -> np.ndarray:
            costs = fitted(without(trials, group), cards[other], other)
            return predicted(group, card, costs)

        for name, slower in costs_of_choices(by_linear(trials), card, number, model).items():
            print(f"| {card.name} | {name} | {np.mean(slower):.1%} | {max(slower):.1%} |")


def candidates(linear: Linear) -> Iterable[GemvLaunch]:
    """Launches that divide K into four or eight parts."""
    for warps in WARPS:
        for warp_groups in (each for each in (1, 2) if warps // each >= 4):
            own = -(-linear.steps * warp_groups // warps)
            for tiles in TILES:
                for depth in {own, -(-own // 2), -(-own // 3), -(-own // 4), 2, 3, 4}:
                    if depth <= own and depth * tiles <= MOST_AHEAD:
                        yield GemvLaunch(
                            tiles, depth, warps, warp_groups=warp_groups, registers=OLDER_REGISTERS
                        )


def possible(linear: Linear, launch: GemvLaunch) -> Trial:
    """A launch that was not measured, without programmatic launch."""
    depth = min(launch.steps, -(-linear.steps // launch.parts))
    registers = min(
        launch.registers or OLDER_REGISTERS, OWN_REGISTERS + STEP_REGISTERS * depth * launch.tiles
    )
    return Trial(linear, launch, False, registers, 0, False, ())


def outlook(card: Card, costs: np.ndarray) -> tuple[list[float], list[float]]:
    """Gains of the model's launches over the tables': of all, and of those with as many parts."""
    gains: tuple[list[float], list[float]] = [], []
    for bits, tiles, steps in measured("one"):
        K = steps * CODECS[bits].STEP_K
        linear = Linear(bits, 16 * tiles, K, False, 16 * tiles > K)
        table = table_of(linear, False)
        if not is_simple(table):
            continue

        def us(launch: GemvLaunch, linear: Linear = linear) -> float:
            return float(np.dot(terms_of(possible(linear, launch), card), costs))

        for found, parts in zip(gains, (None, table.parts), strict=True):
            some = [it for it in candidates(linear) if parts in (None, it.parts)]
            found.append(us(table) / min(map(us, [table, *some])) - 1)
    return gains


@click.command()
@click.argument("files", nargs=-1, type=click.Path(exists=True, path_type=Path))
def main(files: tuple[Path, ...]) -> None:
    cards, trials = joined(files or (MEASURED,))
    usable = [it for it in trials if it.table or not it.spilled]
    waiting = [it for it in usable if not it.programmatic]
    overlapping = [it for it in usable if it.programmatic]
    for some, how in (
        (waiting, "waits for the last one"),
        (overlapping, "starts before the last ends"),
    ):
        if some:
            print(f"\n{len(some)} launches of {len(by_linear(some))} linears; each kernel {how}\n")
            show_errors(cards, some)
            show_choices(cards, some)
    costs = np.mean([fitted(waiting, card, n) for n, card in enumerate(cards)], axis=0)
    print(
        "\n| not measured | gain over the tables, mean | most | with the same bits, mean | most |"
    )
    print("|---|---|---|---|---|")
    for name, (count, threads, kb, rate) in OTHERS.items():
        card = Card(name, Multiprocessors(count, threads, kb << 10), LIKE * rate * 1e3)
        shown = [f"{np.mean(gains):.1%} | {max(gains):.1%}" for gains in outlook(card, costs)]
        print(f"| {name} | {' | '.join(shown)} |")


if __name__ == "__main__":
    main()
