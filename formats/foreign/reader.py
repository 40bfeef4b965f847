"""Opening of a checkpoint folder in any known layout."""

from pathlib import Path

from lowbit.formats.foreign.auto_round import plain_section
from lowbit.formats.foreign.awq import read_awq
from lowbit.formats.foreign.gptq import read_gptq
from lowbit.formats.layout.quantization_config import KEY
from lowbit.formats.safetensors.checkpoint import Checkpoint, open_checkpoint

TRANSLATED = ("gptq", "awq", "auto-round")  # methods whose tensors get native names and layout


def open_native(folder: Path) -> Checkpoint:
    """Open a folder and present it in the layout of SPEC.md, whichever tool packed it.

    GPTQ and AWQ files appear under native names, in the native layout and with a native
    `quantization_config`; their tensors are translated exactly when they are read. Every other
    checkpoint is opened by `open_checkpoint`.

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
        section = plain_section(section)
    match section.get("quant_method"):
        case "gptq":
            return read_gptq(checkpoint, section)
        case "awq":
            return read_awq(checkpoint, section)
        case _:
            return checkpoint
