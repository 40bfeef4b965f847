"""Bits per weight, the one measure of a folder's size that does not depend on the model's."""

import math
from collections.abc import Iterable

from lowbit.formats.layout.manifest import Fate


def bits_per_weight(weight_bytes: int, parameters: int) -> float:
    """Bits of a folder's weight files over the model's parameters.

    Args:
        weight_bytes: sum of the sizes of the safetensors files, headers included: packed linears
            with their scales, embedding, norms, and all else that is stored.
        parameters: `count_parameters` of the source.
    """
    return 8 * weight_bytes / parameters if parameters else 0.0


def count_parameters(sources: Iterable[tuple[str, tuple[int, ...], Fate]]) -> int:
    """Weights of the source that are in the folder, a tied head's counted once.

    Args:
        sources: name, shape and fate of every source tensor; a name may come again.
    """
    shapes = {name: shape for name, shape, fate in sources if fate != "dropped"}
    return sum(math.prod(shape) for shape in shapes.values())
