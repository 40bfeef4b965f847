"""Time and memory of a planned conversion before it begins, and the method that `auto` becomes."""

import math
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from pathlib import Path

import torch

from lowbit.convert.budget.target import TargetChoice
from lowbit.convert.original.rotation import rotation_bytes, why_not_rotated
from lowbit.convert.pipeline.beside import both, hides_writing, writing_memory
from lowbit.convert.pipeline.folder import check_small_files, name_of_copy, passed_through
from lowbit.convert.pipeline.predicted_size import SourceFiles, files_of
from lowbit.convert.plan.calibration_cost import (
    Windows,
    calibration_flops,
    conversion_seconds,
    measured_rate,
    report_seconds,
    rounding_seconds,
    shapes_of,
)
from lowbit.convert.plan.calibration_memory import calibration_memory
from lowbit.convert.plan.choice_of_method import (
    GPTQ,
    Gain,
    automatic_method,
    gain_of,
    methods,
    needs_no_calibration,
    unmeasured_rotation,
)
from lowbit.convert.plan.effort import EffortPlan
from lowbit.convert.plan.memory import (
    BASE_BYTES,
    LIBRARIES_BYTES,
    Memory,
    block_elements,
    expected_blocks_bytes,
    peak_estimate,
)
from lowbit.convert.plan.method import RTN, Method
from lowbit.convert.plan.plan import MethodChooser, Plan
from lowbit.convert.quantize.session import SAMPLES, CalibrationRequest
from lowbit.convert.texts.calibration import bundled_texts
from lowbit.convert.texts.evaluation import (
    LONG_TOKENS,
    LONGEST,
    NOISY,
    WINDOW,
    compared_windows,
    default_texts,
    tokenize,
)
from lowbit.formats.architectures import part_of, read_config
from lowbit.formats.architectures.footprint import DEFAULT_CONTEXT, sequence_bytes
from lowbit.formats.generation import load_generation_config
from lowbit.formats.hub.ids import hub_id
from lowbit.formats.hub.locate import locate, remote_headers
from lowbit.formats.kv_cache import BF16_CACHE, INT8_CACHE
from lowbit.formats.layout.scheme import Scheme
from lowbit.formats.machine.cores import core_count
from lowbit.formats.safetensors.checkpoint import Checkpoint, open_checkpoint
from lowbit.formats.text.tokenizer import TOKENIZER_FILE

DRAFTER = "it is a drafter"  # reason why nothing is calibrated
BYTES_A_TOKEN = 3.7  # of the bundled text, by Qwen's tokenizer
EVAL_BYTES_A_TOKEN = 4.05  # of the bundled evaluation texts, likewise


@dataclass(frozen=True, slots=True)
class MethodCost:
    """Expected time of a whole conversion by one method, and peak memory of its calibration."""

    method: Method  # its steps
    seconds: float  # of the whole conversion
    memory: Memory | None  # None for round-to-nearest, whose memory `--max-ram` bounds


@dataclass(frozen=True, slots=True)
class ReportCost:
    """Size of the bundled evaluation texts, and time of a report on them."""

    tokens: int  # that logits are compared on
    long_tokens: int  # that they are compared on again, in longer windows
    counted: bool  # by the model's tokenizer; estimated from bytes where it is not at hand
    seconds: float


@dataclass(frozen=True, slots=True)
class Estimate:
    """A conversion that can begin."""

    plan: Plan
    device: torch.device  # where it will compute
    windows: Windows  # of the calibration text, estimated from its size
    costs: tuple[MethodCost, ...]  # of `methods`, and of the plan's own where it is none of them
    obstacle: str | None  # reason why `auto` does not rotate the checkpoint; None where it does
    choice: TargetChoice | None = None  # bits chosen for a target; None where the recipe gives them
    effort: EffortPlan | None = None  # that chose the method; None where it was named, or by `auto`
    rate: float | None = None  # operations a second of a calibration; None of a drafter
    report: ReportCost | None = None  # None of a drafter, and before a conversion

    @property
    def method(self) -> Method:
        """The method that will be used."""
        return self.plan.method

    @property
    def gain(self) -> Gain | None:
        """The step to a better method; None where there is none, or nothing to gain."""
        sizes = read_config(self.plan.config)
        if needs_no_calibration(self.plan.schemes) or sizes.block_drafts is not None:
            return None
        return gain_of(self.method, self.obstacle is None, sizes.experts is not None)

    def of(self, method: Method) -> MethodCost:
        """The cost of one of the methods."""
        return next(row for row in self.costs if row.method == method)


