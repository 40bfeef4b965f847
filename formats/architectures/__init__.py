"""Tensor table of each architecture, found by `model_type`."""

from collections.abc import Collection, Mapping
from typing import Any, Literal

from lowbit.formats.architectures import dense, qwen3_5
from lowbit.formats.architectures.decoder import TIED, TIED_FIELD
from lowbit.formats.architectures.dense import DenseConfig
from lowbit.formats.architectures.qwen3_5 import Qwen35Config
from lowbit.formats.architectures.table import TensorSpec
from lowbit.formats.errors import CheckpointError, UnsupportedModelError
from lowbit.formats.fields import MAX_SHOWN, read_field

Part = Literal["decoder", "mtp", "vision"]

Config = DenseConfig | Qwen35Config

SUPPORTED = (*dense.MODEL_TYPES, *qwen3_5.MODEL_TYPES)


def tensor_table(config: Mapping[str, Any], names: Collection[str] = ()) -> list[TensorSpec]:
    """Every tensor that a checkpoint with this `config.json` has, a tied head included.

    Args:
        config: content of config.json.
        names: tensors of the checkpoint, which decide the prefix and whether there is an MTP head;
            without them both are as in the checkpoints on the Hub.

    Raises:
        UnsupportedModelError: the architecture, or a feature of it, is not implemented.
        CheckpointError: the config has more layers than the checkpoint has tensors.
    """
    parsed = read_config(config)
    if 0 < len(names) < parsed.num_hidden_layers:
        raise CheckpointError(
            f"config.json: `num_hidden_layers` is {parsed.num_hidden_layers}, but the checkpoint "
            f"holds {len(names)} tensors",
            hint="config.json and weights do not belong together, or the download is incomplete",
        )
    if isinstance(parsed, DenseConfig):
        return dense.tensor_table(parsed)
    with_mtp = not names or any(name.startswith(qwen3_5.MTP_PREFIX) for name in names)
    return qwen3_5.tensor_table(parsed, qwen3_5.prefix_of(config, names), with_mtp)


def read_config(config: Mapping[str, Any]) -> Config:
    """Parse the sizes that a `config.json` describes.

    Raises:
        UnsupportedModelError: a key is missing, out of range or names a feature that is not
            implemented, or two keys disagree.
    """
    model_type = config.get("model_type")
    if model_type in dense.MODEL_TYPES:
        return DenseConfig.from_hf(config)
    if model_type in qwen3_5.MODEL_TYPES:
        return Qwen35Config.from_hf(config)
    raise UnsupportedModelError(
        f"config.json: model_type `{str(model_type)[:MAX_SHOWN]}` is not supported",
        hint=f"supported: {', '.join(SUPPORTED)}",
    )


def part_of(config: Mapping[str, Any], name: str) -> Part:
    """Part of the model that a tensor belongs to; embedding and head belong to the decoder."""
    if config.get("model_type") in qwen3_5.MODEL_TYPES:
        if name.startswith(qwen3_5.VISION_PREFIXES):
            return "vision"
        if name.startswith(qwen3_5.MTP_PREFIX):
            return "mtp"
    return "decoder"


def is_carried(config: Mapping[str, Any], name: str) -> bool:
    """Tell if a tensor belongs to the vision tower, which is copied unchecked."""
    return part_of(config, name) == "vision"


def never_quantized(config: Mapping[str, Any], names: Collection[str]) -> tuple[str, ...]:
    """Patterns, for engines' module names, of the linears that no recipe quantizes."""
    if config.get("model_type") not in qwen3_5.MODEL_TYPES:
        return ()
    vision = any(is_carried(config, name) for name in names)
    return (*((qwen3_5.VISION_PATTERN,) if vision else ()), qwen3_5.GATES_PATTERN)


def is_tied(config: Mapping[str, Any]) -> bool:
    """Tell if the head shares the embedding's weight.

    Raises:
        UnsupportedModelError: no flag, or an outer and a nested one that disagree.
    """
    if config.get("model_type") in qwen3_5.MODEL_TYPES:
        return qwen3_5.is_tied(config)
    return bool(read_field(config, TIED_FIELD))


def untied(config: Mapping[str, Any]) -> dict[str, Any]:
    """A copy of the config with `tie_word_embeddings` false wherever an engine may look."""
    changed = {**config, TIED: False}
    nested = config.get("text_config")
    if isinstance(nested, dict) and TIED in nested:
        changed["text_config"] = {**nested, TIED: False}
    return changed
