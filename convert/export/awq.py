"""AWQ's container (GEMM): INT4 along N, nibbles shuffled, FP16 scales, zero point 8 throughout.

`qweight` [K, N / 8] int32: nibble i of a word is column 8c + ORDER[i]; `scales` [K / g, N];
`qzeros` [K / g, N / 8] int32, shuffled alike.
"""

from collections.abc import Iterator
from functools import partial
from typing import Any

import torch
from torch import Tensor

from lowbit.convert.export.gptq import expert_notes
from lowbit.convert.export.layout import Layout
from lowbit.convert.export.misfits import Misfit, misfits_of
from lowbit.convert.export.outputs import Output, constant, every_output, transposed_scales
from lowbit.convert.export.proof import Decoded
from lowbit.convert.export.source import BLOCK_WEIGHTS, HEAD, Linear, PackedSource, as_one
from lowbit.convert.export.unquantized_names import unquantized_kinds
from lowbit.formats.architectures import vision_prefix
from lowbit.formats.layout.packing import unpack
from lowbit.formats.layout.quantization_config import KEY
from lowbit.formats.safetensors.checkpoint import Checkpoint

LANES = 8  # nibbles of a word
ORDER = (0, 2, 4, 6, 1, 3, 5, 7)  # the column that each nibble holds
ZEROS = -2004318072  # 0x88888888


def misfits(source: PackedSource) -> list[Misfit]:
    """Linears that AWQ cannot hold beside the others.

    A misfit is the head, is not INT4, has a number of rows that does not fill whole words, or is
    one of `misfits_of`.
    """

    def refusal(linear: Linear) -> tuple[str, str | None] | None:
        if linear.module == HEAD:
            reason = f"{linear.scheme}, and AWQ's readers expect the head unquantized"
            return reason, as_one(source, linear, 4)
        if linear.bits != 4:
            reason = f"{linear.scheme}, and AWQ holds INT4 only"
            return reason, as_one(source, linear, 4)
        words = f"{linear.N} rows do not fill whole words"
        return (words, None) if linear.N % LANES else None

    return misfits_of(
        source, "AWQ", lambda linear: linear.bits == 4 and linear.module != HEAD, refusal
    )


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
    scheme, kept = source.linears[0].scheme, unquantized_kinds(source)
    # vLLM looks for parts of names, transformers for beginnings and ends.
    tower = vision_prefix(source.plain_config, [info.name for info in source.dense])
    if tower is not None and "visual" in kept:
        kept.append(tower.removesuffix("."))
    section = {
        "quant_method": "awq",
        "bits": 4,
        "group_size": -1 if scheme.group_size is None else scheme.group_size,
        "zero_point": True,
        "version": "gemm",
        "modules_to_not_convert": kept,
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
    columns = torch.empty(*words.shape, LANES, dtype=torch.int32)
    for nibble, column in enumerate(ORDER):
        columns[:, :, column] = (words >> (4 * nibble)) & 0xF
    return columns.flatten(1)


LAYOUT = Layout(
    "AWQ", partial(every_output, pack=_linear), config, decode, misfits=misfits, notes=expert_notes
)
