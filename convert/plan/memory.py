"""Memory of every kind of work, from headers and config, and its check before the work begins.

Counted are the largest layer and what is made of it, the head's blocks of rows, and the states of
all windows; and a quarter more for what the allocator keeps. Tests compare each count with the
measured peak of a process. That of calibrations is in `calibration_memory`.
"""

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from lowbit.convert.original.walk import (
    BATCH_TOKENS,
    HEAD_ROWS,
    HEAD_TOKENS,
    SUM_TOKENS,
)
from lowbit.formats.architectures import read_config, tensor_table
from lowbit.formats.architectures.config import Config, Experts
from lowbit.formats.architectures.footprint import kv_bytes, state_bytes
from lowbit.formats.architectures.names import MTP_PREFIX, split_layer
from lowbit.formats.architectures.table import TensorSpec
from lowbit.formats.errors import ResourceError
from lowbit.formats.folder_size import size
from lowbit.formats.machine.memory import free_bytes, resident_bytes

# Interpreter, torch, transformers and what their first calls keep, by builds without CUDA and with
BASE_BYTES = (500 if torch.version.cuda is None else 700) << 20
LIBRARIES_BYTES = BASE_BYTES - (270 << 20)  # of them without transformers' models
DEFAULT_MAX_RAM = 2_000_000_000
LEAST_ROOM = 500_000_000  # for blocks, by default

# Bytes per weight of a block: the 12 blocks of FP32 rows that `stream` may hold between its stages,
# and what a worker holds while it quantizes (its rows, FP32 copies, codes, packed words; on a GPU
# only rows and results are in RAM).
QUEUED_BYTES = 4 * 12
WORKER_BYTES = 4 + 32
CUDA_WORKER_BYTES = 4 + 4
SLACK_BYTES = 96 << 20  # what the allocator keeps, hashes, thread stacks, code paged in
CUDA_SLACK_BYTES = 500 << 20  # libraries and kernels that a GPU's first work loads
CPU_ELEMENTS = 1 << 20
CUDA_ELEMENTS = 1 << 24
LEAST_ELEMENTS = 1 << 16  # one row of the widest known model, with room

PARTS_BYTES = 6  # on a GPU for each number that is multiplied in parts
SCORES = 3  # sets of attention's scores: forward, softmax and gradient
LOGIT_BYTES = 20  # for each logit of an answer's step: the model's, FP32, probabilities and copies
LINEAR_BYTES = 64  # for each value of a linear layer and token of a prompt: FP32 and copies


@dataclass(frozen=True, slots=True)
class Memory:
    """Peak memory in bytes."""

    ram: int  # of the machine, should the hidden states be there
    gpu: int  # of the GPU, should the hidden states be there; 0 on a CPU
    window: int  # part of both that each window of the text takes


def check_free(work: str, need: int, device: str, hint: str) -> None:
    """Refuse work that does not fit.

    Raises:
        ResourceError: it takes more memory than is free.
    """
    free = free_bytes(device)
    if free is not None and need > free:
        raise ResourceError(
            f"{work} takes up to {need / 1e9:.1f} GB of memory, free on {device}: "
            f"{free / 1e9:.1f} GB",
            hint=hint,
        )


def check_windows(
    work: str,
    need: Memory,
    windows: int,
    device: str,
    less: str,
    otherwise: str = "use a machine with more memory",
) -> None:
    """Refuse work on windows of a text that does not fit in RAM or, on `cuda`, on the GPU.

    Args:
        less: hint how to take fewer windows, with `{}` for their number.
        otherwise: hint where no number of windows fits into RAM.

    Raises:
        ResourceError: it takes more memory than is free.
    """
    hint = otherwise
    for kind, taken in (("cpu", need.ram), ("cuda", need.gpu)):
        if kind == "cuda" and device == "cpu":
            return
        fitting = windows - math.ceil((taken - (free_bytes(kind) or 0)) / need.window)
        check_free(work, taken, kind, less.format(fitting) if fitting > 0 else hint)
        hint = "--device cpu takes the machine's memory"


