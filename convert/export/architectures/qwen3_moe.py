"""Qwen3 mixtures of experts in GGUF and MLX, both of which stack the experts of a layer."""

from typing import Any

from lowbit.convert.export.architectures.architecture import ATTENTION, EXPERTS, Exported, Gguf, Mlx
from lowbit.convert.export.rope import mlx_rope
from lowbit.convert.export.source import PackedSource
from lowbit.formats.architectures.experts import COUNT
from lowbit.formats.architectures.names import any_expert
from lowbit.formats.architectures.qwen3_moe import NORMED, Qwen3MoeConfig
from lowbit.formats.errors import FormatError

ANY_EXPERT, MLX_EXPERTS = ".experts.*.", ".switch_mlp."


def stacked_name(name: str) -> str:
    """A tensor or module as mlx-lm names it; one name for all experts of a layer."""
    return any_expert(name).replace(ANY_EXPERT, MLX_EXPERTS)


def _check_gguf(config: Qwen3MoeConfig, source: PackedSource) -> None:
    """Refuse shares that llama.cpp, which always norms them, would compute otherwise."""
    if not config.experts.normed:
        raise FormatError(
            f"config.json: `{NORMED.key}: false`, and llama.cpp norms the shares of a token's "
            "experts",
            hint="export to mlx, or run the packed folder with lowbit-run or vLLM",
        )


def _mlx_config(
    config: Qwen3MoeConfig, source: PackedSource, content: dict[str, Any]
) -> dict[str, Any]:
    """State the keys that mlx-lm requires and a config.json may leave out or name otherwise."""
    defaults = {
        "intermediate_size": config.intermediate_size,
        "decoder_sparse_step": 1,
        "mlp_only_layers": [],
        "head_dim": config.head_dim,
    }
    return {
        **defaults,
        **mlx_rope(config, content),
        COUNT.key: config.experts.count,
        NORMED.key: config.experts.normed,
    }


EXPORTED = Exported(
    gguf=Gguf(
        names={"qwen3_moe": "qwen3moe"},
        inside={**ATTENTION, "post_attention_layernorm": "ffn_norm", **EXPERTS},
        check=_check_gguf,
    ),
    mlx=Mlx(name_of=stacked_name, config=_mlx_config),
)
