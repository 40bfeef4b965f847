"""Sensitivities of a checkpoint from a file or the cache, else computed and kept there.

Those of a calibrated method are measured (`costs`), those of round-to-nearest, of mixtures of
experts and of what a CPU would take long for estimated (`sensitivity`).
"""

import hashlib
import json
import math
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from lowbit.convert.budget.costs import LEARNED, measured_costs
from lowbit.convert.budget.sensitivities import SCHEMA, Row, Sensitivities, read_sensitivities
from lowbit.convert.budget.sensitivity import DRAWS, estimate
from lowbit.convert.original.device import open_device
from lowbit.convert.original.model import load_layered_model
from lowbit.convert.original.progress import Meter, Note, Progress
from lowbit.convert.original.quiet import without_advice
from lowbit.convert.original.weights import Weights
from lowbit.convert.plan.calibration_memory import costs_memory
from lowbit.convert.plan.memory import check_windows, sensitivity_memory
from lowbit.convert.plan.method import RTN, Method
from lowbit.convert.plan.sets import (
    GROUPS,
    RANKED_BITS,
    USUAL_BITS,
    Choice,
    FusedSet,
    choices_of,
    fused_sets,
)
from lowbit.convert.quantize.windows import shuffled
from lowbit.convert.texts.calibration import CalibrationText, read_calibration
from lowbit.formats.architectures import read_config, tensor_table
from lowbit.formats.architectures.names import any_expert, split_layer
from lowbit.formats.errors import FormatError, LowbitError, ResourceError
from lowbit.formats.files.atomic import attempt, check_place, disk_errors, replace_files
from lowbit.formats.files.user_folders import user_folder
from lowbit.formats.layout.manifest import SourceTensor, weights_digest
from lowbit.formats.layout.rtn import ScaleRule
from lowbit.formats.machine.cores import core_count
from lowbit.formats.safetensors.checkpoint import CONFIG_FILE, Checkpoint
from lowbit.formats.safetensors.hashing import hash_file, hash_tensor

WINDOW = 512
WINDOWS = 8
CPU_WINDOWS = 2  # to measure on, where each takes a minute and more
MOST_CPU_WORK = 1e12  # multiplications of weights and activations that measuring takes a CPU
LAYER_SETS = 4  # about as many as a layer has
MAX_FIGURES_BYTES = 2_000_000  # the figures of the largest models, and their plot, take less


@dataclass(frozen=True, slots=True)
class Settings:
    """Settings of sensitivities."""

    calib: Path | None = None  # text to compute them on; the bundled calibration text when None
    # Windows of the text, evenly spread over it; those that costs are measured on, not those that
    # codes are learned from. By default 8, and 2 to measure on a CPU.
    windows: int | None = None
    groups: tuple[int, ...] = GROUPS  # to choose from
    # To choose from; 4, by which sets are ranked, is always among them.
    bits: tuple[int, ...] = USUAL_BITS
    device: str = "cpu"  # `cpu` or `cuda`
    rule: ScaleRule = "signed"  # by which scales are chosen
    method: Method = RTN  # of the conversion
    # True to measure costs where they can be; None to estimate what takes a CPU long
    measured: bool | None = None
    must_keep: bool = True  # refuse, before the work, a cache that cannot be written

    def measures(self, config: Mapping[str, Any]) -> bool:
        """True where costs are measured, not estimated: unasked, on a CPU, of small models alone.

        A CPU takes an hour for half a billion weights. By measured costs, what estimates choose
        costs a twentieth more in sum (LOG.md).
        """
        if not self.method.calibrated or read_config(config).experts is not None:
            return False
        if self.measured is not None:
            return self.measured
        return self.device != "cpu" or _passing_work(config) <= MOST_CPU_WORK


@dataclass(frozen=True, slots=True)
class CachedSensitivities:
    """Sensitivities and where they are."""

    sensitivities: Sensitivities  # figures of the checkpoint
    file: Path  # that holds them
    is_new: bool  # True where they, or some of them, have just been computed
    # Reason why they could not be kept in the file; to be told once they are shown.
    failure: ResourceError | None = None


