"""AWQ's container (GEMM): INT4 along N, nibbles shuffled, FP16 scales, zero point 8 throughout.

`qweight` [K, N / 8] int32: nibble i of a word is column 8c + ORDER[i]; `scales` [K / g, N];
`qzeros` [K / g, N / 8] int32, shuffled alike.
"""

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from lowbit.convert.export.gptq import FP16_MAX, expert_notes
from lowbit.convert.export.layout import Layout
from lowbit.convert.export.misfits import (
    HEAD,
    Misfit,
    beside_plain_experts,
    main_scheme,
    other_scheme,
)
from lowbit.convert.export.outputs import Output, constant, every_output, transposed_scales
from lowbit.convert.export.proof import Decoded
from lowbit.convert.export.source import (
    BLOCK_WEIGHTS,
    Linear,
    PackedSource,
    as_one,
    wrong_scale,
)
from lowbit.convert.export.unquantized_names import unquantized_kinds
from lowbit.formats.layout.packing import unpack
from lowbit.formats.layout.quantization_config import KEY
from lowbit.formats.safetensors.checkpoint import Checkpoint

LANES = 8  # nibbles of a word
ORDER = (0, 2, 4, 6, 1, 3, 5, 7)  # the column that each nibble holds
ZEROS = -2004318072  # 0x88888888


def misfits(source: PackedSource) -> list[Misfit]:
    """Linears that AWQ cannot hold beside the others.

    A misfit is the head, is not INT4, has another group size than most, has a number of rows that
    does not fill whole words, has a scale that FP16 cannot hold, or is an expert's beside linears
    of experts that are not quantized.
    """
    fitting = [linear for linear in source.linears if linear.bits == 4 and linear.module != HEAD]
    main = main_scheme(fitting)
    found = list(beside_plain_experts(source))
    fused = {misfit.linear.module for misfit in found}
    for linear in [one for one in source.linears if one.module not in fused]:
        if linear.module == HEAD:
            reason = f"{linear.scheme}, and AWQ's readers expect the head unquantized"
            found.append(Misfit(linear, reason, as_one(HEAD, 4)))
        elif linear.bits != 4:
            reason = f"{linear.scheme}, and AWQ holds INT4 only"
            found.append(Misfit(linear, reason, as_one(linear.module, 4)))
        elif main is not None and linear.scheme != main:
            found.append(other_scheme(linear, "AWQ", main))
        elif linear.N % LANES:
            found.append(Misfit(linear, f"{linear.N} rows do not fill whole words"))
        elif wrong := wrong_scale(source, linear, torch.float16, FP16_MAX):
            found.append(Misfit(linear, wrong))
    return found


def outputs(source: PackedSource) -> list[Output]:
    """All tensors of the export."""
    return every_output(source, _linear)


def _linear(source: PackedSource, linear: Linear) -> Iterator[Output]:
    N, K = linear.N, linear.K

    def qweight() -> Iterator[Tensor]:
        words = source.words(linear)
        step = max(1, BLOCK_WEIGHTS // (N * LANES))
        for start in range(0, words.shape[1], step):
            part = words[:, start : start + step]
            codes = unpack(part, 4, part.shape[1] * LANES).T.contiguous() + 8
            lanes = codes.view(torch.uint8).view(len(codes), N // LANES, LANES)[:, :, ORDER]
            yield (lanes[:, :, 0::2] | (lanes[:, :, 1::2] << 4)).view(torch.int32)

    yield Output(f"{linear.module}.qweight", torch.int32, (K, N // LANES), qweight)
    yield transposed_scales(source, linear, f"{linear.module}.scales", torch.float16)
    zeros = torch.full((linear.groups, N // LANES), ZEROS, dtype=torch.int32)
    yield constant(f"{linear.module}.qzeros", zeros)


def config(source: PackedSource) -> dict[str, Any]:
    """config.json of the export."""
    scheme = source.linears[0].scheme
    section = {
        "quant_method": "awq",
        "bits": 4,
        "group_size": -1 if scheme.group_size is None else scheme.group_size,
        "zero_point": True,
        "version": "gemm",
        "modules_to_not_convert": unquantized_kinds(source),
    }
    return {**source.plain_config, KEY: section}


def decode(source: PackedSource, made: Checkpoint, linear: Linear) -> Iterator[Decoded]:
    """Decode a linear with AWQ's arithmetic, `(u - z) * s`."""
    qweight = made.read(f"{linear.module}.qweight")
    scales = made.read(f"{linear.module}.scales").to(torch.float32)
    qzeros = made.read(f"{linear.module}.qzeros")
    rows = max(LANES, linear.block_rows // LANES * LANES)
    for start in range(0, linear.N, rows):
        stop = min(start + rows, linear.N)
        words = slice(start // LANES, stop // LANES)
        u = _columns(qweight[:, words])
        z = _columns(qzeros[:, words]).repeat_interleave(linear.group, dim=0)
        s = scales[:, start:stop]
        codes = u - z
        values = codes.to(torch.float32) * s.repeat_interleave(linear.group, dim=0)
        yield Decoded(start, codes.T.to(torch.int8), s.T, values.T)


def _columns(words: Tensor) -> Tensor:
    """Unpack words into columns: [rows, 8 * words] int32."""
    columns = torch.empty(*words.shape, LANES, dtype=torch.int32)
    for nibble, column in enumerate(ORDER):
        columns[:, :, column] = (words >> (4 * nibble)) & 0xF
    return columns.flatten(1)


LAYOUT = Layout("AWQ", outputs, config, decode, misfits=misfits, notes=expert_notes)
