"""Decode speed of a model on two cores of this CPU, alone and beside busy processes.

Run: python examples/benchmarks/make_random_checkpoint.py 0.6B random-0.6b
     python examples/benchmarks/bench_threads.py random-0.6b --quantize int4

A line for each number of busy processes, which share the two cores with the model: tokens per
second on one thread, on two, and on as many as the engine finds fastest, which is the default.
The three take turns, a median of some rounds each. `--cores` takes others than the first two.
"""

import os
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import click
import torch

import lowbit.runtime as lowbit
from lowbit.runtime.backends.step_threads import StepThreads

BUSY = "while True: pass"
PROMPT = [7 * index % 256 for index in range(16)]
NEW_TOKENS = 2000  # at most; a round ends by its time


@contextmanager
def busy(count: int) -> Iterator[None]:
    """So many processes that do nothing else than to take a core."""
    running = [subprocess.Popen([sys.executable, "-c", BUSY]) for _ in range(count)]
    try:
        yield
    finally:
        for process in running:
            process.kill()
            process.wait()


def tokens_per_s(model: lowbit.Model, seconds: float) -> float:
    """Tokens of one greedy request while some time passes."""
    model.engine.forget()
    handle = model.engine.generate(PROMPT, lowbit.SamplingParams(), NEW_TOKENS)
    next(handle)
    started = time.perf_counter()
    count = 0
    for _ in handle:
        count += 1
        if time.perf_counter() - started > seconds:
            break
    handle.cancel()
    return count / (time.perf_counter() - started)


@click.command()
@click.argument("folder", type=click.Path(path_type=Path, exists=True))
@click.option("--quantize", type=click.Choice(["int4", "int8"]), help="Of a BF16 checkpoint.")
@click.option("--cores", default="0,1", show_default=True, help="Cores that all of it runs on.")
@click.option("--seconds", default=3.0, show_default=True, help="Of a round.")
@click.option("--rounds", default=5, show_default=True, help="Of each way.")
@click.option("--busy", "counts", default="0,1,4", show_default=True, help="Busy processes.")
def main(
    folder: Path, quantize: str | None, cores: str, seconds: float, rounds: int, counts: str
) -> None:
    """Measure the model in FOLDER."""
    used = {int(core) for core in cores.split(",")}
    for thread in Path("/proc/self/task").iterdir():  # OpenMP has begun its threads
        os.sched_setaffinity(int(thread.name), used)
    torch.set_num_threads(len(used))
    model = lowbit.load(
        folder,
        device="cpu",
        context=len(PROMPT) + NEW_TOKENS,
        quantize=quantize,  # type: ignore[arg-type]
    )
    follows = StepThreads()
    click.echo(f"busy  1 thread  {len(used)} threads  measured (tok/s)")
    for count in (int(each) for each in counts.split(",")):
        found: dict[str, list[float]] = {"one": [], "all": [], "default": []}
        with busy(count):
            for _ in range(rounds):
                for way, times in found.items():
                    torch.set_num_threads(1 if way == "one" else len(used))
                    model.engine.threads = follows if way == "default" else None
                    times.append(tokens_per_s(model, seconds))
        one, all_, default = (statistics.median(times) for times in found.values())
        click.echo(f"{count:>4}  {one:>8.1f}  {all_:>9.1f}  {default:>7.1f}")


if __name__ == "__main__":
    main()
