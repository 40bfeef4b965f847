"""Changes that GGUF and MLX make in each family of models, found by `model_type`."""

from collections.abc import Mapping
from typing import Any

from lowbit.convert.export.architectures import dense, qwen3_5, qwen3_5_moe, qwen3_moe
from lowbit.convert.export.architectures.architecture import Exported

EXPORTED: Mapping[str, Exported[Any]] = {
    "qwen3": dense.EXPORTED,
    "qwen2": dense.EXPORTED,
    "llama": dense.EXPORTED,
    "qwen3_5": qwen3_5.EXPORTED,
    "qwen3_5_text": qwen3_5.EXPORTED,
    "qwen3_moe": qwen3_moe.EXPORTED,
    "qwen3_5_moe": qwen3_5_moe.EXPORTED,
    "qwen3_5_moe_text": qwen3_5_moe.EXPORTED,
}
