"""Qwen3.5 mixtures of experts in GGUF and MLX: Qwen3.5's layers, with stacked experts."""

from dataclasses import replace
from typing import Any

from lowbit.convert.export.architectures import qwen3_5
from lowbit.convert.export.architectures.architecture import EXPERTS, SHARED_EXPERT, Exported, Mlx
from lowbit.convert.export.architectures.qwen3_moe import stacked_name
from lowbit.convert.export.source import PackedSource
from lowbit.formats.architectures.decoder import TEXT, text_part
from lowbit.formats.architectures.experts import COUNT
from lowbit.formats.architectures.qwen3_5_moe import Qwen35MoeConfig

DENSE = qwen3_5.EXPORTED


def _mlx_name(name: str) -> str:
    return stacked_name(DENSE.mlx.name_of(name))


def _mlx_config(
    config: Qwen35MoeConfig, source: PackedSource, content: dict[str, Any]
) -> dict[str, Any]:
    """Qwen3.5's keys, and the number of experts under the name that mlx-lm reads."""
    content = {**DENSE.mlx.config(config, source, content), "model_type": "qwen3_5_moe"}
    text = {**text_part(content), COUNT.key: config.experts.count}
    return {**content, TEXT: text} if TEXT in content else text


EXPORTED: Exported[Any] = Exported(
    gguf=replace(
        DENSE.gguf,
        names={"qwen3_5_moe": "qwen35moe", "qwen3_5_moe_text": "qwen35moe"},
        inside={**qwen3_5.INSIDE, **EXPERTS, **SHARED_EXPERT},
    ),
    mlx=Mlx(
        name_of=_mlx_name,
        check=DENSE.mlx.check,
        change=DENSE.mlx.change,
        config=_mlx_config,
    ),
)
