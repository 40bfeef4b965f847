"""Tensor parallelism: one rank's share of heads and widths, and the parts of tensors it reads."""

from dataclasses import dataclass
from typing import Generic, TypeVar

import torch
from torch import Tensor

W = TypeVar("W", covariant=True)  # a backend's form of a linear
Ranges = tuple[tuple[int, int], ...]  # start and stop of each, in order

HEAD = "lm_head"
# Ends of the names of linears whose columns ranks share out, so that products are partial sums
PARTIAL_ENDS = (".o_proj", ".out_proj", ".down_proj")


@dataclass(frozen=True, slots=True)
class Share:
    """A rank among others."""

    rank: int  # 0 to ranks - 1
    ranks: int

    def of(self, count: int, width: int = 1) -> tuple[int, int]:
        """Range of this rank's rows, of `count` units of `width` rows.

        Units are shared out evenly; where there are fewer than ranks, several ranks have the same.
        """
        if count >= self.ranks:
            each = count // self.ranks
            return self.rank * each * width, (self.rank + 1) * each * width
        unit = self.rank * count // self.ranks
        return unit * width, (unit + 1) * width

    def count(self, units: int) -> int:
        """Units of this rank."""
        start, stop = self.of(units)
        return stop - start


ALONE = Share(0, 1)


@dataclass(frozen=True, slots=True)
class PartialLinear(Generic[W]):
    """A rank's columns of a linear, in a form whose products are FP32."""

    form: W


@dataclass(frozen=True, slots=True)
class HeadRows(Generic[W]):
    """A rank's rows of the head."""

    form: W
    widths: tuple[int, ...]  # rows of every rank


HeadShare = tuple[tuple[int, int], ...]  # first row of the head, and its end, on every rank


def widths_of(rows: HeadShare) -> tuple[int, ...]:
    """Rows of the head on every rank.

    >>> widths_of(((0, 64), (64, 100)))
    (64, 36)
    """
    return tuple(stop - start for start, stop in rows)


@dataclass(frozen=True, slots=True)
class Part:
    """Rows and columns of a tensor that a rank reads; None for all."""

    rows: Ranges | None = None
    columns: tuple[int, int] | None = None

    def shape(self, whole: tuple[int, ...]) -> tuple[int, ...]:
        """Shape of the part of a tensor of a shape."""
        first, *rest = whole
        if self.rows is not None:
            first = sum(stop - start for start, stop in self.rows)
        if self.columns is not None:
            rest = [self.columns[1] - self.columns[0], *rest[1:]]
        return first, *rest

    def of(self, tensor: Tensor) -> Tensor:
        """The part of a whole tensor."""
        if self.rows is not None:
            tensor = torch.cat([tensor[start:stop] for start, stop in self.rows])
        return self.cut(tensor)

    def cut(self, rows: Tensor) -> Tensor:
        """The part's columns of some of its rows."""
        return rows if self.columns is None else rows[:, slice(*self.columns)].contiguous()

    def stored_rows(self, start: int, stop: int) -> list[tuple[int, int]]:
        """Rows [start, stop) of the part, as ranges of rows of the whole tensor.

        >>> Part(rows=((10, 14), (20, 24))).stored_rows(2, 6)
        [(12, 14), (20, 22)]
        """
        if self.rows is None:
            return [(start, stop)]
        found, before = [], 0
        for first, last in self.rows:
            begin, end = max(start - before, 0) + first, min(stop - before, last - first) + first
            if begin < end:
                found.append((begin, end))
            before += last - first
        return found or [(0, 0)]


WHOLE = Part()
