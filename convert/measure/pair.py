"""A packed folder and its original, in one basis."""

from pathlib import Path

from lowbit.convert.original.rotation import rotation_roles
from lowbit.convert.original.weights import Weights, open_weights
from lowbit.convert.plan.recipe import Recipe
from lowbit.formats.architectures import architecture_of, is_tied
from lowbit.formats.errors import QuantizationError
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
    try:
        return Recipe.from_json(manifest.recipe).method.rotate
    except QuantizationError:  # of another release
        return False


def _looks_rotated(original: Weights, packed: Weights) -> bool:
    """Tell it from the weights: an export has no lowbit.json.

    A rotation leaves gains of one where the original has others, and a head beside the embedding.
    """
    config = original.checkpoint.config
    stream = architecture_of(config).stream
    if stream is None or is_tied(packed.checkpoint.config):
        return False
    one = 0 if stream.zero_centred else 1
    roles = rotation_roles(config, original.checkpoint.tensors)
    gains = [name for name, role in roles.items() if role.kind == "gain"]
    found = [name for name in gains if name in packed.checkpoint.tensors]  # some drop the MTP head
    before, after = ([w.checkpoint.read(name) for name in found] for w in (original, packed))
    return (
        bool(found)
        and all((gain == one).all() for gain in after)
        and not all((gain == one).all() for gain in before)
    )
