"""Weights in the order in which tensor cores take them: what a GPU keeps instead of rows.

A tile is 16 rows, one step of it 16 words of each row: 1 KB, which one warp reads with two loads of
16 bytes a lane, and which are A fragments of `integer_mma`, or of `mma` once widened to BF16:

    words [N / 16, K / step, 2 halves, 8 rows, 4 lanes, 4] int32        (halves: rows 0-7, 8-15)

A lane's words hold chunks of 8 consecutive k: chunk 4 * q + lane of the step for its q-th, so that
x is read in its natural order. A chunk is two words of 8 bits, a word of 4, half a word of 2: in
each byte the first chunk's codes, then the second's. Inside a chunk codes are placed for widening
by a shift and a mask (`unpack`): k 0 to 7 in bytes 0, 2, 0, 2, 1, 3, 1, 3, the first of a byte in
its lower bits. Codes are two's complement.

Codes of 3 bits take three loads. Those of a row's 16 chunks of 32 k in half a step, of which every
byte has eight, are a word of each load: in a byte two codes from the upper bits down, and two bits
of what is left. So six of eight need a mask alone, or a shift and a mask:

    bits of a byte    7..5     4..2     1..0
    first load        code 0   code 3   upper bits of code 6
    second            code 1   code 4   upper bits of code 7
    third             code 2   code 5   lowest bits of code 6 and code 7
    words of a load   [8 rows, 4 lanes, 2 halves of K, 2 halves of the rows]

Scales follow as [N / 16, K / G, 8 rows, 2 halves]. Rows and K are padded with weights of zero.
"""

import itertools
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from lowbit.formats.activation_modes import Activations
from lowbit.formats.activations import (
    activation_group,
    integer_scales,
    row_bounds,
    squared_norms,
)
from lowbit.formats.errors import FormatError
from lowbit.runtime.kernels.codec import CODECS, WIDE_CODECS, Codec
from lowbit.runtime.kernels.launch.int8 import COUNTERS
from lowbit.runtime.kernels.launch.linear import Tuned
from lowbit.runtime.kernels.linear.program import Packed, packed
from lowbit.runtime.weights.linear import DenseLinear, PackedLinear

TILE = 16  # rows
WORDS = 16  # of each row in a step
LEAST_GROUP = 32  # the k that the four lanes of a row hold of one chunk each
BLOCK_WORDS = 1 << 21  # rearranged at a time
SCALES = {  # for kernels
    torch.bfloat16: "bf16",
    torch.float16: "fp16",
    torch.float32: "fp32",
    torch.int16: "int16",
}


@dataclass(frozen=True, slots=True)
class TiledLinear:
    """A weight [N, K] for the GPU's kernels."""

    words: Tensor  # [tiles, steps, 2, 8, 4, 4] int32, of 3 bits [tiles, steps, 3, 8, 4, 4]
    # [tiles, groups, 8, 2] bfloat16, float16 or float32, or int16 of `integer_scales`, for products
    # with x that is normed and has one scale a token in eight bits
    scales: Tensor
    bits: int  # 2, 3, 4 or 8
    group_size: int  # weights that share a scale
    N: int  # outputs
    K: int  # inputs
    # the first half of a tile is of the first N / 2 rows, the second half is the same rows of the
    # others: gate and up
    paired: bool = False
    tuned: Tuned = ()  # launches of its GEMVs that count before those of the tables (`gemv_launch`)
    activations: Activations = "exact"  # how products take x
    # [tiles * COUNTERS] int32, zeros between products: of the programs that share a tile and block
    # of tokens, what they have left. None where none are shared.
    arrived: Tensor | None = None
    # [tiles, 8, 2] float32, for activations in int8: of `row_bounds`, or units of integer scales
    rows: Tensor | None = None
    # whether a token of x is two rows in eight bits: the heads'; see `remainders`
    remainders: bool = False

    @property
    def tiles(self) -> int:
        """Blocks of 16 rows."""
        return self.words.shape[0]

    @property
    def steps(self) -> int:
        """Steps of a row; see `Codec`."""
        return self.words.shape[1]

    @property
    def size(self) -> tuple[int, int, int, bool]:
        """Bits, tiles, steps and whether paired: what its launches are looked up by."""
        return self.bits, self.tiles, self.steps, self.paired

    @property
    def whole(self) -> bool:
        """True if x has one scale a token."""
        return self.scales.dtype == torch.int16

    @property
    def outputs(self) -> int:
        """Columns of a product: the rows, or half of them where gate and up become one."""
        return self.N // 2 if self.paired else self.N

    def new_product(self, M: int, dtype: torch.dtype) -> Tensor:
        """Room for the product of M rows of x, two of which are a token where it has remainders."""
        rows = M // 2 if self.remainders else M
        return torch.empty((rows, self.outputs), dtype=dtype, device=self.words.device)

    @property
    def size_bytes(self) -> int:
        """Bytes that one pass over the weight reads."""
        return self.words.nbytes + self.scales.nbytes

    @property
    def constants(self) -> Packed:
        """The weight as kernels know it."""
        return packed(self.K, self.group_size, self.bits, SCALES[self.scales.dtype])


