"""A conversion that is in its place already: the same command then only adds what it lacks.

Killed while it measures, `convert --report` leaves a whole packed folder without its report.
"""

import hashlib
import json
import time
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path

from lowbit.convert.calibrate.request import CalibrationRequest
from lowbit.convert.calibrate.session import begin
from lowbit.convert.measure.compare import measure_weights
from lowbit.convert.measure.record import QualityReport, read_quality
from lowbit.convert.original.device import open_device
from lowbit.convert.pipeline.conversion import Conversion
from lowbit.convert.pipeline.draft_head import choose_draft_rows, record_of
from lowbit.convert.pipeline.folder import check_output, check_small_files, finish
from lowbit.convert.pipeline.origin import check_origin
from lowbit.convert.pipeline.owned import remove_unfinished_reports
from lowbit.convert.pipeline.place import place_of
from lowbit.convert.pipeline.verification import Progress, check_recorded
from lowbit.convert.plan.plan import Plan, make_plan
from lowbit.convert.plan.recipe import Recipe
from lowbit.formats.draft_head import DRAFT_FILE
from lowbit.formats.errors import LowbitError, ResourceError
from lowbit.formats.file_names import README, SOURCE_README
from lowbit.formats.files.atomic import disk_errors
from lowbit.formats.hub.locate import Location, locate
from lowbit.formats.layout.manifest import MANIFEST_FILE, Manifest, json_bytes, read_manifest
from lowbit.formats.packed import open_packed
from lowbit.formats.safetensors.checkpoint import CONFIG_FILE, INDEX_FILE, open_checkpoint
from lowbit.formats.safetensors.hashing import hash_file
from lowbit.formats.safetensors.shards import index_json
from lowbit.formats.tasks import manifest_sha256


@dataclass(frozen=True, slots=True)
class Finished:
    """A conversion that an earlier run has finished.

    Attributes:
        conversion: as `convert` would have returned it, layer errors of a calibration aside.
        quality: the report beside it; None where there is none about these weights.
    """

    conversion: Conversion
    quality: QualityReport | None


def may_go_on(out: Path, overwrite: bool, logits: bool, publish: bool) -> bool:
    """Tell whether a packed folder is at `out` that a command has still something to add to.

    Args:
        out: of the command.
        overwrite: True where something else there may be replaced.
        logits: True of a command that compares logits.
        publish: True of a command that publishes, which continues after any interruption.

    Raises:
        ResourceError: neither that, nor a free place.
    """
    place = place_of(out)
    if (place / MANIFEST_FILE).exists():
        quality = current_quality(place)
        if publish or quality is None or (logits and quality.logits is None):
            return True
    check_output(place, overwrite)
    return False


def current_quality(folder: Path) -> QualityReport | None:
    """The report of a packed folder, if it can be read and is about the weights there now."""
    try:
        found = read_quality(folder)
        return None if found is None or found.manifest_sha256 != manifest_sha256(folder) else found
    except LowbitError:
        return None


@disk_errors()
def find_finished(
    source: str | Path,
    out: Path,
    recipe: Recipe,
    *,
    revision: str | None,
    device: str,
    max_shard_bytes: int,
    overwrite: bool,
    calibration: CalibrationRequest,
    draft_text: Path | None = None,
    progress: Progress,
) -> Finished | None:
    """The folder at `out`, if it is byte for byte the one that `convert` would make.

    Source and result are both hashed. Arguments are those of `convert`.

    Raises:
        ResourceError: source or result have changed since an earlier run of these arguments, and
            the result may not be replaced.
        LowbitError: what would stop the conversion itself.
    """
    started = time.monotonic()
    place = place_of(out)
    manifest = _manifest_of(place, recipe)
    if manifest is None or manifest.mtp_training is not None:
        return None
    location = locate(str(source), revision)
    checkpoint = open_checkpoint(location.folder)
    plan = make_plan(checkpoint.config, checkpoint.tensors, recipe, max_shard_bytes)
    chosen = choose_draft_rows(plan, checkpoint, draft_text)
    record = None if chosen is None else record_of(chosen, plan)
    if record != manifest.draft_head or not _follows(manifest, plan, location):
        return None
    if plan.recipe.method.calibrated:
        target = open_device(device)
        text = calibration.read(location.folder, target)
        session = begin(plan, location.folder, text, target)
        if session.record != manifest.calibration:
            return None
    try:
        check_origin(manifest, location.folder, progress)
        check_recorded(open_packed(place), manifest, progress)
    except LowbitError as error:
        if overwrite:
            return None
        raise ResourceError(
            f"`{out}` is not empty, and not what this command makes any more: {error}",
            hint="choose another folder, or replace it with --overwrite",
        ) from error
    finish(place)
    remove_unfinished_reports(place)
    quality = current_quality(place)
    weights = None if quality is None else quality.weights
    if weights is None:
        weights = measure_weights(
            location.folder, place, device, lambda done, total: progress("weights", done, total)
        )
    conversion = Conversion(
        folder=out,
        source=location,
        plan=plan,
        manifest=manifest,
        weights=weights,
        calibration=(),
        resumed=len(plan.steps),
        seconds=time.monotonic() - started,
        existed=True,
    )
    return Finished(conversion, quality)


def _manifest_of(place: Path, recipe: Recipe) -> Manifest | None:
    """The manifest at `place`, if it is of this release and recipe."""
    try:
        manifest = read_manifest(place)
    except LowbitError:
        return None
    asked = json.loads(json.dumps(recipe.to_json()))
    if manifest is None or (manifest.lowbit_version, manifest.recipe) != (version("lowbit"), asked):
        return None
    return manifest


def _follows(manifest: Manifest, plan: Plan, location: Location) -> bool:
    """Tell whether a manifest is of the plan's layout, and of the source's name and small files."""
    if (manifest.source.repo, manifest.source.commit) != (location.repo, location.commit):
        return False
    placed = {
        info.name: (info.dtype_name, info.shape, info.file)
        for shard in plan.shards
        for info in shard.tensors
    }
    made = {row.name: (row.dtype, row.shape, row.file) for row in manifest.tensors}
    files = {CONFIG_FILE: _sha256(json_bytes(plan.config))}
    if len(plan.shards) > 1:
        files[INDEX_FILE] = _sha256(json_bytes(index_json(plan.shards)))
    for name in check_small_files(location.folder):
        copy = SOURCE_README if name == README else name
        files[copy] = hash_file(location.folder / name)
    shards = {shard.file for shard in plan.shards}
    others = shards | {DRAFT_FILE}  # made anew alike, if its record in lowbit.json is the same
    listed = {row.name: row.sha256 for row in manifest.files if row.name not in others}
    return placed == made and files == listed


def _sha256(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()
