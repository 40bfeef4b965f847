"""Time every kernel in a decode step, by PyTorch's profiler.

Run: python examples/benchmarks/profile_step.py MODEL [--json]
On a GPU these are the kernels that a graph's replay runs. With programmatic dependent launch a
kernel begins while the one before still runs, and waits; so a kernel is charged with the time by
which it moves the end of the work forward, and no time is counted twice. On a CPU these are the
operators, each without those it calls.
"""

import json
import os
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, Literal, get_args

import click

from lowbit.formats.errors import RequestError, ResourceError
from lowbit.formats.shell.failure import reported
from lowbit.formats.shell.options import json_option
from lowbit.formats.shell.output import print_json
from lowbit.formats.shell.tables import plain_table, results
from lowbit.runtime.cli.bench import measure_options
from lowbit.runtime.cli.options import (
    load_model,
    machine_options,
    model_argument,
    quantize_options,
    with_load_options,
)
from lowbit.runtime.engine.load_options import LoadOptions
from lowbit.runtime.engine.memory import gigabytes
from lowbit.runtime.engine.model import Model
from lowbit.runtime.lab.bench import StepBytes, arbitrary_prompt, check_fits, choice_of, step_bytes
from lowbit.runtime.lab.bench_settings import BenchSettings
from lowbit.runtime.lab.machine_speed import settle

Reads = Literal["weights", "kv", "states", "other"]

STEPS = 32  # profiled, where so many tokens are asked for
LEAST_SHARE = 0.005  # kernels below it are one row
NUMBERS_WIDTH = 60  # of the columns beside a kernel's name
LEAST_NAME = 20
GPU_WORK = ("kernel", "gpu_memcpy", "gpu_memset")  # categories of a trace
# Kind of bytes by a part of the kernel's name; the first that fits counts.
READERS: tuple[tuple[str, Reads], ...] = (
    ("gemv", "weights"),
    ("experts_gate_up", "weights"),
    ("experts_down", "weights"),
    ("gemm", "weights"),
    ("pack_mm", "weights"),
    ("aten::mm", "weights"),
    ("aten::addmm", "weights"),
    ("attention", "kv"),
    ("recurrence", "states"),
    ("delta", "states"),
)


@dataclass(frozen=True, slots=True)
class KernelTime:
    """One kernel, or one kind of operator on a CPU; times are means."""

    name: str  # as the profiler has it
    # Programs along x, y and z, which tell calls of different sizes apart; None on a CPU.
    grid: tuple[int, ...] | None
    reads: Reads  # kind of most of the bytes that it moves
    calls_per_token: float
    us_per_call: float
    us_per_token: float
    share: float  # of the time of all kernels


@dataclass(frozen=True, slots=True)
class ReadTime:
    """Sum over all kernels that move the same kind of bytes."""

    reads: Reads
    us_per_token: float
    share: float
    bytes_per_token: int | None  # that must be moved; None where unknown
    bytes_per_s: float | None  # over their time


@dataclass(frozen=True, slots=True)
class Profile:
    """The kernels of a decode step."""

    steps: int  # profiled
    # Time of all kernels, with the cost of the profiler, without the waits between kernels.
    kernel_us_per_token: float
    kernels: tuple[KernelTime, ...]  # the longest first
    reads: tuple[ReadTime, ...]  # sums by kind of bytes