def find_or_estimate(
    weights: Weights,
    settings: Settings,
    progress: Progress,
    note: Note | None = None,
) -> CachedSensitivities:
    """Look up, or compute, the cost of each precision of each fused set of an original.

    The cache knows them by all that they depend on: weights, configuration, text, group sizes,
    scale rule, method and versions. The device is not part of that: devices differ by rounding
    alone. Bits that a file there lacks are computed and added to it.

    Args:
        note: told before the computation that it begins, and of a damaged file in the cache.
    """
    device = open_device(settings.device)
    sets = fused_sets(weights.checkpoint.config, weights.checkpoint.tensors)
    folder, config = weights.checkpoint.folder, weights.checkpoint.config
    measures = settings.measures(config)
    count = settings.windows or (CPU_WINDOWS if measures and device.type == "cpu" else WINDOWS)
    limit = count + LEARNED[device.type] if measures else count
    text = read_calibration(settings.calib, folder, length=WINDOW, limit=limit)
    windows = text.samples[:0], text.samples
    if measures:
        windows = _split(text.samples, count, LEARNED[device.type])
    identity = _identity(weights, text, windows, settings, progress)
    path = cache_file({**identity, "schema": SCHEMA, "groups": sorted(settings.groups)})
    kept = _kept(path, identity, note)
    known = () if kept is None else kept.rows
    bits = {RANKED_BITS, *settings.bits} - {row.bits for row in known}
    if kept is not None and not bits:
        return CachedSensitivities(kept, path, is_new=False)
    choices = choices_of(sets, settings.groups, sorted(bits))
    if settings.must_keep:
        _check_cache(path)
    head = sum(fused.layer is None for fused, _ in choices)
    threads = torch.get_num_threads()
    measured, length = windows[1].shape
    if measures:
        shape = len(windows[0]), measured, length
        need = costs_memory(config, sets, settings.method, shape, device.type, threads)
    else:
        need = sensitivity_memory(config, (measured, length), head, DRAWS, device.type, threads)
    less = "`lowbit-convert sensitivity` with --windows {} or fewer takes less"
    doing = "measuring" if measures else "estimating"
    check_windows(f"{doing} sensitivities", need, measured, device.type, less)
    if note is not None:
        note(
            f"{doing} the sensitivity of {len(sets)} sets at {len(choices)} precisions on "
            f"{windows[1].numel():,} tokens of {text.name}"
        )
    read = weights.rotated() if settings.method.rotate else weights
    rows = rows_of(choices, _compute(read, choices, windows, settings, progress))
    sensitivities = Sensitivities(**identity, device=device.type, rows=_joined(sets, known, rows))
    failure = attempt(lambda: write_file(path, sensitivities.to_bytes()))
    return CachedSensitivities(sensitivities, path, is_new=True, failure=failure)


def _check_cache(path: Path) -> None:
    """Refuse a file of the cache that cannot be written."""
    try:
        check_file(path)
    except ResourceError as error:
        hint = "set XDG_CACHE_HOME to a folder that can be written to"
        raise ResourceError(str(error), hint=hint) from error


def _kept(path: Path, identity: Mapping[str, Any], note: Note | None) -> Sensitivities | None:
    """Sensitivities of the cache; None where it has none of this identity, or damaged ones."""
    if not path.exists():
        return None
    try:
        sensitivities = read_sensitivities(path)
    except LowbitError as error:
        if note is not None:
            note(f"! {error}: computed again")
        return None
    if any(getattr(sensitivities, name) != value for name, value in identity.items()):
        if note is not None:
            note(f"! `{path}` is of other figures than its name says: computed again")
        return None
    return sensitivities


def _passing_work(config: Mapping[str, Any]) -> float:
    """Multiplications when every set's variant passes the layers behind it, on a CPU's windows."""
    inside = (spec for spec in tensor_table(config) if split_layer(spec.name).layer is not None)
    weights = sum(math.prod(spec.shape) for spec in inside)
    passes = LAYER_SETS * read_config(config).num_hidden_layers / 2
    return weights * passes * CPU_WINDOWS * WINDOW


def _joined(sets: Sequence[FusedSet], known: Sequence[Row], rows: Sequence[Row]) -> tuple[Row, ...]:
    """All rows as if computed at once: by set, bits and group size."""
    order = {fused.name: number for number, fused in enumerate(sets)}
    rows = sorted((*known, *rows), key=lambda row: (order[row.name], row.bits, row.group_size))
    return tuple(rows)


def rows_of(choices: Sequence[Choice], figures: Sequence[float]) -> tuple[Row, ...]:
    """Rows of a record from choices and their KL."""
    return tuple(
        Row(
            name=fused.name,
            modules=tuple(dict.fromkeys(map(any_expert, fused.modules))),
            weights=fused.weights,
            bits=scheme.bits,
            group_size=scheme.group_size or fused.shapes[0][1],
            size_bytes=fused.packed_bytes(scheme),
            kl=kl,
        )
        for (fused, scheme), kl in zip(choices, figures, strict=True)
    )


