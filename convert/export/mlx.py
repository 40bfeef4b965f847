"""MLX's container: the same words as uint32, `W = u * scale + bias` with `bias = -2^(bits-1) * s`.

The files have the form that mlx-lm itself writes (header metadata `{"format": "mlx"}`), so its
loader changes nothing: the experts of a layer are one tensor [E, N, ...]. mlx-lm has no multi-token
prediction and no vision tower; they are left out.
"""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from lowbit.convert.export.architectures import EXPORTED
from lowbit.convert.export.architectures.architecture import Mlx
from lowbit.convert.export.layout import Layout, Place
from lowbit.convert.export.outputs import (
    Output,
    chained,
    check_one_dtype,
    copied,
    row_parts,
    stack_shape,
    stacked,
)
from lowbit.convert.export.proof import Decoded
from lowbit.convert.export.rope import BETAS, check_yarn
from lowbit.convert.export.source import Linear, PackedSource, check_scales, row_blocks
from lowbit.formats.architectures.names import expert_of
from lowbit.formats.errors import FormatError
from lowbit.formats.layout.packing import PACKED, SCALE
from lowbit.formats.layout.quantization_config import KEY
from lowbit.formats.safetensors.checkpoint import Checkpoint, TensorInfo

GROUPS = (128, 64, 32)


def check(source: PackedSource) -> None:
    """Refuse a folder that mlx-lm cannot express.

    Raises:
        FormatError: a group size that no group size of MLX divides, a scale that overflows its
            dtype or its bias, experts of several dtypes, or layers in an order mlx-lm does not
            know.
    """
    for linear in source.linears:
        _group(linear)
    dtype = _dtype(source)
    check_scales(source, dtype, torch.finfo(dtype).max / 128)
    check_one_dtype(source)
    family(source).check(source.config)
    check_yarn(source.config, "mlx-lm", BETAS)


def family(source: PackedSource) -> Mlx[Any]:
    """MLX names and values of the folder's family."""
    return EXPORTED[source.model_type].mlx


def _group(linear: Linear) -> int:
    """MLX's group size: ours, or a divisor of it with the scale repeated."""
    for size in GROUPS:
        if linear.group % size == 0:
            return size
    raise FormatError(
        f"`{linear.module}` is {linear.scheme}: MLX has groups of 32, 64 and 128",
        hint="convert with --group-size 128",
    )


def _dtype(source: PackedSource) -> torch.dtype:
    """Dtype of the scales: FP16 where they are stored so, else BF16."""
    first = source.linears[0]
    stored = source.checkpoint.tensors[f"{first.module}.{SCALE}"].dtype
    return torch.float16 if stored == torch.float16 else torch.bfloat16


def _is_exported(source: PackedSource, name: str) -> bool:
    return source.part_of(name) == "decoder"


def linears(source: PackedSource) -> list[Linear]:
    """Linears that are exported: those of the decoder."""
    return [linear for linear in source.linears if _is_exported(source, linear.name)]


def outputs(source: PackedSource) -> list[Output]:
    """All tensors of the export."""
    name_of = family(source).name_of
    dense = [info for info in source.dense if _is_exported(source, info.name)]
    made = []
    for infos in stacked(dense, lambda info: name_of(info.name)):
        made.append(_stack(infos[0].name, [_dense(source, info) for info in infos]))
    for group in stacked(linears(source), lambda linear: name_of(linear.name)):
        parts = zip(*(_linear(source, linear) for linear in group), strict=True)
        made += [_stack(group[0].name, part) for part in parts]
    return made


def _stack(name: str, parts: Sequence[Output]) -> Output:
    """One tensor of those of a layer's experts; `name` is the first one's in the checkpoint."""
    shape = stack_shape(name, len(parts), parts[0].shape)
    return replace(parts[0], shape=shape, blocks=chained([part.blocks for part in parts]))


def copies(source: PackedSource) -> list[tuple[TensorInfo, Place]]:
    """Tensors that are exported byte for byte, with their new places."""
    return [
        (info, _place(source, info.name))
        for info in source.dense
        if _is_exported(source, info.name) and family(source).change(info.name) is None
    ]


