"""Base recipes: bits of every linear by its role, for conversion and for quantization at load."""

from collections.abc import Sequence
from typing import Literal

from lowbit.formats.architectures.table import TensorSpec
from lowbit.formats.errors import QuantizationError
from lowbit.formats.layout.scheme import AS_STORED as AS_STORED
from lowbit.formats.layout.scheme import Scheme, fitting_group_size, stored_option

Base = Literal["int4", "int8", "int3", "int2"]

GROUP_SIZE = 128  # default

# Bits by recipe and role. By published sensitivities the output of a gated DeltaNet suffers most,
# then attention, then MLP. Multi-token prediction only drafts: its errors cost speed alone.
# Below 4 bits attention and DeltaNet's inputs get one bit more: of the bundled models that took a
# quarter to two fifths off the mean KL with `gptq`, more than as many bytes for `down_proj`.
_ATTENTION = ("attention", "delta_in")
_MLP = ("mlp", "expert")
_ALWAYS = {"delta_out": 8, "head": 8, "mtp": 4}
BITS_BY_ROLE: dict[Base, dict[str, int]] = {
    "int4": {**_ALWAYS, **dict.fromkeys((*_ATTENTION, *_MLP), 4)},
    "int8": {**_ALWAYS, **dict.fromkeys((*_ATTENTION, *_MLP), 8)},
    "int3": {**_ALWAYS, **dict.fromkeys(_ATTENTION, 4), **dict.fromkeys(_MLP, 3)},
    "int2": {**_ALWAYS, **dict.fromkeys(_ATTENTION, 3), **dict.fromkeys(_MLP, 2)},
}


def base_schemes(
    base: Base, table: Sequence[TensorSpec], group_size: int = GROUP_SIZE
) -> dict[str, Scheme | None]:
    """The scheme of every linear module by a base recipe, None for those not quantized.

    Where the group size does not divide K, a smaller one does (`fitting_group_size`).

    Raises:
        QuantizationError: no such recipe, or no group size divides K.
    """
    if base not in BITS_BY_ROLE:
        raise QuantizationError(
            f"recipe `{base}` is not known", hint=f"recipes: {', '.join(BITS_BY_ROLE)}"
        )
    schemes: dict[str, Scheme | None] = {}
    for spec in table:
        if not spec.quantizable:
            continue
        bits = BITS_BY_ROLE[base][spec.role]
        K = spec.shape[1]
        fitting = fitting_group_size(K, group_size) or K
        if bits != AS_STORED and K % fitting:
            raise QuantizationError(
                f"`{spec.module}`: groups of {group_size} or less do not divide K = {K}",
                hint=f"convert with {stored_option([spec.module])} and run the result",
            )
        schemes[spec.module] = None if bits == AS_STORED else Scheme(bits, fitting)
    return schemes
