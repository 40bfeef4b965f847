"""Reading, quantizing and writing, a block of rows at a time: memory does not grow with the model.

Four stages overlap: read, hash the source, quantize and measure, hash and write. Quantizing has a
thread a core, the others one; blocks leave every stage in order, so results do not depend on
timing.
"""

import hashlib
import os
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

import torch
from torch import Tensor

from lowbit.convert.measure.weights import WeightSums
from lowbit.convert.original.progress import Advance
from lowbit.convert.original.rotation import Rotation
from lowbit.convert.original.threads import ordered
from lowbit.convert.pipeline.journal import CompletedStep
from lowbit.convert.plan.plan import Plan, TensorPlan
from lowbit.convert.quantize.rounding import search_on
from lowbit.convert.quantize.store import Calibrated
from lowbit.formats.errors import QuantizationError
from lowbit.formats.layout.manifest import OutputTensor
from lowbit.formats.layout.packing import PACKED, SCALE, SHAPE, dequantize, pack, unpack
from lowbit.formats.layout.rtn import ScaleRule, quantize
from lowbit.formats.machine.cores import core_count
from lowbit.formats.packed import FLOATS
from lowbit.formats.safetensors.checkpoint import DTYPE_NAMES, Checkpoint, TensorInfo
from lowbit.formats.safetensors.tensor_info import raw_bytes

READ_AHEAD = 2  # blocks a stage may be ahead of the next

Item = TypeVar("Item")
Result = TypeVar("Result")


@dataclass(frozen=True, slots=True)
class Blocks:
    """Size of a block, and the place of its work."""

    elements: int  # weights that are quantized at a time
    device: torch.device
    workers: int | None = None  # threads that quantize; a core each where left out
    stream: torch.cuda.Stream | None = None  # that a GPU works in; the usual one where left out


@dataclass(slots=True)
class _Work:
    """A step under way; hashes and sums grow block by block, in order."""

    number: int
    step: TensorPlan
    source_hash: Any = field(default_factory=hashlib.sha256)
    hashes: dict[str, Any] = field(default_factory=dict)
    sums: WeightSums = field(default_factory=WeightSums)
    scale_min: float = float("inf")
    scale_max: float = float("-inf")


@dataclass(frozen=True, slots=True)
class _Block:
    work: _Work
    start: int  # first row
    rows: Tensor
    last: bool


@dataclass(frozen=True, slots=True)
class _Made:
    """A finished block: parts of output tensors by name, on the CPU."""

    block: _Block
    parts: tuple[tuple[str, Tensor], ...]
    sums: WeightSums
    scales: tuple[float, float]


def stream(
    plan: Plan,
    source: Checkpoint,
    folder: Path | None,
    record: Callable[[CompletedStep], None],
    todo: Iterable[int],
    blocks: Blocks,
    advance: Advance,
    calibrated: Calibrated | None = None,
) -> None:
    """Carry out steps of a plan into the shards of `folder`.

    Args:
        folder: where the shards lie, created and sized; None to hash without writing.
        calibrated: linears whose codes are chosen already.

    Raises:
        QuantizationError: a tensor holds NaN or Inf.
        CheckpointError: a source file is cut short while it is read.
        OSError: the disk is full.
    """
    infos = {info.name: info for shard in plan.shards for info in shard.tensors}
    with ExitStack() as stack:
        files = {
            shard.file: stack.enter_context((folder / shard.file).open("r+b", buffering=0))
            for shard in plan.shards
            if folder is not None
        }
        stack.enter_context(_one_thread_an_operation())
        reader, hasher, writer = (stack.enter_context(_Pool(1)) for _ in range(3))
        workers = stack.enter_context(_Pool(blocks.workers or core_count()))
        writes: deque[Future[None]] = deque()

        def put(made: _Made) -> None:
            work = made.block.work
            for name, data in made.parts:
                info = infos[name]
                start = 0 if name.endswith(SHAPE) else made.block.start
                view = raw_bytes(data)
                work.hashes.setdefault(name, hashlib.sha256()).update(view)
                if files:
                    write_at(files[info.file].fileno(), info.offset + start * info.row_bytes, view)
            work.sums.merge(made.sums)
            work.scale_min = min(work.scale_min, made.scales[0])
            work.scale_max = max(work.scale_max, made.scales[1])
            if made.block.last:
                record(_finished(work, infos))

        tasks = _tasks(plan, todo, blocks.elements)
        read = _overlap(reader, lambda task: _read(source, task), tasks)
        hashed = _overlap(hasher, _hash_source, read)
        rule = plan.recipe.rule
        rotation = Rotation(source, plan.rotated)

        def make(block: _Block) -> _Made:
            with torch.cuda.stream(blocks.stream):  # of this thread; none leaves the usual one
                return _make(block, source, rule, blocks.device, calibrated, rotation)

        for made in _overlap(workers, make, hashed):
            writes.append(writer.submit(put, made))
            while len(writes) > READ_AHEAD:
                writes.popleft().result()
            advance(made.block.rows.nbytes)
        for write in writes:
            write.result()


class _Pool(ThreadPoolExecutor):
    """Threads that drop what is queued when the conversion fails."""

    def __init__(self, threads: int) -> None:
        super().__init__(max_workers=threads)
        self.threads = threads

    def __exit__(self, *error: object) -> None:
        self.shutdown(wait=True, cancel_futures=True)


