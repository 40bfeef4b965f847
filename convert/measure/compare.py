"""Weights of a packed folder against their source, from the files alone."""

from lowbit.convert.measure.pair import Pair
from lowbit.convert.measure.weights import WeightQuality, WeightSums, quality_rows
from lowbit.convert.original.device import open_device
from lowbit.convert.original.progress import Meter, Progress, silent
from lowbit.convert.original.weights import Weights
from lowbit.formats.architectures import is_tied
from lowbit.formats.errors import CheckpointError

BLOCK_WEIGHTS = 1 << 22  # read at a time


def measure_weights(
    pair: Pair,
    device: str = "cpu",
    progress: Progress = silent,
) -> tuple[WeightQuality, ...]:
    """One row a packed linear, or for all experts of a layer, in the order of the file.

    Args:
        pair: the original, and the folder made from it by any tool.
        device: `cpu` or `cuda`.
        progress: called with ("weights", weights done, in all).

    Raises:
        CheckpointError: a folder that cannot be read, or a linear the source lacks.
        FormatError: packed weights that break the layout.
        ResourceError: a GPU is asked for where there is none.
    """
    place = open_device(device)
    originals, quantized = pair.original, pair.packed
    schemes = quantized.packed_schemes()
    if not schemes:
        raise CheckpointError(f"`{quantized.checkpoint.folder}` holds no packed linear")
    sizes = {module: _size(quantized, module) for module in schemes}
    meter = Meter(progress, "weights", sum(sizes.values()))
    found = []
    for module, scheme in schemes.items():
        name = _source_name(originals, module)
        if originals.shape(name) != quantized.shape(f"{module}.weight"):
            raise CheckpointError(
                f"`{module}` is {list(quantized.shape(f'{module}.weight'))} in `{quantized.name}`, "
                f"{list(originals.shape(name))} in `{originals.name}`"
            )
        count = max(1, BLOCK_WEIGHTS // originals.shape(name)[1])
        sums = WeightSums()
        blocks = quantized.packed_rows(module, count, place)
        for (_, w), (_, p, scale) in zip(originals.rows(name, count, place), blocks, strict=True):
            sums.add(w, p, scale, scheme)
        found.append((module, scheme, sums))
        meter.add(sizes[module])
    return quality_rows(found)


def _size(weights: Weights, module: str) -> int:
    N, K = weights.shape(f"{module}.weight")
    return N * K


def _source_name(originals: Weights, module: str) -> str:
    """The weight that a packed linear was made from; a tied head is the embedding."""
    tensors = originals.checkpoint.tensors
    tied = is_tied(originals.checkpoint.config) and originals.rotation is None
    if module.endswith("lm_head") and tied:
        return next((n for n in tensors if n.endswith("embed_tokens.weight")), f"{module}.weight")
    return f"{module}.weight"
