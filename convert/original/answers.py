"""Checkpoints that predict nothing by themselves: drafters, which read states of another model."""

from collections.abc import Mapping
from typing import Any

from lowbit.formats.architectures import is_drafter, kind_of
from lowbit.formats.errors import UnsupportedModelError

WHERE_MEASURED = "lowbit-run MODEL PROMPT --speculate dflash --drafter DIR shows its tokens a round"


def require_language_model(config: Mapping[str, Any], name: str) -> None:
    """Refuse a drafter where a model's own predictions are needed.

    Raises:
        UnsupportedModelError: it is a drafter.
    """
    if is_drafter(config):
        raise UnsupportedModelError(
            f"`{name}` is a drafter ({kind_of(config)}), which predicts nothing without its target",
            hint=WHERE_MEASURED,
        )
