"""`finetune-mtp`: train the head for multi-token prediction, and exchange it if it is better."""

import hashlib
import json
import math
import os
import shutil
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from lowbit.convert.measure.drafting import count_drafts
from lowbit.convert.measure.logits import scored_states
from lowbit.convert.measure.peak import logits_peak_bytes
from lowbit.convert.measure.record import Draft
from lowbit.convert.original.calibration_text import CalibrationText, read_calibration
from lowbit.convert.original.device import open_device
from lowbit.convert.original.model import LayeredModel, load_layered_model
from lowbit.convert.original.mtp import LAYER, NORMS, MtpHead, greedy_tokens, load_mtp_head
from lowbit.convert.original.progress import Meter, Note, Progress, silent, unsaid
from lowbit.convert.original.quiet import without_advice
from lowbit.convert.original.threads import Pool, alone_on_threads
from lowbit.convert.original.walk import HEAD_ROWS, embed, pass_through_all
from lowbit.convert.original.weights import open_weights
from lowbit.convert.pipeline.folder import check_output, put_in_place
from lowbit.convert.pipeline.journal import JOURNAL_FILE, open_journal
from lowbit.convert.pipeline.place import partial_of, place_of
from lowbit.convert.pipeline.stream import write_at
from lowbit.convert.pipeline.verification import check_recorded
from lowbit.convert.plan.calibration_cost import BASE_BYTES, Memory
from lowbit.convert.plan.memory import check_windows
from lowbit.convert.quantize.mtp_training import (
    ROUNDS,
    WEIGHTS,
    Grid,
    Trained,
    TrainingWindow,
    optimizer,
    train,
)
from lowbit.convert.quantize.store import PREFIX as CALIBRATED
from lowbit.formats.architectures import tensor_table
from lowbit.formats.architectures.names import MTP_FC, MTP_PREFIX
from lowbit.formats.draft_head import draft_folders, entries, name_in
from lowbit.formats.errors import FormatError, RequestError
from lowbit.formats.file_names import REPORT_FILES
from lowbit.formats.files.atomic import disk_errors
from lowbit.formats.layout.manifest import MANIFEST_FILE, Manifest, MtpTraining
from lowbit.formats.layout.packing import PACKED, SCALE, pack, unpack
from lowbit.formats.packed import PackedCheckpoint, open_packed
from lowbit.formats.safetensors.hashing import hash_file
from lowbit.formats.safetensors.sealed import open_sealed, write_sealed
from lowbit.formats.safetensors.tensor_info import raw_bytes
from lowbit.formats.tasks import manifest_sha256

WINDOWS = {"cpu": 64, "cuda": 1024}  # of the text, by kind of device
LENGTH = 512
HELD_OUT = 8  # every eighth window decides and is not learned from
MOST_ROWS = 32_768  # of the head that targets are told apart by
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


