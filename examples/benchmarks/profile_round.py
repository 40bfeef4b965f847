"""Time the kernels of a plain step and of rounds with a block drafter, in order, with their gaps.

Run: python examples/benchmarks/profile_round.py [MODEL] [--drafter DRAFTER] [--drafts K] [--json]
MODEL is a size that `make_random_checkpoint` knows, or a config.json; DRAFTER a kind that
`bench_speculation` knows, or a config.json. Both have random INT4 weights, made in place: kernels
take as long for these. One sequence on a GPU, greedy; hardly a draft is right.

  us     by which a kernel moves the end of the work forward (see `profile_step`), without the gap
  gap    before it, in which nothing runs
  round  time of a round by the clock without the profiler, and that of the host in it: from one
         wait for the GPU to the next, beside the GPU's work as long as it is shorter
A replay of a graph is a step or a round; figures are medians over replays.
"""

import json
import os
import statistics
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal

import click
from bench_speculation import (
    BITS,
    DRAFT_ROWS,
    KINDS,
    LARGE_VOCABULARY,
    Bench,
    config_by_name,
    new_bench,
)
from profile_step import GPU_WORK
from random_engine import add_drafter

from lowbit.formats.shell.failure import reported
from lowbit.formats.shell.options import json_option
from lowbit.formats.shell.output import print_json
from lowbit.formats.shell.tables import plain_table, results
from lowbit.runtime.engine.draft.source import Drafts
from lowbit.runtime.engine.load_options import MOST_DRAFTS
from lowbit.runtime.lab.bench import GREEDY, device_name, plain_steps
from lowbit.runtime.lab.machine_speed import settle

Stage = Literal["begin", "drafter", "check", "step"]

WARM, PROFILED, TIMED = 8, 16, 96  # replays; tokens of a timed run
NAME = 40  # most letters of a kernel's name in a table


@dataclass(frozen=True, slots=True)
class Kernel:
    """A kernel of a replay, or a copy; times are medians over replays."""

    name: str
    grid: tuple[int, ...] | None  # programs; None of a copy
    us: float  # by which it moves the end of the work forward
    gap_us: float  # before it


@dataclass(frozen=True, slots=True)
class Replay:
    """A step or a round."""

    name: str
    kernels: tuple[Kernel, ...]  # in order
    gpu_us: float  # from the first kernel's begin to the last one's end, under the profiler
    between_us: float  # from the end of one to the begin of the next
    round_us: float  # by the clock, without the profiler
    host_us: float  # of it, in which the host did not wait


def replays(events: Sequence[Mapping[str, Any]], count: int) -> list[list[Mapping[str, Any]]]:
    """The GPU's work in a trace, by the replay of a graph that it belongs to.

    Args:
        events: complete events of the Trace Event Format.
        count: replays that there were, where the trace does not tell.

    Returns:
        Those replays that have as many kernels as most have, in order.
    """
    work = [each for each in events if each.get("ph") == "X" and each.get("cat") in GPU_WORK]
    work.sort(key=lambda each: float(each["ts"]))
    found: dict[Any, list[Mapping[str, Any]]] = {}
    for each in work:
        found.setdefault(each.get("args", {}).get("correlation"), []).append(each)
    groups = list(found.values())
    if max(map(len, groups), default=0) < 2:  # no kernel says which launch it is of
        size = len(work) // count
        groups = [work[first : first + size] for first in range(0, size * count, size)]
    size = statistics.mode([len(each) for each in groups if len(each) > 1])
    return [each for each in groups if len(each) == size]


def timeline(groups: Sequence[Sequence[Mapping[str, Any]]]) -> tuple[list[Kernel], float, float]:
    """Kernels of replays with their medians; median time of a replay, and between two."""
    us: list[list[float]] = [[] for _ in groups[0]]
    gaps: list[list[float]] = [[] for _ in groups[0]]
    whole, between, before = [], [], None
    for group in groups:
        start = end = float(group[0]["ts"])
        if before is not None:
            between.append(start - before)
        for place, event in enumerate(group):
            begun = float(event["ts"])
            stop = begun + float(event["dur"])
            us[place].append(max(0.0, stop - max(begun, end)))
            gaps[place].append(max(0.0, begun - end))
            end = max(end, stop)
        whole.append(end - start)
        before = end
    kernels = []
    for place, event in enumerate(groups[0]):
        grid = event.get("args", {}).get("grid")
        own = None if grid is None else tuple(grid)
        medians = statistics.median(us[place]), statistics.median(gaps[place])
        kernels.append(Kernel(str(event["name"]), own, *medians))
    return kernels, statistics.median(whole), statistics.median(between or [0.0])


def stages(kernels: Sequence[Kernel]) -> Iterator[tuple[Stage, Kernel]]:
    """Kernels of a round with what they belong to: embeddings begin the drafter and the check."""
    names: tuple[Stage, ...] = ("begin", "drafter", "check")
    lookups = sum("embed" in each.name for each in kernels)
    seen = 0
    for each in kernels:
        seen += "embed" in each.name
        yield ("step" if lookups < 2 else names[min(seen, 2)]), each


def profiled(bench: Bench, name: str, drafting: Drafts | None, trace: Path | None) -> Replay:
    """Profile replays of a step, or of a round if something drafts.

    trace: file that gets the profiler's trace; None for none.
    """
    if drafting is None:
        with plain_steps(bench.engine, bench.plain_graphs):
            return _profiled(bench, name, None, trace)
    return _profiled(bench, name, drafting, trace)


