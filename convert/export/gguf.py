"""GGUF as llama.cpp reads it: names, types and order of rows of every tensor.

Packed linears become Q4_0 or Q8_0 with their group's scale repeated in every block of 32. Matrices
that are not packed keep their dtype; vectors, convolutions and routers become F32. The experts of a
layer become one tensor. A vision tower belongs in a file of its own (`mmproj`) and is left out.
"""

import re
from collections.abc import Iterable, Iterator
from dataclasses import replace
from itertools import accumulate, pairwise
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from lowbit.convert.export.architectures import EXPORTED
from lowbit.convert.export.architectures.architecture import Gguf
from lowbit.convert.export.gguf_file import (
    BLOCK,
    DENSE,
    KIND_OF_BITS,
    GgufPlace,
    GgufTensor,
    encode,
    read_rows,
)
from lowbit.convert.export.gguf_file import decode as decode_blocks
from lowbit.convert.export.misfits import FP16_MAX
from lowbit.convert.export.outputs import (
    chained,
    check_one_dtype,
    stack_shape,
    stacked,
)
from lowbit.convert.export.proof import Decoded
from lowbit.convert.export.rope import check_yarn
from lowbit.convert.export.source import BLOCK_WEIGHTS, Linear, PackedSource, check_scales
from lowbit.formats.architectures.names import any_expert, expert_of, split_layer, without_model
from lowbit.formats.architectures.table import TensorSpec
from lowbit.formats.errors import FormatError
from lowbit.formats.safetensors.checkpoint import TensorInfo

QWEN3_HEAD = 128  # size that transformers gives the heads of every dense Qwen3 in a GGUF file
OUTSIDE = {
    "embed_tokens.weight": "token_embd.weight",
    "norm.weight": "output_norm.weight",
    "lm_head.weight": "output.weight",
}


def check(source: PackedSource) -> None:
    """Refuse a folder that GGUF cannot hold or llama.cpp cannot run.

    Raises:
        FormatError: rows or groups that are no multiples of 32, a scale that FP16 cannot hold,
            experts of several dtypes, or sizes that llama.cpp does not have.
    """
    for linear in source.linears:
        if linear.K % BLOCK or linear.group % BLOCK:
            raise FormatError(
                f"`{linear.module}` is {linear.scheme} with rows of {linear.K}: GGUF scales "
                f"blocks of {BLOCK}"
            )
    family(source).check(source.config, source)
    check_yarn(source.config, "llama.cpp")
    check_one_dtype(source)
    check_scales(source, torch.float16, FP16_MAX)


def family(source: PackedSource) -> Gguf[Any]:
    """GGUF names, orders and values of the folder's family."""
    return EXPORTED[source.model_type].gguf


def kind_of(name: str) -> str:
    """A tensor's name without its layer and without `.weight` or `.bias`, `*` for an expert."""
    return any_expert(re.sub(r"\.(weight|bias)$", "", split_layer(name).rest))


def target_name(source: PackedSource, name: str) -> str:
    """The name of a tensor in GGUF; the same for all experts of a layer."""
    layers, names = source.config.num_hidden_layers, family(source)
    if name in names.mtp:
        return f"blk.{layers}.{names.mtp[name]}"
    _, layer, rest = split_layer(name)
    if layer is None:
        return OUTSIDE[without_model(name)]
    block = f"blk.{layer + (layers if source.part_of(name) == 'mtp' else 0)}"
    if rest in names.inside:
        return f"{block}.{names.inside[rest]}"
    kind, _, suffix = rest.rpartition(".")
    return f"{block}.{names.inside[any_expert(kind)]}.{suffix}"


def tensors(source: PackedSource) -> list[GgufTensor]:
    """All tensors of the file."""
    linears = {linear.name: linear for linear in source.linears}
    made = []
    for specs in stacked(source.packed.specs, lambda spec: target_name(source, spec.name)):
        parts = [
            _linear(source, linears[spec.name]) if spec.name in linears else _dense(source, spec)
            for spec in specs
        ]
        shape = stack_shape(specs[0].name, len(parts), parts[0].shape)
        made.append(replace(parts[0], shape=shape, blocks=chained([part.blocks for part in parts])))
    return made + family(source).more_tensors(source.config)


