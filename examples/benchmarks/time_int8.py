"""Time linears with x in eight bits beside exact ones, in CUDA graphs, on Hopper.

Run: python examples/benchmarks/time_int8.py [--bits 4|8] [--launches] [TOKENS ...]

Linears of Qwen3-8B with random weights, of which so many lie behind each other that none is in L2
when its turn comes. `exact` and `int8` are whole products, with the kernel that makes x digits or
rounds it; `rounding` is that kernel alone. --launches times every launch of `gemm_int8`, and those
of `stream_int8` around its own, with x ready, which is what `launch.int8` and `launch.stream` were
made of. Kernels compile first, a process for each share of them: one after the other they would
take minutes.
"""

import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from itertools import product as product_of

import click
import torch
from bench_kernels import graph_us
from random_engine import packed
from torch import Tensor

from lowbit.formats.activations import activation_group
from lowbit.runtime.backends.cuda import product
from lowbit.runtime.kernels.launch.device import card_of
from lowbit.runtime.kernels.launch.int8 import LAUNCHES, SHARED, STEP_K, Int8Launch
from lowbit.runtime.kernels.launch.stream import SPARE, StreamLaunch, stream_launch, stream_shared
from lowbit.runtime.kernels.linear.gemm_int8 import multiply
from lowbit.runtime.kernels.linear.program import Blocks, token_blocks
from lowbit.runtime.kernels.linear.quantize import quantize
from lowbit.runtime.kernels.linear.stream_int8 import multiply as stream
from lowbit.runtime.kernels.linear.tiles import TiledLinear, rounding

LINEARS = {  # rows, columns, whether paired
    "qkv": (6144, 4096, False),
    "o": (4096, 4096, False),
    "gate_up": (24576, 4096, True),
    "down": (4096, 12288, False),
}
TOKENS = (1, 8, 16, 32, 64, 256, 1024, 4096)
BEYOND_L2 = 160 << 20  # bytes of the weights that take turns
PROCESSES = 8


def call_us(calls: Sequence[Callable[[], object]]) -> float:
    """Microseconds of a call, in a graph of all of them."""

    def body() -> None:
        for call in calls:
            call()

    return graph_us(body) / len(calls)


def places_of(w: TiledLinear, tokens: int, sixteens: bool = False) -> Blocks:
    """Places of x in blocks of so many tokens."""
    return token_blocks(w.K, activation_group(w.group_size, w.K), tokens, sixteens=sixteens)


def launches_of(w: TiledLinear, x: Tensor) -> Iterator[tuple[object, Callable[..., Tensor]]]:
    """Launches that the weight has room for, with their product of x, which is ready."""
    yield from streams_of(w, x)
    for launch, _ in LAUNCHES:
        places = places_of(w, launch.tokens, sixteens=True)
        if launch.tokens > max(16, len(x)) or places.STEPS % launch.steps:
            continue
        blocks = quantize(x, w.bits, places)

        def run(
            w: TiledLinear,
            launch: Int8Launch = launch,
            places: Blocks = places,
            given: Tensor = blocks,
        ) -> Tensor:
            return multiply(given, len(x), w, places, launch)

        try:
            run(w)
        except ValueError:  # no room
            continue
        yield launch, run


def streams_of(w: TiledLinear, x: Tensor) -> Iterator[tuple[StreamLaunch, Callable[..., Tensor]]]:
    """The launch of `stream_int8`, if there is one, and others with as many tiles a program."""
    group, steps = activation_group(w.group_size, w.K), w.K // STEP_K
    own = stream_launch(w.bits, w.tiles, steps, group, len(x), card_of(x).multiprocessors)
    if own is None:
        return
    places = places_of(w, own.tokens)
    blocks, each = quantize(x, w.bits, places), own.program_tiles
    for groups, tiles, ahead in product_of((1, 2, 4), (1, 2, 3), (2, 3, 4, 6, 8)):
        rounds = -(-each // (groups * tiles))
        launch = replace(own, groups=groups, tiles=tiles, rounds=rounds, ahead=ahead)
        wide = launch.program_tiles > SPARE * each or ahead > -(-steps // launch.parts)
        if wide or stream_shared(steps, group, launch).size > SHARED:
            continue

        def run(w: TiledLinear, launch: StreamLaunch = launch) -> Tensor:
            return stream(blocks, len(x), w, places, launch)

        yield launch, run


def show(name: str, bits: int, tokens: int, every: bool) -> None:
    """Print what a linear takes for so many tokens."""
    N, K, paired = LINEARS[name]
    count = 2 if tokens > 256 else -(-BEYOND_L2 // (N * K * bits // 8))
    exact = [packed(bits, N, K, paired=paired) for _ in range(count)]
    rounded = [rounding(w) for w in exact]
    x = torch.randn(tokens, K, device="cuda").bfloat16()
    times = [
        call_us([lambda w=w: product(x, w, swiglu=paired) for w in weights])  # type: ignore[misc]
        for weights in (exact, rounded)
    ]
    places = places_of(exact[0], 64)
    alone = call_us([lambda: quantize(x, bits, places)] * 8)
    click.echo(
        f"{name:8} {tokens:5} exact {times[0]:8.1f} us, int8 {times[1]:8.1f}, rounding {alone:5.1f}"
    )
    for launch, run in launches_of(rounded[0], x) if every else ():
        us = call_us([lambda w=w, run=run: run(w) for w in rounded])  # type: ignore[misc]
        click.echo(f"{'':14} {us:8.1f} us {2e-6 * tokens * N * K / us:6.0f} TFLOP/s {launch}")


@click.command()
@click.argument("tokens", type=int, nargs=-1)
@click.option("--bits", type=click.Choice(["4", "8"]), default="4", show_default=True)
@click.option("--launches", is_flag=True, help="Time every launch of gemm_int8.")
@click.option("--share", type=int, help="Compile the kernels of a share alone.")
def main(tokens: tuple[int, ...], bits: str, launches: bool, share: int | None) -> None:
    """Time the linears of Qwen3-8B with x in eight bits beside exact ones."""
    cases = [(name, count) for count in tokens or TOKENS for name in LINEARS]
    if share is not None:
        for name, count in cases[share::PROCESSES]:
            N, K, paired = LINEARS[name]
            w = packed(int(bits), N, K, paired=paired)
            x = torch.randn(count, K, device="cuda").bfloat16()
            rounded = rounding(w)
            for own in (w, rounded):
                product(x, own, swiglu=paired)
            _ = list(launches_of(rounded, x)) if launches else []
        return
    again = [sys.executable, *sys.argv]
    begun = [subprocess.Popen([*again, "--share", str(i)]) for i in range(PROCESSES)]
    if any(process.wait() for process in begun):
        raise SystemExit("a process that compiles has failed")
    for name, count in cases:
        show(name, int(bits), count, launches)


if __name__ == "__main__":
    main()
