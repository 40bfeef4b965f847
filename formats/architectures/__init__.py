"""Families of models, found by `model_type`; of drafters, by the class of the model."""

from collections.abc import Collection, Mapping
from itertools import chain
from typing import Any

from lowbit.formats.architectures import (
    dense,
    dflash,
    dflash2,
    domino,
    dspark,
    lilicorr,
    qwen3_5,
    qwen3_5_moe,
    qwen3_moe,
    xpress,
)
from lowbit.formats.architectures.architecture import PREFIX, Architecture, Part, plain_tied
from lowbit.formats.architectures.config import Config
from lowbit.formats.architectures.decoder import TEXT, TIED
from lowbit.formats.architectures.table import TensorSpec
from lowbit.formats.architectures.vision import VISION, VisionConfig
from lowbit.formats.architectures.vision import read_vision as read_tower
from lowbit.formats.errors import CheckpointError, UnsupportedModelError
from lowbit.formats.fields import MAX_SHOWN

__all__ = [
    "ARCHITECTURES",
    "DRAFTERS",
    "MIXTURES",
    "OTHER_DRAFTERS",
    "ROTATABLE",
    "SUPPORTED",
    "Architecture",
    "Config",
    "Part",
    "architecture_of",
    "is_carried",
    "is_drafter",
    "is_known",
    "is_tied",
    "kind_of",
    "never_quantized",
    "part_of",
    "prefix_of",
    "read_config",
    "read_vision",
    "tensor_table",
    "tie_flags",
    "tied_as",
    "unpacked_modules",
    "untied",
    "unused",
    "vision_prefix",
    "without_mtp",
]

ARCHITECTURES: Mapping[str, Architecture[Any]] = {
    model_type: family
    for family in (
        dense.ARCHITECTURE,
        qwen3_moe.ARCHITECTURE,
        qwen3_5.ARCHITECTURE,
        qwen3_5_moe.ARCHITECTURE,
    )
    for model_type in family.model_types
}
# Known families without an implementation, by model_type, and what they would need.
WANTING: Mapping[str, str] = dict.fromkeys(
    ("qwen4_exp", "qwen4_exp_text"),
    "beside Qwen3.5's mixtures it has hyper-connections (several residual streams, mixed by every "
    "layer), sparse attention to blocks that an indexer chooses, and a table of n-gram embeddings",
)
DRAFTERS: Mapping[str, Architecture[Any]] = {
    dflash.CLASS: dflash.ARCHITECTURE,
    dspark.CLASS: dspark.ARCHITECTURE,
    dspark.SPECFORGE: dspark.BY_SPECFORGE,
    xpress.CLASS: xpress.ARCHITECTURE,
    domino.CLASS: domino.ARCHITECTURE,
    dflash2.CLASS: dflash2.ARCHITECTURE,
    lilicorr.CLASS: lilicorr.ARCHITECTURE,
}
# Known classes of drafters without an implementation, and what they have beside DFlash's layers.
OTHER_DRAFTERS: Mapping[str, str] = {
    "Gemma4DSparkModel": "DSpark's head over layers of Gemma 4",
    "XPressDraftModel": "xPress' head in the layout of speculators",
}
# Classes of other heads that files with the class of DFlash mean, by what their section says
PROJECTORS: Mapping[str, str] = {domino.PROJECTOR: domino.CLASS}
DRAFTS = "DraftModel"  # ends the class of most drafters
SUPPORTED = tuple(ARCHITECTURES)
MIXTURES = tuple(name for name, family in ARCHITECTURES.items() if family.experts)
ROTATABLE = tuple(name for name, family in ARCHITECTURES.items() if family.stream is not None)


def architecture_of(config: Mapping[str, Any]) -> Architecture[Any]:
    """Family of the model that a `config.json` describes.

    Raises:
        UnsupportedModelError: the family is not implemented.
    """
    found = _find(config)
    if found is None:
        kind = kind_of(config)
        by_class = _names_drafter(kind)
        value = kind if by_class else str(config.get("model_type"))
        if kind in WANTING:
            raise UnsupportedModelError(
                f"config.json: model_type `{kind}` is not implemented: {WANTING[kind]}",
                hint=f"supported: {', '.join(SUPPORTED)}",
            )
        what = f": it has {OTHER_DRAFTERS[kind]}" if kind in OTHER_DRAFTERS else ""
        raise UnsupportedModelError(
            f"config.json: {'class' if by_class else 'model_type'} `{value[:MAX_SHOWN]}` is not "
            f"supported{what}",
            hint=f"supported: {', '.join(DRAFTERS if by_class else SUPPORTED)}",
        )
    return found


def _find(config: Mapping[str, Any]) -> Architecture[Any] | None:
    """Family of a `config.json` that nobody has checked; None for an unknown one."""
    kind = kind_of(config)
    return DRAFTERS.get(kind) or ARCHITECTURES.get(kind)


def is_known(config: Mapping[str, Any]) -> bool:
    """Tell if the family of a `config.json` that nobody has checked is implemented."""
    return _find(config) is not None


def kind_of(config: Mapping[str, Any]) -> str:
    """Class of a drafter, model_type of another model; empty where an unchecked config has none.

    A drafter of DFlash's class whose `projector_type` names another head has that head's class.
    """
    classes = config.get("architectures")
    for name in classes if isinstance(classes, list) else ():
        if isinstance(name, str) and _names_drafter(name):
            return _by_projector(config) if name == dflash.CLASS else name
    model_type = config.get("model_type")
    return model_type if isinstance(model_type, str) else ""


