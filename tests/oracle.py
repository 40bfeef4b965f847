"""What a packed folder means, read with the libraries' own file reader."""

from pathlib import Path

from safetensors.torch import load_file
from torch import Tensor

from lowbit.formats.layout.packing import dequantize, unpack
from lowbit.formats.packed import open_packed


def dequantized_weights(folder: Path) -> dict[str, Tensor]:
    """W = q * s in FP32 by original name; what is not packed, upcast."""
    packed = open_packed(folder)
    stored: dict[str, Tensor] = {}
    for path in folder.glob("*.safetensors"):
        stored |= load_file(path)
    weights = {}
    for spec in packed.specs:
        scheme = packed.schemes.get(spec.module)
        if scheme is None:
            weights[spec.name] = stored[spec.name].float()
        else:
            codes = unpack(stored[f"{spec.module}.weight_packed"], scheme.bits, spec.shape[1])
            weights[spec.name] = dequantize(codes, stored[f"{spec.module}.weight_scale"])
    return weights
