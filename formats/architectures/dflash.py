"""DFlash drafters: a few Qwen3 layers that draft a block of tokens for another model, the target.

`DFlashDraftModel` of z-lab, whose config.json has the model_type of its layers, `qwen3`. `fc` joins
outputs of the target's layers to a context; embedding and head are the target's.
"""

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Any

from lowbit.formats.architectures import dense
from lowbit.formats.architectures.architecture import Architecture
from lowbit.formats.architectures.config import BlockDrafts
from lowbit.formats.architectures.decoder import (
    FULL,
    INNER,
    MAX_LAYERS,
    check_features,
    read_layer_types,
)
from lowbit.formats.architectures.dense import DenseConfig
from lowbit.formats.architectures.table import TensorSpec
from lowbit.formats.errors import UnsupportedModelError
from lowbit.formats.fields import Field, read_field, shown

CLASS = "DFlashDraftModel"
LAYERS = ("qwen3",)  # model types whose layers are implemented
SECTION = "dflash_config"  # its keys win over the same keys beside it
SLIDING = "sliding_attention"
CONV_TAPS = Field("conv_kernel_size", least=1, most=16)
CONV_GROUP = Field("conv_group_size", least=1, most=2**20)
UNIT = 32  # divides the widths of heads
COPY = "copy of the target's, which is used"  # why such a tensor is left out
TAPS = "target_layer_ids"
BLOCK = Field("block_size", least=2, most=256, default=16)
WINDOW = Field("sliding_window", least=1, most=2**31)
WINDOWED = Field("use_sliding_window", "flag", default=True)
CAUSAL = Field("is_causal", "flag", default=None, nullable=True)
CUT = "draft_vocab_size"  # of drafters whose head has fewer rows than the target's
LAYOUT = "speculators_model_type"  # of every file of vllm-project/speculators
KIND = "projector_type"  # of SpecForge, which trains other heads under similar configs
DEPTH = Field("num_target_layers", least=1, most=MAX_LAYERS, default=None)
FEATURES: Mapping[str, tuple[Any, ...]] = {
    **dense.FEATURES,
    "input_embedding_scale": (None, 1, 1.0),
    "output_multiplier": (None, 1, 1.0),
    "sample_from_anchor": (None, False),
    KIND: (None, "dflash"),
}


@dataclass(frozen=True, slots=True)
class Convolutions:
    """Sizes of convolutions around attention and MLP, over the tokens of a block."""

    taps: int  # tokens that a token sees, itself included
    group: int  # channels that share the part of a tap that a hidden state gives


@dataclass(frozen=True, slots=True, kw_only=True)
class DFlashConfig(DenseConfig):
    """Sizes of a DFlash drafter."""

    blocks: BlockDrafts  # what it takes from its target, and drafts
    # for every layer, positions that a token sees, itself included; None for all
    windows: tuple[int | None, ...]
    causal: tuple[bool, ...]  # for every layer, a token of a block sees those before it alone
    convolutions: Convolutions | None = None  # of every layer, which other classes have

    @property
    def block_drafts(self) -> BlockDrafts:
        """Layers read from the target, and size of a drafted block."""
        return self.blocks

    @classmethod
    def from_hf(cls, config: Mapping[str, Any]) -> "DFlashConfig":
        """Read a `config.json`.

        Raises:
            UnsupportedModelError: see `read_config` of the package.
        """
        merged = merged_section(config)
        return cls(**read_parts(merged, CLASS, FEATURES))


def merged_section(config: Mapping[str, Any], name: str = SECTION) -> dict[str, Any]:
    """Keys of a `config.json`, those of a section in the place of the same ones beside it.

    Raises:
        UnsupportedModelError: the section is no object.
    """
    section = config.get(name, {})
    if not isinstance(section, dict):
        raise UnsupportedModelError(
            f"config.json: `{name}` must be an object, got {shown(section)}"
        )
    return {**config, **section}


def read_parts(
    merged: Mapping[str, Any],
    kind: str,
    features: Mapping[str, tuple[Any, ...]],
    read: Collection[str] = (),
    first: int = 1,
) -> dict[str, Any]:
    """Read what a DFlashConfig holds.

    Args:
        merged: see `merged_section`.
        kind: class of the drafter.
        features: keys that its kind does not implement, see `check_features`.
        read: keys that it does.
        first: see `read_blocks`.

    Raises:
        UnsupportedModelError: see `read_config` of the package.
    """
    check_layers(merged, kind)
    check_features(merged, features, read=(WINDOWED.key, CAUSAL.key, *read))
    values = dense.read_values(merged, (FULL, SLIDING))
    windows = _windows(merged, values["num_hidden_layers"])
    causal = read_field(merged, CAUSAL)
    return {
        **values,
        "intermediate_size": read_field(merged, INNER),
        "blocks": read_blocks(merged, values["vocab_size"], first=first),
        "windows": windows,
        "causal": tuple(window is not None if causal is None else causal for window in windows),
    }


