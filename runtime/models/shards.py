"""Tensor parallelism: what each rank reads of a checkpoint, straight from the same folder.

A rank holds some heads of every attention, some value heads of every DeltaNet, a part of the width
of every MLP and expert, and some rows of the head. So its shard is a checkpoint of a smaller model:
linears before heads and widths give rows, those behind them columns, whose products are partial
sums. Columns end where groups of a packed linear end, so that a shard has the codes and scales of
the whole, bit for bit. Norms, routers and the embedding are whole on every rank; where there are
fewer key heads than ranks, several ranks have the same. What makes drafts is on the first rank
alone, see `lone_head`.
"""

from collections.abc import Iterator
from dataclasses import replace
from math import prod
from typing import Any, TypeVar

import torch
from torch import Tensor

from lowbit.formats.architectures import Config
from lowbit.formats.architectures.config import LinearLayers
from lowbit.formats.architectures.table import TensorSpec
from lowbit.formats.errors import RequestError
from lowbit.formats.layout.packing import (
    PACKED,
    SCALE,
    SHAPE,
    WORD_BITS,
    ZERO_POINT,
    pack_zero_point,
    packed_words,
    unpack_zero_point,
)
from lowbit.formats.layout.scheme import Scheme
from lowbit.formats.safetensors.checkpoint import Checkpoint, DerivedRows, TensorInfo
from lowbit.runtime.models.loader import OpenedModel, without_head
from lowbit.runtime.models.lone_head import lone_head
from lowbit.runtime.thresholds import MOST_RANKS
from lowbit.runtime.weights.share import HEAD, PARTIAL_ENDS, WHOLE, Part, Share

C = TypeVar("C", bound=Config)
Stored = tuple[TensorInfo, DerivedRows | None]  # a tensor of a shard; None where it lies in a file

SAME_TOKENS = {
    "cpu": "its tokens are those of one process, except where two are about as likely",
    "cuda": "its logits are near those of one GPU, but not the same bits: where two tokens are "
    "about as likely, it may choose the other",
}
HEAD_ROWS = 64  # a rank's rows of the head begin at a multiple, where blocks of products do