GpuLinear = TiledLinear | DenseLinear


def tiled(
    w: PackedLinear, paired: bool = False, activations: Activations = "exact", whole: bool = False
) -> TiledLinear:
    """Rearrange a packed weight into the order of the kernels.

    Args:
        paired: see `TiledLinear`; the rows of the two halves are equal in number.
        activations: see `TiledLinear`; for `int8` rows are padded to a multiple of 128 columns.
        whole: with one scale a token, so the weight's are integers.

    Raises:
        FormatError: rows or groups that are not a multiple of 32 codes.
    """
    if w.K % LEAST_GROUP or w.group_size % LEAST_GROUP:
        raise FormatError(
            f"packed linear: rows of {w.K} in groups of {w.group_size} codes have no GPU kernel, "
            f"both must be multiples of {LEAST_GROUP}",
            hint="convert with another --group-size, or run on the CPU",
        )
    step_k = CODECS[w.bits].STEP_K
    if activations == "int8":
        step_k = WIDE_CODECS[w.bits].STEP_K
    words = _words(w.codes, CODECS[w.bits], paired, step_k)
    sizes = w.bits, w.group_size, w.N, w.K, paired
    scales, arrived = _scales(w, paired), counters(words)
    made = TiledLinear(words, scales, *sizes, activations=activations, arrived=arrived)
    return rounding(made, whole) if activations == "int8" else made