def profile(model: Model, settings: BenchSettings) -> Profile:
    """Profile up to STEPS decode steps after an arbitrary prompt.

    Args:
        model: loaded; the conversations in its cache are dropped.
        settings: of the run, at least 3 new tokens.

    Raises:
        RequestError: fewer than 3 new tokens, or they do not fit the context.
        ResourceError: the profiler sees nothing of the GPU.
    """
    if settings.new_tokens < 3:
        raise RequestError(f"a profile takes at least 3 new tokens, got {settings.new_tokens}")
    check_fits(model, settings)
    # A step before them warms up, a GPU runs one ahead.
    steps = min(STEPS, settings.new_tokens - 2)
    spans = _record(model, steps, settings)
    if not spans:
        raise ResourceError(
            "the profiler saw no kernel of the GPU",
            hint="another profiler may be attached, or the driver keeps its counters to root",
        )
    return _summed(spans, steps, step_bytes(model, settings.prompt_tokens + steps // 2))


@dataclass(frozen=True, slots=True)
class Span:
    """Time that calls of one kernel took together, in microseconds."""

    name: str
    grid: tuple[int, ...] | None
    calls: int
    us: float


def gpu_spans(events: Sequence[Mapping[str, Any]]) -> list[Span]:
    """The work of a GPU in a trace (the Trace Event Format's complete events, times in us).

    Returns:
        One of each kernel and grid, in the order in which they begin. Their times add up to the
        time in which the GPU was not idle, see the top of this file.
    """
    work = [each for each in events if each.get("ph") == "X" and each.get("cat") in GPU_WORK]
    calls: dict[tuple[str, tuple[int, ...] | None], int] = {}
    times: dict[tuple[str, tuple[int, ...] | None], float] = {}
    end = float("-inf")
    for event in sorted(work, key=lambda each: float(each["ts"])):
        grid = event.get("args", {}).get("grid")
        key = (str(event["name"]), None if grid is None else tuple(grid))
        start, stop = float(event["ts"]), float(event["ts"]) + float(event["dur"])
        calls[key] = calls.get(key, 0) + 1
        times[key] = times.get(key, 0.0) + max(0.0, stop - max(start, end))
        end = max(end, stop)
    return [Span(*key, calls=count, us=times[key]) for key, count in calls.items()]


def _record(model: Model, steps: int, settings: BenchSettings) -> list[Span]:
    from torch.profiler import ProfilerActivity
    from torch.profiler import profile as record

    on_gpu = model.device == "cuda"
    model.engine.forget()
    prompt = arbitrary_prompt(model, settings.prompt_tokens)
    tokens = model.engine.generate(prompt, choice_of(settings), steps + 2)
    next(tokens)  # prefill and capture are over
    settle(model.device)
    # The library below the profiler prints a line at its beginning and end, at any lower level.
    os.environ.setdefault("KINETO_LOG_LEVEL", "99")
    with record(activities=[ProfilerActivity.CUDA if on_gpu else ProfilerActivity.CPU]) as recorded:
        for _ in range(steps):
            next(tokens)
        settle(model.device)
    if not on_gpu:
        averages = recorded.key_averages()
        return [Span(each.key, None, each.count, each.self_cpu_time_total) for each in averages]
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "trace.json"
        recorded.export_chrome_trace(str(path))
        return gpu_spans(json.loads(path.read_text())["traceEvents"])


def _summed(spans: Sequence[Span], steps: int, moved: StepBytes) -> Profile:
    total = sum(span.us for span in spans) or 1.0
    kernels = [
        KernelTime(
            name=span.name,
            grid=span.grid,
            reads=_reads(span.name),
            calls_per_token=span.calls / steps,
            us_per_call=span.us / span.calls,
            us_per_token=span.us / steps,
            share=span.us / total,
        )
        for span in spans
    ]
    known = {"weights": moved.weights, "kv": moved.kv, "states": moved.states}
    kinds = []
    for reads in get_args(Reads):
        us = sum(each.us_per_token for each in kernels if each.reads == reads)
        if us > 0:
            size = known.get(reads)
            rate = None if size is None else size / us * 1e6
            kinds.append(ReadTime(reads, us, us * steps / total, size, rate))
    return Profile(
        steps=steps,
        kernel_us_per_token=total / steps,
        kernels=tuple(sorted(kernels, key=lambda each: -each.us_per_token)),
        reads=tuple(kinds),
    )


def _reads(name: str) -> Reads:
    return next((reads for part, reads in READERS if part in name), "other")


def show_profile(profile: Profile) -> None:
    """Print a row for each kernel, then for each kind of bytes."""
    console = results()
    title = f"{profile.steps} decode steps under the profiler"
    figures = ("calls", "us/call", "us/token", "share", "bandwidth")
    table = plain_table(title, ("kernel",), figures)
    width = max(LEAST_NAME, console.width - NUMBERS_WIDTH)
    shown = [each for each in profile.kernels if each.share >= LEAST_SHARE]
    for each in shown:
        numbers = f"{each.calls_per_token:g}", f"{each.us_per_call:.2f}", f"{each.us_per_token:.1f}"
        table.add_row(_label(each, width), *numbers, f"{each.share:.1%}", "")
    if rest := profile.kernels[len(shown) :]:
        us, share = sum(each.us_per_token for each in rest), sum(each.share for each in rest)
        calls = sum(each.calls_per_token for each in rest)
        table.add_row(f"{len(rest)} more", f"{calls:g}", "", f"{us:.1f}", f"{share:.1%}", "")
    table.add_section()
    for kind in profile.reads:
        us, share = kind.us_per_token, kind.share
        rate = "-" if kind.bytes_per_s is None else f"{gigabytes(int(kind.bytes_per_s))}/s"
        table.add_row(kind.reads, "", "", f"{us:.1f}", f"{share:.1%}", rate)
    table.add_section()
    table.add_row("all kernels", "", "", f"{profile.kernel_us_per_token:.1f}", "100.0%", "")
    console.print(table)


def _label(kernel: KernelTime, width: int) -> str:
    """Name, cut to the width, and grid."""
    name = kernel.name.removeprefix("void ")
    grid = "" if kernel.grid is None else " " + "x".join(map(str, kernel.grid))
    room = width - len(grid)
    return (name if len(name) <= room else name[: room - 1] + "…") + grid


@click.command()
@model_argument
@machine_options
@quantize_options
@measure_options
@json_option
@reported
@with_load_options
def main(*, name: str, options: LoadOptions, as_json: bool, **measure: Any) -> None:
    """Show where the time of a token of MODEL goes, in plain decode steps."""
    settings = BenchSettings(**measure)
    options = replace(options, speculate="off", context=options.context or settings.tokens)
    found = profile(load_model(name, options), settings)
    if as_json:
        print_json(asdict(found))
    else:
        show_profile(found)


if __name__ == "__main__":
    main()
