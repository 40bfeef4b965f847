"""DFlash2 drafters: DFlash's layers with convolutions, and a head that walks among candidates.

`DFlash2DraftModel` of z-lab and Inco AI, published for Qwen3.8 27B. A convolution over the tokens
of a block stands before and behind attention, and before and behind the MLP; a token's own hidden
state gives part of its taps. Of each place the likeliest tokens are candidates, which the token
before it weighs anew; see `runtime.models.dflash2`.
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from lowbit.formats.architectures import dflash
from lowbit.formats.architectures.architecture import Architecture
from lowbit.formats.architectures.dflash import DFlashConfig, merged_section, read_parts, read_width
from lowbit.formats.architectures.table import TensorSpec
from lowbit.formats.fields import Field, read_field

CLASS = "DFlash2DraftModel"
HEAD = "candidate_selector"  # begins the names of the head's tensors
RANK = Field("selector_rank", least=1, most=2**13)
CANDIDATES = Field("selector_top_k", least=1, most=64)
MULTIPLIER = Field("output_multiplier", "number", least=0, exclusive=True, most=1e6, default=1.0)
CAP = Field("final_logit_softcapping", "number", least=0, most=1e6, default=None, nullable=True)
FEATURES: Mapping[str, tuple[Any, ...]] = {**dflash.FEATURES, dflash.KIND: (None, "dflash2")}


@dataclass(frozen=True, slots=True, kw_only=True)
class DFlash2Config(DFlashConfig):
    """Sizes of a DFlash2 drafter."""

    rank: int  # width of the head
    candidates: int  # tokens of a place that the head weighs
    multiplier: float  # of the target's logits
    cap: float | None  # of logits after that, by tanh; None without

    @classmethod
    def from_hf(cls, config: Mapping[str, Any]) -> "DFlash2Config":
        """Read a `config.json`.

        Raises:
            UnsupportedModelError: see `read_config` of the package.
        """
        merged = merged_section(config)
        parts = read_parts(merged, CLASS, FEATURES, read=(MULTIPLIER.key, CAP.key))
        return cls(
            rank=read_width(merged, RANK),
            candidates=read_field(merged, replace(CANDIDATES, most=min(64, parts["vocab_size"]))),
            multiplier=float(read_field(merged, MULTIPLIER)),
            cap=float(read_field(merged, CAP) or 0) or None,
            **(parts | {"convolutions": dflash.read_convolutions(merged, parts["hidden_size"])}),
        )


def tensor_table(config: DFlash2Config, prefix: str) -> list[TensorSpec]:
    """All tensors of the checkpoint, in the order of the forward pass."""
    tables = (config.vocab_size, config.rank)
    return [
        *dflash.tensor_table(config, prefix),
        TensorSpec(
            f"{prefix}{HEAD}.hidden_projection.weight", (config.rank, config.hidden_size), "drafter"
        ),
        TensorSpec(f"{prefix}{HEAD}.predecessor_codebook", tables, "embedding"),
        TensorSpec(f"{prefix}{HEAD}.successor_codebook", tables, "embedding"),
    ]


ARCHITECTURE = Architecture(
    model_types=dflash.LAYERS,
    read_config=DFlash2Config.from_hf,
    tensor_table=tensor_table,
    prefix_of=lambda config, names: "",
    is_tied=lambda config: False,  # it has neither embedding nor head
    unused={"embed_tokens.weight": dflash.COPY, "lm_head.weight": dflash.COPY},
)
