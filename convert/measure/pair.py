"""A packed folder and its original, in one basis."""

from pathlib import Path

from lowbit.convert.original.rotation import rotation_roles
from lowbit.convert.original.weights import Weights, open_weights
from lowbit.formats.architectures import ROTATABLE, is_tied
from lowbit.formats.layout.manifest import Manifest, read_manifest


def open_pair(source: Path, packed: Path) -> tuple[Weights, Weights]:
    """The weights of an original and of the folder made from it.

    The original of a rotated folder is rotated too, which changes its logits by rounding alone.

    Raises:
        CheckpointError, FormatError: a folder that cannot be read.
    """
    original, quantized = open_weights(source), open_weights(packed)
    if is_rotated(read_manifest(packed)) or _looks_rotated(original, quantized):
        original = original.rotated()
    return original, quantized


def is_rotated(manifest: Manifest | None) -> bool:
    """Tell whether a folder's hidden states are in another basis than its original's."""
    if manifest is None:
        return False
    method = manifest.recipe.get("method")  # also of a recipe that another release knows
    return isinstance(method, str) and "rotate" in method.split("+")


def _looks_rotated(original: Weights, packed: Weights) -> bool:
    """Tell it from the weights: an export has no lowbit.json.

    A rotation leaves gains of one where the original has others, and a head beside the embedding.
    """
    config = original.checkpoint.config
    if config.get("model_type") not in ROTATABLE or is_tied(packed.checkpoint.config):
        return False
    roles = rotation_roles(config, original.checkpoint.tensors)
    gains = [name for name, role in roles.items() if role.kind == "gain"]
    tensors = (original.checkpoint, packed.checkpoint)
    if not all(name in side.tensors for side in tensors for name in gains):
        return False
    before, after = ([side.read(name) for name in gains] for side in tensors)
    return all((gain == 1).all() for gain in after) and not all((g == 1).all() for g in before)
