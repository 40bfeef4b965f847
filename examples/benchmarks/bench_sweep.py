"""Time decode steps along one axis: tokens in the cache, sequences together, or the group size.

Run: python examples/benchmarks/bench_sweep.py MODEL --contexts 128,8192 [--plot speed.svg] [--json]
     python examples/benchmarks/bench_sweep.py MODEL --batches 1,8,16
     python examples/benchmarks/bench_sweep.py BF16_MODEL --group-sizes 32,64,128
Each point is measured as `lowbit-run bench` measures a model, and takes its options. Sequences are
decoded together greedily, and timed from the first token of every one of them on.
"""

import gc
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any, Literal

import click
import torch

from lowbit.formats.charts.axes import Axis, linear_axis
from lowbit.formats.charts.chart import Dot, Line, Mark, chart_file
from lowbit.formats.errors import QuantizationError, RequestError
from lowbit.formats.files.atomic import replace_file
from lowbit.formats.hub.locate import locate
from lowbit.formats.layout.recipes import Base
from lowbit.formats.layout.scheme import GROUP_SIZES
from lowbit.formats.sequence_counts import MOST_SEQUENCES
from lowbit.formats.shell.failure import reported
from lowbit.formats.shell.options import json_option, output_file
from lowbit.formats.shell.output import note, print_json
from lowbit.formats.shell.tables import plain_table, results
from lowbit.runtime.cli.bench import measure_options
from lowbit.runtime.cli.options import (
    load_model,
    machine_options,
    model_argument,
    numbers,
    quantize_options,
    speculate_options,
    with_load_options,
)
from lowbit.runtime.engine.load_options import LoadOptions
from lowbit.runtime.engine.memory import ChosenType, gigabytes
from lowbit.runtime.engine.model import Model
from lowbit.runtime.engine.stats import Speculated
from lowbit.runtime.engine.stream import Handle
from lowbit.runtime.lab.bench import (
    GREEDY,
    StepBytes,
    TimedRun,
    arbitrary_prompt,
    check_fits,
    device_name,
    in_turn,
    measure_speed,
    step_bytes,
    summed,
)
from lowbit.runtime.lab.bench_settings import BenchSettings
from lowbit.runtime.lab.facts import measurement_facts
from lowbit.runtime.lab.machine_speed import read_bandwidth, settle
from lowbit.runtime.models.loader import open_model
from lowbit.runtime.thresholds import ROUND_SEQUENCES, ROUND_TOKENS, SEQUENCE_TOKENS

Swept = Literal["context", "group_size", "batch"]
Values = tuple[int, ...]

DEFAULT_RECIPE: Base = "int4"  # of a sweep over group sizes
LABELS: dict[Swept, str] = {
    "context": "tokens in the cache before the first new one",
    "group_size": "weights that share a scale",
    "batch": "sequences decoded together",
}
SIZE = (640.0, 320.0)
MARGIN = 0.05  # share of the x axis on each side of the points
LEAST_GAP = 0.065  # share of the x axis between two texts side by side
STYLE = """
text { font: 12px system-ui, -apple-system, 'Segoe UI', sans-serif; fill: #808890; }
.title { font-size: 14px; font-weight: 600; }
.name { fill: #3b82f6; }
.grid { stroke: #808890; stroke-opacity: 0.25; }
.axis, .leader { stroke: #808890; }
polyline { fill: none; }
.measured { stroke: #3b82f6; stroke-width: 2; }
.point { fill: #3b82f6; }
.reference { stroke: #808890; stroke-width: 1.5; stroke-dasharray: 5 4; }
"""


@dataclass(frozen=True, slots=True)
class Point:
    """Figures of one place on the axis."""

    at: int  # tokens of the prompt, weights that share a scale, or sequences
    tokens_per_s: float  # median, of all sequences together
    us_per_step: float  # mean time from one token of a sequence to its next
    relative: float  # tokens per second against the first point
    first_token_s: float | None  # median time of the prompt and the first token; None over batches
    step_bytes: int  # moved by a step at the middle of the run, see `StepBytes`
    kv_bytes: int  # of them, keys and values
    # Over contexts, the keys and values beyond the first point's, divided by the time that a step
    # takes longer; None at the first point, and where none takes longer.
    kv_bytes_per_s: float | None
    # Share of the tokens per second that the read bandwidth allows, a step for each.
    roofline_share: float
    speculation: Speculated | None = None  # drafts of the timed runs; None where speculation is off
    # Tokens per second against runs without drafts, which took turns with these; None where
    # speculation is off.
    speculation_factor: float | None = None


