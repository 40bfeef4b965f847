"""GPTQ's container: words transposed, FP16 scales, a constant zero point, groups in order.

`qweight` [K * bits / 32, N] int32 are the packed words themselves, transposed; `scales` [K / g, N];
`qzeros` [K / g, N * bits / 32] int32 hold the zero point minus one, packed along N (checkpoint
format v1, the one every reader takes); `g_idx` [K] int32 the group of each input.
"""

from collections.abc import Iterable, Iterator
from functools import partial
from typing import Any

import torch
from torch import Tensor

from lowbit.convert.export.layout import Layout
from lowbit.convert.export.misfits import Misfit, misfits_of
from lowbit.convert.export.outputs import Output, constant, every_output, transposed_scales
from lowbit.convert.export.proof import Decoded
from lowbit.convert.export.source import BLOCK_WEIGHTS, Linear, PackedSource, row_blocks
from lowbit.convert.export.unquantized_names import quantized_kinds, unquantized_patterns
from lowbit.formats.architectures.names import MTP_PREFIX, expert_of
from lowbit.formats.layout.packing import WORD_BITS
from lowbit.formats.layout.quantization_config import KEY
from lowbit.formats.safetensors.checkpoint import Checkpoint


def misfits(source: PackedSource) -> list[Misfit]:
    """Linears that GPTQ cannot hold: zero points that do not fill words, and `misfits_of`."""

    def refusal(linear: Linear) -> tuple[str, None] | None:
        words = f"the zero points of {linear.N} rows do not fill whole words"
        return (words, None) if linear.N * linear.bits % WORD_BITS else None

    return misfits_of(source, "GPTQ", lambda linear: True, refusal)


def _linear(source: PackedSource, linear: Linear) -> Iterator[Output]:
    N, K, bits = linear.N, linear.K, linear.bits

    def qweight() -> Iterator[Tensor]:
        words = source.words(linear)
        step = max(1, BLOCK_WEIGHTS // N)
        for start in range(0, words.shape[1], step):
            yield words[:, start : start + step].T

    yield Output(f"{linear.module}.qweight", torch.int32, (K * bits // WORD_BITS, N), qweight)
    yield transposed_scales(source, linear, f"{linear.module}.scales", torch.float16)
    zero = (1 << (bits - 1)) - 1  # v1 stores one less
    word = sum(zero << shift for shift in range(0, WORD_BITS, bits))
    shape = (linear.groups, N * bits // WORD_BITS)
    yield constant(f"{linear.module}.qzeros", torch.full(shape, word, dtype=torch.int32))
    groups = torch.arange(K, dtype=torch.int32) // linear.group
    yield constant(f"{linear.module}.g_idx", groups)


def config(source: PackedSource) -> dict[str, Any]:
    """config.json of the export."""
    scheme = source.linears[0].scheme
    section: dict[str, Any] = {
        "quant_method": "gptq",
        "bits": scheme.bits,
        "group_size": -1 if scheme.group_size is None else scheme.group_size,
        "desc_act": False,
        "sym": True,
        "checkpoint_format": "gptq",
        "pack_dtype": "int32",
        "lm_head": any(linear.module == "lm_head" for linear in source.linears),
    }
    if left := unquantized_patterns(source):
        # Engines differ in where they look for linears that are not quantized.
        section["dynamic"] = {f"-:{pattern}": {} for pattern in left}
        section["modules_in_block_to_quantize"] = [quantized_kinds(source)]
    return {**source.plain_config, KEY: section}


def decode(source: PackedSource, made: Checkpoint, linear: Linear) -> Iterator[Decoded]:
    """Decode a linear with GPTQ's arithmetic, `(u - (z + 1)) * s`, groups by `g_idx`."""
    shifts = torch.arange(0, WORD_BITS, linear.bits, dtype=torch.int32)
    mask = (1 << linear.bits) - 1
    qweight = made.read(f"{linear.module}.qweight")
    scales = made.read(f"{linear.module}.scales").to(torch.float32)
    packed_zeros = made.read(f"{linear.module}.qzeros")
    zeros = ((packed_zeros[:, :, None] >> shifts) & mask).flatten(1) + 1  # [K / g, N]
    g_idx = made.read(f"{linear.module}.g_idx").to(torch.int64)
    for start, stop in row_blocks(linear):
        words = qweight[:, start:stop]
        u = ((words[:, None, :] >> shifts[None, :, None]) & mask).flatten(0, 1)  # [K, rows]
        codes = u - zeros[:, start:stop][g_idx]
        s = scales[:, start:stop]
        values = codes.to(torch.float32) * s[g_idx]
        yield Decoded(start, codes.T.to(torch.int8), s.T, values.T)


def notes(source: PackedSource) -> Iterable[str]:
    """Sentences on which readers take this export."""
    if any(linear.module == "lm_head" for linear in source.linears):
        yield "the head is quantized: gptqmodel and vLLM read it, transformers does not"
    yield from expert_notes(source)
    if any(linear.module.startswith(MTP_PREFIX) for linear in source.linears):
        yield "multi-token prediction is quantized too, which few readers of GPTQ expect"


def expert_notes(source: PackedSource) -> Iterable[str]:
    """Sentence on which readers take experts; nothing where there are none."""
    if any(expert_of(linear.module) is not None for linear in source.linears):
        yield (
            "the experts are stored one by one, as vLLM expects them; transformers 5 holds them "
            "fused and is not known to read them packed like this"
        )


LAYOUT = Layout(
    "GPTQ", partial(every_output, pack=_linear), config, decode, misfits=misfits, notes=notes
)
