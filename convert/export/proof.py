"""Comparison of what an export decodes to with the packed folder."""

from collections.abc import Callable, Iterable
from dataclasses import dataclass

import torch
from torch import Tensor

from lowbit.convert.export.source import Linear, PackedSource
from lowbit.convert.original.progress import Advance
from lowbit.formats.errors import FormatError
from lowbit.formats.layout.packing import dequantize


@dataclass(frozen=True, slots=True)
class Decoded:
    """Rows of a linear as the exported file gives them back, in the source's order."""

    start: int  # number of the first row
    codes: Tensor  # [rows, K] int8, signed
    scales: Tensor  # [rows, K / g] float32; g is the container's own group size
    values: Tensor  # [rows, K] float32, by the container's own arithmetic


@dataclass(frozen=True, slots=True)
class Proof:
    """Counts of what was read back and found equal."""

    linears: int  # number compared
    codes: int  # number compared and equal
    scales: int  # number of the packed folder's, compared and equal
    largest_difference: float  # of a weight's two values, in FP32
    copied: int  # number of other tensors, compared byte for byte


Decode = Callable[[Linear], Iterable[Decoded]]


def prove(
    source: PackedSource,
    linears: Iterable[Linear],
    decode: Decode,
    copies: Iterable[tuple[str, Iterable[Tensor], Iterable[Tensor]]],
    advance: Advance,
) -> Proof:
    """Compare every code, scale and value of an export with the packed folder.

    Args:
        copies: (name, blocks of the source, blocks of the export) of each copied tensor.

    Raises:
        FormatError: naming the first linear or tensor that differs.
    """
    compared = codes = scales = same = 0
    largest = 0.0
    for linear in linears:
        rows = 0
        for part in decode(linear):
            stop = part.start + len(part.codes)
            largest = max(largest, _compare(source, linear, part, stop))
            rows += len(part.codes)
            advance(part.codes.numel())
        if rows != linear.N:
            raise FormatError(f"`{linear.module}`: {rows} of {linear.N} rows were read back")
        compared += 1
        codes += linear.N * linear.K
        scales += linear.N * linear.groups
    for name, ours, theirs in copies:
        if not _same(ours, theirs):
            raise FormatError(f"`{name}` reads back with other bytes than it had")
        same += 1
    return Proof(compared, codes, scales, largest, same)


def _compare(source: PackedSource, linear: Linear, part: Decoded, stop: int) -> float:
    """Largest difference of values; unequal codes or scales are refused."""
    codes = source.codes(linear, part.start, stop)
    scales = source.scales(linear, part.start, stop)
    wide = scales.to(torch.float32)
    repeat = part.scales.shape[1] // linear.groups
    if not torch.equal(part.codes, codes):
        raise FormatError(f"`{linear.module}` reads back with other codes")
    if not torch.equal(part.scales, wide.repeat_interleave(repeat, dim=1)):
        raise FormatError(f"`{linear.module}` reads back with other scales")
    difference = (part.values - dequantize(codes, scales)).abs_().max().item()
    if difference != 0.0:
        raise FormatError(
            f"`{linear.module}` reads back with other values, {difference:.3g} away at most"
        )
    return difference


def _same(ours: Iterable[Tensor], theirs: Iterable[Tensor]) -> bool:
    """Tell if two streams of blocks hold the same bytes, block by block."""
    return all(
        a.shape == b.shape and torch.equal(_bytes(a), _bytes(b))
        for a, b in zip(ours, theirs, strict=True)
    )


def _bytes(block: Tensor) -> Tensor:
    return block.contiguous().view(-1).view(torch.uint8)
