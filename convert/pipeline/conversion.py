"""A planned conversion, carried out: from the original to a packed folder in its place."""

import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path

import torch

from lowbit.convert.measure.record import QualityReport
from lowbit.convert.measure.weights import WeightQuality, quality_rows
from lowbit.convert.original.progress import Meter, Note, Progress, silent, unsaid
from lowbit.convert.original.rotation import rotation_bytes
from lowbit.convert.original.runnable import check_can_run
from lowbit.convert.pipeline.beside import (
    LayerWriter,
    QuietMeter,
    Write,
    blocks_beside,
    hides_writing,
    writing_memory,
)
from lowbit.convert.pipeline.folder import (
    check_apart,
    check_output,
    check_small_files,
    copies,
    copy_file,
    generated_files,
    prepare_shards,
    put_in_place,
    sync,
    working_folder,
)
from lowbit.convert.pipeline.head_rows import make_draft_head, make_frequent_rows, record_of
from lowbit.convert.pipeline.journal import CompletedStep, Journal
from lowbit.convert.pipeline.output_dir import place_of
from lowbit.convert.pipeline.row_choice import choose_draft_rows, choose_frequent_rows
from lowbit.convert.pipeline.stream import Blocks, stream
from lowbit.convert.plan.memory import block_elements
from lowbit.convert.plan.plan import Plan, TensorPlan, draft_scheme, frequent_scheme, source_rows
from lowbit.convert.quantize.session import CalibrationRequest, Session
from lowbit.convert.quantize.store import Calibrated, LayerError
from lowbit.convert.texts.token_counts import Vocabulary
from lowbit.formats.draft_head import DRAFT_FILE, draft_head_bytes
from lowbit.formats.errors import CheckpointError, ResourceError
from lowbit.formats.files.atomic import disk_errors
from lowbit.formats.frequent_rows import FREQUENT_FILE, frequent_rows_bytes
from lowbit.formats.generation import load_generation_config
from lowbit.formats.hub.locate import Location
from lowbit.formats.layout.manifest import (
    MANIFEST_FILE,
    Calibration,
    CountedRows,
    Manifest,
    OutputFile,
    Source,
    SourceTensor,
    weights_digest,
)
from lowbit.formats.machine.cores import core_count
from lowbit.formats.row_folders import ROW_FILES
from lowbit.formats.safetensors.checkpoint import (
    CONFIG_FILE,
    DTYPE_NAMES,
    Checkpoint,
    TensorInfo,
)
from lowbit.formats.safetensors.hashing import hash_file, hash_shard, hash_tensor

AGAIN = "free some space and run the same command again: finished tensors are kept"
OTHER_WORK = "finish it with the command that began it, or start over with --overwrite"


@dataclass(frozen=True, slots=True)
class Conversion:
    """A packed checkpoint in its place."""

    folder: Path  # the packed checkpoint
    source: Location  # where the weights came from
    original: Checkpoint  # headers of the source
    plan: Plan  # fate of every tensor
    manifest: Manifest  # the content of lowbit.json
    # Quality of every quantized tensor, in plan order; a row for a layer's experts
    weights: tuple[WeightQuality, ...]
    # Output errors of every calibrated layer; empty for round-to-nearest
    calibration: tuple[LayerError, ...]
    resumed: int  # steps that an interrupted run had already finished
    seconds: float  # wall time
    # True where an earlier run had put it there, and this one only checked it
    existed: bool = False
    # Report left by an earlier run; None where there is none about these weights
    report: QualityReport | None = None


@dataclass(frozen=True, slots=True)
class Job:
    """A conversion in which everything is decided: to be carried out, or found done already."""

    location: Location  # where the original is
    source: Checkpoint  # its headers
    plan: Plan  # made of them
    device: torch.device
    block_elements: int  # weights that are quantized at a time
    rotated_bytes: int  # of RAM, that matrices with mixed rows take beside the blocks
    small_files: Sequence[str]  # names of the files that are passed through
    vocabulary: Vocabulary | None  # tokens of the draft head; None without one
    frequent: Vocabulary | None  # tokens of the frequent rows; None without some
    session: Session | None  # the calibration, its text read; None for round-to-nearest

    @property
    def draft_record(self) -> CountedRows | None:
        """The record of the draft head in lowbit.json."""
        if self.vocabulary is None:
            return None
        return record_of(self.vocabulary, draft_scheme(self.plan.config, self.plan.recipe))

    @property
    def frequent_record(self) -> CountedRows | None:
        """The record of the frequent rows in lowbit.json."""
        if self.frequent is None:
            return None
        return record_of(self.frequent, frequent_scheme(self.plan.config, self.plan.recipe))

    @property
    def calibration_record(self) -> Calibration | None:
        """The record of the calibration in lowbit.json."""
        return None if self.session is None else self.session.record


