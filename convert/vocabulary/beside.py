"""The original of a smaller vocabulary that a conversion makes beside its result, and packs."""

import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from lowbit.convert.export.outputs import Output
from lowbit.convert.original.progress import Progress
from lowbit.convert.pipeline.output_dir import place_of
from lowbit.convert.vocabulary.cut import (
    CutRequest,
    cut_tensors,
    cut_vocabulary,
    open_as_stored,
    plan_cut,
    write_small_files,
)
from lowbit.formats.errors import ResourceError
from lowbit.formats.hub.locate import Location, locate
from lowbit.formats.kept_vocabulary import KeptVocabulary, read_kept_vocabulary
from lowbit.formats.safetensors.checkpoint import Checkpoint
from lowbit.formats.safetensors.hashing import hash_file

ENDING = ".original"


@dataclass(frozen=True, slots=True)
class CutOriginal:
    """An original with a smaller vocabulary, beside the result of a conversion."""

    location: Location  # of it
    record: KeptVocabulary  # content of its kept_vocabulary.json
    existed: bool  # True where an earlier run had put it there, and this one only checked it


def cut_beside(
    source: str, revision: str | None, out: Path, request: CutRequest, progress: Progress
) -> CutOriginal:
    """Cut the vocabulary of an original into the folder `OUT.original`, which stays.

    A folder that an earlier run left there is used again once all of its bytes are found to be
    those that would be written now.

    Raises:
        ResourceError: something else is at `OUT.original`.
    """
    folder = place_of(out.with_name(out.name + ENDING))
    record = read_kept_vocabulary(folder) if folder.is_dir() else None
    if record is not None:
        _check_same(source, revision, folder, record, request, progress)
        return CutOriginal(locate(str(folder)), record, True)
    done = cut_vocabulary(source, folder, request, revision=revision, progress=progress)
    return CutOriginal(locate(str(folder)), done.record, False)


def _check_same(
    source: str,
    revision: str | None,
    folder: Path,
    record: KeptVocabulary,
    request: CutRequest,
    progress: Progress,
) -> None:
    """Refuse a folder that is not what a cut would write; the measurements in its record aside."""
    location = locate(source, revision)
    work = plan_cut(location, request.keep, request.text, request.languages)
    origin = (work.kept.ids, location.repo, location.commit)
    different = None if origin == (record.ids, record.repo, record.commit) else "the tokens kept"
    if different is None:
        with tempfile.TemporaryDirectory() as scratch:
            write_small_files(work, Path(scratch))
            names = sorted(path.name for path in Path(scratch).iterdir())
            different = next(
                (
                    f"`{name}`"
                    for name in names
                    if not _same_file(folder / name, Path(scratch) / name)
                ),
                None,
            )
    if different is None:
        different = _other_tensor(open_as_stored(folder), cut_tensors(work), progress)
    if different is not None:
        raise ResourceError(
            f"`{folder}` is not the smaller original that this command makes; the first difference "
            f"is in {different}",
            hint="remove it, or choose another output folder",
        )


def _same_file(one: Path, other: Path) -> bool:
    return one.is_file() and hash_file(one) == hash_file(other)


def _other_tensor(cut: Checkpoint, expected: Sequence[Output], progress: Progress) -> str | None:
    """Name of the first tensor that is not the expected one; None where all are."""
    if extra := cut.tensors.keys() ^ {one.name for one in expected}:
        return f"`{min(extra)}`"
    for number, one in enumerate(expected):
        info = cut.tensors[one.name]
        if (info.dtype, info.shape) != (one.dtype, one.shape):
            return f"`{one.name}`"
        row = 0
        for block in one.blocks():
            if not info.shape:
                here = cut.read(one.name)
            else:
                here = cut.read_rows(one.name, row, row + len(block))
                row += len(block)
            if not torch.equal(_bits(here), _bits(block)):
                return f"`{one.name}`"
        progress("source", number + 1, len(expected))
    return None


def _bits(tensor: Tensor) -> Tensor:
    """The bytes of a tensor, by which NaN equals itself."""
    return tensor.contiguous().reshape(-1).view(torch.uint8)