@contextmanager
def _one_thread_an_operation() -> Iterator[None]:
    """Blocks run side by side instead: cheaper than splitting each small operation over cores."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(threads)


def _overlap(
    pool: _Pool, work: Callable[[Item], Result], items: Iterable[Item]
) -> Iterator[Result]:
    """`map(work, items)` in the pool's threads, in order, few results ahead."""
    return ordered(pool, work, items, READ_AHEAD + pool.threads)


def _tasks(
    plan: Plan, todo: Iterable[int], elements: int
) -> Iterator[tuple[_Work, int, int, bool]]:
    """(work, first row, last row + 1, whether it ends the tensor) of every block."""
    for number in todo:
        work = _Work(number, plan.steps[number])
        total = _row_count(work.step.source)
        rows = _rows(work.step.source, elements)
        for start in range(0, max(1, total), rows):  # no rows are a block too
            stop = min(start + rows, total)
            yield work, start, stop, stop == total


def _row_count(info: TensorInfo) -> int:
    """Rows of a tensor; one without dimensions is a single row."""
    return info.shape[0] if info.shape else 1


def _rows(info: TensorInfo, elements: int) -> int:
    """Rows of a tensor in a block of `elements` weights."""
    return max(1, elements * info.dtype.itemsize // max(1, info.row_bytes))


def _read(source: Checkpoint, task: tuple[_Work, int, int, bool]) -> _Block:
    work, start, stop, last = task
    return _Block(work, start, source.read_rows(work.step.source.name, start, stop), last)


def _hash_source(block: _Block) -> _Block:
    block.work.source_hash.update(raw_bytes(block.rows))
    return block


def _make(
    block: _Block,
    source: Checkpoint,
    rule: ScaleRule,
    device: torch.device,
    calibrated: Calibrated | None,
    rotation: Rotation,
) -> _Made:
    """Quantize, pack and measure the rows of a block, or pass them on."""
    step = block.work.step
    # The sum is finite unless a value is not, or values are so large that only a closer look tells.
    if block.rows.dtype in FLOATS and not torch.isfinite(block.rows.sum(dtype=torch.float32)):
        _check_finite(block, source)
    sums = WeightSums()
    name = step.source.name if step.module is None else f"{step.module}.weight"
    rows = block.rows
    if name in rotation.roles:
        rows = rotation.rows(name, block.start, rows, device)
    if step.scheme is None:
        rows = rows.to(step.source.dtype).cpu()
        if step.fate == "rotated" and not torch.isfinite(rows).all():
            raise QuantizationError(
                f"`{name}`, rotated, does not fit its dtype {step.source.dtype_name}",
                hint="leave out +rotate",
            )
        copied = tuple((name, rows) for name, _, _ in step.outputs)
        return _Made(block, copied, sums, (0.0, 0.0))
    w = rows.to(device)
    if calibrated is not None and step.module is not None and step.module in calibrated.files:
        here = slice(block.start, block.start + len(w))
        codes, scale = calibrated.rows(step.module, step.scheme, w.shape[1], here, device)
    else:
        search = search_on(device, step.scheme)
        codes, scale = quantize(w, step.scheme, rule, search)
    packed = pack(codes, step.scheme.bits)
    # Measured on what a reader will decode, not on what was meant to be written.
    read = dequantize(unpack(packed, step.scheme.bits, w.shape[1]), scale)
    sums.add(w, read, scale, step.scheme)
    scales = (float(scale.min()), float(scale.max()))
    parts = [(f"{step.module}.{PACKED}", packed.cpu()), (f"{step.module}.{SCALE}", scale.cpu())]
    if block.last:
        shape = torch.tensor(step.source.shape, dtype=torch.int64)
        parts.append((f"{step.module}.{SHAPE}", shape))
    return _Made(block, tuple(parts), sums, scales)


def _check_finite(block: _Block, source: Checkpoint) -> None:
    if torch.isfinite(block.rows).all():
        return
    info = block.work.step.source
    nan = inf = 0
    total = _row_count(info)
    for start in range(0, total, len(block.rows)):
        rows = source.read_rows(info.name, start, min(start + len(block.rows), total))
        nan += int(torch.isnan(rows).sum())
        inf += int(torch.isinf(rows).sum())
    raise QuantizationError(
        f"`{info.name}` holds {nan} NaN and {inf} infinite values",
        hint="the checkpoint is damaged; download it again or ask its author",
    )


def _finished(work: _Work, infos: dict[str, TensorInfo]) -> CompletedStep:
    step = work.step
    tensors = []
    for name, dtype, shape in step.outputs:
        is_scale = step.scheme is not None and name.endswith(SCALE)
        tensors.append(
            OutputTensor(
                name=name,
                dtype=DTYPE_NAMES[dtype],
                shape=shape,
                file=infos[name].file,
                sha256=work.hashes[name].hexdigest(),
                scale_min=work.scale_min if is_scale else None,
                scale_max=work.scale_max if is_scale else None,
            )
        )
    sums = work.sums if step.scheme else None
    return CompletedStep(work.number, work.source_hash.hexdigest(), tuple(tensors), sums)


def write_at(descriptor: int, offset: int, view: memoryview) -> None:
    """Write all of `view` at a byte offset."""
    done = 0
    while done < len(view):
        done += os.pwrite(descriptor, view[done:], offset + done)
