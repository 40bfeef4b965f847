"""Speed of a model that several GPUs share, beside one GPU: decoding, prompts and loading.

Run: python examples/benchmarks/bench_ranks.py [SIZE ...] [--ranks 1,2] [--together 1,16,64]
    [--prompts 2048,8000] [--activations exact|int8] [--folder DIR]
A SIZE that `make_random_checkpoint` knows is written as a packed folder of random codes, in a
temporary folder or in DIR; anything else is a folder. A line for each number of GPUs: seconds to
load, tokens per second of so many greedy sequences after prompts of 64 tokens, milliseconds of a
prompt, the weights and buffers on each GPU, and after how many tokens a greedy answer first
differs from that of the first line. Models of random weights are indifferent to their inputs, so
that these part soon.
"""

import gc
import tempfile
import time
from contextlib import closing
from pathlib import Path

import click
import torch
from make_random_checkpoint import HYBRID_SIZES, SIZES, config_of, write

import lowbit.runtime as lowbit
from lowbit.formats.activation_modes import ACTIVATIONS, Activations
from lowbit.formats.layout.recipes import Base
from lowbit.runtime.lab.bench import GREEDY

PROMPT = 64
NEW = 128
RUNS = 3


def ids_of(tokens: int, seed: int) -> list[int]:
    """A prompt."""
    return [(7 * index + 31 * seed) % 256 for index in range(tokens)]


def together_rate(model: lowbit.Model, count: int) -> float:
    """Tokens a second of so many answers, from when all have begun to when one ends; the best."""
    rates = []
    for turn in range(RUNS + 1):  # the first compiles and records
        model.engine.forget()
        prompts = [ids_of(PROMPT, 100 * turn + each) for each in range(count)]
        handles = [model.engine.generate(ids, GREEDY, NEW) for ids in prompts]
        for handle in handles:
            next(handle)
        started, tokens = time.perf_counter(), 0
        for _ in range(NEW - 24):
            for handle in handles:
                next(handle)
                tokens += 1
        rates.append(tokens / (time.perf_counter() - started))
        for handle in handles:
            list(handle)
    return max(rates[1:])


def prompt_ms(model: lowbit.Model, tokens: int) -> float:
    """Time to the first token of a prompt; the best."""
    times = []
    for turn in range(RUNS + 1):
        model.engine.forget()
        handle = model.engine.generate(ids_of(tokens, turn), GREEDY, 2)
        started = time.perf_counter()
        next(handle)
        times.append(time.perf_counter() - started)
        list(handle)
    return min(times[1:]) * 1e3


def measured(
    folder: Path,
    ranks: int,
    together: tuple[int, ...],
    prompts: tuple[int, ...],
    activations: Activations,
) -> tuple[str, list[int]]:
    """A line of figures, and a greedy answer."""
    started = time.perf_counter()
    most = max(together)
    length = max(PROMPT + NEW, *prompts) + 8
    options = lowbit.LoadOptions(
        device="cuda",
        tensor_parallel=ranks,
        context=length,
        max_sequences=most,
        cache_tokens=max(length, most * 256),
        speculate="off",
        activations=activations,
    )
    model = lowbit.load(folder, options)
    with closing(model):
        load_s = time.perf_counter() - started
        answer = list(model.engine.generate(ids_of(PROMPT, 0), GREEDY, NEW))
        cells = [f"{ranks:>5} {load_s:7.1f}"]
        cells += [f"{together_rate(model, count):9,.0f}" for count in together]
        cells += [f"{prompt_ms(model, count):9.1f}" for count in prompts]
        cells.append(f"{torch.cuda.max_memory_allocated() / 1e9:7.1f}")
    del model
    gc.collect()
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats()
    return " ".join(cells), answer


def numbers(_context: object, _option: object, text: str) -> tuple[int, ...]:
    """Numbers of an option, comma-separated."""
    return tuple(map(int, text.split(",")))


@click.command()
@click.argument("sizes", nargs=-1)
@click.option("--ranks", default="1,2", callback=numbers, show_default=True)
@click.option("--together", default="1,16,64", callback=numbers, show_default=True)
@click.option("--prompts", default="2048,8000", callback=numbers, show_default=True)
@click.option("--recipe", default="int4", show_default=True)
@click.option("--activations", type=click.Choice(ACTIVATIONS), default="exact", show_default=True)
@click.option("--folder", type=click.Path(path_type=Path), help="Where folders are written.")
def main(
    sizes: tuple[str, ...],
    ranks: tuple[int, ...],
    together: tuple[int, ...],
    prompts: tuple[int, ...],
    recipe: Base,
    activations: Activations,
    folder: Path | None,
) -> None:
    """Time models of SIZEs on one GPU and on several."""
    print(f"{torch.cuda.device_count()} x {torch.cuda.get_device_name()}")
    names = [*(f"x {count}" for count in together), *(f"{count:,} ms" for count in prompts)]
    for size in sizes or ("8B",):
        print(f"{size}\n GPUs  load s " + " ".join(f"{name:>9}" for name in names) + "      GB")
        with tempfile.TemporaryDirectory(dir=folder) as place:
            path = Path(size)
            if size in SIZES or size in HYBRID_SIZES:
                path = Path(place) / "model"
                write(config_of(size), path, packed=recipe)
            first: list[int] | None = None
            for count in ranks:
                line, answer = measured(path, count, together, prompts, activations)
                first = first or answer
                pairs = zip(first, answer, strict=True)
                same = next((at for at, (a, b) in enumerate(pairs) if a != b), NEW)
                print(f"{line}  same {same}", flush=True)


if __name__ == "__main__":
    main()
