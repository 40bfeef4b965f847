"""DSpark drafters: DFlash's layers, and a bias of each draft by the token before it.

`Qwen3DSparkModel` of DeepSpec, as DeepSeek publishes for Qwen3 4B, 8B and 14B. Every output of a
block is a draft, that of the last known token too. The logits of a draft get the row of the token
before it in `markov_w1 @ markov_w2.T`. Without these two (`markov_rank` 0) it is DeepSpec's DFlash.

`DSparkDraftModel` of SpecForge has the same tensors and the same outputs; keys of config.json stand
in `dflash_config`, or in `dspark_config` and at the top (RadixArk, for Qwen3.8 27B). Its vocabulary
may be cut, which is refused. Files in the layout of speculators have this class, too.

The checkpoint also holds embedding and head of the target, which training leaves as they are, and a
head that guesses how many drafts are accepted. They are not read: the target has its own, and what
is accepted is counted.
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from lowbit.formats.architectures import dense, dflash
from lowbit.formats.architectures.architecture import Architecture
from lowbit.formats.architectures.decoder import INNER, check_features
from lowbit.formats.architectures.dflash import DFlashConfig, check_layers, read_blocks
from lowbit.formats.architectures.table import TensorSpec
from lowbit.formats.errors import UnsupportedModelError
from lowbit.formats.fields import Field, read_field, shown

CLASS = "Qwen3DSparkModel"
SPECFORGE = "DSparkDraftModel"
SECTIONS = ("dflash_config", "dspark_config")  # their keys win over the same keys beside them
BLOCK = Field("block_size", least=2, most=256)
RANK = Field("markov_rank", least=0, most=2**13)
KIND = "markov_head_type"
PLAIN = "vanilla"  # the kind of the published drafters; others also read the hidden states
FEATURES: Mapping[str, tuple[Any, ...]] = {
    **dense.FEATURES,
    "is_causal": (None, False),
    "sample_from_anchor": (None, True),
    dflash.KIND: (None, "dspark"),
}
CONFIDENCE = "guesses how many drafts are accepted: not used"


@dataclass(frozen=True, slots=True, kw_only=True)
class DSparkConfig(DFlashConfig):
    """Sizes of a DSpark drafter."""

    markov_rank: int  # of the bias by the token before; 0 without it

    @classmethod
    def from_hf(cls, config: Mapping[str, Any]) -> "DSparkConfig":
        """Read a `config.json`.

        Raises:
            UnsupportedModelError: see `read_config` of the package.
        """
        return cls(**_read(config, CLASS, config.get(KIND)))

    @classmethod
    def from_specforge(cls, config: Mapping[str, Any]) -> "DSparkConfig":
        """Read a `config.json` of SpecForge.

        Raises:
            UnsupportedModelError: see `read_config` of the package.
        """
        merged = config
        for name in SECTIONS:
            merged = dflash.merged_section(merged, name)
        # SpecForge's own default
        return cls(**_read(merged, SPECFORGE, merged.get(KIND, PLAIN)))


def _read(config: Mapping[str, Any], name: str, kind: object) -> dict[str, Any]:
    """Read what a DSparkConfig holds, of a class and a kind of head."""
    check_layers(config, name)
    check_features(config, FEATURES)
    values = dense.read_values(config)
    layers, rank = values["num_hidden_layers"], read_field(config, RANK)
    if rank and kind != PLAIN:
        named = f"no `{KIND}`" if kind is None else f"`{KIND}: {shown(kind)}`"
        raise UnsupportedModelError(
            f"config.json: a {name} with {named} is not implemented", hint=f"implemented: {PLAIN}"
        )
    return {
        **values,
        "intermediate_size": read_field(config, INNER),
        "blocks": read_blocks(config, values["vocab_size"], BLOCK, first=0),
        "windows": (None,) * layers,
        "causal": (False,) * layers,
        "markov_rank": rank,
    }


def tensor_table(config: DSparkConfig, prefix: str) -> list[TensorSpec]:
    """All tensors that are read, in the order of the forward pass."""
    table = dflash.tensor_table(config, prefix)
    if config.markov_rank:
        shape, p = (config.vocab_size, config.markov_rank), f"{prefix}markov_head"
        table.append(TensorSpec(f"{p}.markov_w1.weight", shape, "embedding"))
        table.append(TensorSpec(f"{p}.markov_w2.weight", shape, "head"))
    return table


ARCHITECTURE = Architecture(
    model_types=dflash.LAYERS,
    read_config=DSparkConfig.from_hf,
    tensor_table=tensor_table,
    prefix_of=lambda config, names: "",
    is_tied=lambda config: False,  # its head is the target's
    unused={
        "embed_tokens.weight": dflash.COPY,
        "lm_head.weight": dflash.COPY,
        "confidence_head.proj.weight": CONFIDENCE,
        "confidence_head.proj.bias": CONFIDENCE,
    },
)
BY_SPECFORGE = replace(ARCHITECTURE, read_config=DSparkConfig.from_specforge)
