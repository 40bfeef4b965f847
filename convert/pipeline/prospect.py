"""Time and memory of a conversion before it begins, and the method that `auto` stands for."""

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch

from lowbit.convert.calibrate.request import SAMPLES, CalibrationRequest
from lowbit.convert.original.calibration_text import bundled_texts
from lowbit.convert.original.device import open_device
from lowbit.convert.plan.calibration_cost import (
    Memory,
    Windows,
    calibration_flops,
    calibration_memory,
    calibration_seconds,
    shapes_of,
)
from lowbit.convert.plan.choice_of_method import (
    GPTQ,
    Gain,
    automatic_method,
    gain_of,
    methods,
    needs_no_calibration,
)
from lowbit.convert.plan.matmul_rate import matmul_rate
from lowbit.convert.plan.method import RTN, Method
from lowbit.convert.plan.plan import Plan, make_plan
from lowbit.convert.plan.recipe import Recipe
from lowbit.convert.plan.rotatable import why_not_rotated
from lowbit.formats.architectures import read_config, tensor_table
from lowbit.formats.hub.locate import locate
from lowbit.formats.machine.cores import core_count
from lowbit.formats.safetensors.checkpoint import TensorInfo, open_checkpoint

BYTES_A_TOKEN = 3.7  # of the bundled text, by Qwen's tokenizer
# Weights that are read, rounded to nearest and written in a second: Qwen3-1.7B in 27 s on two
# cores of an EPYC, Qwen3-8B in 41 s with an H200.
ROUNDED = {"cpu": 32e6, "cuda": 200e6}  # on a CPU for each core


@dataclass(frozen=True, slots=True)
class Estimate:
    """Expected time of a whole conversion by one method, and peak memory of its calibration.

    Attributes:
        method: its steps.
        seconds: of the whole conversion.
        memory: None for round-to-nearest, whose memory `--max-ram` bounds.
    """

    method: Method
    seconds: float
    memory: Memory | None


@dataclass(frozen=True, slots=True)
class Prospect:
    """A conversion that can begin.

    Attributes:
        recipe: with the method settled.
        plan: of the recipe.
        device: where it will compute.
        windows: of the calibration text, estimated from its size.
        estimates: of `methods`, and of the recipe's own where it is none of them.
        obstacle: reason why the checkpoint cannot be rotated; None where it can.
    """

    recipe: Recipe
    plan: Plan
    device: torch.device
    windows: Windows
    estimates: tuple[Estimate, ...]
    obstacle: str | None

    @property
    def estimate(self) -> Estimate:
        """The estimate for the recipe's method."""
        return self.of(self.recipe.method)

    @property
    def gain(self) -> Gain | None:
        """The step to a better method; None where there is none, or nothing to gain."""
        method = self.recipe.method
        sizes = read_config(self.plan.config)
        if needs_no_calibration(self.plan.schemes) or self.recipe.rule == "absmax":
            return None
        if sizes.block_drafts is not None:
            return None
        return gain_of(method, self.obstacle is None, sizes.experts is not None)

    def of(self, method: Method) -> Estimate:
        """The estimate for one of the methods."""
        return next(row for row in self.estimates if row.method == method)