def block_elements(
    max_ram: int | None, workers: int, device: torch.device, rotated: int = 0
) -> int:
    """Weights to work on at once so that the process stays below `max_ram` bytes.

    Args:
        max_ram: resident bytes; None for `DEFAULT_MAX_RAM`, or `LEAST_ROOM` beyond everything that
            is not a block where that is more.

    Raises:
        ResourceError: the interpreter and torch alone leave too little.
    """
    if device.type == "cuda":
        torch.zeros(1, device=device)  # CUDA's own memory is there before it is counted
    base, each = _beside_blocks(rotated, device.type), _block_bytes(workers, device.type)
    limit = max(DEFAULT_MAX_RAM, base + LEAST_ROOM) if max_ram is None else max_ram
    most = CUDA_ELEMENTS if device.type == "cuda" else CPU_ELEMENTS
    elements = min(most, (limit - base) // each)
    if elements < LEAST_ELEMENTS:
        least = base + LEAST_ELEMENTS * each
        advised, unrotated = _rounded_up(least), _rounded_up(least - rotated)
        raise ResourceError(
            f"--max-ram {size(limit)} is too little: the process needs {size(least)} before it "
            "holds a weight",
            hint=f"give at least {advised}"
            + (f"; {unrotated} is enough with --method gptq" if unrotated != advised else ""),
        )
    return elements


def _beside_blocks(rotated: int, device: str) -> int:
    slack = SLACK_BYTES + (CUDA_SLACK_BYTES if device == "cuda" else 0)
    return resident_bytes() + slack + rotated


def _block_bytes(workers: int, device: str) -> int:
    return QUEUED_BYTES + workers * (CUDA_WORKER_BYTES if device == "cuda" else WORKER_BYTES)


def _rounded_up(least: int) -> str:
    """A size for the option, above what the process takes by 20 MB or more: `0.5GB`."""
    return f"{math.ceil(least / 1e8 + 0.2) / 10}GB"


def peak_estimate(elements: int, workers: int, rotated: int = 0, device: str = "cpu") -> int:
    """Resident bytes a conversion in blocks of `elements` weights needs at most.

    Args:
        elements: of `block_elements`, which has made CUDA ready.
    """
    return _beside_blocks(rotated, device) + elements * _block_bytes(workers, device)


def expected_blocks_bytes(
    sizes: Sequence[int], elements: int, workers: int, rotated: int, base: int
) -> int:
    """Resident bytes of a conversion in blocks on a CPU; a small model fills fewer of them.

    Args:
        sizes: weights of every tensor.
        base: resident bytes of the libraries.
    """
    total, largest = sum(sizes), max(sizes, default=0)
    queued = min(QUEUED_BYTES * elements, 4 * total)
    working = workers * WORKER_BYTES * min(elements, largest)
    return base + min(SLACK_BYTES, 2 * total) + rotated + queued + working


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


def placed(ram: int, work: int, window: int, device: str) -> Memory:
    """Memory of `work` bytes on the device, beside `ram` bytes that lie in RAM in any case."""
    return Memory(ram + work, 0, window) if device == "cpu" else Memory(ram, work, window)


def sensitivity_memory(
    config: Mapping[str, Any],
    windows: tuple[int, int],
    schemes: int,
    draws: int,
    device: str,
    threads: int,
) -> Memory:
    """Peak memory of estimating sensitivities.

    With T tokens in all, t of a window, h wide, and `draws` tokens drawn at each position:
        kept      layers * T * h * 2 bytes in RAM, the input of every layer
        states    (1 + 2 * draws) * T * h * 4, outputs, and gradients above and below a layer
        layer     its weights in FP32, the squares of their gradients, the largest of them three
                  times more while it is read and rounded, and for each window under way what its
                  linears take and give, 1 + draws times, and its attention's t * t scores of every
                  head three times
        head      HEAD_ROWS rows of h as they are and once a scheme, and blocks of logits

    Args:
        windows: windows of the text, and tokens of each.
    """
    count, t = windows
    sizes = read_config(config)
    table = tensor_table(config)
    V, h = table[0].shape
    layers = decoder_layers(table)
    workers = min(count, threads) if device == "cpu" else 1
    scores = SCORES * sizes.num_attention_heads * t * t

    def values(layer: Sequence[TensorSpec]) -> int:
        """FP32 values of a layer and its activations, the sets of states aside."""
        weights = [math.prod(spec.shape) for spec in layer]
        traced = math.ceil(t * linear_ends(layer, sizes.experts) * (2 + draws))
        return 2 * sum(weights) + 3 * max(weights) + workers * (traced + scores)

    layer = max(map(values, layers))
    rows = min(V, HEAD_ROWS)
    # A block's logits, their differences by a scheme, and sums of probabilities in FP64.
    blocks = min(count * t, HEAD_TOKENS[device] * workers) * rows * (2 + 2 + 4)
    head = rows * h * (2 + schemes) + blocks + draws * count * t * h
    window = 4 * (1 + 2 * draws) * t * h * 5 // 4
    kept = 2 * len(layers) * t * h
    work = count * window + 4 * max(layer, head) * 5 // 4
    return placed(BASE_BYTES + count * kept, work, window + kept, device)


def logits_peak_bytes(
    config: Mapping[str, Any],
    windows: Sequence[int],
    long_windows: Sequence[int] = (0, 0),
    noisy: int = 0,
    watched: int = 0,
    device: str = "cpu",
    rounded_inputs: bool = False,
    threads: int | None = None,
) -> int:
    """Memory that a comparison needs beyond the interpreter and its libraries, at most.

    That of the larger pass, where a pass holds two sets of hidden states, 2 * tokens * h * 4 bytes
    (three with inputs in eight bits), BF16 ones of the noisy windows, and the larger of
        a layer: its weights in FP32 (of two on a GPU, where the next is read meanwhile), the
            largest of them three times more while it is unpacked,
            inputs and outputs of its linears on the watched windows (of its experts on the tokens
            that are routed to them) and, for every thread, the activations of a batch (4 of the
            widest linear's rows and 8 h a token), and on a GPU the parts of a product;
        the head: HEAD_ROWS rows of h twice and unpacked, the sums of each token, one more set of
            hidden states, and, for every thread, a block of logits, part of it in FP64.

    Args:
        long_windows: for figures by position.
        noisy: windows that the original passes in BF16, too.
        watched: windows on which outputs of linears are compared.
        device: `cpu` or `cuda`; on `cuda` this is device memory.
        rounded_inputs: the packed model passes the windows with inputs in eight bits, too.
        threads: of the CPU; torch's own number where left out.
    """
    workers = (threads or torch.get_num_threads()) if device == "cpu" else 1
    first = _pass_bytes(config, windows, noisy, watched, device, workers, 2 + rounded_inputs)
    return max(first, _pass_bytes(config, long_windows, 0, 0, device, workers))


def _pass_bytes(
    config: Mapping[str, Any],
    windows: Sequence[int],
    noisy: int,
    watched: int,
    device: str,
    workers: int,
    sets: int = 2,
) -> int:
    table = tensor_table(config)
    V, h = table[0].shape
    layer = max(
        decoder_layers(table), key=lambda specs: sum(math.prod(spec.shape) for spec in specs)
    )
    sizes = [math.prod(spec.shape) for spec in layer]
    widest = max(spec.shape[0] for spec in layer)
    count, T = windows
    tokens = count * T
    # A batch has at least one window, and there are no more batches than windows.
    together = min(tokens, max(BATCH_TOKENS[device], T) * workers)
    batch = together * (4 * widest + 8 * h)
    calls = math.ceil(min(watched, count) * T * linear_ends(layer, read_config(config).experts))
    layers = 1 if device == "cpu" else 2  # one is read while another is used
    in_layer = 4 * (layers * sum(sizes) + 3 * max(sizes) + batch + calls)
    in_parts = 0 if device == "cpu" else PARTS_BYTES
    in_layer += in_parts * (max(sizes) + together * max(widest, h))
    rows = min(V, HEAD_ROWS)
    block = min(tokens, HEAD_TOKENS[device] * workers) * rows * 2 * 4
    wide = min(tokens, SUM_TOKENS[device] * workers) * rows * 5 * 8
    in_head = 4 * rows * h * 5 + block + wide + tokens * 14 * 8 * (sets - 1) + tokens * h * 4
    in_head += in_parts * h * (rows + min(tokens, HEAD_TOKENS[device]))
    states = sets * tokens * h * 4 + min(noisy, count) * T * h * 2
    return (states + max(in_layer, in_head)) * 5 // 4


def training_memory(
    config: Mapping[str, Any],
    windows: tuple[int, int],
    rows: int,
    steps: int,
    rounds: int,
    device: str,
) -> Memory:
    """Peak memory of training a head for multi-token prediction.

    With P weights of the head and T tokens of width h:
        states    7/2 T h * 4 bytes a window: the trunk's states; of seven eighths, which are
                  learned from, a copy and embeddings; of the others six times as much while rounds
                  are counted
        head      7 P * 4: as it is, positions on the grid, weights made of them, the gradients of
                  both, and two moments of Adam; 3 P * 4 more in RAM while they are saved
        rows      of the model's head, and the logits of a window on them, four times
        columns   of a window and its rounds: 3 steps of 4 widest + 8 h values
    and half more, states aside, for what the allocator keeps: peaks of one training on a CPU differ
    by a third from run to run. The pass through the trunk before it is as that of a report.

    Args:
        windows: windows of the text, and tokens of each.
        rows: of the model's head that targets are told apart by.
        steps: that a draft is trained for.
        rounds: of a window that steps after the first are trained on.
    """
    count, T = windows
    table = tensor_table(config)
    V, h = table[0].shape
    own = [spec.shape for spec in table if spec.name.startswith(MTP_PREFIX)]
    P = sum(map(math.prod, own))
    widest = max((shape[0] for shape in own), default=h)
    columns = T + rounds * (steps - 1)
    rows = min(V, rows)
    values = 7 * P + rows * (h + 4 * columns) + steps * columns * (4 * widest + 8 * h)
    window = 4 * 7 * T * h // 2
    trunk = logits_peak_bytes(config, windows, device=device)
    work = max(count * window + 4 * values * 3 // 2, trunk)
    return placed(BASE_BYTES + 4 * 3 * P, work, window, device)


def answer_bytes(config: Config, prompt: int, tokens: int, itemsize: int) -> int:
    """Memory of one answer: cache, logits and the activations of its prompt."""
    cache = kv_bytes(config, prompt + tokens, itemsize) + state_bytes(config, itemsize)
    activations = (4 * config.intermediate_size + 8 * config.hidden_size) * itemsize
    if config.linear_layers is not None:
        activations += LINEAR_BYTES * config.linear_layers.value_dim
    work = prompt * activations + LOGIT_BYTES * config.vocab_size
    return (cache + work) * 5 // 4


def answers_that_fit(each: int, weights: int, most: int, device: str) -> int:
    """Answers of `each` bytes that fit into the free memory at a time, a power of two up to `most`.

    Raises:
        ResourceError: the weights and one answer do not fit.
    """
    free = free_bytes(device)
    if free is None:
        return most
    fitting = (free - weights) // each
    if fitting < 1:
        hint = "calibrate on the bundled text, which passes through the model layer by layer"
        if device != "cpu":
            hint = "--device cpu answers in the machine's memory"
        check_free("answering", weights + each, device, hint)
    return min(most, 1 << (fitting.bit_length() - 1))
