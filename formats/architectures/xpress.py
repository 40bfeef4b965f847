"""xPress drafters: DFlash's layers, and a head that refines all drafts of a block several times.

`Qwen3XPressModel`, as UIUC-SSAIL publishes for Qwen3-8B. A pass biases the logits of every draft by
its hidden state, by the mean of its block's, and by the tokens of the pass before that stand ahead
of it; see `runtime.models.xpress`. XPressDraftModel of speculators has the same head under other
names.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from lowbit.formats.architectures import dflash
from lowbit.formats.architectures.architecture import Architecture
from lowbit.formats.architectures.dflash import DFlashConfig, merged_section, read_parts
from lowbit.formats.architectures.table import TensorSpec
from lowbit.formats.errors import UnsupportedModelError
from lowbit.formats.fields import Field, read_field

CLASS = "Qwen3XPressModel"
HEAD = "xpress_head"  # begins the names of the head's tensors
RANK = Field("xpress_rank", least=1, most=2**13, default=256)
INNER = Field("xpress_mlp_hidden", least=1, most=2**16, default=512)
PASSES = Field("xpress_num_passes", least=1, most=64, default=6)
BLOCK = Field("xpress_block_size", least=2, most=256, default=None)


@dataclass(frozen=True, slots=True, kw_only=True)
class XPressConfig(DFlashConfig):
    """Sizes of an xPress drafter."""

    rank: int  # width of its head
    inner: int  # width of the head's MLP
    passes: int  # of the head

    @classmethod
    def from_hf(cls, config: Mapping[str, Any]) -> "XPressConfig":
        """Read a `config.json`.

        Raises:
            UnsupportedModelError: see `read_config` of the package.
        """
        merged = merged_section(config)
        parts = read_parts(merged, CLASS, dflash.FEATURES)
        size, own = parts["blocks"].size, read_field(merged, BLOCK)
        if own not in (None, size):
            raise UnsupportedModelError(
                f"config.json: `{BLOCK.key}: {own}` beside `{dflash.BLOCK.key}: {size}`",
                hint="the head and its layers have blocks of one size",
            )
        widths = [dflash.read_width(merged, each) for each in (RANK, INNER)]
        return cls(rank=widths[0], inner=widths[1], passes=read_field(merged, PASSES), **parts)


def tensor_table(config: XPressConfig, prefix: str) -> list[TensorSpec]:
    """All tensors of the checkpoint, in the order of the forward pass."""
    h, V, r, p = config.hidden_size, config.vocab_size, config.rank, f"{prefix}{HEAD}"
    size = config.blocks.size
    return [
        *dflash.tensor_table(config, prefix),
        TensorSpec(f"{p}.down_h.weight", (r, h), "drafter"),
        TensorSpec(f"{p}.down_g.weight", (r, h), "drafter"),
        TensorSpec(f"{p}.w1.weight", (V, r), "embedding"),
        TensorSpec(f"{p}.in_proj.weight", (r, 3 * r), "drafter"),
        TensorSpec(f"{p}.mix.L", (r, size, size), "drafter"),
        TensorSpec(f"{p}.mlp.gate_proj.weight", (config.inner, r), "drafter"),
        TensorSpec(f"{p}.mlp.up_proj.weight", (config.inner, r), "drafter"),
        TensorSpec(f"{p}.mlp.down_proj.weight", (r, config.inner), "drafter"),
        TensorSpec(f"{p}.w2.weight", (V, r), "head"),
    ]


ARCHITECTURE = Architecture(
    model_types=dflash.LAYERS,
    read_config=XPressConfig.from_hf,
    tensor_table=tensor_table,
    prefix_of=lambda config, names: "",
    is_tied=lambda config: False,  # it has neither embedding nor head
    unused={"embed_tokens.weight": dflash.COPY, "lm_head.weight": dflash.COPY},
)
