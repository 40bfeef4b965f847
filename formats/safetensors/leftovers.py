"""Tensors that a model does not need: why each is left out, by the ending of its name.

Older releases of transformers saved rotary frequencies; llm-compressor writes scales of a quantized
KV cache; TRL puts a value head beside the model; transformers saves the scales of weights that it
has unpacked.
"""

from collections.abc import Mapping

from lowbit.formats.layout.packing import FLOATS, PACKED, SCALE, SHAPE, ZERO_POINT
from lowbit.formats.safetensors.tensor_info import TensorInfo

ROTARY = (".rotary_emb.inv_freq", ".rotary_emb.original_inv_freq")
CACHE_SCALES = tuple(
    f".self_attn.{part}"
    for part in (
        *(f"{x}_scale" for x in "qkv"),
        *(f"attn.{x}_scale" for x in "qkv"),
        *(f"{x}_proj.output_scale" for x in "qkv"),
        *(f"{x}_proj.{x}_scale" for x in "kv"),
    )
)
VALUE_HEADS = ("v_head.", "value_head.")
UNPACKED = (SCALE, SHAPE, ZERO_POINT)


def leftovers(tensors: Mapping[str, TensorInfo]) -> dict[str, str]:
    """Reason for every tensor that is left out, by name."""
    found = {name: _reason(name, tensors) for name in tensors}
    return {name: reason for name, reason in found.items() if reason is not None}


def _reason(name: str, tensors: Mapping[str, TensorInfo]) -> str | None:
    """Reason to leave a tensor out; None for one that the model needs, or that nobody knows."""
    if name.endswith(ROTARY):
        return "rotary frequencies: computed from config.json"
    if name.endswith(CACHE_SCALES):
        return "scale of a quantized KV cache: not used"
    if name.startswith(VALUE_HEADS):
        return "value head of a training: no part of the language model"
    module, _, suffix = name.rpartition(".")
    weight = tensors.get(f"{module}.weight")
    if suffix in UNPACKED and weight is not None and f"{module}.{PACKED}" not in tensors:
        return "left from a packed weight that was unpacked" if weight.dtype in FLOATS else None
    return None
