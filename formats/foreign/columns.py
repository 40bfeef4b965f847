"""Reading of columns of a stored matrix, for layouts that are transposed to the native one."""

import os

import torch
from torch import Tensor

from lowbit.formats.errors import CheckpointError
from lowbit.formats.files.reading import open_file
from lowbit.formats.safetensors.checkpoint import Checkpoint


def read_columns(checkpoint: Checkpoint, name: str, start: int, stop: int) -> Tensor:
    """Read columns [start, stop) of a matrix to the CPU: [rows, stop - start].

    All columns take one read. Fewer take one read a row, so that no more memory than the result's
    is needed.

    Raises:
        CheckpointError: the file ends first, or is not a regular file.
    """
    info = checkpoint.tensors[name]
    rows, width = info.shape
    if (start, stop) == (0, width):
        return checkpoint.read(name)
    out = torch.empty(rows, stop - start, dtype=info.dtype)
    if not out.numel():
        return out
    view = out.view(-1).view(torch.uint8).numpy().data
    length = len(view) // rows
    first = info.offset + start * info.dtype.itemsize
    with open_file(checkpoint.folder / info.file) as file:
        for row in range(rows):
            part = view[row * length : (row + 1) * length]
            if os.preadv(file.fileno(), [part], first + row * info.row_bytes) != length:
                raise CheckpointError(
                    f"`{info.file}` ends inside `{name}`",
                    hint="the file is cut short; download or copy it again",
                )
    return out
