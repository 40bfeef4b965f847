"""Parts of a tensor's or module's name: before the layer, its number, and inside the layer."""

import re
from collections.abc import Iterable
from typing import NamedTuple

_LAYER = re.compile(r"^((?:.*\.)?)layers\.(\d+)\.(.+)$")
_EXPERT = re.compile(r"\.experts\.(\d+)\.")
_MODEL = re.compile(r"^model\.(?:language_model\.)?")
MTP_PREFIX = "mtp."  # of the multi-token-prediction head, which has layers of its own
MTP_EMBEDDING_NORM = f"{MTP_PREFIX}pre_fc_norm_embedding.weight"
MTP_HIDDEN_NORM = f"{MTP_PREFIX}pre_fc_norm_hidden.weight"
MTP_FC = f"{MTP_PREFIX}fc.weight"
MTP_NORM = f"{MTP_PREFIX}norm.weight"


class LayerName(NamedTuple):
    """A name split at its layer."""

    prefix: str  # before `layers`, `model.` or `mtp.`; empty outside of layers
    layer: int | None  # its number; None outside of layers
    rest: str  # name inside the layer; the whole name outside of layers


def split_layer(name: str) -> LayerName:
    """Split a name at its layer.

    >>> split_layer("model.layers.3.mlp.up_proj.weight")
    LayerName(prefix='model.', layer=3, rest='mlp.up_proj.weight')
    >>> split_layer("lm_head.weight")
    LayerName(prefix='', layer=None, rest='lm_head.weight')
    """
    match = _LAYER.match(name)
    if match is None:
        return LayerName("", None, name)
    return LayerName(match[1], int(match[2]), match[3])


def without_model(name: str) -> str:
    """A name without `model.` or `model.language_model.` in front.

    >>> without_model("model.language_model.norm.weight")
    'norm.weight'
    """
    return _MODEL.sub("", name)


def expert_of(name: str) -> int | None:
    """Number of the expert that a tensor or module belongs to; None for others.

    >>> expert_of("model.layers.0.mlp.experts.17.up_proj")
    17
    """
    match = _EXPERT.search(name)
    return None if match is None else int(match[1])


def any_expert(name: str) -> str:
    """A name with `*` for the number of its expert; the same for all experts of a layer.

    >>> any_expert("model.layers.0.mlp.experts.17.up_proj")
    'model.layers.0.mlp.experts.*.up_proj'
    """
    return _EXPERT.sub(".experts.*.", name)


def spans(numbers: Iterable[int]) -> str:
    """Ascending numbers, of layers for instance, as ranges.

    >>> spans([0, 1, 2, 5])
    '0-2, 5'
    """
    runs: list[list[int]] = []
    for number in numbers:
        if runs and number == runs[-1][-1] + 1:
            runs[-1][1:] = [number]
        else:
            runs.append([number])
    return ", ".join("-".join(map(str, run)) for run in runs)
