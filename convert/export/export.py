"""Export a packed folder: check it, write beside the output, read back, rename into place."""

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Literal

from torch import Tensor

from lowbit.convert.export import awq, gguf, gptq, mlx
from lowbit.convert.export.architectures import EXPORTED
from lowbit.convert.export.gguf_file import Value, write_gguf
from lowbit.convert.export.gguf_metadata import metadata
from lowbit.convert.export.layout import Layout
from lowbit.convert.export.misfits import (
    Dequantized,
    dequantized_outputs,
    prove_dequantized,
    without,
)
from lowbit.convert.export.outputs import row_parts, write_shards
from lowbit.convert.export.proof import Proof, prove
from lowbit.convert.export.source import Linear, PackedSource, open_source
from lowbit.convert.original.progress import Meter, Progress, silent
from lowbit.convert.pipeline.folder import (
    check_apart,
    check_small_files,
    copy_file,
    free_place,
    new_folder,
)
from lowbit.convert.pipeline.journal import JOURNAL_FILE
from lowbit.convert.pipeline.verification import check_recorded
from lowbit.convert.plan.plan import DEFAULT_SHARD_BYTES
from lowbit.formats.errors import UnsupportedModelError
from lowbit.formats.file_names import README
from lowbit.formats.files.atomic import disk_errors
from lowbit.formats.frequent_rows import FREQUENT_FILE
from lowbit.formats.layout.manifest import MANIFEST_FILE, json_bytes
from lowbit.formats.safetensors.checkpoint import CONFIG_FILE, Checkpoint, open_any_layout

Target = Literal["gptq", "awq", "mlx", "gguf"]

LAYOUTS: Mapping[Target, Layout] = {"gptq": gptq.LAYOUT, "awq": awq.LAYOUT, "mlx": mlx.LAYOUT}
# The card describes the packed folder, not the export.
NOT_EXPORTED = (README,)
LEGAL = ("LICENSE*", "NOTICE*", "COPYING*")
OTHER_WORK = "finish it with the command that began it, or choose another output folder"
NO_MANIFEST = f"the source has no {MANIFEST_FILE}: nothing says whether its bytes are right"


@dataclass(frozen=True, slots=True)
class Export:
    """A finished export."""

    folder: Path
    target: Target
    weight_bytes: int  # size of the weight files
    files: tuple[str, ...]  # names of all files, written or copied
    dropped: tuple[str, ...]  # parts of the model that were left out, each with its reason
    notes: tuple[str, ...]  # sentences on which readers take the export
    proof: Proof  # counts of what was read back and found equal
    # Linears that the container could not hold, written as plain matrices.
    dequantized: tuple[Dequantized, ...] = ()