@dataclass(frozen=True, slots=True)
class RunMemory:
    """Memory that the result takes on a GPU."""

    weight_bytes: int  # of its decoder
    context: int  # tokens that a sequence is counted with
    sequence_bytes: int  # of the cache of one such sequence in BF16
    int8_sequence_bytes: int  # the same with keys and values in INT8
    vision_bytes: int  # of its vision tower, which images alone need; 0 without one


def estimate(
    source: Checkpoint,
    plan: Plan,
    device: torch.device,
    request: CalibrationRequest,
    choice: TargetChoice | None = None,
    effort: EffortPlan | None = None,
) -> Estimate:
    """Time and memory of a planned conversion."""
    sizes, used = source.sizes, plan.method
    windows = expected_windows(request, sizes.max_position_embeddings, device.type)
    if sizes.block_drafts is not None:  # it is rounded to nearest
        seconds = rounding_seconds(sum(plan.parameters.values()), device.type, units_of(device))
        rounded = MethodCost(used, seconds, None)
        return Estimate(plan, device, windows, (rounded,), DRAFTER, choice, effort)
    shapes = shapes_of(source.config, plan.schemes, source.tensors)
    obstacle = obstacle_of(source, plan.schemes, plan.written)
    told = None if effort is None else effort.rate  # its line and these rows agree
    rate = told or measured_rate(device, shapes)
    units = units_of(device)

    def cost(method: Method) -> MethodCost:
        seconds = conversion_seconds(shapes, method, windows, device.type, units, rate)
        if not method.calibrated:
            return MethodCost(method, seconds, None)
        threads = torch.get_num_threads()
        memory = calibration_memory(shapes, method, windows, device.type, threads)
        return MethodCost(method, seconds, memory)

    shown = methods(obstacle is None, sizes.experts is not None)
    others = () if used in shown else (used,)
    costs = tuple(cost(method) for method in (*shown, *others))
    return Estimate(plan, device, windows, costs, obstacle, choice, effort, rate)


def method_chooser(
    source: Checkpoint, device: torch.device, request: CalibrationRequest
) -> MethodChooser:
    """A function that chooses the method where none is named: `--method auto`."""
    sizes = source.sizes

    def choose(schemes: Mapping[str, Scheme | None], written: Collection[str]) -> Method:
        if sizes.block_drafts is not None:
            return RTN
        windows = expected_windows(request, sizes.max_position_embeddings, device.type)
        shapes = shapes_of(source.config, schemes, source.tensors)
        return automatic_method(
            schemes,
            device.type,
            calibration_flops(shapes, GPTQ, windows),
            core_count(),
            obstacle_of(source, schemes, written) is None,
            sizes.experts is not None,
        )

    return choose


def obstacle_of(
    source: Checkpoint, schemes: Mapping[str, Scheme | None], written: Collection[str]
) -> str | None:
    """Reason why `auto` does not rotate; None where it does."""
    obstacle = why_not_rotated(source.config, schemes, written)
    return obstacle or unmeasured_rotation(source.config["model_type"])


def open_headers(source: str, revision: str | None) -> tuple[Checkpoint, SourceFiles]:
    """Headers of a folder, or of a Hub id by range requests, and the files passed through.

    Raises:
        LowbitError: no checkpoint, or a file that would stop a conversion.
    """
    on_hub = None if Path(source).exists() else hub_id(source, revision)
    if on_hub is not None:
        remote = remote_headers(*on_hub)
        sizes = remote.other_files
        checkpoint = Checkpoint(remote.folder, remote.config, remote.tensors, notes=remote.notes)
        passed = {name_of_copy(name): sizes[name] for name in passed_through(sizes)}
        return checkpoint, SourceFiles(passed, on_hub[0], remote.commit)
    location = locate(source, revision)
    folder = location.folder
    checkpoint = open_checkpoint(folder)
    check_small_files(folder)
    load_generation_config(folder, checkpoint.sizes.vocab_size)  # checks it
    return checkpoint, files_of(location)


def conversion_memory(ahead: Estimate) -> Memory:
    """Peak memory of a whole conversion.

    Of its blocks, of its calibration with the writing beside it, or of the costs of bits.
    """
    calibration = ahead.of(ahead.method).memory
    if calibration is not None:
        writing = writing_memory(*_blocks(ahead.plan, ahead.device))
        if hides_writing(ahead.device, calibration, writing):
            calibration = both(calibration, writing)
    taken = [Memory(blocks_ram(ahead.plan, ahead.device), 0, 0), calibration]
    if ahead.effort is not None:
        taken.append(ahead.effort.costs_memory)
    needs = [need for need in taken if need is not None]
    return Memory(max(need.ram for need in needs), max(need.gpu for need in needs), 0)