def _place(source: PackedSource, name: str) -> Place:
    """Place of a tensor, or of all tensors of a module."""
    return Place(family(source).name_of(name), expert_of(name))


def _dense(source: PackedSource, info: TensorInfo) -> Output:
    change = family(source).change(info.name)
    name = family(source).name_of(info.name)
    if change is None:
        return copied(source.checkpoint, info, name)
    if change == "gain":  # rounded as mlx-lm rounds it
        return Output(
            name,
            info.dtype,
            info.shape,
            lambda: (part + 1 for part in row_parts(source.checkpoint, info)),
        )
    C, one, taps = info.shape
    return Output(
        name,
        info.dtype,
        (C, taps, one),
        lambda: (part.movedim(2, 1) for part in row_parts(source.checkpoint, info)),
    )


def _linear(source: PackedSource, linear: Linear) -> Iterator[Output]:
    module, dtype = family(source).name_of(linear.module), _dtype(source)
    repeat = linear.group // _group(linear)
    shape = (linear.N, linear.groups * repeat)

    def words() -> Iterator[Tensor]:
        for start, stop in row_blocks(linear):
            yield source.checkpoint.read_rows(f"{linear.module}.{PACKED}", start, stop)

    def scales(factor: int) -> Iterator[Tensor]:
        for start, stop in row_blocks(linear):
            s = source.scales(linear, start, stop).to(dtype)
            yield s.repeat_interleave(repeat, dim=1) * factor

    packed = source.checkpoint.tensors[f"{linear.module}.{PACKED}"].shape
    zero = 1 << (linear.bits - 1)
    yield Output(f"{module}.weight", torch.uint32, packed, words)
    yield Output(f"{module}.scales", dtype, shape, lambda: scales(1))
    yield Output(f"{module}.biases", dtype, shape, lambda: scales(-zero))


def config(source: PackedSource) -> dict[str, Any]:
    """config.json of the export."""
    made = linears(source)
    schemes = {
        family(source).name_of(linear.module): {
            "group_size": _group(linear),
            "bits": linear.bits,
            "mode": "affine",
        }
        for linear in made
    }
    # The default is the scheme of most weights; other modules are named.
    weights: dict[tuple[int, int], int] = {}
    for linear in made:
        key = (_group(linear), linear.bits)
        weights[key] = weights.get(key, 0) + linear.N * linear.K
    group, bits = max(weights, key=lambda key: weights[key])
    section: dict[str, Any] = {"group_size": group, "bits": bits, "mode": "affine"}
    section |= {name: scheme for name, scheme in schemes.items() if scheme != section}
    content = {**source.plain_config, "quantization": section, KEY: section}
    return family(source).config(source.config, source, content)


def decode(source: PackedSource, made: Checkpoint, linear: Linear) -> Iterator[Decoded]:
    """Decode a linear with MLX's arithmetic, `u * scale + bias` in FP32."""
    place = _place(source, linear.module)
    shifts = torch.arange(0, 32, linear.bits, dtype=torch.int32)
    mask, zero = (1 << linear.bits) - 1, 1 << (linear.bits - 1)
    for start, stop in row_blocks(linear):
        words = place.rows(made, start, stop, ".weight").view(torch.int32)
        u = ((words[:, :, None] >> shifts) & mask).flatten(1)
        s = place.rows(made, start, stop, ".scales").to(torch.float32)
        bias = place.rows(made, start, stop, ".biases").to(torch.float32)
        size = linear.K // s.shape[1]
        values = u.to(torch.float32) * s.repeat_interleave(size, dim=1)
        values += bias.repeat_interleave(size, dim=1)
        yield Decoded(start, (u - zero).to(torch.int8), s, values)


def dropped(source: PackedSource) -> Iterable[str]:
    """Parts of the model that are left out, each with its reason."""
    parts = {source.part_of(name) for name in source.checkpoint.tensors}
    if "vision" in parts:
        yield "the vision tower: mlx-lm serves text"
    if "mtp" in parts:
        yield "multi-token prediction: mlx-lm has none"


LAYOUT = Layout(
    "MLX",
    outputs,
    config,
    decode,
    check=check,
    linears=linears,
    copies=copies,
    header={"format": "mlx"},
    dropped=dropped,
)