def prepare(
    location: Location,
    source: Checkpoint,
    plan: Plan,
    device: torch.device,
    calibration: CalibrationRequest,
    draft_text: Path | None = None,
    max_ram: int | None = None,
) -> Job:
    """Read the texts of a conversion and check all that the original can spoil.

    Args:
        plan: made of them.
        calibration: the text, for methods other than round-to-nearest.
        draft_text: its most frequent tokens are the rows of a draft head; the bundled one when
            None.
        max_ram: resident memory not to exceed, in bytes; see `block_elements`.
    """
    load_generation_config(source.folder, source.sizes.vocab_size)  # checks
    small_files = check_small_files(source.folder)
    rotated_bytes = rotation_bytes(plan.rotated, source.tensors, device.type)
    elements = block_elements(max_ram, core_count(), device, rotated_bytes)
    rows = choose_draft_rows(plan, source, draft_text), choose_frequent_rows(plan, source)
    session = None
    if plan.method.calibrated:
        check_can_run(source.folder, source.config)
        session = Session(plan, source, calibration.read(source.folder, device), device)
    blocks = elements, rotated_bytes
    return Job(location, source, plan, device, *blocks, small_files, *rows, session)


@disk_errors(AGAIN)
def carry_out(
    job: Job,
    out: Path,
    *,
    overwrite: bool = False,
    on_progress: Progress = silent,
    note: Note = unsaid,
) -> Conversion:
    """Quantize into the folder `out`.

    Interrupted at any moment, nothing is at `out`; the same job again continues after the last
    finished tensor and gives the same bytes.

    Args:
        overwrite: replace an existing packed checkpoint, unless there is a file in it that was not
            written here or was changed since; and forget an interrupted conversion that began with
            another recipe or source.
        on_progress: called with (phase, done, in all): layers and steps of a calibration, bytes of
            everything else.
        note: told, a line each, what an earlier run left and this one makes again.
    """
    started = time.monotonic()
    plan, checkpoint, target, session = job.plan, job.source, job.device, job.session
    output_dir = place_of(out)  # a link, or `..`, cannot be renamed to
    check_output(output_dir, overwrite)
    check_apart(checkpoint.folder, output_dir)
    if session is not None:
        session.check_memory()
    digest = plan.digest() if session is None else session.digest
    work = working_folder(output_dir, digest, overwrite, job.small_files, OTHER_WORK)
    with work as (partial, journal):
        prepare_shards(plan, partial)
        if journal.damaged:
            note(f"! the journal in `{partial}` is damaged: what it lost is made again")
        kept = _still_valid(journal, plan, checkpoint, partial, on_progress, note)
        total = sum(step.source.nbytes for step in plan.steps)
        done = sum(plan.steps[number].source.nbytes for number in kept)
        meter = QuietMeter(on_progress, "convert", total, done)

        def write(steps: Iterable[int], blocks: Blocks, linears: Calibrated | None) -> None:
            append = journal.append
            stream(plan, checkpoint, partial, append, steps, blocks, meter.add, linears)

        calibrated = None
        if session is not None:
            with LayerWriter(
                plan, journal, meter, _writing(job, session, partial, write)
            ) as layers:
                calibrated = session.run(partial, on_progress, note, layers.finished)
            kept -= layers.redone
        meter.speak()
        over = {row.step for row in journal.finished}
        todo = [number for number in range(len(plan.steps)) if number not in over]
        write(todo, Blocks(job.block_elements, target), calibrated)
        finished = sorted(journal.finished, key=lambda row: row.step)
        _write_head_rows(job, partial)
        manifest = _finish(job, partial, finished, on_progress)
        (partial / MANIFEST_FILE).write_bytes(manifest.to_bytes())
        put_in_place(output_dir, overwrite)
    return Conversion(
        folder=out,
        source=job.location,
        original=checkpoint,
        plan=plan,
        manifest=manifest,
        weights=_weight_rows(plan, finished),
        calibration=() if calibrated is None else calibrated.errors,
        resumed=len(kept),
        seconds=time.monotonic() - started,
    )


def _write_head_rows(job: Job, folder: Path) -> None:
    """Write the rows of the head that have files of their own."""
    made: dict[str, bytes] = {}
    source = job.plan, job.source
    if job.vocabulary is not None:
        head = make_draft_head(*source, job.vocabulary.ids, job.device)
        made[DRAFT_FILE] = draft_head_bytes(head)
    if job.frequent is not None:
        rows = make_frequent_rows(*source, job.frequent.ids, job.device)
        made[FREQUENT_FILE] = frequent_rows_bytes(rows)
    for name, content in made.items():
        (folder / name).parent.mkdir(exist_ok=True)
        (folder / name).write_bytes(content)


def _writing(
    job: Job,
    session: Session,
    folder: Path,
    write: Callable[[Sequence[int], Blocks, Calibrated | None], None],
) -> Write | None:
    """A function that writes steps beside the calibration; None where they wait for its end.

    Each time the shards are synced, or a disk would begin with them when all is done.
    """
    writing = writing_memory(job.block_elements, job.rotated_bytes)
    if not hides_writing(job.device, session.memory(), writing):
        return None
    blocks = blocks_beside(job.block_elements, job.device)

    def write_synced(steps: Sequence[int], linears: Calibrated | None) -> None:
        write(steps, blocks, linears)
        for shard in job.plan.shards:
            sync(folder / shard.file)

    return write_synced


