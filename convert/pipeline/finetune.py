"""`finetune-mtp`: train the head for multi-token prediction, and exchange it if it is better."""

import hashlib
import json
import os
import shutil
import time
from collections.abc import Mapping
from dataclasses import dataclass, replace
from importlib.metadata import version
from pathlib import Path

import torch
from torch import Tensor

from lowbit.convert.mtp.drafting import Draft
from lowbit.convert.mtp.training import (
    MOST_ROWS,
    ROUNDS,
    WEIGHTS,
    begin,
    count_held_out,
    load_state,
    optimizer,
    run_trunk,
    save_state,
    stored_tensors,
    train,
    training_windows,
)
from lowbit.convert.original.device import open_device
from lowbit.convert.original.progress import Note, Progress, silent, unsaid
from lowbit.convert.original.quiet import without_advice
from lowbit.convert.original.threads import alone_on_threads
from lowbit.convert.pipeline.folder import (
    check_output,
    put_in_place,
    remove_stale,
    working_folder,
)
from lowbit.convert.pipeline.journal import JOURNAL_FILE
from lowbit.convert.pipeline.output_dir import place_of
from lowbit.convert.pipeline.owned import remove_owned
from lowbit.convert.pipeline.stream import write_at
from lowbit.convert.pipeline.verification import check_recorded
from lowbit.convert.plan.memory import check_windows, training_memory
from lowbit.convert.quantize.store import PREFIX as CALIBRATED
from lowbit.convert.texts.calibration import CalibrationText, read_calibration
from lowbit.formats.errors import FormatError, RequestError
from lowbit.formats.file_names import REPORT_FILES
from lowbit.formats.files.atomic import disk_errors
from lowbit.formats.layout.manifest import MANIFEST_FILE, Manifest, MtpTraining
from lowbit.formats.packed import PackedCheckpoint, open_packed
from lowbit.formats.row_folders import entries, name_in
from lowbit.formats.safetensors.hashing import hash_file
from lowbit.formats.safetensors.tensor_info import raw_bytes
from lowbit.formats.tasks import manifest_sha256

WINDOWS = {"cpu": 64, "cuda": 1024}  # of the text, by kind of device
LENGTH = 512
SAVED = 25  # steps between two states on the disk
STATE_FILE = f"{CALIBRATED}mtp.safetensors"
OTHER_WORK = "finish it with the command that began it, or remove that folder"


@dataclass(frozen=True, slots=True)
class Finetuned:
    """A training that has ended."""

    folder: Path
    before: tuple[Draft, ...]  # drafts on windows held out
    after: tuple[Draft, ...]  # same with the trained head
    exchanged: bool  # the trained head is in the folder; False where it was no better
    windows: int  # learned from
    held_out: int  # windows that were not
    steps: int
    seconds: float  # wall time of this run


