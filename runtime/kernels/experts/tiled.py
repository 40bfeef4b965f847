"""Tiles of all experts of a layer in one buffer, so that a kernel finds an expert by its number."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import overload

from torch import Tensor

from lowbit.formats.activation_modes import Activations
from lowbit.formats.errors import UnsupportedModelError
from lowbit.runtime.kernels.linear.program import Packed, packed
from lowbit.runtime.kernels.linear.tiles import SCALES, TILE, GpuLinear, TiledLinear

BLOCK_BYTES = 64 << 20  # of packed weights that are read and rearranged at a time


@dataclass(frozen=True, slots=True)
class TiledExperts(Sequence[TiledLinear]):
    """Linears [N, K] of one scheme, one for each expert; an item is a view of one of them."""

    words: Tensor  # [experts, tiles, steps, 2, 8, 4, 4] int32; see `TiledLinear`, as the rest
    scales: Tensor  # [experts, tiles, groups, 8, 2]
    bits: int  # 2, 3, 4 or 8
    group_size: int  # weights that share a scale
    N: int  # outputs of an expert
    K: int  # inputs
    paired: bool = False  # a tile holds 8 rows of gate and the same 8 rows of up
    activations: Activations = "exact"
    bounds: Tensor | None = None  # [experts, tiles, 8, 2] float32, for activations in int8

    @property
    def tiles(self) -> int:
        """Blocks of 16 rows of an expert."""
        return self.words.shape[1]

    @property
    def steps(self) -> int:
        """Steps of a row; see `Codec`."""
        return self.words.shape[2]

    @property
    def constants(self) -> Packed:
        """An expert as kernels know it."""
        return packed(self.K, self.group_size, self.bits, SCALES[self.scales.dtype])

    def __len__(self) -> int:
        """Experts."""
        return self.words.shape[0]

    @overload
    def __getitem__(self, index: int) -> TiledLinear: ...

    @overload
    def __getitem__(self, index: slice) -> "TiledExperts": ...

    def __getitem__(self, index: int | slice) -> "TiledLinear | TiledExperts":
        """View of one expert, or of several."""
        words, scales = self.words[index], self.scales[index]
        bounds = None if self.bounds is None else self.bounds[index]
        if isinstance(index, slice):
            return replace(self, words=words, scales=scales, bounds=bounds)
        sizes = self.bits, self.group_size, self.N, self.K, self.paired
        return TiledLinear(words, scales, *sizes, activations=self.activations, rows=bounds)


def gathered(read: Callable[[int, int], GpuLinear], count: int) -> TiledExperts:
    """Fill one buffer with all experts, reading some at a time.

    Args:
        read: experts from one number up to another, their rows below each other: where paired, the
            gates of all of them and then the ups of all of them.

    Raises:
        UnsupportedModelError: the experts are not quantized.
    """
    first = _tiled(read(0, 1))
    words = first.words.new_empty((count, *first.words.shape))
    scales = first.scales.new_empty((count, *first.scales.shape))
    bounds = None if first.rows is None else first.rows.new_empty((count, *first.rows.shape))
    for start, stop in _blocks(first, count):
        block = _tiled(read(start, stop))
        words[start:stop] = block.words.view(stop - start, *words.shape[1:])
        scales[start:stop] = block.scales.view(stop - start, *scales.shape[1:])
        if bounds is not None and block.rows is not None:
            bounds[start:stop] = block.rows.view(stop - start, *bounds.shape[1:])
    sizes = first.bits, first.group_size, first.N, first.K, first.paired
    return TiledExperts(words, scales, *sizes, first.activations, bounds)


def stacked(experts: Sequence[GpuLinear]) -> TiledExperts:
    """Experts that `gathered` has made.

    Raises:
        UnsupportedModelError: they do not lie in one buffer.
    """
    if isinstance(experts, TiledExperts):
        return experts
    raise UnsupportedModelError("experts that do not lie in one buffer have no GPU kernel")


def _blocks(one: TiledLinear, count: int) -> Iterator[tuple[int, int]]:
    """Numbers of experts that are read together: one where its last tile is not full."""
    whole = one.N % TILE == 0
    step = max(1, BLOCK_BYTES // one.size_bytes) if whole else 1
    for start in range(0, count, step):
        yield start, min(start + step, count)


def _tiled(w: GpuLinear) -> TiledLinear:
    if isinstance(w, TiledLinear):
        return w
    raise UnsupportedModelError(
        f"experts in {w.weight.dtype} have no GPU kernel: expected packed codes",
        hint="quantize them as they are read with --quantize int4, or run with --device cpu",
    )