def _blocks(plan: Plan, device: torch.device) -> tuple[int, int]:
    """Weights of a block, and bytes of RAM that matrices with mixed rows take beside them."""
    tensors = {step.source.name: step.source for step in plan.steps}
    rotated_bytes = rotation_bytes(plan.rotated, tensors, device.type)
    return block_elements(None, core_count(), device, rotated_bytes), rotated_bytes


def blocks_ram(plan: Plan, device: torch.device) -> int:
    """Resident bytes of a conversion in blocks, on a GPU at most."""
    elements, rotated_bytes = _blocks(plan, device)
    if device.type == "cuda":
        return peak_estimate(elements, core_count(), rotated_bytes, device.type)
    sources = {step.source.name: step.source for step in plan.steps}
    sizes = [math.prod(info.shape) for info in sources.values()]
    base = BASE_BYTES if plan.method.calibrated else LIBRARIES_BYTES
    return expected_blocks_bytes(sizes, elements, core_count(), rotated_bytes, base)


def units_of(device: torch.device) -> int:
    """Cores of a CPU that compute, multiprocessors of a GPU."""
    if device.type == "cpu":
        return torch.get_num_threads()
    return torch.cuda.get_device_properties(device).multi_processor_count


def run_memory(plan: Plan) -> RunMemory:
    """Memory that the result of a plan takes on a GPU."""
    sizes = read_config(plan.config)
    context, D = min(sizes.max_position_embeddings, DEFAULT_CONTEXT), sizes.head_dim
    decoder = (step for step in plan.steps if part_of(plan.config, step.source.name) == "decoder")
    return RunMemory(
        weight_bytes=sum(step.output_bytes for step in decoder),
        context=context,
        sequence_bytes=sequence_bytes(sizes, context, BF16_CACHE.vector_bytes(D)),
        int8_sequence_bytes=sequence_bytes(sizes, context, INT8_CACHE.vector_bytes(D)),
        vision_bytes=sum(step.output_bytes for step in plan.vision_steps),
    )


def report_cost(source: Checkpoint, files: SourceFiles, ahead: Estimate) -> ReportCost | None:
    """Tokens of the bundled evaluation texts, and time of a report; None of a drafter.

    Raises:
        CheckpointError: the original has no tokenizer.json, or one that fails.
        RequestError: it leaves too few tokens.
    """
    if ahead.rate is None:
        return None
    context, device = max(2, source.sizes.max_position_embeddings), ahead.device
    texts, at_hand = default_texts(), (source.folder / TOKENIZER_FILE).exists()
    counted = at_hand or TOKENIZER_FILE not in files.sizes
    if counted:
        cut = tokenize(source.folder, texts, context)
        short, longer = (Windows(*each.shape) for each in compared_windows(cut, context))
        first = len(cut[0].windows)
    else:  # the Hub has it, and only headers were read
        sizes = [len(text.content.encode()) / EVAL_BYTES_A_TOKEN for text in texts]
        window, longest = min(WINDOW, context), min(LONGEST, context)
        short = Windows(math.ceil(sum(sizes) / window), window)
        longer = Windows(LONG_TOKENS // longest if context >= 2 * WINDOW else 0, longest)
        first = math.ceil(sizes[0] / window)
    noisy = Windows(min(NOISY, first), short.length)
    shapes = shapes_of(source.config, ahead.plan.schemes, source.tensors)
    passed, tokens = (short, short, noisy, longer, longer), short.tokens + longer.tokens
    units = units_of(device)
    seconds = report_seconds(shapes, passed, tokens, device.type, units, ahead.rate)
    return ReportCost(short.tokens, longer.tokens, counted, seconds)


def expected_windows(request: CalibrationRequest, context: int, device: str) -> Windows:
    """Windows that a calibration text will give, from its size in bytes."""
    if request.file is None:
        size = sum(len(text) for text in bundled_texts())
    else:
        size = request.file.stat().st_size
    tokens = max(2, math.ceil(size / BYTES_A_TOKEN))
    length = min(request.length, context, tokens)
    return Windows(min(request.samples or SAMPLES[device], tokens // length), length)
