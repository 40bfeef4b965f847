"""Checkpoints whose residual stream can be rotated without a change of what they compute."""

from collections.abc import Collection, Mapping
from typing import Any

from lowbit.convert.original.rotation import VISION_WRITER
from lowbit.formats.architectures import ROTATABLE, is_tied, part_of
from lowbit.formats.layout.scheme import Scheme


def why_not_rotated(
    config: Mapping[str, Any], schemes: Mapping[str, Scheme | None], names: Collection[str]
) -> str | None:
    """Reason why a checkpoint cannot be rotated; None where it can.

    Args:
        config: config.json of the source.
        schemes: of all linears.
        names: of its tensors, without those that are dropped.
    """
    if config.get("model_type") not in ROTATABLE:
        return f"only {', '.join(ROTATABLE)} can be"
    vision = [name for name in names if part_of(config, name) == "vision"]
    if vision and not any(map(VISION_WRITER.search, vision)):
        return "its vision tower has no `merger.linear_fc2` that could be rotated along"
    if is_tied(config) and schemes.get("lm_head") is None:
        return "a head that stays the embedding cannot take over the last norm's gain"
    return None
