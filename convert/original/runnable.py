"""Refusals of a checkpoint that cannot be run here, or predicts nothing by itself."""

from collections.abc import Mapping
from importlib.metadata import version
from pathlib import Path
from typing import Any

from lowbit.formats.architectures import is_drafter, kind_of
from lowbit.formats.errors import CheckpointError, UnsupportedModelError
from lowbit.formats.text.tokenizer import TOKENIZER_FILE

WHERE_MEASURED = "lowbit-run MODEL PROMPT --speculate dflash --drafter DIR shows its tokens a round"
WITHOUT = "--method rtn converts without running the original"


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


def check_can_run(folder: Path, config: Mapping[str, Any]) -> None:
    """Refuse an original that cannot be run here on a text.

    Raises:
        UnsupportedModelError: transformers does not know its architecture.
        CheckpointError: the folder has no tokenizer.
    """
    from transformers import CONFIG_MAPPING

    model_type = str(config.get("model_type"))
    if model_type not in CONFIG_MAPPING:
        raise UnsupportedModelError(
            f"`{folder}` cannot be calibrated: transformers {version('transformers')} does not "
            f"know model_type `{model_type}`",
            hint=WITHOUT,
        )
    if not (folder / TOKENIZER_FILE).exists():
        raise CheckpointError(
            f"`{folder}` has no {TOKENIZER_FILE}, which calibration needs", hint=WITHOUT
        )
