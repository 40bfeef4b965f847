"""Domino drafters: DFlash's layers, and a bias of each draft by all tokens of the block before it.

`DominoDraftModel` of SpecForge. Published files (Huang2020, for Qwen3 4B and 8B and Qwen3.6 27B)
say `DFlashDraftModel`, and `projector_type` in their section says `domino`. A recurrent unit reads
the last known token and each draft; its state and the hidden state of a place give the bias. The
first `pure_draft_prefix_len` drafts get none. With `shift_label` every output of a block is a
draft, as DSpark's are.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from lowbit.formats.architectures import dflash
from lowbit.formats.architectures.architecture import Architecture
from lowbit.formats.architectures.dflash import DFlashConfig, merged_section, read_parts, read_width
from lowbit.formats.architectures.table import TensorSpec
from lowbit.formats.errors import UnsupportedModelError
from lowbit.formats.fields import Field, read_field

CLASS = "DominoDraftModel"
PROJECTOR = "domino"
EMBEDDED = Field("emb_dim", least=1, most=2**16)
STATE = Field("gru_hidden_dim", least=1, most=2**16)
PURE = Field("pure_draft_prefix_len", least=0, most=256, default=0)
SHIFTED = Field("shift_label", "flag", default=False)
FEATURES: Mapping[str, tuple[Any, ...]] = {**dflash.FEATURES, dflash.KIND: (None, PROJECTOR)}


@dataclass(frozen=True, slots=True, kw_only=True)
class DominoConfig(DFlashConfig):
    """Sizes of a Domino drafter."""

    embedded: int  # width of the bias, before the vocabulary
    state: int  # width of the recurrent unit
    pure: int  # drafts without a bias

    @classmethod
    def from_hf(cls, config: Mapping[str, Any]) -> "DominoConfig":
        """Read a `config.json`.

        Raises:
            UnsupportedModelError: see `read_config` of the package.
        """
        merged = merged_section(config)
        first = 0 if read_field(merged, SHIFTED) else 1
        parts = read_parts(merged, CLASS, FEATURES, first=first)
        pure, drafts = read_field(merged, PURE), parts["blocks"].drafts
        if pure > drafts:
            raise UnsupportedModelError(
                f"config.json: `{PURE.key}: {pure}` of the {drafts} drafts of a block"
            )
        embedded, state = (read_width(merged, each) for each in (EMBEDDED, STATE))
        return cls(embedded=embedded, state=state, pure=pure, **parts)


def tensor_table(config: DominoConfig, prefix: str) -> list[TensorSpec]:
    """All tensors of the checkpoint, in the order of the forward pass."""
    h, state, embedded = config.hidden_size, config.state, config.embedded
    return [
        *dflash.tensor_table(config, prefix),
        TensorSpec(f"{prefix}prefix_gru.weight_ih_l0", (3 * state, h), "drafter"),
        TensorSpec(f"{prefix}prefix_gru.weight_hh_l0", (3 * state, state), "drafter"),
        TensorSpec(f"{prefix}embed_proj.0.weight", (embedded, h + state), "drafter"),
        TensorSpec(f"{prefix}embed_proj.2.weight", (config.vocab_size, embedded), "head"),
    ]


ARCHITECTURE = Architecture(
    model_types=dflash.LAYERS,
    read_config=DominoConfig.from_hf,
    tensor_table=tensor_table,
    prefix_of=lambda config, names: "",
    is_tied=lambda config: False,  # it has neither embedding nor head
    unused={"embed_tokens.weight": dflash.COPY, "lm_head.weight": dflash.COPY},
)
