"""Speed of a model that several GPUs share, beside one GPU: decoding, prompts and loading.

Run: python examples/benchmarks/bench_ranks.py [SIZE ...] [--ranks 1,2] [--together 1,16,64]
    [--prompts 2048,8000] [--activations exact|int8] [--draft-with head|dflash|DIR] [--drafts 7]
    [--folder DIR]
A SIZE that `make_random_checkpoint` knows is written as a packed folder of random codes, in a
temporary folder or in DIR; anything else is a folder. A line for each number of GPUs: seconds to
load, the most memory of the host that each process had resident until then (libraries and other
mapped pages of files count, the system's cache of files does not), tokens per second of so many
greedy sequences after prompts of 64 tokens, milliseconds of a prompt, the weights and buffers on
each GPU, and after how many tokens a greedy answer first differs from that of the first line.
Models of random weights are indifferent to their inputs, so that these part soon.

With --draft-with, two more columns: tokens per second of a sequence in rounds whose drafts are all
right, made by the head or a drafter and then replaced by those of the known answer, and the steps
that such a round takes. `!` marks an answer that differs from the one without drafts.
"""

import gc
import tempfile
import time
from contextlib import closing
from dataclasses import replace
from pathlib import Path

import click
import torch
from forced_drafts import forced_rounds
from make_random_checkpoint import HYBRID_SIZES, SIZES, config_of, write
from random_engine import drafter_of

import lowbit.runtime as lowbit
from lowbit.formats.activation_modes import ACTIVATIONS, Activations
from lowbit.formats.layout.recipes import Base
from lowbit.formats.machine.memory import forget_peak, give_back, peak_resident_bytes
from lowbit.runtime.engine.draft.policy import Kind, StepCosts
from lowbit.runtime.engine.draft.source import Drafts
from lowbit.runtime.engine.load_options import Mode
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


def round_rate(model: lowbit.Model, drafting: Drafts, most: int, plain: float) -> str:
    """Cells of rounds with up to so many drafts, all right.

    Args:
        plain: tokens a second of a sequence without drafts.
    """
    engine, prompt = model.engine, ids_of(PROMPT, 0)
    engine.forget()
    truth = list(engine.generate(prompt, GREEDY, NEW + most + 1))
    start: dict[Kind, float] = {"plain": 1.0, "given": 1.0, "made": 1.0}
    drafting.policy.costs = StepCosts(start, dict.fromkeys(start, 0.0))
    if drafting.made is None:
        raise click.UsageError("the model has no head that drafts")
    drafting.made = forced_rounds(drafting.made, prompt, truth, "all")
    rates, same, rounds = [], True, 0
    engine.drafting = drafting
    for _ in range(RUNS + 1):
        engine.forget()
        handle = engine.generate(prompt, GREEDY, NEW)
        tokens = [next(handle)]
        started = time.perf_counter()
        tokens += handle
        rates.append((NEW - 1) / (time.perf_counter() - started))
        same = same and tokens == truth[:NEW]
        rounds = handle.tally.rounds
    engine.drafting = None
    rate = max(rates[1:])
    steps = plain / rate * (NEW - 1) / max(1, rounds)
    return f"{rate:9,.0f} {steps:9.2f}{'' if same else ' !'}"


def host_peaks(model: lowbit.Model) -> str:
    """GB that each process of a model has had of the host at most, the first rank's first."""
    members = [] if model.crew is None else model.crew.members
    processes = (None, *(member.process.pid for member in members))
    return "+".join(f"{peak_resident_bytes(each) / 1e9:.1f}" for each in processes)


def measured(
    folder: Path,
    ranks: int,
    together: tuple[int, ...],
    prompts: tuple[int, ...],
    options: lowbit.LoadOptions,
) -> list[int]:
    """Print a line of figures, each as soon as it is there, but for its end; a greedy answer."""
    give_back()  # else what the allocator keeps of the folder's writing counts
    forget_peak()
    started = time.perf_counter()
    most = max(together)
    length = max(PROMPT + NEW, *prompts) + 24  # and the drafts of a round
    options = replace(
        options,
        tensor_parallel=ranks,
        context=length,
        max_sequences=most,
        cache_tokens=max(length, most * 256),
    )
    model = lowbit.load(folder, options)
    with closing(model):
        show(f"{ranks:>5} {time.perf_counter() - started:7.1f} {host_peaks(model):>9}")
        drafting, model.engine.drafting = model.engine.drafting, None
        answer = list(model.engine.generate(ids_of(PROMPT, 0), GREEDY, NEW))
        for count in together:
            show(f"{together_rate(model, count):9,.0f}")
        for count in prompts:
            show(f"{prompt_ms(model, count):9.1f}")
        if isinstance(drafting, Drafts):
            plain = together_rate(model, 1)
            show(round_rate(model, drafting, options.draft_tokens or 1, plain))
        show(f"{torch.cuda.max_memory_allocated() / 1e9:7.1f}")
    del model, drafting
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
    return answer


def show(cell: str) -> None:
    """Print a cell of a line that goes on."""
    print(cell, end=" ", flush=True)


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
@click.option("--draft-with", metavar="head|dflash|DIR", help="What drafts; nothing by default.")
@click.option("--drafts", default=7, show_default=True, help="Of a round.")
@click.option("--device", default="cuda", show_default=True)
@click.option("--folder", type=click.Path(path_type=Path), help="Where folders are written.")
def main(
    sizes: tuple[str, ...],
    ranks: tuple[int, ...],
    together: tuple[int, ...],
    prompts: tuple[int, ...],
    recipe: Base,
    activations: Activations,
    draft_with: str | None,
    drafts: int,
    device: str,
    folder: Path | None,
) -> None:
    """Time models of SIZEs on one GPU and on several."""
    if device == "cuda":
        print(f"{torch.cuda.device_count()} x {torch.cuda.get_device_name()}")
    names = [*(f"x {count}" for count in together), *(f"{count:,} ms" for count in prompts)]
    names += [f"{drafts} drafts", "steps"] if draft_with else []
    mode: Mode = "off" if draft_with is None else "mtp" if draft_with == "head" else "dflash"
    for size in sizes or ("8B",):
        with tempfile.TemporaryDirectory(dir=folder) as place:
            path = Path(size)
            drafter = Path(draft_with) if draft_with and mode == "dflash" else None
            if size in SIZES or size in HYBRID_SIZES:
                path, config = Path(place) / "model", config_of(size)
                head = {"mtp_num_hidden_layers": 1} if mode == "mtp" else {}
                started = time.perf_counter()
                written = write(config | head, path, packed=recipe)
                took = time.perf_counter() - started
                print(f"{size}: {written / 1e9:.1f} GB written in {took:.0f} s", flush=True)
                if draft_with == "dflash":
                    drafter = Path(place) / "drafter"
                    write(drafter_of(config), drafter, packed=recipe)
            columns = " ".join(f"{name:>9}" for name in ("host GB", *names))
            since = "since its load began" if forget_peak() else "since it began, writing included"
            print(f"{size}; host GB: most resident of each process {since}, mapped files too")
            print(f" GPUs  load s {columns}      GB", flush=True)
            options = lowbit.LoadOptions(
                device=device,
                activations=activations,
                speculate=mode,
                drafter=drafter,
                draft_tokens=drafts,
            )
            first: list[int] | None = None
            for count in ranks:
                answer = measured(path, count, together, prompts, options)
                first = first or answer
                pairs = zip(first, answer, strict=True)
                same = next((at for at, (a, b) in enumerate(pairs) if a != b), NEW)
                print(f" same {same}", flush=True)


if __name__ == "__main__":
    main()
