"""GPTQ files, as AutoGPTQ, GPTQModel, transformers and AutoRound write them.

`qweight` [K * bits / 32, N] is the native `weight_packed` transposed, word for word; `qzeros`
[K/G, N * bits / 32] is the native `weight_zero_point`. Version 1 (`"gptq"`) stores zero points
minus one, version 2 (`"gptq_v2"`) as they are. `dynamic` overrides modules by pattern: the first
match (`+:` or bare) wins, and `-:` leaves a module unquantized.
"""

import re
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from lowbit.formats.errors import FormatError
from lowbit.formats.foreign.native import (
    CODES,
    ZEROS,
    ForeignLinear,
    as_native,
    matrix,
    packed_modules,
    read_columns,
    read_scheme,
)
from lowbit.formats.layout.packing import WORD_BITS, unpack
from lowbit.formats.layout.scheme import Scheme
from lowbit.formats.machine.time_limit import time_limit
from lowbit.formats.safetensors.checkpoint import Checkpoint

ZERO_OFFSETS = {"gptq": 1, "gptq_v2": 0}  # to add to the stored zero points, by version


def read_gptq(checkpoint: Checkpoint, section: Mapping[str, Any]) -> Checkpoint:
    """Translate a GPTQ checkpoint into the native layout.

    Raises:
        FormatError: another packing, bits other than 4 and 8, activation-ordered groups, or
            tensors that do not fit.
        QuantizationError: the group size does not divide K.
    """
    version = section.get("checkpoint_format", section.get("format", "gptq"))
    if section.get("is_marlin_format"):
        version = "marlin"
    if not isinstance(version, str) or version not in ZERO_OFFSETS:
        raise FormatError(
            f"config.json: GPTQ checkpoint format `{version}` is not supported",
            hint="read: gptq (version 1) and gptq_v2, in 32-bit words",
        )
    if section.get("pack_dtype", "int32") != "int32":
        raise FormatError(f"config.json: pack_dtype `{section['pack_dtype']}`, expected `int32`")
    offset = ZERO_OFFSETS[version]
    modules = packed_modules(checkpoint)
    with time_limit("config.json: matching the patterns of `dynamic`"):
        schemes = [_scheme(section, module) for module in modules]
    return as_native(
        checkpoint,
        [
            _linear(checkpoint, module, scheme, offset)
            for module, scheme in zip(modules, schemes, strict=True)
        ],
    )


def _scheme(section: Mapping[str, Any], module: str) -> Scheme:
    """The scheme of a module, from the first override that matches it or the section."""
    dynamic = section.get("dynamic") or {}
    if not isinstance(dynamic, dict) or not all(isinstance(x, dict) for x in dynamic.values()):
        raise FormatError("config.json: `dynamic` is not an object of objects")
    for pattern, override in dynamic.items():
        if _matches(pattern, module):
            if pattern.startswith("-:"):
                raise FormatError(
                    f"`{module}` is packed, but `dynamic` in config.json excludes it: `{pattern}`"
                )
            return read_scheme({**section, **override}, f"config.json: `{pattern}`")
    return read_scheme(section, "config.json: GPTQ")


def _matches(pattern: str, module: str) -> bool:
    try:
        return re.match(re.sub("^[+-]:", "", pattern), module) is not None
    except (re.error, OverflowError, RecursionError) as error:
        raise FormatError(f"config.json: bad pattern `{pattern}`: {error}") from None


def _linear(checkpoint: Checkpoint, module: str, scheme: Scheme, offset: int) -> ForeignLinear:
    name = f"{module}.{CODES}"
    words, N = matrix(checkpoint, name, (torch.int32,)).shape

    def codes(start: int, stop: int, device: torch.device) -> Tensor:
        return read_columns(checkpoint, name, start, stop).to(device).T.contiguous()

    def zero_points() -> Tensor:
        stored = unpack(checkpoint.read(f"{module}.{ZEROS}"), scheme.bits, N)
        if offset and bool((stored == scheme.code_max).any()):
            raise FormatError(
                f"`{module}.{ZEROS}`: a zero point of {1 << scheme.bits} has no {scheme.bits}-bit "
                "code",
                hint="the file may be of version 2 (`gptq_v2`), which config.json should say, or "
                "hold a zero point of 0, which libraries store differently: save it as `gptq_v2`",
            )
        return stored + offset

    K = words * WORD_BITS // scheme.bits
    return ForeignLinear(module, N, K, scheme, codes, zero_points)