def read_checked(
    path: Path, weights: Weights, bits: Sequence[int], progress: Progress
) -> CachedSensitivities:
    """Sensitivities from a file, checked to be of this checkpoint and to have some bits.

    Raises:
        FormatError: the file is malformed, of another checkpoint, or lacks bits.
    """
    sensitivities = read_sensitivities(path)
    if lacking := sorted(set(bits) - {row.bits for row in sensitivities.rows}):
        wanted = ",".join(map(str, bits))
        raise FormatError(
            f"`{path}` has no figures of {lacking[0]} bits",
            hint=f"compute them with `lowbit-convert sensitivity --bits {wanted}`",
        )
    digest = hash_weights(weights.checkpoint, progress)
    if sensitivities.weights_sha256 != digest:
        raise FormatError(
            f"`{path}` is of weights {sensitivities.weights_sha256[:12]}, "
            f"`{weights.checkpoint.folder}` has {digest[:12]}",
            hint="compute them again with `lowbit-convert sensitivity`",
        )
    return CachedSensitivities(sensitivities, path, is_new=False)


def _split(samples: Tensor, count: int, learned: int) -> tuple[Tensor, Tensor]:
    """Windows to learn from, and others to measure on: the same one where there is only one.

    Of a text that is too short for both, at most a quarter is measured on.
    """
    if len(samples) == 1:
        return samples, samples
    mixed = shuffled(samples)
    measured = min(count, max(1, len(mixed) // 4, len(mixed) - learned))
    return mixed[measured:], mixed[:measured]


def _compute(
    weights: Weights,
    choices: Sequence[Choice],
    windows: tuple[Tensor, Tensor],
    settings: Settings,
    progress: Progress,
) -> list[float]:
    device = open_device(settings.device)
    with torch.no_grad(), without_advice():
        model = load_layered_model(weights, windows[1].shape[1], device)
        if settings.measures(weights.checkpoint.config):
            method, rule = settings.method, settings.rule
            return measured_costs(model, choices, windows, method, rule, device, progress)
        return estimate(model, choices, windows[1], device, progress, settings.rule)


def _identity(
    weights: Weights,
    text: CalibrationText,
    windows: tuple[Tensor, Tensor],
    settings: Settings,
    progress: Progress,
) -> dict[str, Any]:
    import transformers

    learned, measured = windows
    measures = settings.measures(weights.checkpoint.config)
    return {
        "lowbit_version": version("lowbit"),
        "torch_version": torch.__version__,
        "transformers_version": str(transformers.__version__),
        "config_sha256": hash_file(weights.checkpoint.folder / CONFIG_FILE),
        "weights_sha256": hash_weights(weights.checkpoint, progress),
        "text_name": text.name,
        "text_sha256": text.sha256,
        "window": measured.shape[1],
        "windows": len(measured),
        "learned": len(learned),
        "draws": 0 if measures else DRAWS,
        "scale_rule": settings.rule,
        "rotated": settings.method.rotate,
        "method": str(replace(settings.method, autoround=False) if measures else RTN),
    }


def cache_file(identity: dict[str, Any]) -> Path:
    """Path of the figures with this identity, below XDG_CACHE_HOME or ~/.cache.

    Args:
        identity: all that the figures depend on, as JSON values.
    """
    name = hashlib.sha256(json.dumps(identity, sort_keys=True).encode()).hexdigest()
    return user_folder("XDG_CACHE_HOME", ".cache") / "sensitivity" / f"{name[:32]}.json"


def write_file(path: Path, content: bytes) -> None:
    """Write a file whole or not at all, and the folders above it.

    Raises:
        ResourceError: the place cannot be written to, or the disk is full.
    """
    with disk_errors(path=path):
        path.parent.mkdir(parents=True, exist_ok=True)
    replace_files({path: content})


def check_file(path: Path) -> None:
    """Make sure, before the computation, that `write_file` can write its figures."""
    with disk_errors(path=path):
        path.parent.mkdir(parents=True, exist_ok=True)
    check_place(path, MAX_FIGURES_BYTES)


def hash_weights(checkpoint: Checkpoint, progress: Progress) -> str:
    """Hash over all tensors, `weights_sha256` of lowbit.json."""
    total = sum(info.nbytes for info in checkpoint.tensors.values())
    meter = Meter(progress, "source", total)

    def one(name: str) -> SourceTensor:
        info = checkpoint.tensors[name]
        digest = hash_tensor(checkpoint.folder / info.file, info)
        meter.add(info.nbytes)
        return SourceTensor(name, info.dtype_name, info.shape, "copied", "", digest)

    with ThreadPoolExecutor(core_count()) as pool:
        return weights_digest(pool.map(one, checkpoint.tensors))
