"""A packed folder and its original, in one basis."""

from dataclasses import dataclass
from pathlib import Path

from lowbit.convert.original.rotation import rotation_roles
from lowbit.convert.original.weights import Weights, open_weights, weights_of, with_frequent_rows
from lowbit.formats.architectures import architecture_of
from lowbit.formats.architectures.names import MTP_PREFIX
from lowbit.formats.layout.manifest import Manifest, is_rotated, read_manifest
from lowbit.formats.packed import PackedCheckpoint
from lowbit.formats.safetensors.checkpoint import Checkpoint


@dataclass(frozen=True, slots=True)
class Pair:
    """Weights of an original, and of the folder made from it.

    The original of a rotated folder is rotated too, which changes its logits by rounding alone.
    """

    original: Weights
    packed: Weights


def pair_of(source: Checkpoint, packed: PackedCheckpoint) -> Pair:
    """A packed folder and its original, both of them open.

    Raises:
        CheckpointError, FormatError: weights that cannot be read.
    """
    own = with_frequent_rows(weights_of(packed.checkpoint), packed.manifest)
    return _pair(weights_of(source), own, packed.manifest)


def open_pair(source: Path, packed: Path) -> Pair:
    """A folder of any tool, whatever its tensors, and its original.

    Raises:
        CheckpointError, FormatError: a folder that cannot be read.
    """
    return _pair(open_weights(source), open_weights(packed), read_manifest(packed))


def _pair(original: Weights, packed: Weights, manifest: Manifest | None) -> Pair:
    if is_rotated(manifest) or _looks_rotated(original, packed):
        original = original.rotated()
    return Pair(original, packed)


def _looks_rotated(original: Weights, packed: Weights) -> bool:
    """Tell it from the weights: an export has no lowbit.json.

    A rotation leaves gains of one where the original has others, and a head beside the embedding.
    """
    config = original.checkpoint.config
    stream = architecture_of(config).stream
    if stream is None or packed.checkpoint.tied:
        return False
    one = 0 if stream.zero_centred else 1
    norms = [
        name
        for name, role in rotation_roles(config, original.checkpoint.tensors).items()
        if role.kind == "gain" and name in packed.checkpoint.tensors
        if not name.startswith(MTP_PREFIX)  # which may have been trained since
    ]
    before, after = ([w.checkpoint.read(name) for name in norms] for w in (original, packed))
    return (
        bool(norms)
        and all((gain == one).all() for gain in after)
        and not all((gain == one).all() for gain in before)
    )
