"""AutoRound's own files: GPTQ or AWQ layouts under another `quantization_config`."""

from collections.abc import Mapping
from typing import Any

from lowbit.formats.errors import FormatError

# `quant_method` of each `packing_format` and, for GPTQ, the version
LAYOUTS: Mapping[str, Mapping[str, str]] = {
    "auto_round": {"quant_method": "gptq", "checkpoint_format": "gptq_v2"},
    "auto_round:gptqmodel": {"quant_method": "gptq", "checkpoint_format": "gptq_v2"},
    "auto_round:auto_gptq": {"quant_method": "gptq", "checkpoint_format": "gptq"},
    "auto_round:auto_awq": {"quant_method": "awq", "version": "gemm"},
}
UNQUANTIZED_BITS = (None, 16, 32)


def plain_section(section: Mapping[str, Any]) -> dict[str, Any]:
    """The `quantization_config` of GPTQ or AWQ for an AutoRound file.

    Raises:
        FormatError: another packing, data type or quantized activations.
    """
    packing, kind = section.get("packing_format"), section.get("data_type", "int")
    layout = LAYOUTS.get(packing) if isinstance(packing, str) else None
    if layout is None or kind != "int":
        raise FormatError(
            f"config.json: AutoRound packing_format `{packing}` of `{kind}` is not supported",
            hint=f"read: {', '.join(LAYOUTS)}, of int",
        )
    if section.get("act_bits") not in UNQUANTIZED_BITS:
        raise FormatError("config.json: `act_bits` is set, only weights may be quantized")
    overrides = section.get("extra_config") or {}
    if not isinstance(overrides, dict) or not all(isinstance(x, dict) for x in overrides.values()):
        raise FormatError("config.json: `extra_config` is not an object of objects")
    dynamic = {
        f"{'-' if override.get('bits') in UNQUANTIZED_BITS[1:] else '+'}:{pattern}": override
        for pattern, override in overrides.items()
    }
    return {**section, "dynamic": dynamic, **layout}
