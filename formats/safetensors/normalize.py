"""Headers of a checkpoint under the names of its architecture, and the tie that its weights have.

Wrappers and other savers put prefixes before the names, or leave `model.` out. config.json may tie
a head that the file holds with other values, or the file may hold one of two tied tensors, either
one. Every change is a renamed header or a changed key, and a sentence that says so.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

from lowbit.formats.architectures import (
    is_drafter,
    is_known,
    prefix_of,
    tie_flags,
    tied_as,
)
from lowbit.formats.layout.quantization_config import KEY, METHOD
from lowbit.formats.safetensors.tensor_info import TensorInfo

LM_HEAD = "lm_head.weight"
EMBEDDING = "embed_tokens.weight"
# Prefixes put before every name: by torch.compile, DataParallel, and PEFT around a merged model.
WRAPPERS = ("_orig_mod.", "module.", "base_model.model.")
OUTER = "language_model."  # of a decoder in a larger model: before `model.` and `lm_head.`
BARE = ("embed_tokens.", "layers.", "norm.", "language_model.", "visual.")  # names in `model.`
DECOMPRESSED = "decompressed"  # quantization_status of weights that were unpacked, then saved
PACKED_ENDING = ".weight_packed"

SameValues = Callable[[TensorInfo, TensorInfo], bool]


@dataclass(frozen=True, slots=True)
class Normalized:
    """Config and headers as their architecture has them."""

    config: Mapping[str, Any]  # content of config.json, its tie that of the weights
    tensors: Mapping[str, TensorInfo]  # headers by name
    notes: tuple[str, ...]  # a sentence for every change


def normalize(
    config: Mapping[str, Any], tensors: Mapping[str, TensorInfo], same: SameValues | None
) -> Normalized:
    """Rename headers, and take tie and layout from what the file holds.

    Args:
        same: tells if two tensors hold equal values; None where only headers are at hand, so that
            config.json is believed about a head beside its embedding.
    """
    found = Normalized(config, tensors, ())
    if not is_known(config) or is_drafter(config):
        return found
    found = _with_known_names(found)
    found = _without_packing(found)
    found = _with_own_cache(found)
    return _with_real_tie(found, same)


def _with_known_names(found: Normalized) -> Normalized:
    """Strip wrappers' prefixes, and add a `model.` that is missing."""
    names = {name: name for name in found.tensors}
    notes = []
    for prefix in WRAPPERS:
        if names and all(name.startswith(prefix) for name in names.values()):
            names = {old: name.removeprefix(prefix) for old, name in names.items()}
            notes.append(f"the tensors' names begin with `{prefix}`, which is left out")
    outer = {f"{OUTER}model.", f"{OUTER}lm_head."}
    if any(name.startswith(f"{OUTER}model.") for name in names.values()):
        names = {
            old: name.removeprefix(OUTER) if name.startswith(tuple(outer)) else name
            for old, name in names.items()
        }
        notes.append(f"the decoder's names begin with `{OUTER}`, which is left out")
    known = prefix_of(found.config, ()).partition(".")[0] + "."
    if any(name.startswith(BARE) for name in names.values()) and not any(
        name.startswith(known) for name in names.values()
    ):
        names = {
            old: f"{known}{name}" if name.startswith(BARE) else name for old, name in names.items()
        }
        notes.append(f"the decoder's names lack `{known}`, which is added")
    if not notes or len(set(names.values())) < len(names):
        return found
    tensors = {names[old]: replace(info, name=names[old]) for old, info in found.tensors.items()}
    return Normalized(found.config, tensors, (*found.notes, *notes))


def _without_packing(found: Normalized) -> Normalized:
    """Leave out a `quantization_config` whose weights have been unpacked."""
    section = found.config.get(KEY)
    if (
        not isinstance(section, dict)
        or section.get("quant_method") != METHOD
        or section.get("quantization_status") != DECOMPRESSED
        or any(name.endswith(PACKED_ENDING) for name in found.tensors)
    ):
        return found
    config = {key: value for key, value in found.config.items() if key != KEY}
    note = "config.json says that the weights were unpacked before they were saved: read as dense"
    return Normalized(config, found.tensors, (*found.notes, note))


def _with_own_cache(found: Normalized) -> Normalized:
    """Say that the scales of a quantized KV cache are not used."""
    section = found.config.get(KEY)
    if not isinstance(section, dict) or not section.get("kv_cache_scheme"):
        return found
    note = "config.json has a quantized KV cache (`kv_cache_scheme`): it is not used"
    return Normalized(found.config, found.tensors, (*found.notes, note))


def _with_real_tie(found: Normalized, same: SameValues | None) -> Normalized:
    """Let config.json tie the head if the weights are tied; transformers 5 decides alike."""
    flags = tie_flags(found.config)
    if True not in flags:
        return found
    embedding = f"{prefix_of(found.config, found.tensors)}{EMBEDDING}"
    both = embedding in found.tensors and LM_HEAD in found.tensors
    if both and same is None:
        return found
    if both and same is not None and not same(found.tensors[embedding], found.tensors[LM_HEAD]):
        note = (
            f"config.json ties the head to the embedding, but `{LM_HEAD}` holds other values than "
            f"`{embedding}`: it is used, as transformers does"
        )
        return Normalized(tied_as(found.config, False), found.tensors, (*found.notes, note))
    tensors, notes = dict(found.tensors), list(found.notes)
    if LM_HEAD in tensors and not both:
        info = tensors.pop(LM_HEAD)
        tensors[embedding] = replace(info, name=embedding)
        notes.append(
            f"the file holds `{LM_HEAD}` alone of two tied tensors: it is the embedding too"
        )
    if False in flags:
        notes.append("config.json ties the head to the embedding in one of two places: it is tied")
    return Normalized(tied_as(found.config, True), tensors, tuple(notes))