def _weight_rows(plan: Plan, finished: list[CompletedStep]) -> tuple[WeightQuality, ...]:
    return quality_rows(
        (step.module, step.scheme, row.sums)
        for row in finished
        if (step := plan.steps[row.step]).module is not None
        and step.scheme is not None
        and row.sums is not None
    )


def _still_valid(
    journal: Journal,
    plan: Plan,
    source: Checkpoint,
    folder: Path,
    on_progress: Progress,
    note: Note,
) -> set[int]:
    """Steps whose source and result still have the hashes an earlier run recorded.

    The journal forgets the others, which are then done again.
    """
    infos = {info.name: info for shard in plan.shards for info in shard.tensors}
    last = {row.step: row for row in journal.finished}  # a step may have been done again
    known = [row for row in last.values() if row.step in range(len(plan.steps))]
    total = sum(plan.steps[row.step].source.nbytes for row in known)
    meter = Meter(on_progress, "check", total)
    kept: dict[int, CompletedStep] = {}
    lost: list[str] = []
    for row in known:
        step = plan.steps[row.step]
        info = step.source
        if (
            _is_of(row, step, infos)
            and hash_tensor(source.folder / info.file, info) == row.source_sha256
            and all(
                hash_tensor(folder / tensor.file, infos[tensor.name]) == tensor.sha256
                for tensor in row.tensors
            )
        ):
            kept[row.step] = row
        else:
            lost.append(info.name)
        meter.add(info.nbytes)
    if lost:
        more = f" and {len(lost) - 1} more" if len(lost) > 1 else ""
        note(
            f"! `{lost[0]}`{more} in `{folder}` or in the source has changed since: quantized again"
        )
    journal.finished[:] = kept.values()
    return set(kept)


def _is_of(row: CompletedStep, step: TensorPlan, infos: Mapping[str, TensorInfo]) -> bool:
    """Tell whether a record of the journal lists the tensors that a step writes."""
    written = [(tensor.name, tensor.dtype, tensor.shape, tensor.file) for tensor in row.tensors]
    return written == [
        (name, DTYPE_NAMES[dtype], shape, infos[name].file) for name, dtype, shape in step.outputs
    ]


def _finish(
    job: Job, folder: Path, finished: list[CompletedStep], on_progress: Progress
) -> Manifest:
    """Write everything beside the weights, and make a manifest of what the disk gives back."""
    plan, source = job.plan, job.source
    small = copies(source.folder)
    for name, copy in small.items():
        copy_file(source.folder / name, folder / copy)
    generated = generated_files(plan)
    for name, content in generated.items():
        (folder / name).write_bytes(content)
    hashes = _hash_shards(plan, folder, finished, on_progress)
    rows = [name for name in ROW_FILES if (folder / name).exists()]
    others = [*small.values(), *generated, *rows]
    hashes |= {name: hash_file(folder / name) for name in others}
    source_tensors = _source_tensors(plan, source, finished)
    return Manifest(
        lowbit_version=version("lowbit"),
        source=Source(
            repo=job.location.repo,
            commit=job.location.commit,
            config_sha256=hash_file(source.folder / CONFIG_FILE),
            weights_sha256=weights_digest(source_tensors),
        ),
        recipe=plan.recipe.to_json(),
        source_tensors=source_tensors,
        tensors=tuple(tensor for row in finished for tensor in row.tensors),
        files=tuple(
            OutputFile(name, (folder / name).stat().st_size, digest)
            for name, digest in sorted(hashes.items())
        ),
        calibration=job.calibration_record,
        draft_head=job.draft_record,
        frequent_rows=job.frequent_record,
    )


def _hash_shards(
    plan: Plan, folder: Path, finished: list[CompletedStep], on_progress: Progress
) -> dict[str, str]:
    """SHA-256 of every shard, each tensor compared with what was written."""
    written = {tensor.name: tensor.sha256 for row in finished for tensor in row.tensors}
    advance = Meter(on_progress, "verify", plan.output_bytes).add
    with ThreadPoolExecutor(core_count()) as pool:
        results = pool.map(
            lambda shard: hash_shard(folder / shard.file, shard.tensors, advance), plan.shards
        )
        hashes = {}
        for shard, (whole, parts) in zip(plan.shards, results, strict=True):
            for name, digest in parts.items():
                if digest != written[name]:
                    raise ResourceError(
                        f"`{shard.file}`: `{name}` reads back with other bytes than were written",
                        hint="check the disk, then run the same command again",
                    )
            hashes[shard.file] = whole
    return hashes


def _source_tensors(
    plan: Plan, source: Checkpoint, finished: list[CompletedStep]
) -> tuple[SourceTensor, ...]:
    rows = source_rows(plan, {row.step: row.source_sha256 for row in finished})
    unread = set(source.tensors) - {row.name for row in rows}
    if unread:
        raise CheckpointError(f"`{min(unread)}` has no fate in the plan")
    return rows