def _linear(source: PackedSource, linear: Linear) -> GgufTensor:
    rows, columns = _order(source, linear.name)

    def blocks() -> Iterator[Tensor]:
        for start, stop in runs(rows, linear.N, linear.block_rows):
            codes = source.codes(linear, start, stop)
            scales = source.scales(linear, start, stop)
            scales = scales.repeat_interleave(linear.group // BLOCK, dim=1)
            if columns is not None:
                codes, scales = codes[:, columns], scales[:, columns[::BLOCK] // BLOCK]
            yield encode(codes, scales, linear.bits)

    name = target_name(source, linear.name)
    return GgufTensor(name, KIND_OF_BITS[linear.bits], (linear.N, linear.K), blocks)


def _order(source: PackedSource, name: str) -> tuple[Tensor | None, Tensor | None]:
    """The checkpoint's number of every row and column, in GGUF's order; None for the same."""
    names, config, kind = family(source), source.config, kind_of(name)
    return names.rows_of(config, source.model_type, kind), names.columns_of(config, kind)


def runs(order: Tensor | None, N: int, most: int) -> Iterator[tuple[int, int]]:
    """Consecutive rows in GGUF's order as (start, stop), at most `most` rows each."""
    if order is None:
        order = torch.arange(N)
    breaks = (order.diff() != 1).nonzero().flatten() + 1
    edges = [0, *breaks.tolist(), N]
    for first, last in pairwise(edges):
        start = int(order[first])
        for part in range(start, start + last - first, most):
            yield part, min(part + most, start + last - first)


def _dense(source: PackedSource, spec: TensorSpec) -> GgufTensor:
    """A tensor that is not packed: a matrix in its own dtype; a router or anything else in F32."""
    info = source.checkpoint.tensors[spec.name]
    name, kind = target_name(source, spec.name), kind_of(spec.name)
    rows, columns = _order(source, spec.name)
    if _keeps_dtype(spec):
        N, K = spec.shape

        def matrix() -> Iterator[Tensor]:
            for start, stop in runs(rows, N, max(1, BLOCK_WEIGHTS // K)):
                block = source.checkpoint.read_rows(spec.name, start, stop)
                yield block if columns is None else block[:, columns]

        return GgufTensor(name, DENSE[info.dtype], spec.shape, matrix)

    def vector() -> Iterator[Tensor]:
        value = source.checkpoint.read(spec.name).to(torch.float32)
        value = value if rows is None else value[rows]
        yield family(source).vector(kind, spec.role, value)

    shape = tuple(size for size in spec.shape if size != 1) if len(spec.shape) > 1 else spec.shape
    return GgufTensor(name, "F32", shape, vector)


def _keeps_dtype(spec: TensorSpec) -> bool:
    """Tell if an unpacked tensor keeps its dtype; llama.cpp's own converter widens routers."""
    return len(spec.shape) == 2 and spec.role != "router"


def _first_row(name: str, N: int) -> int:
    """First row of a tensor within the rows of its stack, if it is an expert's."""
    return (expert_of(name) or 0) * N


def decode(source: PackedSource, path: Path, place: GgufPlace, linear: Linear) -> Iterator[Decoded]:
    """Decode a linear with llama.cpp's arithmetic, `d * q`, back in the order of the source."""
    rows, columns = _order(source, linear.name)
    position = _first_row(linear.name, linear.N)
    for start, stop in runs(rows, linear.N, linear.block_rows):
        blocks = read_rows(path, place, position, position + stop - start)
        position += stop - start
        codes, d = decode_blocks(blocks, place.kind)
        values = codes.to(torch.float32) * d.repeat_interleave(BLOCK, dim=1)
        if columns is not None:
            back = columns.argsort()
            codes, values, d = codes[:, back], values[:, back], d[:, back[::BLOCK] // BLOCK]
        yield Decoded(start, codes, d, values)


def copies(
    source: PackedSource, path: Path, places: dict[str, GgufPlace]
) -> Iterator[tuple[str, Iterable[Tensor], Iterable[Tensor]]]:
    """Matrices that keep their dtype: (name, blocks of the source, the same of the file)."""
    for spec in source.packed.specs:
        info = source.checkpoint.tensors.get(spec.name)
        if info is not None and _keeps_dtype(spec):
            place = places[target_name(source, info.name)]
            yield info.name, *_copy(source, info, path, place)


def _copy(
    source: PackedSource, info: TensorInfo, path: Path, place: GgufPlace
) -> tuple[Iterator[Tensor], Iterator[Tensor]]:
    """Blocks of a matrix in the source, its rows in GGUF's order, and the same of the file."""
    (N, K), name = info.shape, info.name
    rows, columns = _order(source, name)
    parts = list(runs(rows, N, max(1, BLOCK_WEIGHTS // K)))
    stops = list(accumulate((stop - start for start, stop in parts), initial=_first_row(name, N)))
    back = None if columns is None else columns.argsort()
    written = (read_rows(path, place, start, stop) for start, stop in pairwise(stops))
    return (
        (source.checkpoint.read_rows(name, start, stop) for start, stop in parts),
        (block if back is None else block[:, back] for block in written),
    )


def notes(source: PackedSource) -> list[str]:
    """Sentences on readers that would take the file for something else."""
    size = source.config.head_dim
    if source.model_type == "qwen3" and size != QWEN3_HEAD:
        return [
            f"heads have {size} numbers, which llama.cpp reads; transformers passes over "
            f"`attention.key_length` of a Qwen3 and expects {QWEN3_HEAD}"
        ]
    return []


def dropped(source: PackedSource) -> Iterable[str]:
    """Parts of the model that are left out, each with its reason."""
    if source.packed.carried:
        yield "the vision tower: llama.cpp wants it in a file of its own (mmproj)"
