"""Notes on stderr about a loaded model: choices made for the user, effects of options."""

from collections import Counter
from typing import TYPE_CHECKING

from lowbit.formats.layout.recipes import GROUP_SIZE
from lowbit.formats.shell.output import note
from lowbit.runtime.engine.load_options import DEFAULT_ACTIVATIONS, DEFAULT_VISION_DEVICE

THROUGH_HOST = (
    "the GPUs do not reach each other's memory, and exchange through the host's, which is slower"
)

if TYPE_CHECKING:
    from lowbit.runtime.engine.model import Model


def note_choices(model: "Model") -> None:
    """Print a line for each choice that was made while the model was loaded."""
    options = model.options
    for text in model.opened.checkpoint.notes:
        note(text)
    if options.speculate == "auto" and options.drafter is None and not model.opened.drafts:
        note("--speculate auto: the model has no MTP head, so that drafts come from n-grams alone")
    if model.sequences.reason is not None:
        note(f"--sequences: {model.sequences.count}, {model.sequences.reason}")
    if model.kv_cache.reason is not None:
        chosen = model.kv_cache
        note(f"--kv-cache auto: {chosen.cache_type.name}, since {chosen.reason}")
    if model.crew is not None:
        from lowbit.runtime.models.shards import SAME_TOKENS  # needs torch

        ranks, tokens = options.tensor_parallel, SAME_TOKENS[model.device]
        note(f"--tensor-parallel {ranks}: so many processes share the model; {tokens}")
        if model.crew.through_host:
            note(f"--tensor-parallel {ranks}: {THROUGH_HOST}")
    if options.activations != DEFAULT_ACTIVATIONS:
        note(f"activations: {options.activations} in all quantized linears but the head")
    if options.quantize is not None:
        note_quantized(model)
    if model.device != "cpu" and model.launches is None and model.crew is None:
        note_older_launches()


def note_vision(model: "Model") -> None:
    """Tell on stderr where images are read, where that was a choice, or that they are not."""
    asked, vision = model.options.vision_device, model.vision
    if vision is None:
        if asked != DEFAULT_VISION_DEVICE:
            note(f"--vision-device {asked} has no effect: {model.no_vision}")
    elif vision.place.reason:
        note(f"--vision-device {asked}: {vision.place.device}; {vision.place.reason}")


def note_plain(model: "Model") -> None:
    """Point to --quantize on stderr where no weight is quantized."""
    if not any(model.opened.schemes.values()):
        note("the weights are not quantized: --quantize int4 makes them smaller and faster")


def note_quantized(model: "Model") -> None:
    """Print a line on the weights quantized at load, and one on those with smaller groups."""
    options = model.options
    size, method = options.group_size, options.method
    schemes = [scheme for scheme in model.opened.schemes.values() if scheme is not None]
    smaller = Counter(scheme.group_size for scheme in schemes if scheme.group_size != size)
    if smaller:
        counts = ", ".join(f"{count} to {lower}" for lower, count in smaller.items())
        note(f"group size: {size} does not divide the rows of some linears; lowered {counts}")
    chosen = "" if method == "rtn" else f" {method}"
    groups = "" if size == GROUP_SIZE else f" in groups of {size}"
    note(f"quantized at load: {options.quantize}{chosen}{groups}, {model.load_s:.1f} s")


def note_older_launches() -> None:
    """Print a line if launches were measured on this GPU, but with other kernels."""
    from lowbit.runtime.kernels.launch.tuned import card_here, of_other_kernels

    if of_other_kernels(card_here()):
        note(
            "launches that were measured on this GPU are of other kernels and not used: "
            "lowbit-run tune measures again"
        )
