"""Qwen3.5 mixtures of experts: Qwen3.5's decoder with experts, one of them shared, for every MLP.

transformers `Qwen3_5MoeForConditionalGeneration` and `Qwen3_5MoeForCausalLM`; Qwen3.6 has the same
tensors. Files on the Hub hold the decoder's experts fused, and one by one those of the layer for
multi-token prediction.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from lowbit.formats.architectures import qwen3_5
from lowbit.formats.architectures.architecture import Architecture
from lowbit.formats.architectures.config import Experts
from lowbit.formats.architectures.decoder import check_features
from lowbit.formats.architectures.experts import (
    COUNT_NAMES,
    FEATURES,
    ROUTERS_PATTERN,
    read_experts,
)
from lowbit.formats.architectures.qwen3_5 import Qwen35Config


@dataclass(frozen=True, slots=True, kw_only=True)
class Qwen35MoeConfig(Qwen35Config):
    """Sizes of a Qwen3.5 decoder with experts."""

    mixture: Experts  # sizes of the experts, the same in every layer and in the MTP head

    @property
    def experts(self) -> Experts:
        """Sizes of the experts."""
        return self.mixture

    @classmethod
    def from_hf(cls, config: Mapping[str, Any]) -> "Qwen35MoeConfig":
        """Read a `config.json`, nested or text-only.

        Raises:
            UnsupportedModelError: see `read_config` of the package.
        """
        text = qwen3_5.text_of(config)
        check_features(text, {**qwen3_5.FEATURES, **FEATURES}, read=COUNT_NAMES)
        experts = read_experts(text, shared=True)
        values = qwen3_5.read_values(config)
        return cls(intermediate_size=experts.inner, mixture=experts, **values)


ARCHITECTURE = Architecture(
    model_types=("qwen3_5_moe", "qwen3_5_moe_text"),
    read_config=Qwen35MoeConfig.from_hf,
    tensor_table=qwen3_5.tensor_table,
    prefix_of=qwen3_5.prefix_of,
    is_tied=qwen3_5.is_tied,
    parts=qwen3_5.ARCHITECTURE.parts,
    mtp_layers=qwen3_5.MTP_LAYERS,
    unquantized={
        "vision": (qwen3_5.VISION_PATTERN,),
        "decoder": (qwen3_5.GATES_PATTERN, ROUTERS_PATTERN),
    },
    float32_roles=qwen3_5.ARCHITECTURE.float32_roles,
    stream=qwen3_5.ARCHITECTURE.stream,
    experts=True,
)