def look_ahead(
    config: Mapping[str, Any],
    tensors: Mapping[str, TensorInfo],
    recipe: Recipe,
    max_shard_bytes: int,
    *,
    automatic: bool,
    device: str,
    request: CalibrationRequest,
) -> Prospect:
    """Estimate a conversion, and settle its method.

    Args:
        config: config.json of the source.
        tensors: its headers.
        recipe: which linear gets which scheme.
        max_shard_bytes: limit of an output file.
        automatic: choose the method; the recipe's own is not looked at.
        device: `cpu` or `cuda`.
        request: the calibration text.

    Raises:
        LowbitError: a source that cannot be converted by the recipe.
    """
    place = open_device(device)
    if automatic:
        recipe = automatic_recipe(config, tensors, recipe, device=device, request=request)
    plan = make_plan(config, tensors, recipe, max_shard_bytes)
    sizes = read_config(config)
    if sizes.block_drafts is not None:  # it is rounded to nearest
        windows = expected_windows(request, sizes.max_position_embeddings, place.type)
        seconds = _rounding_seconds(sum(plan.parameters.values()), place.type)
        rounded = Estimate(recipe.method, seconds, None)
        return Prospect(recipe, plan, place, windows, (rounded,), "it is a drafter")
    shapes = shapes_of(tensor_table(config, tensors), plan.schemes, sizes.experts)
    context, experts = sizes.max_position_embeddings, sizes.experts is not None
    windows = expected_windows(request, context, place.type)
    rate = matmul_rate(place, *shapes.largest)
    weights = shapes.weights + shapes.vocabulary * shapes.hidden
    rounding = _rounding_seconds(weights, place.type)

    def estimate(method: Method) -> Estimate:
        if not method.calibrated:
            return Estimate(method, rounding, None)
        seconds = calibration_seconds(shapes, method, windows, place.type, rate)
        threads = torch.get_num_threads()
        memory = calibration_memory(shapes, method, windows, place.type, threads)
        return Estimate(method, rounding + seconds, memory)

    obstacle = why_not_rotated(config, plan.schemes, tensors)
    rotatable = obstacle is None
    estimates = [estimate(method) for method in methods(rotatable, experts)]
    if all(recipe.method != row.method for row in estimates):
        estimates.append(estimate(recipe.method))
    return Prospect(recipe, plan, place, windows, tuple(estimates), obstacle)


def automatic_recipe(
    config: Mapping[str, Any],
    tensors: Mapping[str, TensorInfo],
    recipe: Recipe,
    *,
    device: str,
    request: CalibrationRequest,
) -> Recipe:
    """The recipe with the method that `auto` stands for; a drafter's is left as it is.

    Args:
        config: config.json of the source.
        tensors: its headers.
        recipe: which linear gets which scheme; its method is not looked at.
        device: `cpu` or `cuda`.
        request: the calibration text.

    Raises:
        LowbitError: a source that cannot be converted by the recipe.
    """
    sizes = read_config(config)
    if sizes.block_drafts is not None:
        return recipe
    schemes = make_plan(config, tensors, replace(recipe, method=RTN)).schemes
    windows = expected_windows(request, sizes.max_position_embeddings, device)
    shapes = shapes_of(tensor_table(config, tensors), schemes, sizes.experts)
    method = automatic_method(
        schemes,
        device,
        calibration_flops(shapes, GPTQ, windows),
        core_count(),
        why_not_rotated(config, schemes, tensors) is None,
        sizes.experts is not None,
    )
    return replace(recipe, method=method)


def look_ahead_at(
    source: str,
    revision: str | None,
    recipe: Recipe,
    max_shard_bytes: int,
    *,
    automatic: bool,
    device: str,
    request: CalibrationRequest,
) -> Prospect:
    """`look_ahead` for a folder or a Hub id.

    Raises:
        LowbitError: whatever would stop the conversion before it starts.
    """
    checkpoint = open_checkpoint(locate(source, revision).folder)
    return look_ahead(
        checkpoint.config,
        checkpoint.tensors,
        recipe,
        max_shard_bytes,
        automatic=automatic,
        device=device,
        request=request,
    )


def expected_windows(request: CalibrationRequest, context: int, device: str) -> Windows:
    """Windows that a calibration text will give, from its size in bytes."""
    if request.file is None:
        size = sum(len(text) for text in bundled_texts())
    else:
        size = request.file.stat().st_size
    tokens = max(2, math.ceil(size / BYTES_A_TOKEN))
    length = min(request.length, context, tokens)
    return Windows(min(request.samples or SAMPLES[device], tokens // length), length)


def _rounding_seconds(weights: int, device: str) -> float:
    return weights / (ROUNDED[device] * (core_count() if device == "cpu" else 1))
