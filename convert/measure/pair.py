"""A packed folder and its original, in one basis."""

from dataclasses import replace
from pathlib import Path

from lowbit.convert.original.rotation import rotation_of
from lowbit.convert.original.weights import Weights, open_weights
from lowbit.convert.plan.recipe import Recipe
from lowbit.formats.errors import QuantizationError
from lowbit.formats.layout.manifest import Manifest, read_manifest


def open_pair(source: Path, packed: Path) -> tuple[Weights, Weights]:
    """The weights of an original and of the folder made from it.

    The original of a rotated folder is rotated too, which changes its logits by rounding alone.

    Raises:
        CheckpointError, FormatError: a folder that cannot be read.
    """
    original, quantized = open_weights(source), open_weights(packed)
    if is_rotated(read_manifest(packed)):
        original = replace(original, rotation=rotation_of(original.checkpoint))
    return original, quantized


def is_rotated(manifest: Manifest | None) -> bool:
    """Tell whether a folder's hidden states are in another basis than its original's."""
    if manifest is None:
        return False
    try:
        return Recipe.from_json(manifest.recipe).method.rotate
    except QuantizationError:  # of another release; its weights tell what they are
        return False
