"""Packed layout of one linear: bit order, tensor names, shapes, and a slow reference codec.

`W` is [N, K]; q is the signed code, u = q + 2^(bits-1) its unsigned form. Element k of a row sits
at bit k*bits of the row, low bits first, in little-endian 32-bit words (compressed-tensors
`pack-quantized`). `W = (q - z) * s` in FP32, with z = 0 where the scheme is symmetric.
"""

import math
from collections.abc import Mapping

import torch
from torch import Tensor

from lowbit.formats.layout.scheme import Scheme

PACKED = "weight_packed"
SCALE = "weight_scale"
SHAPE = "weight_shape"
ZERO_POINT = "weight_zero_point"
GROUP_INDEX = "weight_g_idx"

WORD_BITS = 32
FLOATS = (torch.bfloat16, torch.float16, torch.float32)  # dtypes of scales and dense tensors
PACKED_DTYPES: Mapping[str, tuple[torch.dtype, ...]] = {
    PACKED: (torch.int32,),
    SCALE: FLOATS,
    SHAPE: (torch.int64, torch.int32),
    ZERO_POINT: (torch.int32,),
}


def packed_words(K: int, bits: int) -> int:
    """Number of 32-bit words that hold a row of K codes."""
    return math.ceil(K * bits / WORD_BITS)


def fills_words(K: int, bits: int) -> bool:
    """Tell if a row of K codes ends where a word does, as kernels need it."""
    return K * bits % WORD_BITS == 0


def pack(codes: Tensor, bits: int) -> Tensor:
    """Pack signed codes along the last dimension.

    Args:
        codes: [N, K] int8, each in [-2^(bits-1), 2^(bits-1) - 1].
        bits: 2 to 8.

    Returns:
        [N, ceil(K * bits / 32)] int32; unused high bits of a row's last word are zero.
    """
    N, K = codes.shape
    if bits == 8:
        unsigned = codes.view(torch.uint8) ^ 0x80
        return _pad(unsigned, 4).view(torch.int32)
    unsigned = (codes + (1 << (bits - 1))).view(torch.uint8)
    if bits == 4:
        unsigned = _pad(unsigned, 8)
        return (unsigned[:, 0::2] | (unsigned[:, 1::2] << 4)).contiguous().view(torch.int32)
    # 32 codes fill exactly `bits` words: every group of 32 has the same pattern of shifts.
    lanes = _pad(unsigned, WORD_BITS).view(N, -1, WORD_BITS).to(torch.int64)
    words = torch.zeros(N, lanes.shape[1], bits, dtype=torch.int64, device=codes.device)
    for lane in range(WORD_BITS):
        word, shift = divmod(lane * bits, WORD_BITS)
        words[:, :, word] |= (lanes[:, :, lane] << shift) & 0xFFFFFFFF
        if shift + bits > WORD_BITS:
            words[:, :, word + 1] |= lanes[:, :, lane] >> (WORD_BITS - shift)
    flat = words.view(N, -1)[:, : packed_words(K, bits)]
    return ((flat ^ 0x80000000) - 0x80000000).to(torch.int32)


def unpack(words: Tensor, bits: int, K: int) -> Tensor:
    """Invert `pack`.

    Args:
        words: [N, ceil(K * bits / 32)] int32.
        bits: 2 to 8.

    Returns:
        [N, K] int8 signed codes.
    """
    N = words.shape[0]
    words = words.contiguous()
    if bits == 8:
        return (words.view(torch.uint8) ^ 0x80)[:, :K].view(torch.int8)
    if bits == 4:
        pairs = words.view(torch.uint8)
        codes = torch.stack((pairs & 0xF, pairs >> 4), dim=-1).view(N, -1)[:, :K]
        return codes.view(torch.int8) - 8
    groups = math.ceil(words.shape[1] / bits)
    padded = torch.zeros(N, groups * bits, dtype=torch.int64, device=words.device)
    padded[:, : words.shape[1]] = words.to(torch.int64) & 0xFFFFFFFF
    padded = padded.view(N, groups, bits)
    lanes = torch.empty(N, groups, WORD_BITS, dtype=torch.int64, device=words.device)
    for lane in range(WORD_BITS):
        word, shift = divmod(lane * bits, WORD_BITS)
        value = padded[:, :, word] >> shift
        if shift + bits > WORD_BITS:
            value = value | (padded[:, :, word + 1] << (WORD_BITS - shift))
        lanes[:, :, lane] = value & ((1 << bits) - 1)
    return (lanes.view(N, -1)[:, :K] - (1 << (bits - 1))).to(torch.int8)


def dequantize(codes: Tensor, scale: Tensor, zero_point: Tensor | None = None) -> Tensor:
    """Dequantize codes: `(q - z) * s` in FP32.

    Args:
        codes: [N, K] int8.
        scale: [N, K/G] (or [N, 1]), any float dtype.
        zero_point: [N, K/G] int8 signed, or None.

    Returns:
        [N, K] float32.
    """
    N, K = codes.shape
    groups = scale.shape[1]
    values = codes.view(N, groups, K // groups).to(torch.float32)
    if zero_point is not None:
        values = values - zero_point[:, :, None].to(torch.float32)
    return (values * scale[:, :, None].to(torch.float32)).view(N, K)


def pack_zero_point(zero_point: Tensor, bits: int) -> Tensor:
    """Pack [N, K/G] int8 zero points along N: [ceil(N * bits / 32), K/G] int32."""
    return pack(zero_point.T.contiguous(), bits).T.contiguous()


def unpack_zero_point(words: Tensor, bits: int, N: int) -> Tensor:
    """Invert `pack_zero_point`: [N, K/G] int8."""
    return unpack(words.T.contiguous(), bits, N).T.contiguous()


def packed_shapes(N: int, K: int, scheme: Scheme, name: str) -> dict[str, tuple[int, ...]]:
    """Shapes of the tensors that replace `name.weight` [N, K], keyed by suffix.

    Raises:
        QuantizationError: the group size does not divide K.
    """
    groups = scheme.groups(name, K)
    shapes = {PACKED: (N, packed_words(K, scheme.bits)), SCALE: (N, groups), SHAPE: (2,)}
    if not scheme.symmetric:
        shapes[ZERO_POINT] = (packed_words(N, scheme.bits), groups)
    return shapes


def _pad(values: Tensor, multiple: int) -> Tensor:
    """Zero-pad the last dimension to a multiple; the result is contiguous."""
    missing = -values.shape[-1] % multiple
    if not missing:
        return values.contiguous()
    return torch.nn.functional.pad(values, (0, missing)).contiguous()
