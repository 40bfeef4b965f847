"""Time prompts on a CPU beside transformers in FP32, in one process and in turn.

python examples/benchmarks/bench_cpu_prompts.py examples/models/tiny-qwen3 --recipes int4 int8
ATEN_CPU_CAPABILITY=avx2 MKL_ENABLE_INSTRUCTIONS=AVX2 ONEDNN_MAX_CPU_ISA=AVX2 python ...

ORIGINAL is a folder in BF16; lowbit quantizes it as it loads. A line gives the median time to the
logits of the last token. With `--cpu-time`, on one thread, it is the thread's own time, which other
processes hardly change.
"""

import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, cast

import click
import torch
from transformers import AutoModelForCausalLM

import lowbit.runtime as lowbit
from lowbit.formats.layout.recipes import Base
from lowbit.formats.machine.cores import multiplies_bf16


def prompt_of(model: lowbit.Model, ids: list[int]) -> Callable[[], object]:
    """Run a prompt through lowbit, without what the cache has of it."""

    def run() -> object:
        model.engine.forget()
        return model.engine.logits(ids, len(ids) - 1)

    return run


def transformers_prompt(model: Any, ids: list[int]) -> Callable[[], object]:
    """Run a prompt through transformers; head on the last token alone, as lowbit does."""
    inputs = torch.tensor([ids])

    def run() -> object:
        with torch.inference_mode():
            return model(inputs, logits_to_keep=1)

    return run


def times(
    runs: dict[str, Callable[[], object]], rounds: int, clock: Callable[[], float]
) -> dict[str, float]:
    """Median seconds of each run, taken in turn after one round that warms up."""
    taken: dict[str, list[float]] = {name: [] for name in runs}
    for _ in range(1 + rounds):
        for name, run in runs.items():
            began = clock()
            run()
            taken[name].append(clock() - began)
    return {name: statistics.median(each[1:]) for name, each in taken.items()}


@click.command()
@click.argument("original", type=click.Path(exists=True, path_type=Path))
@click.option("--recipes", default="int4,int8", show_default=True, help="Separated by commas.")
@click.option("--tokens", default="48,128,512,1024", show_default=True, help="Lengths of prompts.")
@click.option("--rounds", default=5, show_default=True)
@click.option("--threads", type=int, help="Of both; PyTorch's own number without.")
@click.option("--cpu-time", is_flag=True, help="Time of one thread, without waiting.")
def main(
    original: Path, recipes: str, tokens: str, rounds: int, threads: int | None, cpu_time: bool
) -> None:
    """Print a line for each length."""
    if threads or cpu_time:
        torch.set_num_threads(threads or 1)
    kind = torch.backends.cpu.get_cpu_capability()
    products = "BF16" if multiplies_bf16() else "FP32"
    print(f"{kind}, {torch.get_num_threads()} threads, weights of many tokens widen to {products}")
    peer: Any = AutoModelForCausalLM.from_pretrained(original, dtype=torch.float32)
    models = {
        recipe: lowbit.load(original, device="cpu", quantize=cast(Base, recipe), threads=threads)
        for recipe in recipes.split(",")
    }
    vocabulary = peer.config.vocab_size
    ids = torch.randint(vocabulary, (8192,), generator=torch.Generator().manual_seed(1)).tolist()
    for count in map(int, tokens.split(",")):
        runs = {"transformers": transformers_prompt(peer, ids[:count])}
        runs |= {recipe: prompt_of(model, ids[:count]) for recipe, model in models.items()}
        found = times(runs, rounds, time.thread_time if cpu_time else time.perf_counter)
        base = found.pop("transformers")
        ours = (f"{name} {s * 1e3:.1f} ms ({s / base:.2f})" for name, s in found.items())
        print(f"{count:5} tokens: transformers FP32 {base * 1e3:.1f} ms,", ", ".join(ours))


if __name__ == "__main__":
    main()
