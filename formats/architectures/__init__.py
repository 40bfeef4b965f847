"""The tensor table of each architecture, and the way from `model_type` to it."""

from collections.abc import Mapping
from typing import Any

from lowbit.formats.architectures import qwen3
from lowbit.formats.architectures.table import TensorSpec
from lowbit.formats.errors import UnsupportedModelError

SUPPORTED = (qwen3.MODEL_TYPE,)


def tensor_table(config: Mapping[str, Any]) -> list[TensorSpec]:
    """Every tensor that a checkpoint with this `config.json` has, a tied head included.

    Raises:
        UnsupportedModelError: the architecture, or a feature of it, is not implemented.
    """
    model_type = config.get("model_type")
    if model_type == qwen3.MODEL_TYPE:
        return qwen3.tensor_table(qwen3.Qwen3Config.from_hf(config))
    raise UnsupportedModelError(
        f"config.json: model_type `{model_type}` is not supported",
        hint=f"supported: {', '.join(SUPPORTED)}",
    )


def is_tied(config: Mapping[str, Any]) -> bool:
    """Whether the head shares the embedding's weight."""
    return bool(config.get("tie_word_embeddings", False))