def _by_projector(config: Mapping[str, Any]) -> str:
    section = config.get(dflash.SECTION)
    found = section.get(dflash.KIND) if isinstance(section, dict) else None
    return PROJECTORS.get(found, dflash.CLASS) if isinstance(found, str) else dflash.CLASS


def _names_drafter(name: str) -> bool:
    return name.endswith(DRAFTS) or name in DRAFTERS or name in OTHER_DRAFTERS


def is_drafter(config: Mapping[str, Any]) -> bool:
    """Tell if a checkpoint proposes tokens for another model, and has no head of its own."""
    return kind_of(config) in DRAFTERS


def tensor_table(config: Mapping[str, Any], names: Collection[str] = ()) -> list[TensorSpec]:
    """Every tensor that a checkpoint with this `config.json` has, a tied head included.

    Args:
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
    table = architecture_of(config).tensor_table(parsed, prefix_of(config, names))
    if not names or any(part_of(config, name) == "mtp" for name in names):
        return table
    return [spec for spec in table if part_of(config, spec.name) != "mtp"]


def read_config(config: Mapping[str, Any]) -> Config:
    """Parse the sizes that a `config.json` describes.

    Raises:
        UnsupportedModelError: a key is missing, out of range or names a feature that is not
            implemented, or two keys disagree.
    """
    parsed: Config = architecture_of(config).read_config(config)
    return parsed


def prefix_of(config: Mapping[str, Any], names: Collection[str] = ()) -> str:
    """Prefix of decoder tensors: that of `names`, or without names that used on the Hub."""
    found = _find(config)
    return PREFIX if found is None else found.prefix_of(config, names)


def part_of(config: Mapping[str, Any], name: str) -> Part:
    """Part of the model that a tensor belongs to; embedding and head belong to the decoder."""
    found = _find(config)
    for part, prefixes in {} if found is None else found.parts.items():
        if name.startswith(prefixes):
            return part
    return "decoder"


def is_carried(config: Mapping[str, Any], name: str) -> bool:
    """Tell if a tensor belongs to the vision tower, which is copied unchecked."""
    return part_of(config, name) == "vision"


def read_vision(config: Mapping[str, Any]) -> VisionConfig | None:
    """Parse the sizes of the vision tower that a `config.json` describes; None without one.

    Raises:
        UnsupportedModelError: see `read_config`, for the tower's part and the decoder's.
    """
    if VISION not in config or "vision" not in architecture_of(config).parts:
        return None
    sizes = read_config(config)
    return read_tower(config, sizes.vocab_size, sizes.hidden_size)


def vision_prefix(config: Mapping[str, Any], names: Collection[str]) -> str | None:
    """Prefix of the vision tower's tensors; None where a checkpoint's `names` have none of it."""
    found = _find(config)
    prefixes = () if found is None else found.parts.get("vision", ())
    return next((p for p in prefixes if any(name.startswith(p) for name in names)), None)


def unused(config: Mapping[str, Any], names: Collection[str]) -> dict[str, str]:
    """Reason for every one of these tensors that a drafter has beside those it needs, by name."""
    found = _find(config)
    reasons = {} if found is None else found.unused
    return {name: reasons[name] for name in names if name in reasons}


def never_quantized(config: Mapping[str, Any], names: Collection[str]) -> tuple[str, ...]:
    """Patterns, for engines' module names, of the linears that no recipe quantizes."""
    found = _find(config)
    if found is None or not found.unquantized:
        return ()
    present = {"decoder", *(part_of(config, name) for name in names)}
    patterns = (listed for part, listed in found.unquantized.items() if part in present)
    return tuple(chain.from_iterable(patterns))


def unpacked_modules(config: Mapping[str, Any]) -> tuple[str, ...]:
    """Regular expressions for the decoder's linears that no engine here reads packed."""
    found = _find(config)
    patterns = () if found is None else found.unquantized.get("decoder", ())
    return tuple(pattern.removeprefix("re:") for pattern in patterns)


def is_tied(config: Mapping[str, Any]) -> bool:
    """Tell if the head shares the embedding's weight.

    Raises:
        UnsupportedModelError: no flag, or an outer and a nested one that disagree.
    """
    found = _find(config)
    return plain_tied(config) if found is None else found.is_tied(config)


def tie_flags(config: Mapping[str, Any]) -> tuple[Any, ...]:
    """Every `tie_word_embeddings` of an unchecked config, in both places where engines look.

    One that is absent counts as false beside another that is not.
    """
    nested = config.get(TEXT)
    places = (config, nested) if isinstance(nested, dict) else (config,)
    if len(places) > 1 and config.get(TIED) is True and TIED not in places[1]:
        places = (config,)  # the nested one follows the outer one
    return tuple(place.get(TIED, False) for place in places)


def tied_as(config: Mapping[str, Any], tied: bool) -> dict[str, Any]:
    """A copy of the config with one `tie_word_embeddings` wherever an engine may look."""
    changed = {**config, TIED: tied}
    nested = config.get(TEXT)
    if isinstance(nested, dict) and TIED in nested:
        changed[TEXT] = {**nested, TIED: tied}
    return changed


def untied(config: Mapping[str, Any]) -> dict[str, Any]:
    """A copy of the config that ties no head."""
    return tied_as(config, False)


def without_mtp(config: Mapping[str, Any]) -> dict[str, Any]:
    """A copy of the config that counts no layers of an MTP head wherever an engine may look."""
    key = architecture_of(config).mtp_layers
    changed = dict(config)
    nested = config.get(TEXT)
    if key is not None and isinstance(nested, dict) and nested.get(key):
        changed[TEXT] = {**nested, key: 0}
    return {**changed, key: 0} if key is not None and config.get(key) else changed
