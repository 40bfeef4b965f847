"""A conversion that is in its place already: the same command then only adds what it lacks.

Killed while it measures, `convert --report` leaves a whole packed folder without its report.
"""

import time
from collections import defaultdict
from contextlib import suppress
from dataclasses import replace
from importlib.metadata import version
from pathlib import Path

from lowbit.convert.measure.pair import pair_of
from lowbit.convert.measure.record import QualityReport, read_quality
from lowbit.convert.measure.weights import measure_weights
from lowbit.convert.original.progress import Note, Progress, unsaid
from lowbit.convert.pipeline.conversion import Conversion, Job
from lowbit.convert.pipeline.folder import check_output, expected_files, finish
from lowbit.convert.pipeline.origin import check_origin
from lowbit.convert.pipeline.output_dir import place_of
from lowbit.convert.pipeline.owned import remove_unfinished_reports
from lowbit.convert.pipeline.verification import check_recorded
from lowbit.convert.plan.plan import source_rows
from lowbit.formats.errors import LowbitError, ResourceError
from lowbit.formats.files.atomic import disk_errors
from lowbit.formats.layout.manifest import MANIFEST_FILE, Manifest, read_manifest
from lowbit.formats.packed import open_packed
from lowbit.formats.row_folders import ROW_FILES
from lowbit.formats.tasks import manifest_sha256


def can_continue(
    out: Path, overwrite: bool, logits: bool, publish: bool, int8_inputs: bool = False
) -> bool:
    """Tell whether a packed folder is at `out` that a command has still something to add to.

    Args:
        overwrite: True where something else there may be replaced.
        logits: True of a command that compares logits.
        publish: True of a command that publishes, which continues after any interruption.
        int8_inputs: True of a command that compares logits with inputs in eight bits, too.

    Raises:
        ResourceError: neither that, nor a free place.
    """
    output_dir = place_of(out)
    if (output_dir / MANIFEST_FILE).exists():
        quality = None
        with suppress(LowbitError):
            quality = quality_of(output_dir, manifest_sha256(output_dir))
        if publish or quality is None:
            return True
        found = quality.logits
        if logits and (found is None or (int8_inputs and not found.int8_inputs)):
            return True
    check_output(output_dir, overwrite)
    return False


def quality_of(folder: Path, digest: str | None, note: Note = unsaid) -> QualityReport | None:
    """The report in a packed folder, if it can be read and is about lowbit.json of this hash.

    Args:
        digest: of its lowbit.json.
        note: told of a report that cannot be read.
    """
    try:
        report = read_quality(folder)
    except LowbitError as error:
        note(f"! {error}: measured again")
        return None
    return report if report is not None and report.manifest_sha256 == digest else None


@disk_errors()
def find_existing(
    job: Job, out: Path, overwrite: bool, progress: Progress, note: Note = unsaid
) -> Conversion | None:
    """The folder at `out`, if it is byte for byte the one that `carry_out` would make.

    Source and result are both hashed. Layer errors of a calibration are not known any more.

    Args:
        overwrite: something else there may be replaced.
        note: told of a report there that cannot be read.

    Raises:
        ResourceError: source or result have changed since an earlier run of this job, and the
            result may not be replaced.
        LowbitError: what would stop the conversion itself.
    """
    started = time.monotonic()
    output_dir = place_of(out)
    try:
        manifest = read_manifest(output_dir)
    except LowbitError:
        return None
    if manifest is None or not _is_of(manifest, job):
        return None
    try:
        check_origin(manifest, job.source, progress)
        packed = open_packed(output_dir)
        check_recorded(packed, manifest, progress)
    except LowbitError as error:
        if overwrite:
            return None
        raise ResourceError(
            f"`{out}` is not empty, and not what this command makes any more: {error}",
            hint="choose another folder, or replace it with --overwrite",
        ) from error
    finish(output_dir)
    remove_unfinished_reports(output_dir)
    quality = quality_of(output_dir, packed.manifest_sha256, note)
    if quality is None:
        weights = measure_weights(pair_of(job.source, packed), job.device.type, progress)
    else:
        weights = quality.weights
    return Conversion(
        folder=out,
        source=job.location,
        original=job.source,
        plan=job.plan,
        manifest=manifest,
        weights=weights,
        calibration=(),
        resumed=len(job.plan.steps),
        seconds=time.monotonic() - started,
        existed=True,
        report=quality,
    )


def _is_of(manifest: Manifest, job: Job) -> bool:
    """Tell whether lowbit.json is what a job would write, but for hashes of tensors."""
    plan, location = job.plan, job.location
    if (
        (version("lowbit"), plan.recipe.to_json()) != (manifest.lowbit_version, manifest.recipe)
        or (location.repo, location.commit) != (manifest.source.repo, manifest.source.commit)
        or manifest.mtp_training is not None
    ):
        return False
    unhashed = tuple(replace(row, sha256="") for row in manifest.source_tensors)
    if unhashed != source_rows(plan, defaultdict(str)):
        return False
    weights = {*ROW_FILES, *(row.file for row in manifest.tensors)}  # made alike, if records are
    listed = {row.name: row.sha256 for row in manifest.files if row.name not in weights}
    return (
        expected_files(plan, job.source.folder) == listed
        and job.draft_record == manifest.draft_head
        and job.frequent_record == manifest.frequent_rows
        and job.calibration_record == manifest.calibration
    )
