"""Decode speed along one axis: tokens in the cache, the group size, or sequences at a time."""

import gc
import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Literal

import torch

from lowbit.formats.errors import QuantizationError
from lowbit.formats.layout.recipes import Base
from lowbit.runtime.bench.bench import (
    StepBytes,
    batched_run,
    check_fits,
    check_sequences,
    device_name,
    in_turn,
    measure_speed,
    step_bytes,
    summed,
)
from lowbit.runtime.bench.machine_speed import read_bandwidth
from lowbit.runtime.bench.plot import NamedLine, line_plot
from lowbit.runtime.bench.settings import BenchSettings
from lowbit.runtime.engine.memory import ChosenType
from lowbit.runtime.engine.model import Model
from lowbit.runtime.engine.stats import Speculated
from lowbit.runtime.models.loader import open_model

Axis = Literal["context", "group_size", "batch"]

LABELS: dict[Axis, str] = {
    "context": "tokens in the cache before the first new one",
    "group_size": "weights that share a scale",
    "batch": "sequences decoded together",
}


@dataclass(frozen=True, slots=True)
class Point:
    """Figures of one place on the axis.

    Attributes:
        at: tokens of the prompt, weights that share a scale, or sequences.
        tokens_per_s: median, of all sequences together.
        us_per_step: mean time from one token of a sequence to its next.
        relative: tokens per second against the first point.
        first_token_s: median time of the prompt and the first token; None over batches.
        step_bytes: moved by a step at the middle of the run, see `StepBytes`.
        kv_bytes: of them, keys and values.
        kv_bytes_per_s: over contexts, the keys and values beyond the first point's, divided by the
            time that a step takes longer; None at the first point, and where none takes longer.
        roofline_share: of the tokens per second that the read bandwidth would allow, a step for
            each.
        speculation: drafts of the timed runs; None where speculation is off.
        speculation_factor: tokens per second against runs without drafts, which took turns with
            these; None where speculation is off.
    """

    at: int
    tokens_per_s: float
    us_per_step: float
    relative: float
    first_token_s: float | None
    step_bytes: int
    kv_bytes: int
    kv_bytes_per_s: float | None
    roofline_share: float
    speculation: Speculated | None = None
    speculation_factor: float | None = None


@dataclass(frozen=True, slots=True)
class Sweep:
    """Points along one axis, from the lowest up.

    Attributes:
        device: name of the GPU, or `cpu`.
        new_tokens: decoded at each point.
        sampled: see `BenchSettings`.
        bandwidth: bytes per second that a plain read of a large buffer reaches here.
        kv_cache: type of keys and values: bf16, int8 or fp32.
    """

    over: Axis
    device: str
    new_tokens: int
    sampled: bool
    bandwidth: float
    kv_cache: str
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


def plotted(name: str, sweep: Sweep) -> str:
    """SVG text: tokens per second along the axis, measured and allowed by the bandwidth."""
    measured = tuple((float(each.at), each.tokens_per_s) for each in sweep.points)
    allowed = tuple((float(p.at), p.tokens_per_s / p.roofline_share) for p in sweep.points)
    lines = [NamedLine("measured", measured, marked=True)]
    lines.append(NamedLine("read bandwidth / bytes per token", allowed, marked=False))
    return line_plot(f"{name} on {sweep.device}", LABELS[sweep.over], "tokens / s", lines)


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
    over: Axis, device: str, timed: Sequence[_Timed], settings: BenchSettings, kv_cache: ChosenType
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
