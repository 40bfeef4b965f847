"""`verify`: compare a packed folder with its architecture, lowbit.json and original."""

from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import torch

from lowbit.convert.original.progress import Meter, Progress
from lowbit.convert.pipeline.derivation import check_derived
from lowbit.convert.pipeline.origin import check_origin, open_origin
from lowbit.convert.quantize.session import CalibrationRequest
from lowbit.formats.draft_head import open_draft_head
from lowbit.formats.errors import FormatError, RequestError
from lowbit.formats.files.reading import check_regular
from lowbit.formats.folder_size import folder_bytes
from lowbit.formats.frequent_rows import open_frequent_rows
from lowbit.formats.hub.locate import locate
from lowbit.formats.layout.manifest import (
    MANIFEST_FILE,
    Calibration,
    Manifest,
    weights_digest,
)
from lowbit.formats.layout.packing import SCALE, SHAPE
from lowbit.formats.machine.cores import core_count
from lowbit.formats.packed import PackedCheckpoint, open_packed
from lowbit.formats.row_folders import ROW_FILES, entries, name_in
from lowbit.formats.safetensors.checkpoint import CONFIG_FILE, INDEX_FILE, TensorInfo
from lowbit.formats.safetensors.hashing import hash_file, hash_shard

DAMAGED = "the file was changed or damaged; convert or download it again"


@dataclass(frozen=True, slots=True)
class Verification:
    """Record of a verification; every check passed."""

    folder: Path
    files: int  # hashed and equal to the manifest
    tensors: int  # likewise
    size_bytes: int  # of the folder, reports aside
    source_tensors: int | None  # hashed in the original and equal; None where it was not given
    derived: bool  # True where all tensors were made again from the source, and are equal
    not_derived: str | None  # why they were not; None where they were, or no source was given
    unlisted: tuple[str, ...]  # files beside the checkpoint that the manifest does not name


def verify_folder(
    folder: Path,
    source: str | None,
    progress: Progress,
    calib: Path | None = None,
    device: str | None = None,
) -> Verification:
    """Check layout and completeness against the architecture, bytes against lowbit.json.

    Args:
        source: original to compare with the recorded hashes and to quantize again, or None.
        calib: text of a calibrated method, the bundled one where left out.
        device: where to quantize again; where it was calibrated, if left out and at hand here.

    Raises:
        FormatError: naming the first file or tensor that differs.
        CheckpointError: a damaged or missing file.
        RequestError: a text for a folder that was not calibrated.
    """
    packed = open_packed(folder)
    manifest = packed.manifest
    if manifest is None:
        raise FormatError(
            f"`{folder}` has no {MANIFEST_FILE}, nothing to verify against",
            hint="layout and completeness are fine; only lowbit-convert writes hashes",
        )
    if calib is not None and manifest.calibration is None:
        raise RequestError(f"`{folder}` was not calibrated on a text", hint="leave out --calib")
    original = None if source is None else open_origin(manifest, locate(source).folder)
    check_recorded(packed, manifest, progress)
    compared, reason = None, None
    if original is not None:
        compared = check_origin(manifest, original, progress)
        recorded = manifest.calibration
        request = (
            CalibrationRequest(calib)
            if recorded is None
            else CalibrationRequest(calib, recorded.samples, recorded.length, recorded.chat)
        )
        rerun_on = device or _device_of(recorded)
        reason = check_derived(folder, manifest, original, request, rerun_on, progress)
    listed = {file.name for file in manifest.files} | {MANIFEST_FILE}
    return Verification(
        folder=folder,
        files=len(manifest.files),
        tensors=len(manifest.tensors),
        size_bytes=folder_bytes(folder),
        source_tensors=compared,
        derived=source is not None and reason is None,
        not_derived=reason,
        unlisted=tuple(sorted({name_in(folder, path) for path in entries(folder)} - listed)),
    )


def _device_of(recorded: Calibration | None) -> str:
    """The device that a calibration ran on; `cpu` for others, and where there is no GPU."""
    on_gpu = recorded is not None and recorded.device != "cpu"
    return "cuda" if on_gpu and torch.cuda.is_available() else "cpu"


