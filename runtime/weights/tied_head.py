"""A head that shares the codes of a packed embedding, as tensors of its own name.

A tied folder with a packed embedding holds one matrix. A lookup reads rows of it as they are
stored, a product needs the backend's own form, so the head is loaded from the same bytes like any
packed head.
"""

from dataclasses import replace

from lowbit.formats.architectures import untied
from lowbit.formats.architectures.table import TensorSpec
from lowbit.formats.layout.packing import PACKED, SCALE, SHAPE
from lowbit.formats.packed import PackedCheckpoint
from lowbit.runtime.weights.share import HEAD


def with_own_head(packed: PackedCheckpoint) -> PackedCheckpoint:
    """The checkpoint with a head beside a packed embedding that it is tied to."""
    spec = next((spec for spec in packed.specs if spec.is_embedding), None)
    scheme = None if spec is None else packed.schemes.get(spec.module)
    if spec is None or scheme is None or not packed.checkpoint.tied:
        return packed
    tensors = dict(packed.checkpoint.tensors)
    tensors.pop(f"{HEAD}.weight", None)  # a stale copy
    for suffix in (PACKED, SCALE, SHAPE):
        name = f"{HEAD}.{suffix}"
        tensors[name] = replace(tensors[f"{spec.module}.{suffix}"], name=name)
    config = untied(packed.checkpoint.config)
    return replace(
        packed,
        checkpoint=replace(packed.checkpoint, config=config, tensors=tensors),
        specs=(*packed.specs, TensorSpec(f"{HEAD}.weight", spec.shape, "head")),
        schemes={**packed.schemes, HEAD: scheme},
    )
