"""Translation of a GPTQ or AWQ checkpoint: native names, same codes, zero points and scales.

GPTQ and AWQ name their tensors alike and transpose them: `P.qweight` of a linear P [N, K] runs
along K first, `P.scales` and `P.qzeros` are [K/G, N], and there always is a zero point, 2^(bits-1)
in a symmetric weight. The order of codes in a word differs: see the modules `gptq` and `awq`.
"""

import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from lowbit.formats.errors import CheckpointError, FormatError
from lowbit.formats.files.reading import open_file
from lowbit.formats.layout.packing import (
    FLOATS,
    PACKED,
    SCALE,
    SHAPE,
    WORD_BITS,
    ZERO_POINT,
    pack_zero_point,
    packed_shapes,
)
from lowbit.formats.layout.quantization_config import KEY, section_of
from lowbit.formats.layout.scheme import Scheme
from lowbit.formats.safetensors.checkpoint import Checkpoint, DerivedRows, TensorInfo

CODES, ZEROS, SCALES, ORDER = "qweight", "qzeros", "scales", "g_idx"
READ_BITS = (4, 8)


@dataclass(frozen=True, slots=True)
class ForeignLinear:
    """A packed linear [N, K] in a file of another tool."""

    module: str  # its name
    N: int  # outputs
    K: int  # inputs
    scheme: Scheme  # symmetric until the zero points have been read
    codes: DerivedRows  # reads rows as native words: [stop - start, K * bits / 32] int32
    zero_points: Callable[[], Tensor]  # [K/G, N] int8, signed


def packed_modules(checkpoint: Checkpoint) -> list[str]:
    """Names of the packed linears, in file order.

    Raises:
        FormatError: there is none.
    """
    suffix = f".{CODES}"
    found = [name.removesuffix(suffix) for name in checkpoint.tensors if name.endswith(suffix)]
    if not found:
        method = checkpoint.config[KEY]["quant_method"]
        raise FormatError(
            f"config.json says `{method}`, but `{checkpoint.folder}` holds no `{CODES}` tensor"
        )
    return found


def read_scheme(section: Mapping[str, Any], where: str) -> Scheme:
    """Bits and group size as GPTQ and AWQ files state them; group size -1 is a whole row.

    Raises:
        FormatError: a key is missing or of another type, or no layout has such bits.
    """
    bits, size = section.get("bits"), section.get("group_size")
    if type(bits) is not int or type(size) is not int:
        raise FormatError(f"{where}: bits is {bits!r}, group_size is {size!r}")
    if bits not in READ_BITS:
        raise FormatError(
            f"{where}: {bits}-bit weights are not supported (read: 4 and 8 bits)",
            hint="convert from the original checkpoint with lowbit-convert",
        )
    return Scheme(bits, None if size == -1 else size)


def matrix(checkpoint: Checkpoint, name: str, dtypes: Sequence[torch.dtype]) -> TensorInfo:
    """Header of a matrix in the file.

    Raises:
        FormatError: it is missing, not a matrix, or of another dtype.
    """
    if name not in checkpoint.tensors:
        raise FormatError(f"`{name}` is missing from `{checkpoint.folder}`")
    info = checkpoint.tensors[name]
    if len(info.shape) != 2 or info.dtype not in dtypes:
        names = " or ".join(str(dtype).removeprefix("torch.") for dtype in dtypes)
        raise FormatError(
            f"`{name}`: expected a matrix of {names}, got {info.dtype_name} {list(info.shape)}"
        )
    return info


def as_native(checkpoint: Checkpoint, linears: Sequence[ForeignLinear]) -> Checkpoint:
    """The checkpoint with native tensors instead of the foreign ones, translated when read.

    Zero points and `g_idx` are read at once, because only they tell if weights are symmetric and in
    order. One zero point other than 0 anywhere makes every linear asymmetric.

    Raises:
        QuantizationError: the group size does not divide K.
        FormatError: activation-ordered groups, or tensors that do not fit each other.
    """
    for linear in linears:
        _check_shapes(checkpoint, linear)
        _check_order(checkpoint, linear)
    symmetric = not any(bool(linear.zero_points().any()) for linear in linears)
    stale = {f"{x.module}.{suffix}" for x in linears for suffix in (CODES, ZEROS, SCALES, ORDER)}
    tensors = {name: info for name, info in checkpoint.tensors.items() if name not in stale}
    derived: dict[str, DerivedRows] = {}
    targets: dict[Scheme, list[str]] = {}
    for linear in linears:
        scheme = replace(linear.scheme, symmetric=symmetric)
        targets.setdefault(scheme, []).append(linear.module)
        for info, rows in _native_tensors(checkpoint, linear, scheme):
            tensors[info.name], derived[info.name] = info, rows
    config = {**checkpoint.config, KEY: section_of(targets)}
    return replace(checkpoint, config=config, tensors=tensors, derived=derived)