@disk_errors("free some space and run the same command again: training is kept")
def finetune_mtp(
    folder: Path,
    text: Path | None = None,
    *,
    steps: int = 600,
    device: str = "cpu",
    windows: int | None = None,
    length: int = LENGTH,
    progress: Progress | None = None,
    note: Note | None = None,
) -> Finetuned:
    """Train the head for multi-token prediction on what the packed trunk says next on a text.

    The folder is compared with its lowbit.json first, and exchanged as a whole, only for one whose
    head makes more tokens a round on windows held out. Interrupted, it is as it was, and the same
    call continues.

    Args:
        text: `.txt` or `.jsonl`; the bundled calibration text where left out.
        steps: windows to learn from, one a step.
        windows: of the text at most.
        note: told if the training cannot be taken up where an earlier run left it.

    Raises:
        FormatError: the folder has no lowbit.json or differs from it, or has no such head of one
            layer.
        RequestError: a text of fewer than two windows.
        LowbitError: a folder or a text that cannot be read, or too little disk.
    """
    started = time.monotonic()
    on_progress, on_note = progress or silent, note or unsaid
    target, output_dir = open_device(device), place_of(folder)
    packed = open_packed(output_dir)
    if packed.manifest is None:
        raise FormatError(f"`{folder}` has no {MANIFEST_FILE}: lowbit-convert did not make it")
    check_output(output_dir, overwrite=True)
    limit = windows or WINDOWS[target.type]
    read = read_calibration(text, output_dir, length=length, limit=limit)
    if len(read.samples) < 2 or read.samples.shape[1] < 8:
        raise RequestError(
            f"`{read.name}` has {len(read.samples)} windows of {read.samples.shape[1]} tokens, "
            "expected at least 2 of 8",
            hint="give a longer --text",
        )
    shape = (read.samples.shape[0], read.samples.shape[1])
    need = training_memory(
        packed.checkpoint.config, shape, MOST_ROWS, len(WEIGHTS), ROUNDS, target.type
    )
    check_windows("training", need, shape[0], target.type, "give --windows {} or fewer")
    check_recorded(packed, packed.manifest, on_progress)
    digest = _digest(output_dir, read, steps, target)
    names = [name_in(output_dir, path) for path in entries(output_dir)]
    with working_folder(output_dir, digest, False, names, OTHER_WORK) as (partial, _):
        with torch.no_grad(), without_advice(), alone_on_threads(target) as pool:
            trunk = run_trunk(output_dir, read.samples, target, pool, on_progress)
            trained = begin(packed, trunk.model, target)
            before = count_held_out(trunk, trained.head, pool)
        learned, rows = training_windows(trunk, target)
        file, parameters = partial / STATE_FILE, trained.parameters()
        adam = optimizer(trained, steps)
        begun = load_state(file, digest, parameters, adam, on_note)
        for done in train(trained, adam, learned, rows, steps, begun):
            if done % SAVED == 0 or done == steps:
                save_state(file, digest, done, parameters, adam)
            on_progress("train", done, steps)
        stored = stored_tensors(packed, trained)
        with torch.no_grad(), alone_on_threads(target) as pool:
            after = count_held_out(trunk, trained.current(), pool)
        better = after[-1].tokens_a_round > before[-1].tokens_a_round
        if better:
            record = MtpTraining(
                text=read.name,
                text_sha256=read.sha256,
                steps=steps,
                device="cpu" if target.type == "cpu" else torch.cuda.get_device_name(target),
                before=before[-1].tokens_a_round,
                after=after[-1].tokens_a_round,
            )
            _exchange(output_dir, partial, packed, packed.manifest, stored, record)
        else:
            remove_owned(partial)
    held_out = len(trunk.part(True))
    return Finetuned(
        folder=folder,
        before=before,
        after=after,
        exchanged=better,
        windows=len(trunk.windows) - held_out,
        held_out=held_out,
        steps=steps,
        seconds=time.monotonic() - started,
    )


def _digest(output_dir: Path, text: CalibrationText, steps: int, device: torch.device) -> str:
    shape = list(text.samples.shape)
    on_cpu = device.type == "cpu"
    machine = torch.get_num_threads() if on_cpu else torch.cuda.get_device_name(device)
    versions = [version("lowbit"), torch.__version__]
    content = [
        manifest_sha256(output_dir),
        text.sha256,
        shape,
        steps,
        device.type,
        machine,
        versions,
    ]
    return hashlib.sha256(json.dumps(content).encode()).hexdigest()


def _exchange(
    output_dir: Path,
    partial: Path,
    packed: PackedCheckpoint,
    manifest: Manifest,
    stored: Mapping[str, Tensor],
    record: MtpTraining,
) -> None:
    """Build the folder anew beside its place, with the trained tensors, and put it there."""
    tensors = packed.checkpoint.tensors
    changed = {tensors[name].file for name in stored}
    remove_stale(partial, (JOURNAL_FILE,))
    for path in entries(output_dir):
        name = name_in(output_dir, path)
        if name in REPORT_FILES or name == MANIFEST_FILE:
            continue
        copy = partial / name
        copy.parent.mkdir(exist_ok=True)
        if name in changed:
            shutil.copyfile(path, copy)
        else:
            _link(path, copy)
    for name, tensor in stored.items():
        info, view = tensors[name], raw_bytes(tensor)
        with (partial / info.file).open("r+b", buffering=0) as file:
            write_at(file.fileno(), info.offset, view)
    hashes = {
        name: hashlib.sha256(raw_bytes(tensor)).hexdigest() for name, tensor in stored.items()
    }
    trained_manifest = replace(
        manifest,
        tensors=tuple(
            replace(row, sha256=hashes.get(row.name, row.sha256)) for row in manifest.tensors
        ),
        files=tuple(
            replace(row, sha256=hash_file(partial / row.name)) if row.name in changed else row
            for row in manifest.files
        ),
        mtp_training=record,
    )
    (partial / MANIFEST_FILE).write_bytes(trained_manifest.to_bytes())
    put_in_place(output_dir, overwrite=True)


def _link(path: Path, copy: Path) -> None:
    try:
        os.link(path, copy, follow_symlinks=True)
    except OSError:  # a file system without links
        shutil.copyfile(path, copy)