@dataclass(frozen=True, slots=True)
class Sweep:
    """Points along one axis, from the lowest up."""

    over: Swept
    device: str  # name of the GPU, or `cpu`
    new_tokens: int  # decoded at each point
    sampled: bool  # see `BenchSettings`
    bandwidth: float  # bytes per second that a plain read of a large buffer reaches here
    kv_cache: str  # type of keys and values: bf16, int8 or fp32
    points: tuple[Point, ...] = field(repr=False)


def over_contexts(model: Model, contexts: Sequence[int], settings: BenchSettings) -> Sweep:
    """Decode after prompts of several lengths.

    Args:
        model: loaded with a context for the longest prompt and the new tokens.
        contexts: tokens of each prompt, in place of `prompt_tokens`.
        settings: of the runs at each length.

    Raises:
        RequestError: the longest run does not fit the context.
    """
    lengths = [replace(settings, prompt_tokens=length) for length in sorted(set(contexts))]
    check_fits(model, lengths[-1])
    timed = [_timed(each.prompt_tokens, model, each) for each in lengths]
    return _sweep("context", model.device, timed, settings, model.kv_cache)


def over_group_sizes(
    load: Callable[[int], Model], group_sizes: Sequence[int], settings: BenchSettings
) -> Sweep:
    """Decode with a model that is quantized at load in groups of several sizes.

    Args:
        load: the model of a group size; one is dropped before the next is loaded.
        group_sizes: weights that share a scale.
        settings: of the runs with each size.

    Raises:
        LowbitError: raised by `load`, or as `bench`.
    """
    timed = []
    for size in sorted(set(group_sizes)):
        model = load(size)
        timed.append(_timed(size, model, settings))
        device, kv_cache = model.device, model.kv_cache
        del model
        _release(device)
    return _sweep("group_size", device, timed, settings, kv_cache)


def check_group_sizes(folder: Path, base: Base, group_sizes: Sequence[int]) -> None:
    """Refuse group sizes that do not divide the rows of a checkpoint, by its headers alone.

    Raises:
        QuantizationError: a size does not divide a row.
        LowbitError: as `open_model`.
    """
    for size in group_sizes:
        for module, scheme in open_model(folder, base, size).schemes.items():
            if scheme is not None and scheme.group_size != size:
                raise QuantizationError(
                    f"`{module}`: groups of {size} do not divide its rows",
                    hint=f"leave {size} out of --group-sizes",
                )


def check_sequences(model: Model, batch: int) -> None:
    """Refuse more sequences than the model has room for.

    Raises:
        RequestError: there are.
    """
    if not 1 <= batch <= model.cache.sequences:
        raise RequestError(
            f"{batch} sequences cannot be decoded together",
            hint=f"1 to {model.cache.sequences} can",
        )