@dataclass(frozen=True, slots=True)
class _TrunkStates:
    """The trunk's states on all windows, on the device."""

    model: LayeredModel
    windows: Tensor  # [windows, T]
    states: Tensor  # [windows, T - 1, h]
    greedy: Tensor  # [windows, T - 1]

    def part(self, held_out: bool) -> list[int]:
        """Numbers of the windows that are held out, or of the others."""
        return [n for n in range(len(self.windows)) if (n % HELD_OUT == 0) == held_out]


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
        progress: called with ("verify", "states" or "train", done, in all).
        note: told if the training cannot be taken up where an earlier run left it.

    Raises:
        FormatError: the folder has no lowbit.json or differs from it, or has no such head of one
            layer.
        RequestError: a text of fewer than two windows.
        LowbitError: a folder or a text that cannot be read, or too little disk.
    """
    started = time.monotonic()
    report = progress or silent
    target, place = open_device(device), place_of(folder)
    packed = open_packed(place)
    if packed.manifest is None:
        raise FormatError(f"`{folder}` has no {MANIFEST_FILE}: lowbit-convert did not make it")
    check_output(place, overwrite=True)
    limit = windows or WINDOWS[target.type]
    read = read_calibration(text, place, length=length, limit=limit)
    if len(read.samples) < 2 or read.samples.shape[1] < 8:
        raise RequestError(
            f"`{read.name}` has {len(read.samples)} windows of {read.samples.shape[1]} tokens, "
            "expected at least 2 of 8",
            hint="give a longer --text",
        )
    shape = (read.samples.shape[0], read.samples.shape[1])
    need = training_memory(packed.checkpoint.config, shape, MOST_ROWS, target.type)
    check_windows("training", need, shape[0], target.type, "give --windows {} or fewer")
    check_recorded(packed, packed.manifest, report)
    partial = partial_of(place)
    partial.mkdir(exist_ok=True)
    digest = _digest(place, read, steps, target)
    names = [name_in(place, path) for path in entries(place)]
    with open_journal(partial, digest, False, names, OTHER_WORK):
        with torch.no_grad(), without_advice(), alone_on_threads(target) as pool:
            trunk = _attend(place, read.samples, target, pool, report)
            trained = _begin(packed, trunk.model, target)
            before = _count(trunk, trained.head, pool)
        learned, rows = _training_windows(trunk, target)
        file, parameters = partial / STATE_FILE, trained.parameters()
        adam = optimizer(trained, steps)
        begun = _load_state(file, digest, parameters, adam, note or unsaid)
        for done in train(trained, adam, learned, rows, steps, begun):
            if done % SAVED == 0 or done == steps:
                _save_state(file, digest, done, parameters, adam)
            report("train", done, steps)
        stored = _stored(packed, trained)
        with torch.no_grad(), alone_on_threads(target) as pool:
            after = _count(trunk, trained.current(), pool)
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
            _exchange(place, partial, packed, packed.manifest, stored, record)
        else:
            _clear(partial, keep=())
            partial.rmdir()
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


def _digest(place: Path, text: CalibrationText, steps: int, device: torch.device) -> str:
    shape = list(text.samples.shape)
    on_cpu = device.type == "cpu"
    machine = torch.get_num_threads() if on_cpu else torch.cuda.get_device_name(device)
    versions = [version("lowbit"), torch.__version__]
    content = [manifest_sha256(place), text.sha256, shape, steps, device.type, machine, versions]
    return hashlib.sha256(json.dumps(content).encode()).hexdigest()


def _attend(
    folder: Path, windows: Tensor, device: torch.device, pool: Pool, report: Progress
) -> _TrunkStates:
    """Pass all windows through the packed trunk, layer by layer."""
    model = load_layered_model(open_weights(folder), windows.shape[1], device)
    report("states", 0, len(model.layers))
    meter = Meter(report, "states", len(model.layers))
    hidden = pass_through_all(model, windows, device, pool, meter.add)
    states = scored_states(model, hidden)
    greedy = greedy_tokens(model, states, pool)
    shape = (len(windows), windows.shape[1] - 1)
    return _TrunkStates(model, windows.to(device), states.view(*shape, -1), greedy.view(shape))


def _begin(packed: PackedCheckpoint, model: LayeredModel, device: torch.device) -> Trained:
    """The head as it is stored.

    Raises:
        FormatError: there is none, or one of several layers.
    """
    head = load_mtp_head(model, device)
    if head is None:
        raise FormatError(
            f"`{packed.checkpoint.folder.name}` has no head for multi-token prediction of one layer"
        )
    grids: dict[str, Grid] = {}
    plain: dict[str, Tensor] = {}
    for name in (MTP_FC, *NORMS, *(f"{LAYER}{name}" for name in head.layer.state_dict())):
        module = name.removesuffix(".weight")
        scheme = packed.schemes.get(module)
        if scheme is None:
            weight = packed.checkpoint.read(name).to(device, torch.float32)
            plain[name] = weight.clone().requires_grad_(True)
            continue
        words = packed.checkpoint.read(f"{module}.{PACKED}")
        K = model.weights.shape(name)[1]
        scale = packed.checkpoint.read(f"{module}.{SCALE}").to(device)
        grids[name] = Grid.begin(unpack(words, scheme.bits, K).to(device), scale, scheme)
    return Trained(head, grids, plain)


def _count(trunk: _TrunkStates, head: MtpHead, pool: Pool) -> tuple[Draft, ...]:
    here = trunk.part(True)
    parts = (trunk.windows[here], trunk.states[here], trunk.greedy[here])
    return count_drafts(trunk.model, *parts, pool, head=head)


def _training_windows(
    trunk: _TrunkStates, device: torch.device
) -> tuple[list[TrainingWindow], Tensor]:
    """Windows to learn from, and the rows of the head that their targets are among."""
    model, here = trunk.model, trunk.part(False)
    targets = trunk.greedy[here]
    first = torch.arange(min(model.vocabulary, MOST_ROWS), device=device)
    often = torch.unique(targets)[:MOST_ROWS]
    ids = torch.cat((often, first[~torch.isin(first, often)]))[: len(first)].sort().values
    rows = torch.empty(len(ids), model.hidden_size, device=device)
    for start, block in model.weights.rows(model.head, HEAD_ROWS, device):
        among = (ids >= start) & (ids < start + len(block))
        rows[among] = block[ids[among] - start]
    places = torch.searchsorted(ids, targets).clamp_(max=len(ids) - 1)
    places = torch.where(ids[places] == targets, places, -1)
    embeddings = embed(model, trunk.windows[here][:, 1:], device)
    states = trunk.states[here]
    return [TrainingWindow(*parts) for parts in zip(embeddings, states, places, strict=True)], rows


def _stored(packed: PackedCheckpoint, trained: Trained) -> dict[str, Tensor]:
    """Tensors to store, by name; weights that are not packed become what their dtype holds."""
    found: dict[str, Tensor] = {}
    with torch.no_grad():
        for name, grid in trained.grids.items():
            words = pack(grid.codes().cpu(), grid.scheme.bits)
            found[f"{name.removesuffix('.weight')}.{PACKED}"] = words
        for name, weight in trained.plain.items():
            found[name] = weight.to(packed.checkpoint.tensors[name].dtype).cpu()
            weight.copy_(found[name])
    return found


def _exchange(
    place: Path,
    partial: Path,
    packed: PackedCheckpoint,
    manifest: Manifest,
    stored: Mapping[str, Tensor],
    record: MtpTraining,
) -> None:
    """Build the folder anew beside its place, with the trained tensors, and put it there."""
    tensors = packed.checkpoint.tensors
    changed = {tensors[name].file for name in stored}
    _clear(partial, keep=(JOURNAL_FILE, STATE_FILE))
    for path in entries(place):
        name = name_in(place, path)
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
    made = replace(
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
    (partial / MANIFEST_FILE).write_bytes(made.to_bytes())
    put_in_place(place, overwrite=True)


def _link(path: Path, copy: Path) -> None:
    try:
        os.link(path, copy, follow_symlinks=True)
    except OSError:  # a file system without links
        shutil.copyfile(path, copy)


def _clear(partial: Path, keep: Sequence[str]) -> None:
    for path in list(entries(partial)):
        if name_in(partial, path) not in keep:
            path.unlink()
    for draft in draft_folders(partial):
        draft.rmdir()


def _load_state(
    file: Path,
    digest: str,
    parameters: Mapping[str, Tensor],
    adam: torch.optim.Adam,
    tell: Note,
) -> int:
    """Take up what an earlier run of the same command left; the number of its steps."""
    if not file.exists():
        return 0
    kept = open_sealed(file, digest)
    if kept is None:
        tell(f"! `{file}` is damaged or of another command: training begins again")
        return 0
    step, read = int(kept.facts["step"]), kept.content.read
    with torch.no_grad():
        for name, value in parameters.items():
            value.copy_(read(name))
            adam.state[value] = {
                "step": torch.tensor(float(step)),
                "exp_avg": read(f"{name}:first").to(value.device),
                "exp_avg_sq": read(f"{name}:second").to(value.device),
            }
    return step


def _save_state(
    file: Path, digest: str, step: int, parameters: Mapping[str, Tensor], adam: torch.optim.Adam
) -> None:
    """Keep parameters and their moments after a step."""
    found: dict[str, Tensor] = {}
    for name, value in parameters.items():
        found[name] = value.detach().cpu()
        found[f"{name}:first"] = adam.state[value]["exp_avg"].cpu()
        found[f"{name}:second"] = adam.state[value]["exp_avg_sq"].cpu()
    write_sealed(file, found, {"step": step}, digest)


def training_memory(
    config: Mapping[str, Any], windows: tuple[int, int], rows: int, device: str
) -> Memory:
    """Memory that a training needs at most, the interpreter in RAM included.

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
    """
    count, T = windows
    table = tensor_table(config)
    V, h = table[0].shape
    own = [spec.shape for spec in table if spec.name.startswith(MTP_PREFIX)]
    P = sum(map(math.prod, own))
    widest = max((shape[0] for shape in own), default=h)
    steps = len(WEIGHTS)
    columns = T + ROUNDS * (steps - 1)
    rows = min(V, rows)
    values = 7 * P + rows * (h + 4 * columns) + steps * columns * (4 * widest + 8 * h)
    window = 4 * 7 * T * h // 2
    trunk = logits_peak_bytes(config, windows, device=device)
    work = max(count * window + 4 * values * 3 // 2, trunk)
    saved = 4 * 3 * P
    if device == "cpu":
        return Memory(BASE_BYTES + saved + work, 0, window)
    return Memory(BASE_BYTES + saved, work, window)