def _profiled(bench: Bench, name: str, drafting: Drafts | None, trace: Path | None) -> Replay:
    from torch.profiler import ProfilerActivity
    from torch.profiler import profile as record

    engine = bench.engine
    engine.drafting = drafting
    timed = _timed(bench)
    engine.forget()
    handle = engine.generate(bench.prompt, GREEDY, (WARM + PROFILED + 2) * (MOST_DRAFTS + 1))
    while not handle.begun:
        engine.step()
    for _ in range(WARM):
        engine.step()
    settle(bench.device)
    os.environ.setdefault("KINETO_LOG_LEVEL", "99")  # see `profile_step`
    with record(activities=[ProfilerActivity.CUDA]) as recorded:
        for _ in range(PROFILED):
            engine.step()
        settle(bench.device)
    handle.cancel()
    engine.step()
    with tempfile.TemporaryDirectory() as folder:
        path = trace or Path(folder) / "trace.json"
        recorded.export_chrome_trace(str(path))
        events = json.loads(path.read_text())["traceEvents"]
    kernels, gpu_us, between_us = timeline(replays(events, PROFILED))
    return Replay(name, tuple(kernels), gpu_us, between_us, *timed)


def _timed(bench: Bench) -> tuple[float, float]:
    """Microseconds of a replay by the clock, and of the host in it; the first run records."""
    engine, results_ = bench.engine, bench.engine.runner.results
    waited, wait = [0.0], results_.wait

    def waiting(done: Any) -> None:
        started = time.perf_counter()
        wait(done)
        waited[0] += time.perf_counter() - started

    results_.wait = waiting  # type: ignore[method-assign]
    try:
        for _ in range(2):
            engine.forget()
            handle = engine.generate(bench.prompt, GREEDY, TIMED + 2 * (MOST_DRAFTS + 1))
            while not handle.begun:
                engine.step()
            for _ in range(WARM):
                engine.step()
            output = len(handle.poll())
            settle(bench.device)
            waited[0], steps, started = 0.0, 0, time.perf_counter()
            while output < TIMED and not handle.ended:
                engine.step()
                output += len(handle.poll())
                steps += 1
            settle(bench.device)
            seconds = time.perf_counter() - started
            handle.cancel()
            engine.step()
    finally:
        results_.wait = wait  # type: ignore[method-assign]
    each = 1e6 / max(1, steps)
    return seconds * each, (seconds - waited[0]) * each


def show_replay(replay: Replay) -> None:
    """Print a row for all kernels of a name and grid in a stage, and the sums of stages."""
    table = plain_table(replay.name, ("stage", "kernel"), ("calls", "us", "gap", "us in all"))
    rows: dict[tuple[Stage, str, tuple[int, ...] | None], list[Kernel]] = {}
    sums: dict[Stage, list[Kernel]] = {}
    for stage, each in stages(replay.kernels):
        rows.setdefault((stage, each.name, each.grid), []).append(each)
        sums.setdefault(stage, []).append(each)
    for (stage, name, grid), some in rows.items():
        label = f"{name.removeprefix('void ')[:NAME]} {'x'.join(map(str, grid or ()))}"
        table.add_row(stage, label, *_numbers(some))
    table.add_section()
    for stage, some in sums.items():
        table.add_row(stage, "", *_numbers(some))
    console = results()
    console.print(table)
    console.print(
        f"{len(replay.kernels)} kernels, {replay.gpu_us:.1f} us under the profiler and "
        f"{replay.between_us:.1f} to the next; {replay.round_us:.1f} us by the clock, "
        f"{replay.host_us:.1f} of the host beside it"
    )


def _numbers(some: Sequence[Kernel]) -> tuple[str, ...]:
    us, gap = sum(each.us for each in some), sum(each.gap_us for each in some)
    each = f"{us / len(some):.2f}", f"{gap / len(some):.2f}"
    return str(len(some)), *each, f"{us + gap:.1f}"


def config_from(name: str, raw: Mapping[str, Any]) -> dict[str, Any]:
    """config.json of a drafter: of a kind for a model's config.json, or of a file."""
    if name in KINDS:
        return KINDS[name](raw)
    return dict(json.loads(Path(name).read_text("utf-8")))


@click.command(help=__doc__)
@click.argument("model", default="8B")
@click.option("--drafter", default="dflash", show_default=True, metavar="KIND|CONFIG")
@click.option("--drafts", multiple=True, type=int, help="Drafts of a round; 3 and 7 by default.")
@click.option("--whole-head", is_flag=True, help="Draft from all of the head.")
@click.option("--trace", type=click.Path(file_okay=False, path_type=Path), help="Keeps traces.")
@json_option
@reported
def main(
    model: str,
    drafter: str,
    drafts: tuple[int, ...],
    whole_head: bool,
    trace: Path | None,
    as_json: bool,
) -> None:
    bench = new_bench(model, "cuda", None, 1, TIMED, "dflash", whole_head, "exact")
    raw = config_by_name(model)
    large = raw.get("vocab_size", 0) > LARGE_VOCABULARY
    rows = DRAFT_ROWS if large and not whole_head else 0
    found = [profiled(bench, "plain step", None, trace and trace / "plain.json")]
    add_drafter(bench.engine, config_from(drafter, raw), BITS, "cuda", rows)
    for k in drafts or (3, 7):
        rounds = bench.new_made((), "own")
        file = trace and trace / f"round{k}.json"
        found.append(profiled(bench, f"round of {k} drafts", bench.drafting(k, None, rounds), file))
    if as_json:
        print_json(
            {"model": model, "device": device_name("cuda"), "replays": list(map(asdict, found))}
        )
        return
    for each in found:
        show_replay(each)


if __name__ == "__main__":
    main()
