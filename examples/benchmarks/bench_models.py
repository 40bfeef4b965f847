"""Decode speed of models on this GPU, with random weights that need no files.

Run: python examples/benchmarks/bench_models.py [--bits N ...] [--activations int8] [SIZE ...]
Sizes are those of `make_random_checkpoint`; by default all but LARGE. A line for each size and
recipe: tokens per second of the engine's loop, 128 tokens after a prompt of 64, greedy and drawn
(top-k 20, top-p 0.95), a median of three captures of three runs each; what the slowest and the
fastest capture made of it, since captures of the same step differ; the packed weights it reads a
second, of what a plain read of memory reaches; and the rate at which the cache is read at long
contexts: its bytes by the time that a step takes longer.
"""

import gc
import math
import statistics
import time

import click
import torch
from bench_kernels import elapsed_us
from make_random_checkpoint import HYBRID_SIZES, SIZES, config_of
from random_engine import GROUP, bits_of, random_engine, standing_sequences

from lowbit.formats.activation_modes import ACTIVATIONS, Activations
from lowbit.formats.architectures import read_config, tensor_table
from lowbit.runtime.engine.engine import Engine
from lowbit.runtime.engine.graphs import Graphs
from lowbit.runtime.lab.bench import GREEDY, SAMPLED
from lowbit.runtime.lab.bench_settings import BenchSettings
from lowbit.runtime.lab.machine_speed import read_bandwidth
from lowbit.runtime.state.sampling_params import SamplingParams

LARGE = ("14B", "32B", "3.5-27B", "30B-A3B", "3.5-35B-A3B")  # measured where they are asked for
CONTEXTS = (8_000, 32_000)
CONTEXT = 33_000
CAPTURES = 3
RUN = BenchSettings()
RUNS = 3
STEPS = 20  # timed at a long context, each
BURSTS = 3  # of them; the first after a capture is slower and does not count
MOST_STEPS = STEPS * (1 + BURSTS) + 1  # of a sequence


def token_us(engine: Engine, params: SamplingParams) -> float:
    """A token of a request, as the host sees them come."""
    engine.forget()
    ids = [7 * index % 256 for index in range(RUN.prompt_tokens)]
    marks = [time.perf_counter() for _ in engine.generate(ids, params, RUN.new_tokens)]
    return (marks[-1] - marks[0]) / (RUN.new_tokens - 1) * 1e6


def captured_us(engine: Engine, params: SamplingParams) -> list[float]:
    """The same for each of some captures."""
    times = []
    for _ in range(CAPTURES):
        engine.runner.graphs = Graphs()
        gc.collect()
        token_us(engine, params)
        times.append(statistics.median(token_us(engine, params) for _ in range(RUNS)))
    return sorted(times)


def step_us(engine: Engine, position: int, count: int = 1) -> float:
    """A greedy step of so many sequences, each with so many tokens in the cache."""
    sequences = standing_sequences(engine, count, position, MOST_STEPS)

    def burst() -> None:
        for _ in range(STEPS):
            engine.runner.decode(sequences)
            for each in sequences:
                each.length += 1

    times = [elapsed_us(burst) / STEPS for _ in range(1 + BURSTS)]
    return statistics.median(times[1:])


def cache_rates(engine: Engine, size: str) -> str:
    """Bytes that a step reads more at long contexts, by the time it takes longer."""
    engine.runner.graphs = Graphs()
    config, short = read_config(config_of(size)), step_us(engine, RUN.prompt_tokens)
    rates = []
    for context in CONTEXTS:
        tokens = config.kv_layers * (context - RUN.prompt_tokens)
        size_bytes = tokens * engine.runner.state.pages.token_bytes
        rate = size_bytes / (step_us(engine, context) - short) / 1e6
        rates.append(f"{rate:.1f} at {context:,}")
    return ", ".join(rates)


def weight_bytes(size: str, bits: int) -> float:
    """Packed bytes that a step reads; of experts, those of one token."""
    experts = read_config(config_of(size)).experts
    share = 1.0 if experts is None else experts.chosen / experts.count
    linears = [spec for spec in tensor_table(config_of(size)) if spec.quantizable]
    weights = [
        math.prod(spec.shape) * (share if spec.role == "expert" else 1.0) for spec in linears
    ]
    widths = [bits_of(spec.module, bits) for spec in linears]
    return sum(n * (width / 8 + 2 / GROUP) for n, width in zip(weights, widths, strict=True))


@click.command()
@click.argument("sizes", nargs=-1, type=click.Choice([*SIZES, *HYBRID_SIZES]), metavar="[SIZE]...")
@click.option(
    "--bits",
    "widths",
    type=int,
    multiple=True,
    default=(4, 8),
    help="Of the MLP; attention gets one more below 4, the head 8.",
)
@click.option("--activations", type=click.Choice(ACTIVATIONS), default="exact", show_default=True)
def main(sizes: tuple[str, ...], widths: tuple[int, ...], activations: Activations) -> None:
    """Time the decoding of models of SIZEs."""
    if not torch.cuda.is_available():
        raise SystemExit("bench_models needs an NVIDIA GPU")
    bandwidth = read_bandwidth("cuda")
    print(f"{torch.cuda.get_device_name()}, reads {bandwidth / 1e12:.2f} TB/s")
    columns = ("greedy", "from", "to", "drawn", "of reads")
    print(f"{'tok/s':<16}" + "".join(f"{name:>9}" for name in columns) + "  cache, TB/s")
    for size in sizes or [size for size in (*SIZES, *HYBRID_SIZES) if size not in LARGE]:
        for bits in widths:
            engine = random_engine(size, bits, CONTEXT, activations=activations)
            greedy, drawn = captured_us(engine, GREEDY), captured_us(engine, SAMPLED)
            middle = greedy[CAPTURES // 2]
            share = weight_bytes(size, bits) / middle / 1e-6 / bandwidth
            speeds = (middle, greedy[-1], greedy[0], drawn[CAPTURES // 2])
            line = f"{size + f' INT{bits}':<16}" + "".join(f"{1e6 / us:9,.0f}" for us in speeds)
            rates = cache_rates(engine, size) if bits == 4 else ""
            print(f"{line}{share:9.0%}  {rates}", flush=True)
            del engine
            gc.collect()
            torch.cuda.empty_cache()


if __name__ == "__main__":
    main()
