"""Tensors of a checked checkpoint on their way to a device: one buffer each, fused by rows.

Data goes from the file straight into the buffer the model keeps (on a GPU through two pinned
buffers that take turns), so a second copy of the model never exists in RAM. What another tool laid
out its own way is translated some rows at a time.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Generic, TypeVar

import torch
from torch import Tensor

from lowbit.formats.activation_modes import Activations, Inputs, inputs_of
from lowbit.formats.errors import FormatError
from lowbit.formats.layout.packing import (
    PACKED,
    SCALE,
    SHAPE,
    WORD_BITS,
    ZERO_POINT,
    pack,
    packed_words,
    unpack,
    unpack_zero_point,
)
from lowbit.formats.layout.scheme import Scheme
from lowbit.formats.safetensors.checkpoint import Checkpoint, read_at
from lowbit.runtime.weights.linear import DenseLinear, Linear, PackedLinear
from lowbit.runtime.weights.table import PackedTable, Table

W = TypeVar("W")
Gather = Callable[[Callable[[int, int], W], int], Sequence[W]]

BLOCK_BYTES = 32 << 20  # read at a time where a tensor cannot be read in place
DERIVED_BYTES = 8 << 20  # likewise where its rows are computed, which takes several times as much
WIDE_BITS = 8


def served(scheme: Scheme) -> Scheme:
    """Scheme that serves a linear: INT8 for INT4 with zero points, as its codes hold q - z."""
    return scheme if scheme.symmetric else Scheme(WIDE_BITS, scheme.group_size)


def as_made(module: str, linear: W) -> W:
    """The linear as it is, whatever the module."""
    return linear


def one_by_one(read: Callable[[int, int], W], count: int) -> Sequence[W]:
    """Linears of `count` experts, each in buffers of its own."""
    return tuple(read(number, number + 1) for number in range(count))


@dataclass(frozen=True, slots=True)
class Weights(Generic[W]):
    """Reads dense tensors and fused linears."""

    checkpoint: Checkpoint  # whose tensors have been checked against the architecture's table
    # of every linear module; None, or no entry, where its weight is dense
    schemes: Mapping[str, Scheme | None]
    device: str  # where the model lives
    dtype: torch.dtype  # of its dense tensors and activations
    # makes the backend's form of a linear; the flag says that its two halves are paired
    prepare: Callable[[Linear, bool, Inputs], W]
    # makes the linears of all experts of a layer, from a function that reads a range of them, their
    # rows below each other, and the number of experts
    gather: Gather[W] = one_by_one
    activations: Activations = "exact"  # inputs of packed linears, other than heads
    rotated: bool = False  # whether hidden states are; see `inputs_of`
    # what a model keeps of the linear of a module, or of several from a first one on
    formed: Callable[[str, W], W] = as_made
    head_rows: Tensor | None = None  # [N] int64, rows of heads that are kept; None for all
    # least and largest value of every dense tensor read so far, on its device
    extremes: dict[str, tuple[Tensor, Tensor]] = field(default_factory=dict)
    _staging: list["_PinnedBlock"] = field(default_factory=list)

    def tensor(self, name: str, dtype: torch.dtype | None = None) -> Tensor:
        """A dense tensor on the model's device, in its dtype unless another is given."""
        shape = self.checkpoint.tensors[name].shape
        out = torch.empty(shape, dtype=dtype or self.dtype, device=self.device)
        self._fill(name, out)
        self._note_extremes(name, out)
        return out

    def table(self, module: str) -> Table:
        """A lookup table on the model's device; rows of a packed one are made as they are read."""
        if self.schemes.get(module) is None:
            return self.tensor(f"{module}.weight")
        codes = self._stacked([f"{module}.{PACKED}"], torch.int32)
        return PackedTable(codes, self._scales(module).to(self.device), self.dtype)

    def check_finite(self) -> None:
        """Refuse dense tensors with NaN or Inf, once all have been read.

        Raises:
            FormatError: naming the first of them.
        """
        for name, extremes in self.extremes.items():
            if not all(bool(value.isfinite()) for value in extremes):
                raise FormatError(
                    f"`{name}` holds NaN or Inf", hint="download or convert the checkpoint again"
                )

    def dense(self, weight: Tensor, module: str = "") -> W:
        """A linear, of a name, that shares a tensor already read: a tied embedding as the head."""
        return self.formed(module, self.prepare(DenseLinear(weight), False, "exact"))

    def linear(
        self, *modules: str, paired: bool = False, head: bool = False, normed: bool = False
    ) -> W:
        """One linear over the rows of several modules of one scheme, in the given order.

        paired: the rows of the first half of the modules, gates, meet those of the others, ups, one
            by one.
        head: its outputs are logits, so that its inputs keep 16 bits; see `head_rows`.
        normed: its inputs always come with a norm, which their product takes; see `inputs_of`.
        """
        scheme, kept = self.schemes.get(modules[0]), self.head_rows if head else None
        if scheme is None:
            rows = self.dense_rows(modules)
            dense = DenseLinear(rows if kept is None else rows[kept])
            return self.formed(modules[0], self.prepare(dense, paired, "exact"))
        if scheme.symmetric:
            codes = self._stacked([f"{module}.{PACKED}" for module in modules], torch.int32)
        else:
            codes = self._widened(modules, scheme)
        scales = torch.cat([self._scales(module) for module in modules]).to(self.device)
        if kept is not None:
            codes, scales = codes[kept], scales[kept]
        bits = served(scheme).bits
        packed = PackedLinear(
            codes=codes,
            scales=scales,
            bits=bits,
            group_size=scheme.group_size or codes.shape[1] * WORD_BITS // bits,
        )
        inputs = inputs_of(self.activations, head, normed, self.rotated)
        form = self.prepare(packed, paired, inputs)
        return self.formed(modules[0], form)

    def stack(self, experts: Sequence[Sequence[str]], paired: bool = False) -> Sequence[W]:
        """One linear for each expert, over the rows of its modules; see `linear`."""

        def read(first: int, stop: int) -> W:
            modules = [name for part in zip(*experts[first:stop], strict=True) for name in part]
            return self.linear(*modules, paired=paired)

        return self.gather(read, len(experts))

    def dense_rows(self, modules: Sequence[str]) -> Tensor:
        """Rows of several dense modules in one buffer, in the given order."""
        return self._stacked([f"{module}.weight" for module in modules], self.dtype)

    def _widened(self, modules: Sequence[str], scheme: Scheme) -> Tensor:
        """Codes q - z of asymmetric modules in one buffer of 8-bit codes, some rows at a time."""
        infos = [self.checkpoint.tensors[f"{module}.{PACKED}"] for module in modules]
        rows = [info.shape[0] for info in infos]
        K = infos[0].shape[1] * WORD_BITS // scheme.bits
        words = packed_words(K, WIDE_BITS)
        out = torch.empty(sum(rows), words, dtype=torch.int32, device=self.device)
        for module, info, part in zip(modules, infos, torch.split(out, rows), strict=True):
            stored = self.checkpoint.read(f"{module}.{ZERO_POINT}")
            zero = unpack_zero_point(stored, scheme.bits, info.shape[0]).to(self.device)
            for start, stop in _blocks(info.shape[0], info.row_bytes, DERIVED_BYTES):
                block = self._rows(info.name, start, stop)
                codes = unpack(block, scheme.bits, K).view(stop - start, zero.shape[1], -1)
                shifted = codes - zero[start:stop, :, None]
                part[start:stop] = pack(shifted.view(stop - start, K), WIDE_BITS)
        return out

    def _stacked(self, names: list[str], dtype: torch.dtype) -> Tensor:
        """Tensors of one width, read into the rows of one buffer."""
        infos = [self.checkpoint.tensors[name] for name in names]
        rows = [info.shape[0] for info in infos]
        out = torch.empty(sum(rows), infos[0].shape[1], dtype=dtype, device=self.device)
        for name, part in zip(names, torch.split(out, rows), strict=True):
            self._fill(name, part)
            if dtype.is_floating_point:
                self._note_extremes(name, part)
        return out

    def _scales(self, module: str) -> Tensor:
        """Scales of one module on the CPU, as stored and finite; checks `weight_shape` too."""
        scales = self.checkpoint.read(f"{module}.{SCALE}")
        if not bool(torch.isfinite(scales).all()):
            raise FormatError(f"`{module}.{SCALE}` holds NaN or Inf")
        shape = self.checkpoint.read(f"{module}.{SHAPE}").tolist()
        N, words = self.checkpoint.tensors[f"{module}.{PACKED}"].shape
        scheme = self.schemes[module]
        expected = [N, words * WORD_BITS // scheme.bits] if scheme is not None else []
        if shape != expected:
            raise FormatError(f"`{module}.{SHAPE}`: expected {expected}, got {shape}")
        return scales

    def _note_extremes(self, name: str, values: Tensor) -> None:
        """Keep a tensor's least and largest value, both NaN if it holds one; no wait for them."""
        if values.numel():
            self.extremes[name] = values.aminmax()

    def _fill(self, name: str, out: Tensor) -> None:
        """Read a tensor into a contiguous buffer of its shape, converting the dtype."""
        info = self.checkpoint.tensors[name]
        if name in self.checkpoint.derived:
            for start, stop in _blocks(info.shape[0], info.row_bytes, DERIVED_BYTES):
                out[start:stop] = self._rows(name, start, stop)
        elif out.device.type == "cuda":
            self._fill_cuda(name, out)
        elif info.dtype == out.dtype:
            self.checkpoint.read_into(name, out)
        else:
            rows = max(1, BLOCK_BYTES // max(info.row_bytes, 1))
            for start, block in self.checkpoint.rows(name, rows):
                out[start : start + len(block)] = block

    def _rows(self, name: str, start: int, stop: int) -> Tensor:
        device = torch.device(self.device)
        derived = self.checkpoint.derived.get(name)
        if derived is not None:
            return derived(start, stop, device)
        return self.checkpoint.read_rows(name, start, stop).to(device)

    def _fill_cuda(self, name: str, out: Tensor) -> None:
        """Read blocks of rows into pinned memory while the block before is on its way."""
        info = self.checkpoint.tensors[name]
        path = self.checkpoint.folder / info.file
        if not self._staging:
            self._staging.extend(_PinnedBlock.new(BLOCK_BYTES) for _ in range(2))
        for start, stop in _blocks(info.shape[0], info.row_bytes, BLOCK_BYTES):
            block = self._staging[0]
            self._staging.reverse()
            block.sent.synchronize()
            staged = block.bytes[: (stop - start) * info.row_bytes].view(info.dtype)
            read_at(path, info.offset + start * info.row_bytes, staged)
            out[start:stop].copy_(staged.view(out[start:stop].shape), non_blocking=True)
            block.sent.record()


def _blocks(rows: int, row_bytes: int, block_bytes: int) -> Iterator[tuple[int, int]]:
    """Ranges of rows of at most `block_bytes`, one row at least."""
    step = max(1, block_bytes // max(row_bytes, 1))
    for start in range(0, rows, step):
        yield start, min(start + step, rows)


@dataclass(frozen=True, slots=True)
class _PinnedBlock:
    """Page-locked bytes and the event after which they may be overwritten."""

    bytes: Tensor
    sent: torch.cuda.Event

    @classmethod
    def new(cls, size_bytes: int) -> "_PinnedBlock":
        buffer = torch.empty(size_bytes, dtype=torch.uint8, pin_memory=True)
        return cls(buffer, torch.cuda.Event())  # type: ignore[no-untyped-call]
