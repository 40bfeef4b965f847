"""Memory that is free, that a layer takes, and that a conversion may hold while it streams."""

import math
from collections.abc import Iterable

import torch

from lowbit.convert.plan.calibration_cost import Memory
from lowbit.formats.architectures.config import Experts
from lowbit.formats.architectures.names import MTP_PREFIX, split_layer
from lowbit.formats.architectures.table import TensorSpec
from lowbit.formats.errors import ResourceError
from lowbit.formats.folder_size import size
from lowbit.formats.machine.memory import free_bytes, resident_bytes

DEFAULT_MAX_RAM = 2_000_000_000
LEAST_ROOM = 500_000_000  # for blocks, by default

# Bytes per weight of a block: the 12 blocks of FP32 rows that `stream` may hold between its stages,
# and what a worker holds while it quantizes (its rows, FP32 copies, codes, packed words; on a GPU
# only rows and results are in RAM). Checked by measuring the peak.
QUEUED_BYTES = 4 * 12
WORKER_BYTES = 4 + 32
CUDA_WORKER_BYTES = 4 + 4
SLACK_BYTES = 96 << 20  # what the allocator keeps, hashes, thread stacks, code paged in
CUDA_SLACK_BYTES = 500 << 20  # libraries and kernels that a GPU's first work loads
CPU_ELEMENTS = 1 << 20
CUDA_ELEMENTS = 1 << 24
LEAST_ELEMENTS = 1 << 16  # one row of the widest known model, with room


def decoder_layers(table: Iterable[TensorSpec]) -> list[list[TensorSpec]]:
    """Tensors of every layer of the decoder; kinds of layer differ in size."""
    layers: dict[int, list[TensorSpec]] = {}
    for spec in table:
        prefix, number, _ = split_layer(spec.name)
        if number is not None and prefix != MTP_PREFIX:
            layers.setdefault(number, []).append(spec)
    return list(layers.values())


def linear_ends(layer: Iterable[TensorSpec], experts: Experts | None) -> float:
    """Values that go into and come out of the linears of a layer for each token, on average."""
    share = 1.0 if experts is None else experts.chosen / experts.count
    return sum(
        sum(spec.shape) * (share if spec.role == "expert" else 1.0)
        for spec in layer
        if len(spec.shape) == 2
    )


def check_free(what: str, need: int, device: str, hint: str) -> None:
    """Refuse work that does not fit.

    Raises:
        ResourceError: it takes more memory than is free.
    """
    free = free_bytes(device)
    if free is not None and need > free:
        raise ResourceError(
            f"{what} takes up to {need / 1e9:.1f} GB of memory, free on {device}: "
            f"{free / 1e9:.1f} GB",
            hint=hint,
        )


def check_windows(what: str, need: Memory, windows: int, device: str, less: str) -> None:
    """Refuse work on windows of a text that does not fit in RAM or, on `cuda`, on the GPU.

    Args:
        less: hint how to take fewer windows, with `{}` for their number.

    Raises:
        ResourceError: it takes more memory than is free.
    """
    hint = "use a machine with more memory"
    for place, taken in (("cpu", need.ram), ("cuda", need.gpu)):
        if place == "cuda" and device == "cpu":
            return
        fitting = windows - math.ceil((taken - (free_bytes(place) or 0)) / need.window)
        check_free(what, taken, place, less.format(fitting) if fitting > 0 else hint)
        hint = "--device cpu takes the machine's memory"


def block_elements(max_ram: int | None, workers: int, device: torch.device, held: int = 0) -> int:
    """Weights to work on at once so that the process stays below `max_ram` bytes.

    Args:
        max_ram: resident bytes; None for `DEFAULT_MAX_RAM`, or `LEAST_ROOM` beyond everything that
            is not a block where that is more.

    Raises:
        ResourceError: the interpreter and torch alone leave too little.
    """
    on_gpu = device.type == "cuda"
    if on_gpu:
        torch.zeros(1, device=device)  # CUDA's own memory is there before it is counted
    base = resident_bytes() + SLACK_BYTES + held + (CUDA_SLACK_BYTES if on_gpu else 0)
    limit = max(DEFAULT_MAX_RAM, base + LEAST_ROOM) if max_ram is None else max_ram
    each = QUEUED_BYTES + workers * (CUDA_WORKER_BYTES if on_gpu else WORKER_BYTES)
    most = CUDA_ELEMENTS if on_gpu else CPU_ELEMENTS
    elements = min(most, (limit - base) // each)
    if elements < LEAST_ELEMENTS:
        least = base + LEAST_ELEMENTS * each
        advised, unrotated = _rounded_up(least), _rounded_up(least - held)
        raise ResourceError(
            f"--max-ram {size(limit)} is too little: the process needs {size(least)} before it "
            "holds a weight",
            hint=f"give at least {advised}"
            + (f"; {unrotated} is enough with --method gptq" if unrotated != advised else ""),
        )
    return elements


def _rounded_up(least: int) -> str:
    """A size for the option, above what the process takes by 20 MB or more: `0.5GB`."""
    return f"{math.ceil(least / 1e8 + 0.2) / 10}GB"


def peak_estimate(elements: int, workers: int, held: int = 0, device: str = "cpu") -> int:
    """Resident bytes a conversion in blocks of `elements` weights needs at most.

    Args:
        elements: of `block_elements`, which has made CUDA ready.
    """
    on_gpu = device == "cuda"
    slack = SLACK_BYTES + (CUDA_SLACK_BYTES if on_gpu else 0)
    each = QUEUED_BYTES + workers * (CUDA_WORKER_BYTES if on_gpu else WORKER_BYTES)
    return resident_bytes() + slack + held + elements * each
