"""AWQ's container (GEMM): INT4 along N, nibbles shuffled, FP16 scales, zero point 8 throughout.

`qweight` [K, N / 8] int32: nibble i of a word is column 8c + ORDER[i]; `scales` [K / g, N];
`qzeros` [K / g, N / 8] int32, shuffled alike.
"""

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from lowbit.convert.export.gptq import FP16_MAX
from lowbit.convert.export.layout import Layout
from lowbit.convert.export.left import left_kinds
from lowbit.convert.export.outputs import Output, constant, copied, transposed_scales
from lowbit.convert.export.proof import Decoded
from lowbit.convert.export.source import (
    BLOCK_WEIGHTS,
    Linear,
    Source,
    as_one,
    check_scales,
    one_scheme,
)
from lowbit.formats.checkpoint import Checkpoint
from lowbit.formats.errors import FormatError
from lowbit.formats.packing import unpack
from lowbit.formats.quantization_config import KEY

LANES = 8  # nibbles of a word
ORDER = (0, 2, 4, 6, 1, 3, 5, 7)  # the column that each nibble holds
ZEROS = -2004318072  # 0x88888888


def check(source: Source) -> None:
    """Make sure that AWQ can state all of it.

    Raises:
        FormatError: another scheme than one of INT4, a quantized head, a width that fills no words,
            or a scale that FP16 cannot hold.
    """
    for linear in source.linears:
        if linear.bits != 4:
            raise FormatError(
                f"`{linear.module}` is {linear.scheme}: AWQ holds INT4 only",
                hint=f"{as_one(linear.module, 4)}, or export to mlx or gguf",
            )
        if linear.module == "lm_head":
            raise FormatError(
                "`lm_head` is quantized: AWQ's readers expect the head as it was",
                hint="convert with --lm-head bf16",
            )
        if linear.N % LANES:
            raise FormatError(f"`{linear.module}`: {linear.N} rows do not fill whole words")
    one_scheme(source, "AWQ", source.linears)
    check_scales(source, torch.float16, FP16_MAX)


def outputs(source: Source) -> list[Output]:
    """Every tensor of the export."""
    made = [copied(source, info) for info in source.dense]
    for linear in source.linears:
        made += _linear(source, linear)
    return made


def _linear(source: Source, linear: Linear) -> Iterator[Output]:
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


def config(source: Source) -> dict[str, Any]:
    """config.json of the export."""
    scheme = source.linears[0].scheme
    section = {
        "quant_method": "awq",
        "bits": 4,
        "group_size": -1 if scheme.group_size is None else scheme.group_size,
        "zero_point": True,
        "version": "gemm",
        "modules_to_not_convert": left_kinds(source),
    }
    return {**source.plain_config, KEY: section}


def decode(source: Source, made: Checkpoint, linear: Linear) -> Iterator[Decoded]:
    """A linear as AWQ's arithmetic reads it: `(u - z) * s`."""
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
    """[rows, 8 * words] int32, every nibble in its column."""
    columns = torch.empty(*words.shape, LANES, dtype=torch.int32)
    for nibble, column in enumerate(ORDER):
        columns[:, :, column] = (words >> (4 * nibble)) & 0xF
    return columns.flatten(1)


LAYOUT = Layout(check, outputs, config, decode)
