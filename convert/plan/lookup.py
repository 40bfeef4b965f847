"""Sensitivities of a checkpoint: from a file, from the cache, or measured and kept there."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch

from lowbit.convert.original.calibration_text import CalibrationText, read_calibration
from lowbit.convert.original.device import open_device
from lowbit.convert.original.model import load_side
from lowbit.convert.original.quiet import without_advice
from lowbit.convert.original.weights import Weights, open_weights
from lowbit.convert.plan.cache import cache_file, check_file, hash_weights, write_file
from lowbit.convert.plan.sensitivities import Row, Sensitivities, read_sensitivities
from lowbit.convert.plan.sensitivity import RULE, Variant, measure, variants_of
from lowbit.convert.plan.sets import GROUPS, fused_sets
from lowbit.formats.errors import FormatError, QuantizationError, ResourceError
from lowbit.formats.files.atomic import attempt
from lowbit.formats.safetensors.checkpoint import CONFIG_FILE
from lowbit.formats.safetensors.hashing import hash_file

WINDOW = 512
WINDOWS = 8
MEMORY = 4_000_000_000

Progress = Callable[[str, int, int], None]  # phase, done, in all


@dataclass(frozen=True, slots=True)
class Settings:
    """Settings of a measurement of sensitivities.

    Attributes:
        calib: text to measure on; the bundled calibration text when None.
        windows: of the text, evenly spread over it.
        groups: group sizes to measure.
        device: `cpu` or `cuda`.
        memory: bytes for hidden states.
    """

    calib: Path | None = None
    windows: int = WINDOWS
    groups: tuple[int, ...] = GROUPS
    device: str = "cpu"
    memory: int = MEMORY


@dataclass(frozen=True, slots=True)
class Found:
    """Sensitivities and where they are.

    Attributes:
        sensitivities: of the checkpoint.
        file: that holds them.
        is_new: True where they have just been measured.
        failure: why they could not be kept in the file; to be told once they are shown.
    """

    sensitivities: Sensitivities
    file: Path
    is_new: bool
    failure: ResourceError | None = None


def find_or_measure(
    folder: Path,
    settings: Settings,
    progress: Progress,
    note: Callable[[str], None] | None = None,
) -> Found:
    """Look up, or measure, the cost of each precision of each fused set of an original.

    The cache knows them by all that they depend on: weights, configuration, text, group sizes and
    versions. The device is not part of that: devices differ by rounding alone.

    Args:
        folder: of the original.
        settings: how to measure.
        progress: called with ("source" or "sensitivity", done, in all).
        note: told before a measurement that it begins.

    Raises:
        LowbitError: for anything that a file, an option or the machine causes.
    """
    device = open_device(settings.device)
    weights = open_original(folder)
    sets = fused_sets(weights.checkpoint.config, weights.checkpoint.tensors)
    variants = variants_of(sets, settings.groups)
    text = read_calibration(settings.calib, folder, length=WINDOW, limit=settings.windows)
    identity = _identity(weights, text, progress)
    path = cache_file({**identity, "groups": sorted(settings.groups)})
    if path.exists():
        return Found(read_sensitivities(path), path, is_new=False)
    try:
        check_file(path)
    except ResourceError as error:
        hint = "set XDG_CACHE_HOME to a folder that can be written to"
        raise ResourceError(str(error), hint=hint) from error
    if note is not None:
        note(
            f"measuring the sensitivity of {len(sets)} sets at {len(variants)} precisions on "
            f"{text.samples.numel():,} tokens of {text.name}"
        )
    figures = _measure(weights, variants, text, device, settings.memory, progress)
    rows = rows_of(variants, figures)
    found = Sensitivities(**identity, device=device.type, rows=rows)
    failure = attempt(lambda: write_file(path, found.to_bytes()))
    return Found(found, path, is_new=True, failure=failure)


def open_original(folder: Path) -> Weights:
    """A checkpoint that is not quantized yet.

    Raises:
        CheckpointError, FormatError: not a checkpoint.
        QuantizationError: it is quantized.
    """
    weights = open_weights(folder)
    if weights.quantization is not None:
        raise QuantizationError(
            f"`{folder}` is already quantized", hint="start from the BF16 checkpoint"
        )
    return weights


def rows_of(variants: Sequence[Variant], figures: Sequence[float]) -> tuple[Row, ...]:
    """Variants of one set each and their KL as rows of a record."""
    pairs = [pair for variant in variants for pair in variant.schemes]
    return tuple(
        Row(
            name=fused.name,
            modules=fused.modules,
            weights=fused.weights,
            bits=scheme.bits,
            group_size=scheme.group_size or fused.shapes[0][1],
            size_bytes=fused.packed_bytes(scheme),
            kl=kl,
        )
        for (fused, scheme), kl in zip(pairs, figures, strict=True)
    )


def read_checked(path: Path, folder: Path, progress: Progress) -> Found:
    """Sensitivities from a file, made sure to be this checkpoint's.

    Raises:
        FormatError: the file is malformed, or of another checkpoint.
    """
    found = read_sensitivities(path)
    digest = _hash(open_original(folder), progress)
    if found.weights_sha256 != digest:
        raise FormatError(
            f"`{path}` was measured on weights {found.weights_sha256[:12]}, "
            f"`{folder}` has {digest[:12]}",
            hint="measure again with `lowbit-convert sensitivity`",
        )
    return Found(found, path, is_new=False)


def _measure(
    weights: Weights,
    variants: list[Variant],
    text: CalibrationText,
    device: torch.device,
    memory: int,
    progress: Progress,
) -> list[float]:
    with torch.inference_mode(), without_advice():
        figures = measure(
            load_side(weights, text.samples.shape[1], device),
            variants,
            text.samples,
            device,
            memory,
            lambda done, total: progress("sensitivity", done, total),
        )
    return figures.mean(1).tolist()


def _identity(weights: Weights, text: CalibrationText, progress: Progress) -> dict[str, Any]:
    """All that the figures depend on, beside the choices measured."""
    import transformers

    windows, window = text.samples.shape
    return {
        "lowbit_version": version("lowbit"),
        "torch_version": torch.__version__,
        "transformers_version": str(transformers.__version__),
        "config_sha256": hash_file(weights.checkpoint.folder / CONFIG_FILE),
        "weights_sha256": _hash(weights, progress),
        "text_name": text.name,
        "text_sha256": text.sha256,
        "window": window,
        "windows": windows,
        "scale_rule": RULE,
    }


def _hash(weights: Weights, progress: Progress) -> str:
    return hash_weights(weights.checkpoint, lambda done, total: progress("source", done, total))