def tokens_before(batch: int, speculation: bool) -> int:
    """Most tokens that a sequence of a batch may get while the prompts of others run.

    With speculation a step of up to ROUND_SEQUENCES sequences shares ROUND_TOKENS among them.
    """
    if not speculation:
        return batch
    rounds = range(1, 1 + min(batch, ROUND_SEQUENCES))
    each = (min(SEQUENCE_TOKENS, ROUND_TOKENS // running) for running in rounds)
    return sum(each) + max(0, batch - ROUND_SEQUENCES)


def batched_run(model: Model, batch: int, settings: BenchSettings) -> TimedRun:
    """A greedy run of `batch` sequences, timed from the first token of every sequence on.

    Prompts are run one after the other, so the first sequences are given more tokens: those that
    they decode while the others' prompts run. With speculation the average sequence decodes
    `new_tokens`, as long as all of them run.

    Args:
        model: loaded; the conversations in its cache are dropped.
        batch: sequences, each with a prompt of its own.
        settings: of each sequence.

    Raises:
        RequestError: the run does not fit the context, or the model has room for fewer sequences.
    """
    check_fits(model, settings)
    check_sequences(model, batch)
    engine, new = model.engine, settings.new_tokens
    engine.forget()
    extra = tokens_before(batch, engine.drafting is not None)
    prompts = [arbitrary_prompt(model, settings.prompt_tokens, index) for index in range(batch)]
    begun = time.perf_counter()
    handles = [engine.generate(prompt, GREEDY, new + extra) for prompt in prompts]
    while not all(handle.begun for handle in handles):
        engine.step()
    _take(handles)
    settle(model.device)
    started, tokens = time.perf_counter(), 0
    while tokens < batch * (new - 1) and not any(handle.ended for handle in handles):
        engine.step()
        tokens += _take(handles)
    settle(model.device)
    seconds = time.perf_counter() - started
    found = summed(handle.speculation for handle in handles)
    for handle in handles:
        handle.cancel()
    engine.step()
    return TimedRun(started - begun, seconds, tokens, found)


def _take(handles: Sequence[Handle]) -> int:
    """Number of tokens that have come since the last time."""
    return sum(len(handle.poll()) for handle in handles)


def over_batches(model: Model, batches: Sequence[int], settings: BenchSettings) -> Sweep:
    """Decode several sequences together, greedily.

    Raises:
        RequestError: as `batched_run`.
    """
    check_sequences(model, max(batches))
    check_fits(model, settings)
    timed = []
    for batch in sorted(set(batches)):
        run = partial(batched_run, model, batch, settings)
        (_, *runs), factor = in_turn(model, settings.runs, run)
        rate = statistics.median(run.tokens_per_s for run in runs)
        drafts = summed(run.speculation for run in runs)
        step = step_bytes(model, settings.middle, batch)
        timed.append(_Timed(batch, batch, rate, None, step, drafts, factor))
    return _sweep("batch", model.device, timed, settings, model.kv_cache)


@dataclass(frozen=True, slots=True)
class _Timed:
    """A point before it is compared with others."""

    at: int
    sequences: int
    tokens_per_s: float
    first_token_s: float | None
    step: StepBytes
    speculation: Speculated | None
    factor: float | None

    @property
    def step_s(self) -> float:
        return self.sequences / self.tokens_per_s


def _timed(at: int, model: Model, settings: BenchSettings) -> _Timed:
    """Measure a point of one sequence."""
    speed = measure_speed(model, settings)
    step = step_bytes(model, settings.middle)
    return _Timed(
        at,
        1,
        speed.tokens_per_s,
        speed.first_token_s,
        step,
        speed.speculation,
        speed.speculation_factor,
    )


def _sweep(
    over: Swept, device: str, timed: Sequence[_Timed], settings: BenchSettings, kv_cache: ChosenType
) -> Sweep:
    bandwidth = read_bandwidth(device)
    first = timed[0]
    points = []
    for each in timed:
        longer = each.step_s - first.step_s
        kv_rate = (each.step.kv - first.step.kv) / longer if longer > 0 else None
        points.append(
            Point(
                at=each.at,
                tokens_per_s=each.tokens_per_s,
                us_per_step=each.step_s * 1e6,
                relative=each.tokens_per_s / first.tokens_per_s,
                first_token_s=each.first_token_s,
                step_bytes=each.step.total,
                kv_bytes=each.step.kv,
                kv_bytes_per_s=kv_rate if over == "context" else None,
                roofline_share=each.step.total / each.step_s / bandwidth,
                speculation=each.speculation,
                speculation_factor=each.factor,
            )
        )
    return Sweep(
        over=over,
        device=device_name(device),
        new_tokens=settings.new_tokens,
        sampled=settings.sampled,
        bandwidth=bandwidth,
        kv_cache=kv_cache.cache_type.name,
        points=tuple(points),
    )


def _release(device: str) -> None:
    """Return the memory of a dropped model, so that the next one finds it free."""
    gc.collect()
    if device == "cuda":
        torch.cuda.empty_cache()


def plotted(name: str, sweep: Sweep) -> str:
    """SVG text of tokens per second, as measured and as the bandwidth allows, over a log axis."""
    measured = [(float(each.at), each.tokens_per_s) for each in sweep.points]
    allowed = [(float(p.at), p.tokens_per_s / p.roofline_share) for p in sweep.points]
    first, last = measured[0][0], measured[-1][0]
    room = max(2.0, last / first) ** MARGIN
    low, high, label = first / room, last * room, LABELS[sweep.over]
    named = set(_spaced(Axis(label, low, high, (), log=True), [at for at, _ in measured]))
    x = Axis(label, low, high, tuple((at, number(at)) for at in sorted(named)), log=True)
    y = linear_axis("tokens / s", [rate for _, rate in measured + allowed], from_zero=True)
    marks: list[Mark] = [
        Line(tuple(measured), "measured", marked=False),
        Line(tuple(allowed), "reference", marked=False),
        *(Dot(at, rate, number(rate) if at in named else "", "point") for at, rate in measured),
    ]
    legend = [("measured", "measured"), ("read bandwidth / bytes per token", "reference")]
    return chart_file(f"{name} on {sweep.device}", x, y, marks, legend, STYLE, SIZE)


def number(value: float) -> str:
    """Three digits, or all digits before the point of a larger number: `0.25`, `84.1`, `2,310`."""
    return f"{value:,.0f}" if value >= 100 else f"{value:.3g}"


def _spaced(axis: Axis, values: Sequence[float]) -> Iterator[float]:
    """The values whose texts do not touch, from left to right."""
    last = -LEAST_GAP
    for value in values:
        if axis.share(value) - last >= LEAST_GAP:
            last = axis.share(value)
            yield value


def show(name: str, sweep: Sweep) -> None:
    """Print a row for each point."""
    how = "sampled" if sweep.sampled else "greedy"
    title = f"{name} on {sweep.device}, {sweep.new_tokens} tokens, {how}, {sweep.kv_cache} cache"
    drafts = any(each.speculation is not None for each in sweep.points)
    columns = ["tok/s", "us/token" if drafts else "us/step", "a step reads", "of the roofline"]
    columns += ["against the first", "first token", "KV read at"]
    columns += ["tokens/round", "against off"] if drafts else []
    table = plain_table(title, (sweep.over.replace("_", " "),), columns)
    for each in sweep.points:
        first, rate = each.first_token_s, each.kv_bytes_per_s
        row = [str(each.at), f"{each.tokens_per_s:.1f}", f"{each.us_per_step:.0f}"]
        row += [gigabytes(each.step_bytes), f"{each.roofline_share:.1%}", f"x {each.relative:.2f}"]
        row += ["-" if first is None else f"{first * 1e3:.1f} ms"]
        row += ["-" if rate is None else f"{gigabytes(int(rate))}/s"]
        if each.speculation is not None:
            row += [
                f"{each.speculation.tokens_a_round or 0:.2f}",
                f"x {each.speculation_factor:.2f}",
            ]
        table.add_row(*row)
    results().print(table)
    results().print(f"read bandwidth {gigabytes(int(sweep.bandwidth))}/s")


@click.command()
@model_argument
@click.option("--contexts", callback=numbers(), metavar="N,N,...", help="Lengths of prompts.")
@click.option(
    "--group-sizes",
    callback=numbers(GROUP_SIZES),
    metavar="N,N,...",
    help=f"Quantize a BF16 MODEL at load, by --quantize or {DEFAULT_RECIPE}, in groups of so many.",
)
@click.option(
    "--batches",
    callback=numbers(most=MOST_SEQUENCES),
    metavar="N,N,...",
    help="Numbers of sequences that are decoded together.",
)
@click.option(
    "--plot",
    type=click.Path(dir_okay=False, path_type=Path),
    callback=output_file,
    metavar="FILE.svg",
    help="Draw the points.",
)
@machine_options
@quantize_options
@speculate_options
@measure_options
@json_option
@reported
@with_load_options
def main(
    *,
    name: str,
    options: LoadOptions,
    contexts: Values | None,
    group_sizes: Values | None,
    batches: Values | None,
    plot: Path | None,
    as_json: bool,
    **measure: Any,
) -> None:
    """Time decode steps of MODEL along one axis."""
    settings = BenchSettings(**measure)
    options = replace(options, speculate=options.speculate or "off")
    if (contexts, group_sizes, batches).count(None) != 2:
        raise click.UsageError("give one of --contexts, --group-sizes and --batches.")
    if contexts is not None:
        needed = replace(settings, prompt_tokens=max(contexts)).tokens
        model = load_model(name, replace(options, context=options.context or needed))
        sweep = over_contexts(model, contexts, settings)
    elif batches is not None:
        most = max(batches)  # the first sequences decode while the last prompts run
        needed = settings.tokens + tokens_before(most, options.speculate != "off")
        options = replace(options, context=options.context or needed, max_sequences=most)
        sweep = over_batches(load_model(name, options), batches, settings)
    else:
        folder, recipe = locate(name).folder, options.quantize or DEFAULT_RECIPE
        options, sizes = replace(options, quantize=recipe), group_sizes or ()
        check_group_sizes(folder, recipe, sizes)
        sweep = over_group_sizes(
            lambda size: load_model(str(folder), replace(options, group_size=size)), sizes, settings
        )
    if as_json:
        device = "cpu" if sweep.device == "cpu" else "cuda"
        print_json({**asdict(sweep), **measurement_facts(options.quantize, device)})
    else:
        show(name, sweep)
    if plot is not None:
        replace_file(plot, plotted(Path(name).name or name, sweep).encode())
        note(f"written to {plot}")


if __name__ == "__main__":
    main()
