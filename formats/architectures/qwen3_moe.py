"""Qwen3 mixtures of experts: Qwen3's dense decoder with experts in place of every MLP.

transformers `Qwen3MoeForCausalLM`. Files on the Hub hold the experts one by one.
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from lowbit.formats.architectures import dense
from lowbit.formats.architectures.architecture import Architecture
from lowbit.formats.architectures.config import Experts
from lowbit.formats.architectures.decoder import check_features
from lowbit.formats.architectures.dense import DenseConfig
from lowbit.formats.architectures.experts import (
    COUNT_NAMES,
    FEATURES,
    ROUTERS_PATTERN,
    read_experts,
)
from lowbit.formats.fields import Field, read_field

NORMED = Field("norm_topk_prob", "flag", default=False)  # absent is false in transformers


@dataclass(frozen=True, slots=True, kw_only=True)
class Qwen3MoeConfig(DenseConfig):
    """Sizes of a Qwen3 decoder with experts."""

    mixture: Experts  # sizes of the experts, the same in every layer

    @property
    def experts(self) -> Experts:
        """Sizes of the experts."""
        return self.mixture

    @classmethod
    def from_hf(cls, config: Mapping[str, Any]) -> "Qwen3MoeConfig":
        """Read a `config.json`.

        Raises:
            UnsupportedModelError: see `read_config` of the package.
        """
        check_features(config, {**dense.FEATURES, **FEATURES}, read=COUNT_NAMES)
        experts = replace(read_experts(config, shared=False), normed=read_field(config, NORMED))
        return cls(intermediate_size=experts.inner, mixture=experts, **dense.read_values(config))


ARCHITECTURE = Architecture(
    model_types=("qwen3_moe",),
    read_config=Qwen3MoeConfig.from_hf,
    tensor_table=dense.tensor_table,
    unquantized={"decoder": (ROUTERS_PATTERN,)},
    stream=dense.ARCHITECTURE.stream,
    experts=True,
)
