"""Bits per weight of a checkpoint: all its weight files over the parameters they hold."""

import math
from collections.abc import Iterable

from lowbit.formats.architectures import is_carried, tensor_table
from lowbit.formats.frequent_rows import FREQUENT_FILE
from lowbit.formats.layout.manifest import Fate, Manifest
from lowbit.formats.safetensors.checkpoint import Checkpoint


def weight_bits(checkpoint: Checkpoint, manifest: Manifest | None) -> float:
    """Bits of a folder's weight files over the model's parameters.

    Where lowbit.json is absent, the parameters are those of config.json, in which a head that was
    untied to be packed counts apart from the embedding.

    Args:
        checkpoint: its headers; the files need not be on this machine.
        manifest: its lowbit.json; None where it has none.

    Raises:
        UnsupportedModelError: an architecture that is not implemented.
    """
    ends: dict[str, int] = {}
    for info in checkpoint.tensors.values():  # the last tensor ends its file
        ends[info.file] = max(ends.get(info.file, 0), info.offset + info.nbytes)
    size = sum(ends.values())
    if manifest is not None:
        size += sum(file.size_bytes for file in manifest.files if file.name == FREQUENT_FILE)
        rows = manifest.source_tensors
        return bits_per_weight(size, count_parameters((r.name, r.shape, r.fate) for r in rows))
    table = tensor_table(checkpoint.config, checkpoint.tensors)
    count = sum(
        math.prod(spec.shape) for spec in table if not (checkpoint.tied and spec.role == "head")
    )
    count += sum(
        math.prod(info.shape)
        for name, info in checkpoint.tensors.items()
        if is_carried(checkpoint.config, name)
    )
    return bits_per_weight(size, count)


def bits_per_weight(weight_bytes: int, parameters: int) -> float:
    """Bits of a folder's weight files over the model's parameters.

    Args:
        weight_bytes: sum of the sizes of the safetensors files, headers included: packed linears
            with their scales, embedding, norms, and all else that is stored.
    """
    return 8 * weight_bytes / parameters if parameters else 0.0


def count_parameters(sources: Iterable[tuple[str, tuple[int, ...], Fate]]) -> int:
    """Weights of the source that are in the folder, a tied head's counted once.

    Args:
        sources: name, shape and fate of every source tensor; a name may come again.
    """
    shapes = {name: shape for name, shape, fate in sources if fate != "dropped"}
    return sum(math.prod(shape) for shape in shapes.values())
