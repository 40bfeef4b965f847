"""Changes that GGUF and MLX make in each family of models, found by `model_type`."""

from collections.abc import Mapping
from typing import Any

from lowbit.convert.export.architectures import dense, qwen3_5
from lowbit.convert.export.architectures.architecture import Exported
from lowbit.formats.errors import UnsupportedModelError

# Mixtures of experts are in neither.
EXPORTED: Mapping[str, Exported[Any]] = {
    "qwen3": dense.EXPORTED,
    "qwen2": dense.EXPORTED,
    "llama": dense.EXPORTED,
    "qwen3_5": qwen3_5.EXPORTED,
    "qwen3_5_text": qwen3_5.EXPORTED,
}


def exported(model_type: str) -> Exported[Any]:
    """Changes that GGUF and MLX make in a family.

    Raises:
        UnsupportedModelError: neither is implemented for it.
    """
    if model_type not in EXPORTED:
        raise UnsupportedModelError(
            f"config.json: model_type `{model_type}` cannot be exported to GGUF or MLX yet",
            hint=f"exported are: {', '.join(EXPORTED)}",
        )
    return EXPORTED[model_type]
