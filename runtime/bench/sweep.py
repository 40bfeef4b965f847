"""Decode speed along one axis: tokens in the cache, the group size, or sequences at a time."""

import gc
import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

import torch

from lowbit.formats.errors import QuantizationError
from lowbit.formats.layout.recipes import Base
from lowbit.runtime.bench.bench import (
    Speed,
    StepBytes,
    batched_speed,
    check_fits,
    check_sequences,
    device_name,
    measure_speed,
    read_bandwidth,
    step_bytes,
    summed,
)
from lowbit.runtime.bench.plot import NamedLine, line_plot
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
    """What was measured at one place of the axis.

    Attributes:
        at: tokens of the prompt, weights that share a scale, or sequences.
        tokens_per_s: median, of all sequences together.
        us_per_step: mean time from one token of a sequence to its next.
        relative: tokens per second against the first point.
        first_token_s: median time of the prompt and the first token; None over batches.
        step_bytes: what a step must move at the middle of the run, see `StepBytes`.
        kv_bytes: of them, keys and values.
        kv_bytes_per_s: over contexts, the keys and values beyond the first point's, divided by the
            time that a step takes longer; None at the first point, and where none takes longer.
        roofline_share: of the tokens per second that the read bandwidth would allow, a step for
            each.
        speculation: drafts of the timed runs; None where speculation is off.
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


@dataclass(frozen=True, slots=True)
class Sweep:
    """Points along one axis, from the lowest up.

    Attributes:
        device: name of the GPU, or `cpu`.
        new_tokens: decoded at each point.
        sampled: whether tokens were sampled rather than the likeliest taken.
        bandwidth: bytes per second that a plain read of a large buffer reaches here.
    """

    over: Axis
    device: str
    new_tokens: int
    sampled: bool
    bandwidth: float
    points: tuple[Point, ...] = field(repr=False)


def over_contexts(
    model: Model, contexts: Sequence[int], new_tokens: int, runs: int, sampled: bool = False
) -> Sweep:
    """Decode after prompts of several lengths.

    Args:
        model: loaded with a context for the longest prompt and the new tokens.
        contexts: tokens of each prompt.
        new_tokens: decoded after each, at least 2.
        runs: at each length, of which the median counts; one more warms up.
        sampled: see `bench`.

    Raises:
        RequestError: the longest run does not fit the context.
    """
    lengths = sorted(set(contexts))
    check_fits(model, lengths[-1], new_tokens)
    timed = []
    for length in lengths:
        speed = measure_speed(model, length, new_tokens, runs, sampled)
        step = step_bytes(model, length + new_tokens // 2)
        timed.append(_timed(length, speed, step))
    return _sweep("context", model.device, timed, new_tokens, sampled)


def over_group_sizes(
    load: Callable[[int], Model],
    group_sizes: Sequence[int],
    prompt_tokens: int,
    new_tokens: int,
    runs: int,
    sampled: bool = False,
) -> Sweep:
    """Decode with a model that is quantized at load in groups of several sizes.

    Args:
        load: the model of a group size; one is dropped before the next is loaded.
        group_sizes: weights that share a scale.
        prompt_tokens: see `bench`, as the rest.
        new_tokens: see `bench`.
        runs: see `bench`.
        sampled: see `bench`.

    Raises:
        LowbitError: what `load` raises, or as `bench`.
    """
    timed, device = [], ""
    for size in sorted(set(group_sizes)):
        model = load(size)
        speed = measure_speed(model, prompt_tokens, new_tokens, runs, sampled)
        step = step_bytes(model, prompt_tokens + new_tokens // 2)
        timed.append(_timed(size, speed, step))
        device = model.device
        del model
        _release(device)
    return _sweep("group_size", device, timed, new_tokens, sampled)


def check_group_sizes(folder: Path, base: Base, group_sizes: Sequence[int]) -> None:
    """Refuse group sizes that a checkpoint cannot be quantized in, by its headers alone.

    Raises:
        QuantizationError: a size does not divide a row, which would get smaller groups.
        LowbitError: as `open_model`.
    """
    for size in group_sizes:
        for module, scheme in open_model(folder, base, size).schemes.items():
            if scheme is not None and scheme.group_size != size:
                raise QuantizationError(
                    f"`{module}`: groups of {size} do not divide its rows",
                    hint=f"leave {size} out of --group-sizes",
                )


def over_batches(
    model: Model, batches: Sequence[int], prompt_tokens: int, new_tokens: int, runs: int
) -> Sweep:
    """Decode several sequences together, greedy; arguments as in `bench` and `batched_speed`.

    Raises:
        RequestError: as `batched_speed`.
        ResourceError: as `batched_speed`.
    """
    check_sequences(model, max(batches))
    check_fits(model, prompt_tokens, new_tokens)
    timed = []
    for batch in sorted(set(batches)):
        _, *speeds = [
            batched_speed(model, batch, prompt_tokens, new_tokens) for _ in range(runs + 1)
        ]
        step = step_bytes(model, prompt_tokens + new_tokens // 2, batch)
        rate = statistics.median(speed.tokens_per_s for speed in speeds)
        drafts = summed(speed.speculation for speed in speeds)
        timed.append(_Timed(batch, batch, rate, None, step, drafts))
    return _sweep("batch", model.device, timed, new_tokens, sampled=False)


def plotted(name: str, sweep: Sweep) -> str:
    """The SVG text of tokens per second along the axis, beside what the memory would allow."""
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

    @property
    def step_s(self) -> float:
        return self.sequences / self.tokens_per_s


def _timed(at: int, speed: Speed, step: StepBytes) -> _Timed:
    """A point of one sequence."""
    return _Timed(at, 1, speed.tokens_per_s, speed.first_token_s, step, speed.speculation)


def _sweep(
    over: Axis, device: str, timed: Sequence[_Timed], new_tokens: int, sampled: bool
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
            )
        )
    return Sweep(over, device_name(device), new_tokens, sampled, bandwidth, tuple(points))


def _release(device: str) -> None:
    """Give the memory of a dropped model back, that the next one may find it free."""
    gc.collect()
    if device == "cuda":
        torch.cuda.empty_cache()
