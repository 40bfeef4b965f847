"""Checkpoints whose residual stream can be rotated without a change of what they compute."""

from collections.abc import Mapping
from typing import Any

from lowbit.formats.architectures import is_tied
from lowbit.formats.architectures.dense import MODEL_TYPES
from lowbit.formats.layout.scheme import Scheme


def why_not_rotated(config: Mapping[str, Any], schemes: Mapping[str, Scheme | None]) -> str | None:
    """Reason why a checkpoint cannot be rotated; None where it can.

    Args:
        config: config.json of the source.
        schemes: of all linears.
    """
    if config.get("model_type") not in MODEL_TYPES:
        return "its head for multi-token prediction shares lm_head but not the norm before it"
    if is_tied(config) and schemes.get("lm_head") is None:
        return "its head is the embedding, and would have to be written a second time"
    return None