def check_layers(config: Mapping[str, Any], kind: str) -> None:
    """Refuse a drafter of other layers than Qwen3's, or in another layout.

    Args:
        kind: class of the drafter.

    Raises:
        UnsupportedModelError: naming the class and its layers or layout.
    """
    if LAYOUT in config:
        raise UnsupportedModelError(
            f"config.json: a {kind} in the layout of speculators (`{LAYOUT}`) is not implemented",
            hint="its tensors have other names, and its vocabulary may be cut",
        )
    drafted, whole = config.get(CUT), config.get("vocab_size")
    if drafted is not None and drafted != whole:
        raise UnsupportedModelError(
            f"config.json: a {kind} with a vocabulary of its own (`{CUT}: {shown(drafted)}` beside "
            f"`vocab_size: {shown(whole)}`) is not implemented",
            hint="where the model has a draft head (lowbit-convert --draft-vocabulary), drafts of "
            "any drafter are chosen from its rows",
        )
    if config.get("model_type") not in LAYERS:
        raise UnsupportedModelError(
            f"config.json: a {kind} with layers of `{shown(config.get('model_type'))}` is not "
            "implemented",
            hint=f"implemented: {', '.join(LAYERS)}",
        )


def read_blocks(
    config: Mapping[str, Any], vocab_size: int, block: Field = BLOCK, first: int = 1
) -> BlockDrafts:
    """Read what a drafter takes from its target, and the size of a block.

    Args:
        block: key of the size of a block.
        first: place in a block whose output is the first draft.

    Raises:
        UnsupportedModelError: a key is missing or out of range.
    """
    mask = Field("mask_token_id", least=0, most=vocab_size - 1)
    depth = read_field(config, DEPTH)
    layers = MAX_LAYERS if depth is None else depth
    found = config.get(TAPS)
    known = isinstance(found, list) and all(type(t) is int and 0 <= t < layers for t in found)
    if not isinstance(found, list) or not known or not found or len({*found}) < len(found):
        named = f", got {shown(found)}" if TAPS in config else ""
        raise UnsupportedModelError(
            f"config.json: `{TAPS}` must be a list of different layers of the target, from 0 to "
            f"{layers - 1}{named}"
        )
    size, mask_token = read_field(config, block), read_field(config, mask)
    return BlockDrafts(size, mask_token, tuple(found), first, depth)


def read_width(config: Mapping[str, Any], field: Field) -> int:
    """Read a width of a head, which must suit packed linears and the kernels of dense ones.

    Raises:
        UnsupportedModelError: out of range, or not a multiple of UNIT.
    """
    width: int = read_field(config, field)
    if width % UNIT:
        raise UnsupportedModelError(
            f"config.json: `{field.key}: {width}` is not implemented",
            hint=f"implemented: multiples of {UNIT}",
        )
    return width


def read_convolutions(config: Mapping[str, Any], hidden_size: int) -> Convolutions:
    """Read the sizes of convolutions.

    Raises:
        UnsupportedModelError: a key is missing or out of range, or groups do not divide the width.
    """
    found = Convolutions(read_field(config, CONV_TAPS), read_field(config, CONV_GROUP))
    if hidden_size % found.group:
        raise UnsupportedModelError(
            f"config.json: `{CONV_GROUP.key}: {found.group}` does not divide hidden_size = "
            f"{hidden_size}"
        )
    return found


def _windows(config: Mapping[str, Any], layers: int) -> tuple[int | None, ...]:
    """Window of every layer; without a list of kinds no layer has one."""
    kinds = read_layer_types(config, layers, (FULL, SLIDING)) or (FULL,) * layers
    if SLIDING not in kinds:
        return (None,) * layers
    if not read_field(config, WINDOWED):
        raise UnsupportedModelError(
            f"config.json: `{WINDOWED.key}: false` beside layers of `{SLIDING}`"
        )
    window: int = read_field(config, WINDOW)
    return tuple(window if kind == SLIDING else None for kind in kinds)


def tensor_table(config: DFlashConfig, prefix: str) -> list[TensorSpec]:
    """All tensors of the checkpoint, in the order of the forward pass."""
    h = config.hidden_size
    return [
        TensorSpec(f"{prefix}fc.weight", (h, len(config.blocks.target_layers) * h), "attention"),
        TensorSpec(f"{prefix}hidden_norm.weight", (h,), "norm"),
        *dense.layer_table(config, prefix),
        *_convolution_table(config, prefix),
        TensorSpec(f"{prefix}norm.weight", (h,), "norm"),
    ]


def _convolution_table(config: DFlashConfig, prefix: str) -> list[TensorSpec]:
    """Two convolutions, before and behind, around attention and MLP of every layer."""
    sizes, h = config.convolutions, config.hidden_size
    found: list[TensorSpec] = []
    if sizes is None:
        return found
    for layer in range(config.num_hidden_layers):
        for p in (f"{prefix}layers.{layer}.{part}_conv" for part in ("attention", "mlp")):
            rows = 2 * sizes.taps * (h // sizes.group)
            found.append(TensorSpec(f"{p}.kernel_projection.weight", (rows, h), "drafter"))
            found.append(TensorSpec(f"{p}.base_kernel", (2, sizes.taps, h), "drafter"))
    return found


ARCHITECTURE = Architecture(
    model_types=LAYERS,
    read_config=DFlashConfig.from_hf,
    tensor_table=tensor_table,
    prefix_of=lambda config, names: "",
    is_tied=lambda config: False,  # it has neither embedding nor head
)
