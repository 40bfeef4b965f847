"""Compare with vLLM in FP8 on this GPU: the same closed batches, one engine after the other.

Run: python examples/benchmarks/compare_vllm.py [SIZE] [--out FILE] [--site DIR]
    [--modes exact,int8] [--no-vllm]
SIZE is one that `make_random_checkpoint` knows. lowbit runs INT4 with random weights, a process for
each mode of activations; vLLM makes up the weights of the same config.json and quantizes them to
FP8 (`bench_vllm.py --quantization fp8 --dummy`). --site is a folder that holds vLLM and what it
needs, where it is not installed. Figures are those of bench_vllm.py, in one table; `clients` is
lowbit's alone, the engine's part of bench_serve.py. FILE is written again after each process, so
that what was measured survives a time limit.

Kernels are compiled before anything is timed, by all modes beside each other. On a H100 that has
compiled nothing yet, lowbit takes about three minutes, and vLLM three to start.
"""

import json
import os
import subprocess
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import click
from bench_vllm import LOAD, NEW, PROMPT, SEQUENCES, Figures, measure, numbers, prompt_ids
from make_random_checkpoint import config_of

from lowbit.formats.activation_modes import ACTIVATIONS, Activations

CONTEXT = 8192
BITS = 4
CLIENTS = f"clients {LOAD[0]} x {LOAD[1]} in, {LOAD[2]} out"
CHILD_S = 400  # most seconds of a process
SERVER = {  # quiet, without a network
    "HF_HUB_OFFLINE": "1",
    "VLLM_USE_FLASHINFER_SAMPLER": "0",
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
}


def lowbit_figures(
    size: str, activations: Activations, batches: list[int], prompts: list[int], warm: bool
) -> Figures:
    """Measure lowbit; with `warm` compile its kernels alone."""
    from bench_serve import engine_alone
    from random_engine import random_engine

    from lowbit.runtime.lab.bench import GREEDY

    clients, length, new = LOAD
    cache = max(clients * (length + new + 64), 2 * CONTEXT)
    engine = random_engine(size, BITS, CONTEXT, SEQUENCES, cache, activations=activations)

    def answer(sequences: int, length: int, new: int) -> None:
        engine.forget()  # as vLLM, which keeps no prefixes here
        ids = [prompt_ids(length, each) for each in range(sequences)]
        handles = [engine.generate(each, GREEDY, new) for each in ids]
        if any(len(handle.result()) != new for handle in handles):
            raise SystemExit(f"lowbit made fewer than {new} tokens")

    if warm:
        for tokens in prompts:
            answer(1, tokens, 1)
        for count in batches:
            answer(count, PROMPT, NEW)
        answer(clients, length, 2)
        return {}
    figures = measure(answer, batches, prompts)
    engine.forget()
    engine_alone(engine, clients, length, new)
    figures[CLIENTS] = engine_alone(engine, clients, length, new)["tok_s"]
    click.echo(f"{CLIENTS}: {figures[CLIENTS]:,.0f} tok/s")
    return figures


def run(command: list[str], environment: Mapping[str, str] | None = None) -> None:
    """Run a process; a line says how it failed or how long it took."""
    begun = time.perf_counter()
    try:
        done = subprocess.run(command, env=environment, timeout=CHILD_S, check=False).returncode
    except subprocess.TimeoutExpired:
        done = -1
    took = time.perf_counter() - begun
    click.echo(f"{'done' if done == 0 else f'FAILED ({done})'} after {took:.0f} s", err=True)


def show(found: Mapping[str, Mapping[str, Any]]) -> None:
    """Print a row for each figure, a column for each engine."""
    engines = {name: each["figures"] for name, each in found.items() if "figures" in each}
    rows = list(dict.fromkeys(row for figures in engines.values() for row in figures))
    click.echo(f"{'':<40}" + "".join(f"{name:>16}" for name in engines))
    for row in rows:
        unit = "ms" if row.startswith("prompt") else "tok/s"
        cells = [f"{each[row]:,.0f}" if row in each else "-" for each in engines.values()]
        click.echo(f"{row + ', ' + unit:<40}" + "".join(f"{cell:>16}" for cell in cells))


@click.command()
@click.argument("size", default="8B")
@click.option("--out", type=click.Path(path_type=Path), help="File for the figures, as JSON.")
@click.option("--site", type=click.Path(path_type=Path), help="Folder with vLLM.")
@click.option("--modes", default=",".join(ACTIVATIONS), show_default=True, help="Of activations.")
@click.option("--batches", default="1,16,32,64", show_default=True, help="Sequences together.")
@click.option("--prompts", default="2048,8000", show_default=True, help="Tokens of long prompts.")
@click.option("--vllm/--no-vllm", "beside", default=True, show_default=True)
@click.option("--only", type=click.Choice(ACTIVATIONS), hidden=True)
@click.option("--warm", is_flag=True, hidden=True)
def main(
    size: str,
    out: Path | None,
    site: Path | None,
    modes: str,
    batches: str,
    prompts: str,
    beside: bool,
    only: Activations | None,
    warm: bool,
) -> None:
    """Compare lowbit's INT4 with vLLM's FP8 on a model of SIZE."""
    if only is not None:  # a child
        figures = lowbit_figures(size, only, numbers(batches), numbers(prompts), warm)
        if out is not None:
            out.write_text(json.dumps({"activations": only, "figures": figures}))
        return
    here, shapes = Path(__file__), ["--batches", batches, "--prompts", prompts]
    ours = [sys.executable, str(here), size, *shapes]
    gpu = subprocess.run(
        ["nvidia-smi", "--query-gpu=name", "--format=csv,noheader"],
        capture_output=True,
        text=True,
        check=True,
    ).stdout.splitlines()[0]
    found: dict[str, Any] = {}

    def keep(name: str, file: Path) -> None:
        found[name] = json.loads(file.read_text()) if file.exists() else {"failed": True}
        if out is not None:
            out.write_text(json.dumps({"gpu": gpu, "size": size, "engines": found}, indent=1))

    click.echo(gpu)
    names = modes.split(",")
    warming = [subprocess.Popen([*ours, "--only", each, "--warm"]) for each in names]
    for process in warming:
        process.wait(CHILD_S)
    with TemporaryDirectory() as name:
        folder = Path(name)
        for each in names:
            click.echo(f"\nlowbit INT4, {each} activations", err=True)
            file = folder / f"{each}.json"
            run([*ours, "--only", each, "--out", str(file)])
            keep(f"INT4 {each}", file)
        if beside:
            click.echo("\nvLLM, FP8", err=True)
            (folder / "config.json").write_text(json.dumps(config_of(size)))
            paths = [str(site)] if site else []
            paths += [path for path in (os.environ.get("PYTHONPATH"),) if path]
            environment = {**os.environ, **SERVER, "PYTHONPATH": os.pathsep.join(paths)}
            file = folder / "vllm.json"
            options = ["--quantization", "fp8", "--dummy", "--out", str(file)]
            script = str(here.with_name("bench_vllm.py"))
            run([sys.executable, script, name, *options, *shapes], environment)
            keep("vLLM FP8", file)
    show(found)


if __name__ == "__main__":
    main()
