"""Weights in the order in which tensor cores take them: what a GPU keeps instead of rows.

A tile is 16 rows, one step of it 16 words of each row: 1 KB, which one warp reads with two loads of
16 bytes a lane, and which are A fragments of `integer_mma`, or of `mma` once widened to BF16:

    words [N / 16, K / step, 2 halves, 8 rows, 4 lanes, 4] int32        (halves: rows 0-7, 8-15)

A lane's words hold chunks of 8 consecutive k: chunk 4 * q + lane of the step for its q-th, so that
x is read in its natural order. Inside a chunk the codes are placed for widening by a shift and a
mask (`mma.pairs`): of a word's nibbles 0..7, 0 and 4 are the first pair, 1 and 5 the second...
Codes are two's complement. Scales follow as [N / 16, K / G, 8 rows, 2 halves]. Rows and K are
padded with weights of zero.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from lowbit.formats.errors import FormatError
from lowbit.runtime.kernels.launch.linear import Tuned
from lowbit.runtime.kernels.linear.program import Packed, packed
from lowbit.runtime.weights.linear import DenseLinear, PackedLinear

TILE = 16  # rows
WORDS = 16  # of each row in a step
LEAST_GROUP = 32  # the k that the four lanes of a row hold of one chunk each
BLOCK_WORDS = 1 << 21  # rearranged at a time
SCALES = {torch.bfloat16: "bf16", torch.float16: "fp16", torch.float32: "fp32"}  # for kernels


@dataclass(frozen=True, slots=True)
class TiledLinear:
    """A weight [N, K] for the GPU's kernels.

    Attributes:
        words: [tiles, steps, 2, 8, 4, 4] int32.
        scales: [tiles, groups, 8, 2] bfloat16, float16 or float32.
        bits: 4 or 8.
        group_size: weights that share a scale.
        N: outputs.
        K: inputs.
        paired: the first half of a tile is of the first N / 2 rows, the second half is the same
            rows of the others: gate and up.
        tuned: launches of its GEMVs that count before those of the tables (`gemv_launch`).
    """

    words: Tensor
    scales: Tensor
    bits: int
    group_size: int
    N: int
    K: int
    paired: bool = False
    tuned: Tuned = ()

    @property
    def tiles(self) -> int:
        """Blocks of 16 rows."""
        return self.words.shape[0]

    @property
    def steps(self) -> int:
        """Blocks of 512 / bits columns."""
        return self.words.shape[1]

    @property
    def size(self) -> tuple[int, int, int, bool]:
        """Bits, tiles, steps and whether paired: what its launches are looked up by."""
        return self.bits, self.tiles, self.steps, self.paired

    @property
    def size_bytes(self) -> int:
        """Bytes that one pass over the weight reads."""
        return self.words.nbytes + self.scales.nbytes

    @property
    def constants(self) -> Packed:
        """The weight as kernels know it."""
        return packed(self.K, self.group_size, self.bits, SCALES[self.scales.dtype])


GpuLinear = TiledLinear | DenseLinear


def tiled(w: PackedLinear, paired: bool = False) -> TiledLinear:
    """Rearrange a packed weight into the order of the kernels.

    Args:
        w: packed.
        paired: see `TiledLinear`; the rows of the two halves are equal in number.

    Raises:
        FormatError: rows or groups that are not a multiple of 32 codes.
    """
    if w.K % LEAST_GROUP or w.group_size % LEAST_GROUP:
        raise FormatError(
            f"packed linear: rows of {w.K} in groups of {w.group_size} codes have no GPU kernel, "
            f"both must be multiples of {LEAST_GROUP}",
            hint="convert with another --group-size, or run on the CPU",
        )
    words = _words(w.codes, w.bits, paired)
    return TiledLinear(words, _scales(w, paired), w.bits, w.group_size, w.N, w.K, paired)


def dequantized(w: TiledLinear) -> Tensor:
    """The weight as [N, K] float32, exactly `code * scale`: the reference of every kernel."""
    inner = w.bits // 4  # words of a chunk
    chunks = w.words.view(w.tiles, w.steps, 2, 8, 4, 4 // inner, inner)
    chunks = chunks.permute(2, 0, 3, 1, 5, 4, 6)  # half, tile, row, step, q, lane, word
    rows = chunks.reshape(2, w.tiles, 8, -1)
    shifts = torch.tensor(_places(w.bits), dtype=torch.int32, device=rows.device) * w.bits
    codes = rows[..., None] >> shifts << (32 - w.bits) >> (32 - w.bits)  # the sign comes along
    values = codes.float().flatten(-2)
    values = _untiled(values, w)[:, : w.K]
    scales = _untiled(w.scales.float().permute(3, 0, 2, 1), w)
    return values * scales.repeat_interleave(w.group_size, 1)[:, : w.K]


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


def _words(codes: Tensor, bits: int, paired: bool) -> Tensor:
    """Native words [N, K * bits / 32] to [tiles, steps, 2, 8, 4, 4]."""
    N, width = codes.shape
    steps, inner = -(-width // WORDS), bits // 4
    zero = {4: -0x77777778, 8: -0x7F7F7F80}[bits]  # every code is 2^(bits - 1)
    tiles = -(-N // TILE)
    out = codes.new_empty((tiles, steps, 2, 8, 4, 4))
    block = max(1, BLOCK_WORDS // (TILE * steps * WORDS))
    for tile in range(0, tiles, block):
        part = slice(tile, min(tile + block, tiles))
        halves = _halves(_rows(codes, part, paired), paired, zero)
        if steps * WORDS > width:
            halves = torch.nn.functional.pad(halves, (0, steps * WORDS - width), value=zero)
        count = halves.shape[1]
        chunks = _placed(halves, bits).view(2, count, 8, steps, 4 // inner, 4, inner)
        words = chunks.permute(1, 3, 0, 2, 5, 4, 6).reshape(count, steps, 2, 8, 4, 4)
        out[part] = words ^ zero  # two's complement
    return out


def _rows(codes: Tensor, tiles: slice, paired: bool) -> Tensor:
    """The rows of some tiles, those of the second half after those of the first."""
    if not paired:
        return codes[tiles.start * TILE : tiles.stop * TILE]
    rows = slice(tiles.start * 8, tiles.stop * 8)
    return torch.cat([half[rows] for half in codes.chunk(2)])


def _places(bits: int) -> tuple[int, ...]:
    """Where the codes of a word go, in order of k."""
    return (0, 4, 1, 5, 2, 6, 3, 7) if bits == 4 else (0, 2, 1, 3)


def _placed(words: Tensor, bits: int) -> Tensor:
    """Words whose codes, in order of k, have moved to their places."""
    mask = (1 << bits) - 1
    out = torch.zeros_like(words)
    for k, place in enumerate(_places(bits)):
        out |= ((words >> (bits * k)) & mask) << (bits * place)
    return out


def _scales(w: PackedLinear, paired: bool) -> Tensor:
    """Native scales [N, K / G] to [tiles, groups, 8, 2]."""
    return _halves(w.scales, paired, 0).permute(1, 3, 2, 0).contiguous()