def part_of_tensor(config: Config, spec: TensorSpec, share: Share) -> Part:
    """Part that a rank reads of a tensor of the architecture's table, [N, K] or [N, ...]."""
    N, heads, kv_heads = spec.shape[0], config.num_attention_heads, config.num_key_value_heads
    if spec.module == HEAD:
        return Part(rows=(head_rows(N, share),))
    name = spec.module.removesuffix(".bias").rpartition(".")[2]
    linear = config.linear_layers
    if linear is not None and ".linear_attn." in spec.name:
        return _part_of_delta_net(linear, name, share)
    match name:
        case "q_proj":  # a gate of each head stands beside its query
            return Part(rows=(share.of(heads, N // heads),))
        case "k_proj" | "v_proj":
            return Part(rows=(share.of(kv_heads, N // kv_heads),))
        case "o_proj":
            return Part(columns=share.of(heads, config.head_dim))
        case "gate_proj" | "up_proj":
            return Part(rows=(share.of(N),))
        case "down_proj":
            return Part(columns=share.of(spec.shape[1]))
        case _:
            return WHOLE


def _part_of_delta_net(linear: LinearLayers, name: str, share: Share) -> Part:
    start, stop = share.of(linear.value_heads, linear.value_head_dim)
    match name:
        case "in_proj_qkv" | "conv1d":
            q = share.of(linear.key_heads, linear.key_head_dim)
            keys = linear.key_dim
            k, v = (keys + q[0], keys + q[1]), (2 * keys + start, 2 * keys + stop)
            return Part(rows=(q, k, v))
        case "in_proj_z":
            return Part(rows=((start, stop),))
        case "in_proj_b" | "in_proj_a" | "A_log" | "dt_bias":
            return Part(rows=(share.of(linear.value_heads),))
        case "out_proj":
            return Part(columns=(start, stop))
        case _:
            return WHOLE


def head_rows(vocabulary: int, share: Share) -> tuple[int, int]:
    """Rows of the head on a rank, which has some wherever there are as many as ranks."""
    unit = HEAD_ROWS if vocabulary >= HEAD_ROWS * share.ranks else 1
    units = -(-vocabulary // unit)
    start, stop = (rank * units // share.ranks * unit for rank in (share.rank, share.rank + 1))
    return start, min(stop, vocabulary)


def config_of_rank(config: C, share: Share) -> C:
    """Sizes of the model that a rank runs: its heads and its widths."""
    counts = {
        "num_attention_heads": config.num_attention_heads,
        "num_key_value_heads": config.num_key_value_heads,
        "intermediate_size": config.intermediate_size,
    }
    if (linear := config.linear_layers) is not None:
        counts["linear_num_key_heads"] = linear.key_heads
        counts["linear_num_value_heads"] = linear.value_heads
    values: dict[str, Any] = {name: share.count(count) for name, count in counts.items()}
    if (experts := config.experts) is not None:
        shared = experts.shared_inner
        values["mixture"] = replace(
            experts,
            inner=share.count(experts.inner),
            shared_inner=None if shared is None else share.count(shared),
        )
    return replace(config, **values)


def check_ranks(opened: OpenedModel, ranks: int) -> None:
    """Refuse a number of ranks that cannot share a model.

    Raises:
        RequestError: naming what does not divide, and numbers of ranks that can.
    """
    problem = next(_problems(opened, ranks), None) if ranks > 1 else None
    if problem is None:
        return
    fit = ranks_that_fit(opened)
    raise RequestError(
        f"`tensor_parallel` {ranks}: {problem}",
        hint=f"numbers that fit: {', '.join(map(str, fit))}" if fit else "run it on one",
    )


def ranks_that_fit(opened: OpenedModel) -> tuple[int, ...]:
    """Numbers of ranks, two or more, that can share a model."""
    counts = range(2, MOST_RANKS + 1)
    return tuple(ranks for ranks in counts if next(_problems(opened, ranks), None) is None)


def _problems(opened: OpenedModel, ranks: int) -> Iterator[str]:
    """Reasons why a number of ranks cannot share a model."""
    config, share = opened.config, Share(0, ranks)
    for count, what, repeated in _units(config):
        if count % ranks and not (repeated and ranks % count == 0):
            yield f"the model has {count} {what}, which cannot be shared out evenly"
    for spec in without_head(opened).specs:
        scheme = opened.schemes.get(spec.module)
        if scheme is None or not spec.module.endswith(PARTIAL_ENDS):
            continue
        start, stop = part_of_tensor(config, spec, share).columns or (0, spec.shape[1])
        width, group = stop - start, scheme.group_size
        if group is not None and width % group:
            yield (
                f"each rank would have {width} columns of `{spec.module}`, which do not end where "
                f"groups of {group} do"
            )
        if width * scheme.bits % WORD_BITS:
            yield f"{width} columns of `{spec.module}` for each rank do not fill whole words"


def _units(config: Config) -> Iterator[tuple[int, str, bool]]:
    """Counts that ranks share out: what they are, and if several ranks may have the same."""
    yield config.num_attention_heads, "attention heads", False
    yield config.num_key_value_heads, "key heads", True
    if (linear := config.linear_layers) is not None:
        yield linear.value_heads, "value heads of DeltaNet", False
        yield linear.key_heads, "key heads of DeltaNet", True
    if (experts := config.experts) is None:
        yield config.intermediate_size, "columns in an MLP", False
        return
    yield experts.inner, "columns in an expert", False
    if experts.shared_inner is not None:
        yield experts.shared_inner, "columns in a shared expert", False


def shard_of(opened: OpenedModel, share: Share) -> OpenedModel:
    """The smaller model that a rank runs, whose tensors are read from the same folder.

    opened: of a number of ranks that `check_ranks` accepts.
    """
    if share.ranks == 1:
        return opened
    drafter = opened.drafter if share.rank == 0 else None
    own = drafter is not None or (opened.head and share.rank == 0)
    lone = lone_head(opened) if own else None
    opened = without_head(opened)
    tensors: dict[str, TensorInfo] = dict(opened.checkpoint.tensors)
    derived: dict[str, DerivedRows] = dict(opened.checkpoint.derived)
    specs = []
    for spec in opened.specs:
        part = part_of_tensor(opened.config, spec, share)
        specs.append(replace(spec, shape=part.shape(spec.shape)))
        if part == WHOLE:
            continue
        scheme = opened.schemes.get(spec.module)
        for info, read in _stored_parts(opened.checkpoint, spec, scheme, part):
            tensors[info.name] = info
            if read is not None:
                derived[info.name] = read
    return replace(
        opened,
        checkpoint=replace(opened.checkpoint, tensors=tensors, derived=derived),
        config=config_of_rank(opened.config, share),
        specs=tuple(specs),
        share=share,
        drafter=drafter,
        lone=lone,
    )


def _stored_parts(
    checkpoint: Checkpoint, spec: TensorSpec, scheme: Scheme | None, part: Part
) -> Iterator[Stored]:
    """Tensors that stand for a part of a weight in a checkpoint."""
    if scheme is None:
        yield _stored(checkpoint, spec.name, part)
        return
    module, columns, words, groups = spec.module, part.columns, None, None
    if columns is not None:
        words = columns[0] * scheme.bits // WORD_BITS, columns[1] * scheme.bits // WORD_BITS
        if (size := scheme.group_size) is not None:
            groups = columns[0] // size, columns[1] // size
    scales = Part(part.rows, groups)
    yield _stored(checkpoint, f"{module}.{PACKED}", Part(part.rows, words))
    yield _stored(checkpoint, f"{module}.{SCALE}", scales)
    yield _shape_of_part(checkpoint, f"{module}.{SHAPE}", part)
    if not scheme.symmetric:
        name = f"{module}.{ZERO_POINT}"
        yield _zero_points(checkpoint, name, scales, scheme.bits, spec.shape[0])


def _stored(checkpoint: Checkpoint, name: str, part: Part) -> Stored:
    """A part of a tensor; one range of rows is read as a tensor of the file is."""
    info = checkpoint.tensors[name]
    shape = part.shape(info.shape)
    own = _info(info, shape)
    ranges = part.stored_rows(0, shape[0])
    if part.columns is None and len(ranges) == 1 and name not in checkpoint.derived:
        return replace(own, offset=info.offset + ranges[0][0] * info.row_bytes), None

    def read(start: int, stop: int, device: torch.device) -> Tensor:
        ranges = part.stored_rows(start, stop)
        return part.cut(torch.cat([_rows(checkpoint, name, *each, device) for each in ranges]))

    return own, read


def _rows(checkpoint: Checkpoint, name: str, start: int, stop: int, device: torch.device) -> Tensor:
    derived = checkpoint.derived.get(name)
    if derived is not None:
        return derived(start, stop, device)
    return checkpoint.read_rows(name, start, stop).to(device)


def _shape_of_part(checkpoint: Checkpoint, name: str, part: Part) -> Stored:
    """`weight_shape`, which is wrong where the whole's is."""
    info = checkpoint.tensors[name]

    def read(start: int, stop: int, device: torch.device) -> Tensor:
        shape = part.shape(tuple(checkpoint.read(name).tolist()))
        return torch.tensor(shape, dtype=info.dtype, device=device)[start:stop]

    return info, read


def _zero_points(checkpoint: Checkpoint, name: str, part: Part, bits: int, N: int) -> Stored:
    """Zero points of a part, which are packed along the N rows of the whole."""
    info = checkpoint.tensors[name]
    rows, groups = part.shape((N, info.shape[1]))

    def read(start: int, stop: int, device: torch.device) -> Tensor:
        zero = part.of(unpack_zero_point(checkpoint.read(name), bits, N))
        return pack_zero_point(zero, bits)[start:stop].to(device)

    return _info(info, (packed_words(rows, bits), groups)), read


def _info(info: TensorInfo, shape: tuple[int, ...]) -> TensorInfo:
    return replace(info, shape=shape, nbytes=prod(shape) * info.dtype.itemsize)
