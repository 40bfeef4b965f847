"""Finished layers written into the shards while a GPU calibrates those after them.

A calibration waits for the GPU, writing for the disk and for hashes, so one hides the other. A CPU
has no core to spare for it, and writes once all is calibrated. What waits lies in the files that
the calibration keeps, not in memory; only the blocks under way do.
"""

from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from threading import Lock
from types import TracebackType

import torch

from lowbit.convert.original.progress import Meter, Progress
from lowbit.convert.pipeline.journal import CompletedStep, Journal
from lowbit.convert.pipeline.stream import Blocks
from lowbit.convert.plan.memory import CUDA_WORKER_BYTES, QUEUED_BYTES, Memory
from lowbit.convert.plan.plan import Plan
from lowbit.convert.quantize.store import Calibrated
from lowbit.formats.layout.packing import PACKED, SCALE
from lowbit.formats.machine.memory import free_bytes

WORKERS = 4  # threads that unpack and measure blocks beside a calibration
# On a GPU for each weight of a block: as stored, rotated with copies, codes, read back, its error;
# and of the largest matrix with mixed rows: two that are kept, one that is made.
GPU_BYTES, MIXED_GPU_BYTES = 28, 12

# Carries out some steps of the plan, given the linears that are calibrated.
Write = Callable[[Sequence[int], Calibrated | None], None]


def writing_memory(elements: int, rotated_bytes: int) -> Memory:
    """Memory of writing beside a calibration on a GPU, beyond the calibration's.

    Args:
        elements: weights of a block.
        rotated_bytes: of `rotation_bytes`, on a GPU.
    """
    ram = elements * (QUEUED_BYTES + WORKERS * CUDA_WORKER_BYTES) + rotated_bytes
    gpu = elements * WORKERS * GPU_BYTES + rotated_bytes // 4 * MIXED_GPU_BYTES
    return Memory(ram, gpu, 0)


def hides_writing(device: torch.device, calibration: Memory, writing: Memory) -> bool:
    """Tell whether layers are written beside a calibration: on a GPU, where both fit."""
    if device.type == "cpu":
        return False
    need = both(calibration, writing)
    rooms = ((need.ram, free_bytes("cpu")), (need.gpu, free_bytes(device.type)))
    return all(free is None or taken <= free for taken, free in rooms)


def both(calibration: Memory, writing: Memory) -> Memory:
    """Memory of a calibration with the writing beside it."""
    ram, gpu = calibration.ram + writing.ram, calibration.gpu + writing.gpu
    return Memory(ram, gpu, calibration.window)


def blocks_beside(elements: int, device: torch.device) -> Blocks:
    """Blocks of that writing, on a GPU in a stream of its own.

    In the calibration's stream it would wait for all that is queued there.
    """
    if device.type == "cpu":
        return Blocks(elements, device, WORKERS)
    stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
    return Blocks(elements, device, WORKERS, stream)


class QuietMeter:
    """A meter of a phase that tells nobody before `speak`: another one is shown meanwhile."""

    def __init__(self, progress: Progress, phase: str, total: int, done: int) -> None:
        """Begin after some work that an earlier run has done."""
        self._progress, self._loud, self._lock = progress, False, Lock()
        self._last = phase, done, total
        self.add = Meter(self._tell, phase, total, done).add

    def _tell(self, phase: str, done: int, total: int) -> None:
        with self._lock:
            self._last = phase, done, total
            if self._loud:
                self._progress(phase, done, total)

    def speak(self) -> None:
        """Tell of what follows, and of what was done until now."""
        with self._lock:
            if not self._loud and self._last[1]:
                self._progress(*self._last)
            self._loud = True


class LayerWriter:
    """Writes layers in a thread as they are finished; a context that ends when all are written.

    Where the context fails, what is not begun is dropped; what is written is in the journal.
    """

    def __init__(
        self, plan: Plan, journal: Journal, meter: QuietMeter, write: Write | None
    ) -> None:
        """Begin with what is not quantized, whatever the codes.

        Args:
            journal: with the steps of an earlier run that are still valid.
            meter: of bytes of the source; speaks once the calibration has ended.
            write: None to leave all steps to the caller.
        """
        self.redone: set[int] = set()  # steps of an earlier run that follow from other codes
        self._plan, self._journal, self._meter, self._write = plan, journal, meter, write
        self._numbers: dict[str, int] = {}  # of the steps, by module
        others = []
        for number, step in enumerate(plan.steps):
            if step.module is not None and step.scheme is not None:
                self._numbers[step.module] = number
            else:
                others.append(number)
        self._thread = ThreadPoolExecutor(1, "lowbit-writer")
        self._jobs: list[Future[None]] = []
        self._submit(others, None)

    def finished(self, linears: Calibrated) -> None:
        """Write the linears of a layer, also where an earlier run wrote others.

        Raises:
            OSError, LowbitError: an earlier layer could not be written.
        """
        for job in self._jobs:
            if job.done():
                job.result()
        self._submit([self._numbers[module] for module in linears.files], linears)

    def _submit(self, numbers: Sequence[int], linears: Calibrated | None) -> None:
        self._jobs.append(self._thread.submit(self._carry_out, numbers, linears))

    def _carry_out(self, numbers: Sequence[int], linears: Calibrated | None) -> None:
        done = {row.step: row for row in self._journal.finished if row.step in numbers}
        if linears is not None:
            # A linear's file may be older than this run and still newer than what was written
            others = {number for number in done if not self._holds(done[number], linears)}
            self._journal.forget(others)
            self._meter.add(-sum(self._plan.steps[number].source.nbytes for number in others))
            self.redone |= others
            done = {number: row for number, row in done.items() if number not in others}
        if self._write is not None:
            self._write([number for number in numbers if number not in done], linears)

    def _holds(self, row: CompletedStep, linears: Calibrated) -> bool:
        """Tell whether the codes and scales that a step wrote are those of its linear."""
        module = str(self._plan.steps[row.step].module)
        written = {tensor.name: tensor.sha256 for tensor in row.tensors}
        names = f"{module}.{PACKED}", f"{module}.{SCALE}"
        return tuple(map(written.get, names)) == linears.packed_sha256(module)

    def __enter__(self) -> "LayerWriter":
        """Nothing to do: the thread is there."""
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        """Wait for what is left, or drop it."""
        try:
            if kind is None:
                self._meter.speak()
                for job in self._jobs:
                    job.result()
        finally:
            self._thread.shutdown(wait=True, cancel_futures=True)
