"""Opening of a checkpoint folder in any known layout."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from lowbit.formats.errors import FormatError
from lowbit.formats.foreign.awq import read_awq
from lowbit.formats.foreign.gates import with_wide_gates
from lowbit.formats.foreign.gptq import read_gptq
from lowbit.formats.layout.quantization_config import KEY
from lowbit.formats.safetensors.checkpoint import Checkpoint, open_checkpoint

# AutoRound's own files: `quant_method` of each `packing_format` and, for GPTQ, the version
AUTO_ROUND: Mapping[str, Mapping[str, str]] = {
    "auto_round": {"quant_method": "gptq", "checkpoint_format": "gptq_v2"},
    "auto_round:gptqmodel": {"quant_method": "gptq", "checkpoint_format": "gptq_v2"},
    "auto_round:auto_gptq": {"quant_method": "gptq", "checkpoint_format": "gptq"},
    "auto_round:auto_awq": {"quant_method": "awq", "version": "gemm"},
}
UNQUANTIZED_BITS = (None, 16, 32)


def open_native(folder: Path) -> Checkpoint:
    """Open a folder and present it in the layout of SPEC.md, whichever tool packed it.

    GPTQ and AWQ files appear under native names, in the native layout and with a native
    `quantization_config`; their tensors are translated exactly when they are read. Every other
    checkpoint is opened by `open_checkpoint`. Gates that are packed appear as wide weights.

    Raises:
        CheckpointError: no checkpoint, or a damaged one.
        FormatError: a GPTQ or AWQ file of a kind that is not supported.
        QuantizationError: its group size does not divide a row.
    """
    checkpoint = open_checkpoint(folder)
    section = checkpoint.config.get(KEY)
    if not isinstance(section, dict):
        return checkpoint
    if section.get("quant_method") == "auto-round":
        section = _plain_section(section)
    match section.get("quant_method"):
        case "gptq":
            checkpoint = read_gptq(checkpoint, section)
        case "awq":
            checkpoint = read_awq(checkpoint, section)
    return with_wide_gates(checkpoint)


def _plain_section(section: Mapping[str, Any]) -> dict[str, Any]:
    """The `quantization_config` of GPTQ or AWQ for an AutoRound file.

    Raises:
        FormatError: another packing, data type or quantized activations.
    """
    packing, kind = section.get("packing_format"), section.get("data_type", "int")
    layout = AUTO_ROUND.get(packing) if isinstance(packing, str) else None
    if layout is None or kind != "int":
        raise FormatError(
            f"config.json: AutoRound packing_format `{packing}` of `{kind}` is not supported",
            hint=f"read: {', '.join(AUTO_ROUND)}, of int",
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