@disk_errors()
def export(
    folder: str | Path,
    out: str | Path,
    target: Target,
    *,
    max_shard_bytes: int = DEFAULT_SHARD_BYTES,
    dequantize: bool = False,
    progress: Progress | None = None,
) -> Export:
    """Repack a folder into another engine's container, and read the result back.

    The folder's bytes are compared with its lowbit.json before anything is written. Memory holds
    the packed words of one linear at a time. GGUF also takes an original, whose matrices keep their
    dtype.

    Args:
        max_shard_bytes: limit of a weight file; a GGUF file is always one.
        dequantize: write linears that GPTQ or AWQ cannot hold as plain matrices.

    Raises:
        LowbitError: a folder that differs from its lowbit.json, or something that the container
            cannot express exactly, both found before anything is written; or an `out` that is not
            free.
    """
    out = Path(out)
    place = free_place(out)
    on_progress = progress or silent
    check_apart(Path(folder), place)
    source = open_source(Path(folder), originals=target == "gguf")
    if source.model_type not in EXPORTED:
        raise UnsupportedModelError(
            f"config.json: model_type `{source.model_type}` cannot be exported yet",
            hint=f"exported are: {', '.join(EXPORTED)}",
        )
    layout = LAYOUTS.get(target)
    keys: dict[str, Value] = {}
    plain: tuple[Dequantized, ...] = ()
    if layout is not None:
        layout.check(source)
        source = without(source, layout.misfits(source), layout.name, dequantize)
    else:
        gguf.check(source)
        keys = metadata(source, place.name)
    carried = _carried(source, target)
    manifest = source.packed.manifest
    notes = [NO_MANIFEST] if manifest is None and source.linears else []
    if manifest is not None:
        check_recorded(source.packed, manifest, on_progress)
    written = [*carried, f"{place.name}.gguf"]
    with new_folder(place, f"export {target}", written, OTHER_WORK) as partial:
        if layout is not None:
            size, made = _write_safetensors(source, partial, layout, max_shard_bytes, on_progress)
            proof = _prove_safetensors(source, made, layout, on_progress)
            meter = Meter(on_progress, "dequantized", _weights(source.dequantized))
            plain = prove_dequantized(source, made, meter.add)
        else:
            size, proof = _gguf(source, partial / f"{place.name}.gguf", keys, on_progress)
        for name in carried:
            copy_file(source.checkpoint.folder / name, partial / name)
        files = sorted(path.name for path in partial.iterdir() if path.name != JOURNAL_FILE)
    return Export(
        folder=out,
        target=target,
        weight_bytes=size,
        files=tuple(files),
        dropped=(*(layout.dropped(source) if layout else gguf.dropped(source)), *_rows(source)),
        notes=(*(layout.notes(source) if layout else gguf.notes(source)), *notes),
        proof=proof,
        dequantized=plain,
    )


def _rows(source: PackedSource) -> list[str]:
    """The frequent rows of the head, which the codes of one width have no place for."""
    there = (source.checkpoint.folder / FREQUENT_FILE).exists()
    return [f"`{FREQUENT_FILE}`: frequent rows of the head, which no container holds"] * there


def _weights(linears: Iterable[Linear]) -> int:
    return sum(linear.N * linear.K for linear in linears)


def _write_safetensors(
    source: PackedSource, folder: Path, layout: Layout, max_shard_bytes: int, on_progress: Progress
) -> tuple[int, Checkpoint]:
    total = sum(info.nbytes for info in source.checkpoint.tensors.values())
    writing = Meter(on_progress, "export", total).add
    outputs = [*layout.outputs(source), *dequantized_outputs(source)]
    size = write_shards(outputs, folder, max_shard_bytes, layout.header, writing)
    (folder / CONFIG_FILE).write_bytes(json_bytes(layout.config(source)))
    return size, open_any_layout(folder)


def _prove_safetensors(
    source: PackedSource, made: Checkpoint, layout: Layout, on_progress: Progress
) -> Proof:
    linears = layout.linears(source)

    def copies() -> Iterator[tuple[str, Iterable[Tensor], Iterable[Tensor]]]:
        for info, place in layout.copies(source):
            yield info.name, row_parts(source.checkpoint, info), place.parts(made)

    return prove(
        source,
        linears,
        lambda linear: layout.decode(source, made, linear),
        copies(),
        Meter(on_progress, "prove", _weights(linears)).add,
    )


def _gguf(
    source: PackedSource, path: Path, keys: Mapping[str, Value], on_progress: Progress
) -> tuple[int, Proof]:
    tensors = gguf.tensors(source)
    total = sum(tensor.nbytes for tensor in tensors)
    size, places = write_gguf(path, keys, tensors, Meter(on_progress, "export", total).add)
    proof = prove(
        source,
        source.linears,
        lambda linear: gguf.decode(
            source, path, places[gguf.target_name(source, linear.name)], linear
        ),
        gguf.copies(source, path, places),
        Meter(on_progress, "prove", _weights(source.linears)).add,
    )
    return size, proof


def _carried(source: PackedSource, target: Target) -> list[str]:
    """Names of the small files to copy; beside a GGUF file only licenses are copied."""
    return [
        name
        for name in check_small_files(source.checkpoint.folder)
        if any(fnmatchcase(name, pattern) for pattern in LEGAL)
        or (target != "gguf" and name not in NOT_EXPORTED)
    ]
