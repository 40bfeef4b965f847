"""Any weight of a checkpoint in FP32, as a reader of the file sees it, in blocks of rows."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path

import torch
from torch import Tensor

from lowbit.convert.original.rotation import Rotation, rotation_roles
from lowbit.convert.original.runnable import require_language_model
from lowbit.formats.errors import CheckpointError, FormatError, QuantizationError
from lowbit.formats.foreign.reader import open_native
from lowbit.formats.frequent_rows import open_frequent_rows
from lowbit.formats.head_rows import PackedRows
from lowbit.formats.layout.manifest import Manifest, read_manifest
from lowbit.formats.layout.packing import (
    GROUP_INDEX,
    PACKED,
    PACKED_DTYPES,
    SCALE,
    SHAPE,
    ZERO_POINT,
    dequantize,
    packed_shapes,
    unpack,
    unpack_zero_point,
)
from lowbit.formats.layout.quantization_config import (
    QuantizationConfig,
    method_of,
    read_quantization_config,
)
from lowbit.formats.layout.scheme import Scheme
from lowbit.formats.packed import FLOATS
from lowbit.formats.safetensors.checkpoint import Checkpoint, open_checkpoint

HEAD = "lm_head.weight"
PACKED_ROWS = 4096  # of an embedding, unpacked at a time


@dataclass(frozen=True, slots=True)
class Weights:
    """A checkpoint, packed or not, whose weights are read in FP32."""

    checkpoint: Checkpoint  # headers of the folder
    quantization: QuantizationConfig | None  # how its linears are packed; None where none is
    rotation: Rotation | None = None  # of its residual stream; None to read the weights as they are
    frequent: PackedRows | None = None  # rows that `rows` gives in place of the packed head's own
    # Of packed weights: each is a tensor of its own, read when it is first asked for.
    _shapes: dict[str, tuple[int, int]] = field(default_factory=dict, repr=False, compare=False)

    @property
    def name(self) -> str:
        """Name of the folder, for messages."""
        return self.checkpoint.folder.name

    def rotated(self) -> "Weights":
        """The weights of the same model, a dense one, with its residual stream rotated."""
        roles = rotation_roles(self.checkpoint.config, self.checkpoint.tensors)
        return replace(self, rotation=Rotation(self.checkpoint, roles))

    def packed_schemes(self) -> Mapping[str, Scheme]:
        """The scheme of every packed linear, by module name.

        Raises:
            FormatError: a packed tensor that `quantization_config` does not cover.
        """
        suffix = f".{PACKED}"
        modules = [n.removesuffix(suffix) for n in self.checkpoint.tensors if n.endswith(suffix)]
        return {module: self._scheme(module) for module in modules}

    def shape(self, name: str) -> tuple[int, ...]:
        """Shape of a weight, unpacked.

        Raises:
            CheckpointError: the checkpoint has no such weight.
        """
        tensors = self.checkpoint.tensors
        if self.rotation is not None:
            name = self.rotation.source(name)
        if name in tensors:
            return tensors[name].shape
        if name not in self._shapes:
            stored = f"{name.removesuffix('.weight')}.{SHAPE}"
            if stored not in tensors:
                raise CheckpointError(f"`{self.name}` lacks `{name}`, packed or not")
            N, K = self.checkpoint.read(stored).tolist()
            self._shapes[name] = N, K
        return self._shapes[name]

    def read(self, name: str, shape: tuple[int, ...], device: torch.device) -> Tensor:
        """A whole weight: float32 of the given shape, on the device.

        Args:
            name: as in an unpacked checkpoint, `.weight` included.
            shape: what the model expects.

        Raises:
            CheckpointError: no such weight, or one of another shape or dtype.
            FormatError: a packed weight that breaks the layout.
        """
        actual = self.shape(name)
        if actual != shape:
            raise CheckpointError(
                f"`{self.name}`: `{name}` has shape {list(actual)}, expected {list(shape)}"
            )
        if self.rotation is not None:
            self._check_dtype(self.rotation.source(name))
            return self.rotation.whole(name, device)
        if name in self.checkpoint.tensors:
            self._check_dtype(name)
            return self.checkpoint.read(name).to(device).to(torch.float32)
        module = name.removesuffix(".weight")
        scheme = self._checked_scheme(module)
        return self._unpack_rows(module, scheme, 0, shape[0], shape[1], device)[0]

    def rows(self, name: str, count: int, device: torch.device) -> Iterator[tuple[int, Tensor]]:
        """Blocks of at most `count` rows with the number of their first row, in FP32.

        Raises:
            CheckpointError, FormatError: as `read`.
        """
        if self.rotation is not None:
            source = self.rotation.source(name)
            self._check_dtype(source)
            for start, block in self.checkpoint.rows(source, count):
                yield start, self.rotation.rows(name, start, block, device)
            return
        if name in self.checkpoint.tensors:
            self._check_dtype(name)
            for start, block in self.checkpoint.rows(name, count):
                yield start, block.to(device).to(torch.float32)
            return
        for start, block, _ in self.packed_rows(name.removesuffix(".weight"), count, device):
            if name == HEAD and self.frequent is not None:
                _replace_rows(block, start, self.frequent)
            yield start, block

    def some_rows(self, name: str, numbers: Tensor, device: torch.device) -> Tensor:
        """Some rows of an embedding: [len(numbers), K] float32 on the device.

        Args:
            numbers: [rows] int64 on the CPU, ascending.

        Raises:
            CheckpointError, FormatError: as `read`.
        """
        stored = name if self.rotation is None else self.rotation.source(name)
        if stored not in self.checkpoint.tensors:
            return torch.cat(list(self._some_packed_rows(name, numbers, device)))
        self._check_dtype(stored)
        chosen = self.checkpoint.read_some(stored, numbers.tolist())
        if self.rotation is not None:  # each of an embedding's rows by itself
            return self.rotation.rows(name, 0, chosen, device)
        return chosen.to(device).to(torch.float32)

    def _some_packed_rows(
        self, name: str, numbers: Tensor, device: torch.device
    ) -> Iterator[Tensor]:
        for start, block in self.rows(name, PACKED_ROWS, device):
            inside = (numbers >= start) & (numbers < start + len(block))
            yield block[(numbers[inside] - start).to(device)]

    def packed_rows(
        self, module: str, count: int, device: torch.device
    ) -> Iterator[tuple[int, Tensor, Tensor]]:
        """First row, FP32 weights [rows, K] and stored scales [rows, K/G] of a packed linear.

        Raises:
            CheckpointError, FormatError: as `read`.
        """
        scheme = self._checked_scheme(module)
        N, K = self.shape(f"{module}.weight")
        for start in range(0, N, count):
            stop = min(start + count, N)
            weights, scale = self._unpack_rows(module, scheme, start, stop, K, device)
            yield start, weights, scale

    def _unpack_rows(
        self, module: str, scheme: Scheme, start: int, stop: int, K: int, device: torch.device
    ) -> tuple[Tensor, Tensor]:
        words = self.checkpoint.read_rows(f"{module}.{PACKED}", start, stop).to(device)
        scale = self.checkpoint.read_rows(f"{module}.{SCALE}", start, stop).to(device)
        zero_point = None
        if not scheme.symmetric:  # packed along N, so that rows cannot be read by themselves
            packed = self.checkpoint.read(f"{module}.{ZERO_POINT}").to(device)
            N = self.checkpoint.tensors[f"{module}.{PACKED}"].shape[0]
            zero_point = unpack_zero_point(packed, scheme.bits, N)[start:stop]
        return dequantize(unpack(words, scheme.bits, K), scale, zero_point), scale

    def _scheme(self, module: str) -> Scheme:
        scheme = None if self.quantization is None else self.quantization.scheme_for(module)
        if scheme is None:
            raise FormatError(
                f"`{module}` is packed but config.json's quantization_config does not cover it"
            )
        return scheme

    def _checked_scheme(self, module: str) -> Scheme:
        """The scheme of a packed linear whose tensors fit it."""
        scheme = self._scheme(module)
        tensors = self.checkpoint.tensors
        if f"{module}.{GROUP_INDEX}" in tensors:
            raise FormatError(f"`{module}.{GROUP_INDEX}`: reordered groups are not supported")
        N, K = self.shape(f"{module}.weight")
        for suffix, shape in packed_shapes(N, K, scheme, module).items():
            name = f"{module}.{suffix}"
            if name not in tensors:
                raise FormatError(f"`{module}` is packed but `{name}` is missing")
            info = tensors[name]
            if info.shape != shape:
                raise FormatError(
                    f"`{name}` has shape {list(info.shape)}, {scheme} of [{N}, {K}] "
                    f"needs {list(shape)}"
                )
            if info.dtype not in PACKED_DTYPES[suffix]:
                raise FormatError(f"`{info.name}` has dtype {info.dtype_name}")
        return scheme

    def _check_dtype(self, name: str) -> None:
        info = self.checkpoint.tensors[name]
        if info.dtype not in FLOATS:
            raise CheckpointError(
                f"`{self.name}`: `{name}` has dtype {info.dtype_name}, expected BF16, F16 or F32"
            )


def open_weights(folder: Path) -> Weights:
    """Read the headers of a folder, packed or not, and frequent rows of its head.

    Raises:
        CheckpointError, FormatError: not a checkpoint, or quantized by another method; or damaged
            rows.
    """
    return with_frequent_rows(weights_of(open_native(folder)), read_manifest(folder))


def with_frequent_rows(weights: Weights, manifest: Manifest | None) -> Weights:
    """The weights of a folder with the frequent rows of its head, if it has some.

    Args:
        manifest: lowbit.json of the folder.

    Raises:
        FormatError: see `open_frequent_rows`.
    """
    checkpoint = weights.checkpoint
    rows = open_frequent_rows(checkpoint.folder, checkpoint.config, manifest)
    return replace(weights, frequent=rows)


def _replace_rows(block: Tensor, first: int, rows: PackedRows) -> None:
    """Put rows in the places of their tokens in a block [count, K] of the head from `first` on."""
    here = (rows.ids >= first) & (rows.ids < first + len(block))
    codes = unpack(rows.packed[here].to(block.device), rows.scheme.bits, block.shape[1])
    tokens = rows.ids[here].to(block.device).long() - first
    block[tokens] = dequantize(codes, rows.scale[here].to(block.device))


def weights_of(checkpoint: Checkpoint) -> Weights:
    """The weights of a checkpoint that is open, packed or not.

    Raises:
        FormatError: quantized by another method.
    """
    return Weights(checkpoint, read_quantization_config(checkpoint.config))


def open_dense(folder: Path) -> Weights:
    """The weights of a folder that is not quantized yet.

    Raises:
        CheckpointError: not a checkpoint.
        QuantizationError, UnsupportedModelError: see `dense_weights`.
    """
    return dense_weights(open_checkpoint(folder))


def dense_weights(source: Checkpoint) -> Weights:
    """The weights of a checkpoint that is not quantized yet.

    Raises:
        QuantizationError: it is quantized.
        UnsupportedModelError: it is a drafter.
    """
    require_language_model(source.config, str(source.folder))
    if method_of(source.config) is not None:
        raise QuantizationError(
            f"`{source.folder}` is already quantized", hint="start from the BF16 checkpoint"
        )
    return Weights(source, None)