def _native_tensors(
    checkpoint: Checkpoint, linear: ForeignLinear, scheme: Scheme
) -> Iterator[tuple[TensorInfo, DerivedRows]]:
    """Headers of the native tensors of a linear, and functions that make their rows."""
    scales = checkpoint.tensors[f"{linear.module}.{SCALES}"]

    def scale_rows(start: int, stop: int, device: torch.device) -> Tensor:
        return read_columns(checkpoint, scales.name, start, stop).to(device).T.contiguous()

    def shape_rows(start: int, stop: int, device: torch.device) -> Tensor:
        return torch.tensor([linear.N, linear.K], device=device)[start:stop]

    def zero_point_rows(start: int, stop: int, device: torch.device) -> Tensor:
        words = pack_zero_point(linear.zero_points().T, scheme.bits)
        return words[start:stop].to(device)

    made: dict[str, tuple[torch.dtype, DerivedRows]] = {
        PACKED: (torch.int32, linear.codes),
        SCALE: (scales.dtype, scale_rows),
        SHAPE: (torch.int64, shape_rows),
        ZERO_POINT: (torch.int32, zero_point_rows),
    }
    for suffix, shape in packed_shapes(linear.N, linear.K, scheme, linear.module).items():
        dtype, rows = made[suffix]
        info = replace(
            checkpoint.tensors[f"{linear.module}.{CODES}"],
            name=f"{linear.module}.{suffix}",
            dtype=dtype,
            shape=shape,
            nbytes=torch.Size(shape).numel() * dtype.itemsize,
        )
        yield info, rows


def _check_shapes(checkpoint: Checkpoint, linear: ForeignLinear) -> None:
    """Compare scales and zero points with the codes."""
    bits, N, K = linear.scheme.bits, linear.N, linear.K
    groups = linear.scheme.groups(linear.module, K)
    expected = {SCALES: (groups, N), ZEROS: (groups, N * bits // WORD_BITS)}
    for suffix, shape in expected.items():
        dtypes = FLOATS if suffix == SCALES else (torch.int32,)
        info = matrix(checkpoint, f"{linear.module}.{suffix}", dtypes)
        if info.shape != shape or N * bits % WORD_BITS or K * bits % WORD_BITS:
            raise FormatError(
                f"`{info.name}`: shape {list(info.shape)} does not fit {linear.scheme} of "
                f"[{N}, {K}]"
            )


def _check_order(checkpoint: Checkpoint, linear: ForeignLinear) -> None:
    """Refuse weights whose groups are not contiguous along K."""
    name = f"{linear.module}.{ORDER}"
    if name not in checkpoint.tensors:
        return
    groups = torch.arange(linear.K) // (linear.scheme.group_size or linear.K)
    if not torch.equal(checkpoint.read(name).to(torch.int64), groups):
        raise FormatError(
            f"`{name}`: activation-ordered groups (act-order, `desc_act`) are not supported",
            hint="take a checkpoint without desc_act, or convert the original with lowbit-convert",
        )


def read_columns(checkpoint: Checkpoint, name: str, start: int, stop: int) -> Tensor:
    """Read columns [start, stop) of a matrix to the CPU: [rows, stop - start].

    All columns take one read. Fewer take one read a row, so that no more memory than the result's
    is needed.

    Raises:
        CheckpointError: the file ends first, or is not a regular file.
    """
    info = checkpoint.tensors[name]
    rows, width = info.shape
    if (start, stop) == (0, width):
        return checkpoint.read(name)
    out = torch.empty(rows, stop - start, dtype=info.dtype)
    if not out.numel():
        return out
    view = out.view(-1).view(torch.uint8).numpy().data
    length = len(view) // rows
    first = info.offset + start * info.dtype.itemsize
    with open_file(checkpoint.folder / info.file) as file:
        for row in range(rows):
            part = view[row * length : (row + 1) * length]
            if os.preadv(file.fileno(), [part], first + row * info.row_bytes) != length:
                raise CheckpointError(
                    f"`{info.file}` ends inside `{name}`",
                    hint="the file is cut short; download or copy it again",
                )
    return out
