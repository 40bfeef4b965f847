"""Speed of mixtures of experts on this GPU, with random weights in real shapes.

Run: python examples/benchmarks/bench_experts.py [SIZE ...] [--bits 4] [--only layers|decode|prompt]
Sizes are 30B-A3B and 3.5-35B-A3B. `layers` prints microseconds of a layer's experts, and of each of
their kernels in a row of its own kind, as medians of replays of a CUDA graph of several layers
(gate_up and down are those of few tokens also where a layer takes the others, from 13 tokens on);
`decode` tokens per second of the engine's loop for 1 and 8 sequences; `prompt` the time of 2,048
tokens, by the wall and in the experts of one layer.
"""

import gc
import statistics
import time
from collections.abc import Callable, Sequence
from functools import partial

import click
import torch
from bench_engine import batch_rate
from bench_kernels import elapsed_us, graph_us
from make_random_checkpoint import EXPERTS
from random_engine import packed_experts, randn, random_engine
from torch import Tensor

from lowbit.formats.architectures.config import Experts
from lowbit.runtime.backends import cuda
from lowbit.runtime.kernels.experts.down import experts_down
from lowbit.runtime.kernels.experts.gate_up import experts_gate_up
from lowbit.runtime.kernels.experts.route import Routes, experts_route
from lowbit.runtime.kernels.experts.tiled import stacked
from lowbit.runtime.kernels.linear.dense import dense_gemv
from lowbit.runtime.kernels.linear.tiles import GpuLinear
from lowbit.runtime.lab.bench import GREEDY
from lowbit.runtime.weights.linear import ExpertWeights

H = 2048
CHOSEN = 8
LAYERS = 12  # of random weights, more than the L2 cache holds
TOKENS = (1, 2, 4, 8, 16, 64)
PROMPT = 2048
EPS = 1e-6
RUNS = 3
PARTS = ("layers", "decode", "prompt")

Layer = ExpertWeights[GpuLinear]


def sizes_of(size: str) -> Experts:
    """Experts of a size."""
    count, inner, shared = EXPERTS[size]
    return Experts(count, CHOSEN, inner, shared)


def random_layer(experts: Experts, bits: int) -> Layer:
    """The experts of a layer."""
    shared = experts.shared_inner is not None
    count = experts.count + shared
    return ExpertWeights(
        router=0.05 * randn(count, H),
        gate_up=packed_experts(bits, count, 2 * experts.inner, H, True),
        down=packed_experts(bits, count, H, experts.inner, False),
        chosen=CHOSEN,
        shared=shared,
    )


def chain_us(made: Sequence[Layer], kernels: Callable[[Layer], object]) -> float:
    """Microseconds a layer of a graph that runs some kernels of every layer, one after another."""
    return graph_us(lambda: [kernels(layer) for layer in made]) / len(made)


def scores(x: Tensor, norm: Tensor, layer: Layer) -> Tensor:
    return dense_gemv(x, layer.router, norm=norm, eps=EPS, dtype=torch.float32)


def routes_of(given: Tensor, layer: Layer) -> Routes | None:
    """As `cuda.moe` has them: a lone token's experts are chosen where they are needed."""
    return None if len(given) == 1 else experts_route(given, layer)


def gate_up(x: Tensor, norm: Tensor, given: Tensor, routes: Routes | None, layer: Layer) -> Tensor:
    return experts_gate_up(x, norm, EPS, given, routes, layer)


def down(x: Tensor, act: Tensor, given: Tensor, routes: Routes | None, layer: Layer) -> Tensor:
    return experts_down(act, given, routes, layer, x)


def chosen_of(given: Tensor, experts: Experts) -> list[int]:
    """Experts of all tokens."""
    found: list[int] = given[:, : experts.count].topk(CHOSEN).indices.flatten().tolist()
    return found


def layers(size: str, bits: int) -> None:
    """Print microseconds of a layer and of its kernels, and the weights that it reads a second."""
    experts, norm = sizes_of(size), 1 + 0.1 * randn(H)
    made = [random_layer(experts, bits) for _ in range(LAYERS)]
    one = stacked(made[0].gate_up)[0].size_bytes + stacked(made[0].down)[0].size_bytes
    print(f"{size} INT{bits}, us a layer")
    columns = ("all", "router", "choice", "gate_up", "down")
    print(f"{'tokens':>8}" + "".join(f"{name:>9}" for name in columns) + f"{'TB/s of all':>13}")
    for M in TOKENS:
        x = randn(M, H)
        given = [scores(x, norm, layer) for layer in made]
        routes = routes_of(given[0], made[0])
        act = gate_up(x, norm, given[0], routes, made[0])
        whole = chain_us(made, partial(cuda.moe, x, norm, EPS))
        parts = [
            chain_us(made, partial(scores, x, norm)),
            0.0 if routes is None else chain_us(made, partial(routes_of, given[0])),
            chain_us(made, partial(gate_up, x, norm, given[0], routes)),
            chain_us(made, partial(down, x, act, given[0], routes)),
        ]
        hit = [len(set(chosen_of(each, experts))) for each in given]
        read = (statistics.mean(hit) + made[0].shared) * one
        line = "".join(f"{us:9.2f}" for us in (whole, *parts))
        print(f"{M:>8}{line}{read / whole / 1e6:13.2f}", flush=True)


def decode(size: str, bits: int) -> None:
    """Print tokens per second of 1 and of 8 sequences, medians after a first run."""
    engine = random_engine(size, bits, context=1024, sequences=8)
    for batch in (1, 8):
        rates = [batch_rate(engine, batch) for _ in range(RUNS + 1)][1:]
        print(f"{size} INT{bits}, {batch} sequences: {statistics.median(rates):,.0f} tok/s")


def prompt(size: str, bits: int) -> None:
    """Print milliseconds of a prompt by the wall, and of the experts of one layer."""
    norm, x = 1 + 0.1 * randn(H), randn(PROMPT, H)
    body = partial(cuda.moe, x, norm, EPS, random_layer(sizes_of(size), bits))
    alone = [elapsed_us(body) for _ in range(RUNS + 2)][2:]
    del body
    engine = random_engine(size, bits, context=4096)
    ids, times = torch.randint(256, (PROMPT,)).tolist(), []
    for _ in range(RUNS + 1):
        engine.forget()
        start = time.perf_counter()
        next(iter(engine.generate(ids, GREEDY, 1)))
        times.append(time.perf_counter() - start)
    print(
        f"{size} INT{bits}, {PROMPT:,} tokens: {statistics.median(times[1:]) * 1e3:.1f} ms by the "
        f"wall, experts of one layer {statistics.median(alone) / 1e3:.2f} ms"
    )


@click.command(help=__doc__)
@click.argument("sizes", nargs=-1, type=click.Choice(list(EXPERTS)))
@click.option("--bits", type=click.Choice(["4", "8"]), default="4", show_default=True)
@click.option("--only", type=click.Choice(PARTS), multiple=True, help="All of them by default.")
def main(sizes: tuple[str, ...], bits: str, only: tuple[str, ...]) -> None:
    if not torch.cuda.is_available():
        raise SystemExit("bench_experts needs an NVIDIA GPU")
    parts = {"layers": layers, "decode": decode, "prompt": prompt}
    for size in sizes or tuple(EXPERTS):
        for name in only or PARTS:
            with torch.inference_mode():
                parts[name](size, int(bits))
            gc.collect()
            torch.cuda.empty_cache()


if __name__ == "__main__":
    main()