def rounding(w: TiledLinear, whole: bool = False) -> TiledLinear:
    """A weight for x in eight bits: with bounds of its rows, or with integer scales (`whole`)."""
    groups = -(-w.K // activation_group(w.group_size, w.K))
    rows = w.scales.new_empty((w.tiles, 8, 2), dtype=torch.float32)
    scales = torch.empty_like(w.scales, dtype=torch.int16) if whole else w.scales
    block = max(1, BLOCK_WORDS // (TILE * w.steps * WORDS))
    for first in () if rows.is_meta else range(0, w.tiles, block):
        part = slice(first, first + block)
        words = w.words[part]
        own = TiledLinear(words, w.scales[part], w.bits, w.group_size, TILE * len(words), w.K)
        codes, own_scales = _unpacked(own)
        if whole:
            multiples, found = integer_scales(codes.to(torch.int8), own_scales, w.bits)
            scales[part] = multiples.view(-1, 2, 8, multiples.shape[1]).permute(0, 3, 2, 1)
        else:
            found = row_bounds(squared_norms(codes, own_scales), groups)
        rows[part] = found.view(-1, 2, 8).transpose(1, 2)
    return replace(w, scales=scales, rows=rows, activations="int8")


def counters(words: Tensor) -> Tensor:
    """Zeros for `TiledLinear.arrived`."""
    return words.new_zeros(words.shape[0] * COUNTERS)


def dequantized(w: TiledLinear) -> Tensor:
    """The weight as [N, K] float32, exactly `code * scale`: the reference of every kernel."""
    codes, scales = _unpacked(w)
    return codes * scales.repeat_interleave(w.group_size, 1)[:, : w.K]


def _unpacked(w: TiledLinear) -> tuple[Tensor, Tensor]:
    """Codes [N, K] and scales [N, groups] of a weight, float32."""
    codec = CODECS[w.bits]
    if codec.SPANS:
        codes = _three_bits(w.words)
    else:
        shifts = torch.tensor(codec.PLACES, dtype=torch.int32, device=w.words.device)
        codes = w.words[..., None] >> shifts  # [tiles, steps, 2, 8, 4, 4, codes]
        codes = codes << (32 - w.bits) >> (32 - w.bits)  # the sign comes along
        codes = codes.flatten(-2).unflatten(-1, (codec.PRODUCTS, 8))
    codes = codes.permute(2, 0, 3, 1, 5, 4, 6)  # half, tile, row, step, q, lane, k
    values = _untiled(codes.reshape(2, w.tiles, 8, -1).float(), w)[:, : w.K]
    return values, _untiled(w.scales.float().permute(3, 0, 2, 1), w)


def _untiled(halves: Tensor, w: TiledLinear) -> Tensor:
    """[2, tiles, 8, X] to [N, X]."""
    if w.paired:
        return halves.flatten(1, 2)[:, : w.N // 2].flatten(0, 1)
    return halves.transpose(0, 1).flatten(0, 2)[: w.N]


def _halves(rows: Tensor, paired: bool, fill: int) -> Tensor:
    """[N, X] to [2, tiles, 8, X], padded."""
    blocks = rows.chunk(2) if paired else (rows,)
    unit = 8 if paired else TILE
    count = -(-len(blocks[0]) // unit)
    short = count * unit - len(blocks[0])
    if short:
        padding = rows.new_full((short, rows.shape[1]), fill)
        blocks = tuple(torch.cat((block, padding)) for block in blocks)
    if paired:
        return torch.stack([block.view(count, 8, -1) for block in blocks])
    return blocks[0].view(count, 2, 8, -1).transpose(0, 1)


def _words(codes: Tensor, codec: Codec, paired: bool, step_k: int) -> Tensor:
    """Native words [N, K * bits / 32] to tiles, rows padded to a multiple of `step_k` codes."""
    N, width = codes.shape
    steps = -(-width * 32 // codec.BITS // step_k) * (step_k // codec.STEP_K)
    tiles = -(-N // TILE)
    out = codes.new_empty((tiles, steps, codec.LOADS, 8, 4, 4))
    if out.is_meta:  # each of some hundred operations would take longer than with data
        return out
    block = max(1, BLOCK_WORDS // (TILE * steps * WORDS))
    for tile in range(0, tiles, block):
        part = slice(tile, min(tile + block, tiles))
        rows = _rows(codes, part, paired)
        if codec.SPANS:
            out[part] = _words_of_three_bits(rows, steps, paired, codec.SIGN_BITS)
        else:
            out[part] = _halves_of_words(rows, codec, steps, paired)
    return out


def _halves_of_words(rows: Tensor, codec: Codec, steps: int, paired: bool) -> Tensor:
    """Native words whose codes do not span them to [tiles, steps, 2, 8, 4, 4]."""
    zero = codec.SIGN_BITS  # of a native word: every code is 2^(bits - 1)
    halves = _padded(_halves(rows, paired, zero), steps * WORDS, zero)
    count = halves.shape[1]
    if len(codec.PLACES) > 8:  # two chunks of every word, of two lanes
        chunks = halves.view(torch.int16).view(2, count, 8, steps, 4, 2, 4)
        words = chunks.permute(1, 3, 0, 2, 6, 4, 5).contiguous().view(torch.int32)
        words = _placed(words.view(count, steps, 2, 8, 4, 4), codec)
    else:
        inner = 8 // len(codec.PLACES)  # words of a chunk
        chunks = _placed(halves, codec).view(2, count, 8, steps, 4 // inner, 4, inner)
        words = chunks.permute(1, 3, 0, 2, 5, 4, 6).reshape(count, steps, 2, 8, 4, 4)
    return words ^ zero  # two's complement


def _words_of_three_bits(rows: Tensor, steps: int, paired: bool, sign_bits: int) -> Tensor:
    """Native words of 3 bits to [tiles, steps, 3, 8, 4, 4]."""
    three = rows.view(torch.uint8).view(len(rows), -1, 3).to(torch.int32)  # bytes of a chunk
    chunks = three[..., 0] | three[..., 1] << 8 | three[..., 2] << 16
    chunks ^= sign_bits  # two's complement
    halves = _padded(_halves(chunks, paired, 0), steps * 32, 0)
    count = halves.shape[1]
    halves = halves.view(2, count, 8, steps, 2, 4, 4)  # half of rows, row, step, half of K, q, lane
    q = halves.permute(1, 3, 2, 6, 4, 0, 5).flatten(4, 5).unbind(-1)
    words = [torch.zeros_like(q[0]) for _ in range(3)]
    for byte in range(4):
        codes = [q[n // 2] >> 3 * _K_OF[n % 2][byte] & 7 for n in range(8)]
        rest = codes[6] >> 1, codes[7] >> 1, codes[6] & 1 | (codes[7] & 1) << 1
        for load in range(3):
            value = codes[load] << 5 | codes[3 + load] << 2 | rest[load]
            words[load] |= value << 8 * byte
    return torch.stack(words, 2)


_K_OF = ((0, 4, 1, 5), (2, 6, 3, 7))  # of a chunk: in each byte the first code, and the second


def _three_bits(words: Tensor) -> Tensor:
    """Invert `_words_of_three_bits`: [tiles, steps, 2 halves, 8 rows, 4 lanes, 8, 8] int32."""
    found = words.new_empty((*words.shape[:2], 2, 8, 4, 8, 8))
    for at in range(4):
        loads = words[..., at].unbind(2)  # [tiles, steps, 8, 4]
        for byte, n in itertools.product(range(4), range(8)):
            load = [word >> 8 * byte for word in loads]
            code = load[n % 3] >> (5 if n < 3 else 2)
            if n >= 6:
                code = load[n - 6] << 1 | load[2] >> n - 6 & 1
            k = _K_OF[n % 2][byte]
            found[:, :, at % 2, :, :, at // 2 * 4 + n // 2, k] = (code & 7 ^ 4) - 4
    return found


def _padded(halves: Tensor, width: int, fill: int) -> Tensor:
    short = width - halves.shape[-1]
    return torch.nn.functional.pad(halves, (0, short), value=fill) if short else halves


def _rows(codes: Tensor, tiles: slice, paired: bool) -> Tensor:
    """The rows of some tiles, those of the second half after those of the first."""
    if not paired:
        return codes[tiles.start * TILE : tiles.stop * TILE]
    rows = slice(tiles.start * 8, tiles.stop * 8)
    return torch.cat([half[rows] for half in codes.chunk(2)])


def _placed(words: Tensor, codec: Codec) -> Tensor:
    """Words whose codes, in order of k, have moved to their places."""
    mask = (1 << codec.BITS) - 1
    out = torch.zeros_like(words)
    for k, place in enumerate(codec.PLACES):
        out |= ((words >> (codec.BITS * k)) & mask) << place
    return out


def _scales(w: PackedLinear, paired: bool) -> Tensor:
    """Native scales [N, K / G] to [tiles, groups, 8, 2]."""
    return _halves(w.scales, paired, 0).permute(1, 3, 2, 0).contiguous()
