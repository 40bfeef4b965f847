"""Q4_0 and Q8_0 blocks: 32 weights of a row with one FP16 scale.

Q4_0: d, then 16 bytes whose low nibbles are elements 0-15 and whose high nibbles are 16-31;
`W = d * (u - 8)`. Q8_0: d, then 32 int8; `W = d * q`. d may be negative in both.
"""

import torch
from torch import Tensor

from lowbit.convert.export.gguf_file import GgmlType

BLOCK = 32
KIND_OF_BITS: dict[int, GgmlType] = {4: "Q4_0", 8: "Q8_0"}


def encode(codes: Tensor, scales: Tensor, bits: int) -> Tensor:
    """Encode rows of codes and scales as blocks.

    Args:
        codes: [rows, K] int8, signed.
        scales: [rows, K / 32], exact in FP16.
        bits: 4 or 8.

    Returns:
        [rows, K / 32, 18 or 34] uint8.
    """
    rows, K = codes.shape
    d = scales.to(torch.float16).contiguous().view(torch.uint8).view(rows, K // BLOCK, 2)
    if bits == 8:
        q = codes.contiguous().view(torch.uint8).view(rows, K // BLOCK, BLOCK)
        return torch.cat((d, q), dim=2)
    u = (codes + 8).view(torch.uint8).view(rows, K // BLOCK, 2, BLOCK // 2)
    return torch.cat((d, u[:, :, 0] | (u[:, :, 1] << 4)), dim=2)


def decode(blocks: Tensor, kind: GgmlType) -> tuple[Tensor, Tensor]:
    """Decode blocks into signed codes [rows, K] int8 and scales [rows, K / 32] float32."""
    rows = len(blocks)
    d = blocks[:, :, :2].contiguous().view(torch.float16).squeeze(2).to(torch.float32)
    q = blocks[:, :, 2:]
    if kind == "Q8_0":
        return q.contiguous().view(torch.int8).view(rows, -1), d
    low, high = (q & 0xF).to(torch.int8), (q >> 4).to(torch.int8)
    return torch.cat((low, high), dim=2).view(rows, -1) - 8, d
