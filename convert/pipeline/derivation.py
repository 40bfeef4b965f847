"""Check that a packed folder follows from its source and recipe by quantizing again."""

import hashlib
import tempfile
from pathlib import Path

import torch

from lowbit.convert.original.device import open_device
from lowbit.convert.original.progress import Meter, Progress
from lowbit.convert.original.rotation import rotation_bytes
from lowbit.convert.pipeline.folder import expected_files
from lowbit.convert.pipeline.head_rows import make_draft_head, make_frequent_rows
from lowbit.convert.pipeline.journal import CompletedStep
from lowbit.convert.pipeline.stream import Blocks, stream
from lowbit.convert.plan.memory import block_elements
from lowbit.convert.plan.plan import Plan, make_plan
from lowbit.convert.plan.recipe import Recipe
from lowbit.convert.quantize.session import CalibrationRequest, Session
from lowbit.convert.quantize.store import Calibrated
from lowbit.convert.texts.calibration import BUNDLED_NAME
from lowbit.formats.architectures.names import MTP_PREFIX
from lowbit.formats.draft_head import DRAFT_FILE, draft_head_bytes, open_draft_head
from lowbit.formats.errors import FormatError
from lowbit.formats.file_names import SOURCE_README
from lowbit.formats.frequent_rows import FREQUENT_FILE, frequent_rows_bytes, open_frequent_rows
from lowbit.formats.layout.manifest import MANIFEST_FILE, Calibration, Manifest
from lowbit.formats.machine.cores import core_count
from lowbit.formats.safetensors.checkpoint import INDEX_FILE, Checkpoint

TRAINED = "the head for multi-token prediction, which was trained since; all else was, and is equal"


def check_derived(
    folder: Path,
    manifest: Manifest,
    source: Checkpoint,
    calibration: CalibrationRequest,
    device: str,
    progress: Progress,
) -> str | None:
    """Make every tensor again and compare hashes; nothing is written beside the source.

    Returns:
        Why it cannot be told here; None where everything was made again and is equal.

    Raises:
        FormatError: naming the first tensor or file that does not follow from the source.
        QuantizationError: the recipe is of another release.
    """
    plan = make_plan(source.config, source.tensors, Recipe.from_json(manifest.recipe))
    _check_files(manifest, plan, source.folder)
    target = open_device(device)
    _check_head_rows(folder, manifest, plan, source, target)
    expected = {tensor.name: tensor.sha256 for tensor in manifest.tensors}
    trained = manifest.mtp_training is not None
    total = sum(step.source.nbytes for step in plan.steps)
    advance = Meter(progress, "derive", total).add

    def compare(finished: CompletedStep) -> None:
        for tensor in finished.tensors:
            if trained and tensor.name.startswith(MTP_PREFIX):
                continue
            if expected.get(tensor.name) != tensor.sha256:
                raise FormatError(
                    f"`{tensor.name}` does not follow from the source by the recipe in lowbit.json",
                    hint=f"it was written by lowbit {manifest.lowbit_version}",
                )

    with tempfile.TemporaryDirectory(prefix="lowbit-") as work:
        calibrated: Calibrated | None = None
        if plan.method.calibrated:
            reason = _elsewhere(manifest.calibration, calibration)
            if reason is not None:
                return reason
            session = Session(plan, source, calibration.read(source.folder, target), target)
            if session.record != manifest.calibration:
                return _difference(session.record, manifest.calibration)
            calibrated = session.run(Path(work), progress)
        rotated_bytes = rotation_bytes(plan.rotated, source.tensors, target.type)
        blocks = Blocks(block_elements(None, core_count(), target, rotated_bytes), target)
        steps = range(len(plan.steps))
        stream(plan, source, None, compare, steps, blocks, advance, calibrated)
    return TRAINED if trained else None


def _check_files(manifest: Manifest, plan: Plan, source: Path) -> None:
    """config.json, and what is passed through from the source."""
    files = expected_files(plan, source)
    # The plan's shards have the default size; a card is edited without a change of the model.
    compared = files.keys() - {INDEX_FILE, SOURCE_README}
    for file in manifest.files:
        if file.name in compared and files[file.name] != file.sha256:
            raise FormatError(f"`{file.name}` does not follow from the source")


def _check_head_rows(
    folder: Path, manifest: Manifest, plan: Plan, source: Checkpoint, device: torch.device
) -> None:
    draft = open_draft_head(folder, plan.config)
    frequent = open_frequent_rows(folder, plan.config, manifest)
    hashes = {file.name: file.sha256 for file in manifest.files}
    for name, rows, expected in (
        (DRAFT_FILE, draft, plan.draft_rows),
        (FREQUENT_FILE, frequent, plan.frequent_rows),
    ):
        count = 0 if rows is None else len(rows.ids)
        if count != expected:
            raise FormatError(
                f"`{name}` has {count} rows, by the recipe in {MANIFEST_FILE} {expected}"
            )
    made: dict[str, bytes] = {}
    if draft is not None:
        head = make_draft_head(plan, source, draft.ids, device)
        made[DRAFT_FILE] = draft_head_bytes(head)
    if frequent is not None:
        rows = make_frequent_rows(plan, source, frequent.ids, device)
        made[FREQUENT_FILE] = frequent_rows_bytes(rows)
    for name, content in made.items():
        if hashlib.sha256(content).hexdigest() != hashes[name]:
            raise FormatError(f"`{name}` does not follow from the source")


def _elsewhere(made: Calibration | None, request: CalibrationRequest) -> str | None:
    """Why the text cannot be the one that was used."""
    if made is None:
        return "lowbit.json does not say what it was calibrated on"
    if request.file is None and made.text != BUNDLED_NAME:
        return f"it was calibrated on `{made.text}`, which --calib would name"
    return None


def _difference(here: Calibration, made: Calibration | None) -> str:
    names = [name for name in Calibration.__slots__ if getattr(here, name) != getattr(made, name)]
    return "; ".join(
        f"{name.replace('_', ' ')} is {getattr(here, name)} here and was {getattr(made, name)}"
        for name in names
    )
