"""Linear layers on a CPU: the forms a weight is kept in, and the product with each.

In BF16 a linear with BF16 scales keeps its codes:

- INT4 in groups runs in PyTorch's INT4 product, which sums in FP32 and rounds once.
- INT2 and INT3 in groups run there too, as INT4 codes: a pass over them reads as much as over INT4.
- INT8 in groups runs in the same product. A code q = 16 h + l is stored as two INT4 codes, h and l,
  side by side along K: `x @ w.T = [x, x] @ [16 s h, s l].T`. Every factor is exact in BF16, so the
  result is as close as that of INT4, and a weight takes one byte.
- INT8 with one scale per row runs in PyTorch's INT8 product.

The INT4 product decodes a weight again for every four tokens, and the INT8 product is no faster for
many tokens than for few. For many tokens some rows at a time are widened instead and multiplied
densely: to BF16 where the processor is faster in BF16 (AMX, AVX-512 BF16 of AMD's), to FP32
everywhere else, where PyTorch's BF16 products are 2 to 100 times slower than its FP32 products.
Dense BF16 weights take the same way. So the last bits of many tokens differ between these two kinds
of processors.

Every other scheme, and every linear in FP32, runs as the dequantized weight; FP32 is the checked
mode, its weights are exactly `code * scale`.

A packed linear whose inputs are rounded to eight bits has a form of its own: see `cpu_int8`.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache

import torch
from torch import Tensor
from torch.nn import functional

from lowbit.formats.activation_modes import Activations, Inputs
from lowbit.formats.layout.packing import dequantize, unpack
from lowbit.formats.layout.scheme import Scheme, fitting_group_size
from lowbit.formats.machine.cores import multiplies_bf16
from lowbit.runtime.backends.cpu_int8 import (
    GroupedCodes,
    grouped,
    grouped_bytes,
    grouped_product,
)
from lowbit.runtime.thresholds import CPU_PACKED_TOKENS, EXACT_TOKENS
from lowbit.runtime.weights.linear import DenseLinear, Linear, PackedLinear

PLANE_BITS = 4
PLANE_GROUPS = (32, 64, 128, 256)  # group sizes of the INT4 product
PLANE_ROWS = 16  # the INT4 product takes N that are multiples
INT8_COLUMNS = 32  # the INT8 product reads past the end of K where it is not a multiple of 16
CHUNK_ROWS = 256  # unpacked at a time at load: they stay in cache; a multiple of all BLOCK_ROWS
CHUNK_BYTES = 1 << 20  # of packed codes reordered at a time
BLOCK_ROWS = {"AVX512": 64, "AVX2": 32}  # rows in a block of the INT4 product, by CPU capability
FEW_ROWS = 1024  # of a dense weight, up to which it stays in cache from one token to the next
CHUNK_WEIGHTS = 1 << 19  # widened at a time for many tokens: 1 MB in BF16, 2 MB in FP32


@dataclass(frozen=True, slots=True)
class Planes:
    """Weight [N, K] as P planes of 4-bit codes in the block order of this CPU's INT4 product.

    Up to 4 bits are one plane; INT8 is two, the high and the low half of the codes. Made at load
    only.
    """

    blocks: Tensor  # [N, P * K / 2] uint8
    # [P * K / group_size, N, 2] bfloat16; a plane's weight is `(code - 8) * scale + zero`
    scale_zero: Tensor
    group_size: int  # one of PLANE_GROUPS
    planes: int  # P, 1 or 2

    @property
    def size_bytes(self) -> int:
        """Bytes that one pass over the weight reads."""
        return self.blocks.nbytes + self.scale_zero.nbytes


@dataclass(frozen=True, slots=True)
class Int8Rows:
    """Weight [N, K] as codes [N, K] int8 and one scale per row [N] bfloat16."""

    codes: Tensor
    scales: Tensor

    @property
    def size_bytes(self) -> int:
        """Bytes that one pass over the weight reads."""
        return self.codes.nbytes + self.scales.nbytes


@dataclass(frozen=True, slots=True)
class WatchedLinear:
    """Dense weight [N, K] that is read at each use and notes the power of its input."""

    read: Callable[[], Tensor]  # gives the weight on the device of the input
    modules: tuple[str, ...]  # names of the linears whose rows are stacked in it
    # mean square of each input channel [K] float32 by module; filled by `linear`
    power: dict[str, Tensor]
    least: int = 1  # tokens from which on their power counts


CpuLinear = Planes | Int8Rows | DenseLinear | WatchedLinear | GroupedCodes


def prepared_bytes(
    N: int,
    K: int,
    scheme: Scheme,
    scales: torch.dtype,
    dtype: torch.dtype,
    activations: Activations = "exact",
) -> int:
    """Bytes that `prepare` will keep for a packed weight [N, K] with scales of a dtype."""
    group = scheme.group_size or K
    if activations == "int8":
        return grouped_bytes(N, K, group)
    if not scales == dtype == torch.bfloat16:
        return N * K * dtype.itemsize
    if _int8_rows_fit(K, scheme.bits, group):
        return N * K + N * 2
    plane_group = _plane_group(N, group)
    if plane_group is None:
        return N * K * dtype.itemsize
    planes = -(-scheme.bits // PLANE_BITS)
    return planes * (N * K // 2 + N * (K // plane_group) * 4)


def prepare(
    w: Linear, dtype: torch.dtype, inputs: Inputs = "exact"
) -> Planes | Int8Rows | DenseLinear | GroupedCodes:
    """The form of a linear that is fastest here in `dtype` (bfloat16 or float32).

    inputs: of a packed linear; a dense one, and a head, takes them as they are.
    """
    if isinstance(w, DenseLinear):
        return DenseLinear(w.weight.to(dtype))
    if inputs in ("int8", "whole"):
        return grouped(w, whole=inputs == "whole")
    if w.scales.dtype == dtype == torch.bfloat16:
        if _int8_rows_fit(w.K, w.bits, w.group_size):
            return Int8Rows(unpack(w.codes, w.bits, w.K), w.scales[:, 0].contiguous())
        plane_group = _plane_group(w.N, w.group_size)
        if plane_group is not None:
            return _planes(w, plane_group)
    weight = torch.empty(w.N, w.K, dtype=dtype)
    for start in range(0, w.N, CHUNK_ROWS):
        rows = slice(start, start + CHUNK_ROWS)
        weight[rows] = dequantize(unpack(w.codes[rows], w.bits, w.K), w.scales[rows])
    return DenseLinear(weight)


def linear(
    x: Tensor,
    w: CpuLinear,
    norm: Tensor | None = None,
    eps: float = 0.0,
    normed: Tensor | None = None,
) -> Tensor:
    """`rms_norm(x) @ w.T`: [M, K] to [M, N] in x's dtype; float32 of x rounded to eight bits.

    Args:
        norm: [K] gain; None leaves x as it is.
        normed: `rms_norm(x, norm, eps)`, made here if None.
    """
    if isinstance(w, GroupedCodes):
        return grouped_product(x, w, norm, eps)
    if norm is not None:
        x = rms_norm(x, norm, eps) if normed is None else normed
    if isinstance(w, DenseLinear):
        return _dense(x, w.weight)
    if isinstance(w, WatchedLinear):
        if len(x) >= w.least:
            w.power.update(dict.fromkeys(w.modules, x.float().square().mean(0)))
        return _together(x, w.read())
    if isinstance(w, Int8Rows):
        if len(x) > EXACT_TOKENS:
            return _in_pieces(x, w.codes, w.scales)
        return torch._weight_int8pack_mm(x, w.codes, w.scales)
    rows = _block_rows()
    many = len(x) > max(EXACT_TOKENS, CPU_PACKED_TOKENS // w.planes)
    if many and rows is not None and len(w.blocks) % rows == 0:
        return _linear_of_many_tokens(x, w, rows)
    wide = x if w.planes == 1 else torch.cat((x, x), dim=1)
    return torch._weight_int4pack_mm_for_cpu(wide, w.blocks, w.group_size, w.scale_zero)


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """`x / rms(x)` in FP32, rounded to weight's dtype, times weight: [..., D] in x's dtype."""
    wide = x.float()
    normed = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps)
    return (normed.to(weight.dtype) * weight).to(x.dtype)


def swiglu_of(gate_up: Tensor, w: CpuLinear) -> Tensor:
    """`silu(gate) * up` of what `linear` gave for w: [M, N] to [M, N / 2] in the same dtype."""
    gate, up = gate_up.chunk(2, dim=-1)
    if isinstance(w, GroupedCodes):
        # In FP32 a vector's exponential and that of the elements left over have other last bits.
        return functional.silu(gate.double()).float() * up
    return functional.silu(gate) * up


def _dense(x: Tensor, weight: Tensor) -> Tensor:
    """`x @ weight.T`; few tokens one by one, since sums depend on how many there are.

    Large BF16 weights take all tokens together: one pass over them is worth a different last bit.
    """
    alone = x.dtype == torch.float32 or len(weight) <= FEW_ROWS
    if alone and 1 < len(x) <= EXACT_TOKENS:
        return torch.cat([functional.linear(token, weight) for token in torch.split(x, 1)])
    return _together(x, weight)


def _int8_rows_fit(K: int, bits: int, group_size: int) -> bool:
    return bits == 8 and group_size == K and K % INT8_COLUMNS == 0


def _plane_group(N: int, group_size: int) -> int | None:
    """Group size in which the INT4 product takes the weight; None where it does not.

    Groups that are too large for it, rows included, become several that share a scale.
    """
    group = fitting_group_size(group_size, PLANE_GROUPS[-1])
    fits = N % PLANE_ROWS == 0 and group in PLANE_GROUPS and group_size % group == 0
    return group if fits else None


def _planes(w: PackedLinear, group_size: int) -> Planes:
    """Split codes into planes and reorder them for the INT4 product, some rows at a time."""
    planes = -(-w.bits // PLANE_BITS)
    # Made at once: small blocks that stay, between larger ones that go, leave the heap in pieces.
    blocks = torch.empty(w.N, planes * w.K // 2, dtype=torch.uint8)
    rows, done = _block_rows(), 0
    if rows is not None and rows <= w.N and w.bits == planes * PLANE_BITS:
        done = w.N - w.N % rows
        _put_blocks(w.codes[:done], blocks[:done].view(-1, planes, w.K, rows // 2))
    half = 1 << (planes * PLANE_BITS - 1)  # what unsigned codes of whole planes are more
    for start in range(done, w.N, CHUNK_ROWS):
        part = slice(start, start + CHUNK_ROWS)
        codes = unpack(w.codes[part], w.bits, w.K).to(torch.int32) + half
        if planes == 2:
            codes = torch.cat((codes >> PLANE_BITS, codes & 15), dim=1)
        blocks[part] = torch._convert_weight_to_int4pack_for_cpu(codes, 2)
    scale = w.scales.repeat_interleave(w.group_size // group_size, dim=1).T  # [K / G, N]
    zero = torch.zeros_like(scale)
    if planes == 2:
        scale, zero = torch.cat((16 * scale, scale)), torch.cat((zero, 8 * scale))
    scale_zero = torch.stack((scale, zero), dim=-1).contiguous()
    return Planes(blocks, scale_zero, group_size, planes)


def _put_blocks(words: Tensor, blocks: Tensor) -> None:
    """Reorder packed codes of 4 or 8 bits without unpacking them.

    NumPy takes one core, which beside other work is faster than PyTorch's threads, since these wait
    for each other at the end of each operation.

    Args:
        words: [B * R, W] int32, rows of B blocks as `pack` leaves them.
        blocks: [B, P, K, R / 2] uint8 to fill; see `_block_rows`.
    """
    _, planes, K, half = blocks.shape
    packed = words.contiguous().view(torch.uint8).view(len(blocks), 2, half, -1).numpy()
    if planes == 1:  # a byte of `packed` holds two columns
        low, high = (x.numpy() for x in blocks.view(len(blocks), K // 2, 2, half).unbind(2))
    else:
        high, low = (x.numpy() for x in blocks.unbind(1))
    step = max(1, CHUNK_BYTES // packed[:1].nbytes)
    for start in range(0, len(blocks), step):
        part = slice(start, start + step)
        first, second = packed[part, 0], packed[part, 1]  # rows r, and r + R / 2
        low[part] = ((first & 15) | (second << PLANE_BITS)).swapaxes(1, 2)
        high[part] = ((first >> PLANE_BITS) | (second & 0xF0)).swapaxes(1, 2)


@lru_cache(maxsize=1)
def _block_rows() -> int | None:
    """Rows R of a block [K, R / 2] in which a byte holds row r low and row r + R / 2 high.

    None where this CPU's INT4 product wants another order.
    """
    rows = BLOCK_ROWS.get(torch.backends.cpu.get_cpu_capability())
    if rows is None:
        return None
    codes = (torch.arange(rows)[:, None] + torch.arange(2)).remainder(16).to(torch.int32)
    low, high = codes.T.chunk(2, dim=1)
    packed = torch._convert_weight_to_int4pack_for_cpu(codes, 2)
    return rows if torch.equal(packed.flatten(), (low | high << 4).flatten()) else None


def _together(x: Tensor, weight: Tensor) -> Tensor:
    """`x @ weight.T` of a dense weight, all tokens at once; on a GPU too, see `input_power`."""
    few = len(x) <= EXACT_TOKENS
    if few or x.dtype == torch.float32 or not x.is_cpu or multiplies_bf16():
        return functional.linear(x, weight)
    return _in_pieces(x, weight)


def _in_pieces(x: Tensor, weight: Tensor, scales: Tensor | None = None) -> Tensor:
    """`x @ weight.T` in FP32, widening some rows of the weight at a time.

    Args:
        x: [M, K] bfloat16.
        weight: [N, K], of any dtype that FP32 holds exactly.
        scales: [N], factors of the rows of weight; None for 1.
    """
    N, K = weight.shape
    wide, y = x.float(), x.new_empty(len(x), N)
    step = max(1, CHUNK_WEIGHTS // K)
    for start in range(0, N, step):
        rows = slice(start, start + step)
        piece = functional.linear(wide, weight[rows].float())
        y[:, rows] = piece if scales is None else piece.mul_(scales[rows])
    return y


def _linear_of_many_tokens(x: Tensor, w: Planes, block_rows: int) -> Tensor:
    """`x @ w.T` in which some blocks of rows of the weight are widened at a time."""
    N, K = len(w.blocks), x.shape[1]
    blocks = w.blocks.view(N // block_rows, w.planes, K, block_rows // 2)
    scales = w.scale_zero[-(K // w.group_size) :, :, 0]  # of the last plane: the linear's own
    scales = scales.view(len(scales), -1, block_rows).transpose(0, 1).float()  # [N / R, K / G, R]
    step = max(1, CHUNK_WEIGHTS // (K * block_rows))
    y = x.new_empty(len(x), N)
    wide = x if multiplies_bf16() else x.float()
    for start in range(0, len(blocks), step):
        part = slice(start, start + step)
        weight = _widened_blocks(blocks[part], scales[part], w.group_size, wide.dtype)  # [K, rows]
        rows = slice(start * block_rows, start * block_rows + weight.shape[1])
        y[:, rows] = wide @ weight
    return y


def _widened_blocks(blocks: Tensor, scales: Tensor, group_size: int, dtype: torch.dtype) -> Tensor:
    """Blocks [B, P, K, R / 2] with scales [B, K / G, R] as a weight [K, B * R] of a dtype."""
    B, planes, K, half = blocks.shape
    top = blocks[:, 0]
    if planes == 1:
        codes = torch.cat((top & 15, top >> 4), dim=2).view(torch.int8).sub_(8)
    else:
        low = blocks[:, 1]
        first = (top << 4).bitwise_or_(low & 15)
        second = (top & 0xF0).bitwise_or_(low >> 4)
        codes = torch.cat((first, second), dim=2).bitwise_xor_(0x80).view(torch.int8)
    groups = codes.view(B, K // group_size, group_size, 2 * half)
    weight = torch.empty(K // group_size, group_size, B, 2 * half, dtype=dtype)
    torch.mul(groups, scales[:, :, None], out=weight.permute(2, 0, 1, 3))
    return weight.view(K, -1)