def check_recorded(packed: PackedCheckpoint, manifest: Manifest, progress: Progress) -> None:
    """Compare every tensor and file of a packed folder with its lowbit.json.

    Raises:
        FormatError: naming the first file or tensor that differs.
        CheckpointError: a file that cannot be read, or lies outside the folder.
    """
    if weights_digest(manifest.source_tensors) != manifest.source.weights_sha256:
        raise FormatError(
            f"`{MANIFEST_FILE}`: `weights_sha256` is not that of its `source_tensors`",
            hint=DAMAGED,
        )
    _check_layout(packed, manifest)
    _check_shapes(packed)
    checkpoint = packed.checkpoint
    open_draft_head(checkpoint.folder, checkpoint.config)
    open_frequent_rows(checkpoint.folder, checkpoint.config, manifest)
    _check_files(packed, manifest, progress)
    _check_scales(packed, manifest)


def _check_layout(packed: PackedCheckpoint, manifest: Manifest) -> None:
    tensors = packed.checkpoint.tensors
    listed = {tensor.name: tensor for tensor in manifest.tensors}
    for name in sorted(tensors.keys() ^ listed.keys()):
        where = "the weights" if name in tensors else MANIFEST_FILE
        raise FormatError(f"`{name}` is only in {where}")
    for name, info in tensors.items():
        expected = (listed[name].dtype, listed[name].shape, listed[name].file)
        if (info.dtype_name, info.shape, info.file) != expected:
            raise FormatError(
                f"`{name}`: {info.dtype_name} {list(info.shape)} in `{info.file}`, "
                f"{MANIFEST_FILE} says {expected[0]} {list(expected[1])} in `{expected[2]}`"
            )


def _check_shapes(packed: PackedCheckpoint) -> None:
    for spec in packed.specs:
        if packed.schemes.get(spec.module) is None:
            continue
        name = f"{spec.module}.{SHAPE}"
        stored = packed.checkpoint.read(name).tolist()
        if stored != list(spec.shape):
            raise FormatError(f"`{name}` holds {stored}, expected {list(spec.shape)}")


def _check_scales(packed: PackedCheckpoint, manifest: Manifest) -> None:
    for row in manifest.tensors:
        extremes: tuple[float | None, float | None] = None, None
        if row.name.endswith(f".{SCALE}"):
            scale = packed.checkpoint.read(row.name)
            extremes = float(scale.min()), float(scale.max())
        if extremes != (row.scale_min, row.scale_max):
            raise FormatError(
                f"`{row.name}` has scales of {extremes[0]} to {extremes[1]}, {MANIFEST_FILE} says "
                f"{row.scale_min} to {row.scale_max}",
                hint=DAMAGED,
            )


def _check_files(packed: PackedCheckpoint, manifest: Manifest, progress: Progress) -> None:
    folder, tensors = packed.checkpoint.folder, packed.checkpoint.tensors
    by_file: dict[str, list[TensorInfo]] = {}
    for info in tensors.values():
        by_file.setdefault(info.file, []).append(info)
    listed = {file.name for file in manifest.files}
    for name in (*by_file, CONFIG_FILE, INDEX_FILE, *ROW_FILES):
        if name not in listed and (folder / name).exists():
            raise FormatError(f"`{name}` is not listed in {MANIFEST_FILE}: no hash covers it")
    expected = {tensor.name: tensor.sha256 for tensor in manifest.tensors}
    total = sum(file.size_bytes for file in manifest.files)
    advance = Meter(progress, "verify", total).add
    for file in manifest.files:
        path = folder / file.name
        try:
            check_regular(path, folder)
        except FileNotFoundError:
            raise FormatError(f"`{file.name}` is missing from `{folder}`") from None
        if path.stat().st_size != file.size_bytes:
            raise FormatError(
                f"`{file.name}` has {path.stat().st_size} bytes, expected {file.size_bytes}"
            )
    shards = {file.name for file in manifest.files if file.name in by_file}
    others = [file for file in manifest.files if file.name not in shards]
    with ThreadPoolExecutor(core_count()) as pool:
        hashes = {
            name: pool.submit(hash_shard, folder / name, by_file[name], advance) for name in shards
        }
        for file in others:
            _require(file.name, hash_file(folder / file.name), file.sha256)
            advance(file.size_bytes)
        for file in manifest.files:
            if file.name not in shards:
                continue
            whole, parts = hashes[file.name].result()
            for name, digest in parts.items():
                _require(name, digest, expected[name], f" in `{file.name}`")
            _require(file.name, whole, file.sha256)
    progress("verify", total, total)


def _require(name: str, actual: str, expected: str, where: str = "") -> None:
    if actual != expected:
        raise FormatError(
            f"`{name}`{where} is not what {MANIFEST_FILE} says (sha256 {actual[:12]}…, expected "
            f"{expected[:12]}…)",
            hint=DAMAGED,
        )
