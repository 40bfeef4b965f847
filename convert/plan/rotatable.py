"""Checkpoints whose residual stream can be rotated without a change of what they compute."""

from collections.abc import Collection, Mapping
from typing import Any

from lowbit.formats.architectures import ROTATABLE, is_tied, part_of
from lowbit.formats.layout.scheme import Scheme


def why_not_rotated(
    config: Mapping[str, Any], schemes: Mapping[str, Scheme | None], names: Collection[str]
) -> str | None:
    """Reason why a checkpoint cannot be rotated; None where it can.

    Args:
        config: config.json of the source.
        schemes: of all linears.
        names: of its tensors.
    """
    if any(part_of(config, name) == "mtp" for name in names):
        return "its head for multi-token prediction shares lm_head but not the norm before it"
    if config.get("model_type") not in ROTATABLE:
        return f"only {', '.join(ROTATABLE)} can be"
    if is_tied(config) and schemes.get("lm_head") is None:
        return "a head that stays the embedding cannot take over the last norm's gain"
    return None
