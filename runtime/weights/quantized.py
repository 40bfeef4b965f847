"""A float checkpoint as a packed one whose codes are made when they are read.

The result holds the names, shapes and config.json that lowbit-convert would write, so everything
that reads a packed folder reads it unchanged. Rows are read, moved to the device, quantized and
packed there; nothing is written, and no more than a block of the original is in memory.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from functools import partial

import torch
from torch import Tensor

from lowbit.formats.architectures import is_tied, never_quantized, tensor_table, untied
from lowbit.formats.errors import QuantizationError
from lowbit.formats.layout.packing import PACKED, SCALE, SHAPE, pack, packed_shapes
from lowbit.formats.layout.quantization_config import (
    KEY,
    method_of,
    runs_as_stored,
    write_quantization_config,
)
from lowbit.formats.layout.recipes import GROUP_SIZE, Base, base_schemes
from lowbit.formats.layout.rtn import (
    SCALE_DTYPE,
    SEARCHED_BITS,
    ScaleRule,
    nearest_codes,
    quantize,
    weighted_scales,
)
from lowbit.formats.layout.scheme import Scheme
from lowbit.formats.packed import check_packed
from lowbit.formats.safetensors.checkpoint import Checkpoint, DerivedRows, TensorInfo

DTYPES = {PACKED: torch.int32, SCALE: SCALE_DTYPE, SHAPE: torch.int64}


def quantized(
    source: Checkpoint,
    base: Base,
    group_size: int = GROUP_SIZE,
    rule: ScaleRule = "signed",
    power: Mapping[str, Tensor] | None = None,
) -> Checkpoint:
    """The checkpoint as lowbit-convert packs it by a base recipe.

    Args:
        source: BF16, F16 or F32.
        group_size: weights that share a scale; where it does not divide a row, a smaller one.
        power: mean square of each input channel [K] by module; weights the search of scales.

    Raises:
        QuantizationError: it is quantized already, or no group size divides a row.
        LowbitError: as `check_packed`, for what is wrong with the source.
    """
    _check_plain(source)
    table = tensor_table(source.config, source.tensors)
    schemes = base_schemes(base, table, group_size)
    tied = is_tied(source.config)
    embedding = next(spec.name for spec in table if spec.role == "embedding")
    tensors = dict(source.tensors)
    derived: dict[str, DerivedRows] = {}
    for spec in table:
        scheme = schemes.get(spec.module)
        if scheme is None:
            continue
        read_from = embedding if tied and spec.role == "head" else spec.name
        if power is None or scheme.bits not in SEARCHED_BITS:
            importance = None
        else:
            importance = power.get(spec.module)  # none of multi-token prediction, of rare experts
        linear = _Linear(source, read_from, scheme, rule, importance)
        tensors.pop(spec.name, None)  # a tied head has none, or a stale copy
        N, K = spec.shape
        for suffix, shape in packed_shapes(N, K, scheme, spec.module).items():
            name = f"{spec.module}.{suffix}"
            tensors[name] = _derived_info(name, DTYPES[suffix], shape)
        derived[f"{spec.module}.{PACKED}"] = linear.packed
        derived[f"{spec.module}.{SCALE}"] = linear.scales
        derived[f"{spec.module}.{SHAPE}"] = partial(_shape, N, K)
    config = untied(source.config) if schemes.get("lm_head") else dict(source.config)
    patterns = never_quantized(source.config, source.tensors)
    config[KEY] = write_quantization_config(schemes, patterns)
    return replace(source, config=config, tensors=tensors, derived=derived)


def _check_plain(source: Checkpoint) -> None:
    stored = method_of(source.config)
    if stored is not None:
        raise QuantizationError(
            f"`{source.folder}` is already quantized (`{stored}`)",
            hint="leave out --quantize to run it as it is, or give the BF16 checkpoint"
            if runs_as_stored(source.config)
            else "give the BF16 checkpoint: it is not run as it is either",
        )
    check_packed(source, None)


@dataclass(frozen=True, slots=True)
class _Linear:
    """One weight of the source, quantized as its rows are read."""

    source: Checkpoint
    name: str
    scheme: Scheme
    rule: ScaleRule
    # of the input, [K] float32, which weights the errors of the search; None for none
    power: Tensor | None
    # scales by first row: one search gives the codes and scales of a block, and the scales wait
    # here until they are read
    found: dict[int, Tensor] = field(default_factory=dict)

    def packed(self, start: int, stop: int, device: torch.device) -> Tensor:
        """Rows of `weight_packed`."""
        rows = self.source.read_rows(self.name, start, stop).to(device)
        if self.power is None:
            codes, scale = quantize(rows, self.scheme, self.rule)
        else:
            scale = weighted_scales(rows, self.scheme, self.rule, self.power.to(device))
            codes = nearest_codes(rows, scale, self.scheme)
        self.found[start] = scale
        return pack(codes, self.scheme.bits)

    def scales(self, start: int, stop: int, device: torch.device) -> Tensor:
        """Rows of `weight_scale`, from the search that chose the codes."""
        parts = []
        while start < stop:
            if start not in self.found:
                self.packed(start, stop, device)
            part = self.found.pop(start)[: stop - start].to(device)
            # NaN and Inf in a group of weights are NaN or Inf in its scale.
            if not bool(torch.isfinite(part).all()):
                raise QuantizationError(
                    f"`{self.name}` holds NaN or infinite values",
                    hint="the checkpoint is damaged; download it again or ask its author",
                )
            parts.append(part)
            start += len(part)
        return torch.cat(parts)


def _shape(N: int, K: int, start: int, stop: int, device: torch.device) -> Tensor:
    return torch.tensor([N, K], device=device)[start:stop]


def _derived_info(name: str, dtype: torch.dtype, shape: tuple[int, ...]) -> TensorInfo:
    """Header of a tensor that is in no file."""
    nbytes = torch.Size(shape).numel() * dtype.itemsize
    return TensorInfo(name, dtype, shape, file="", offset=0, nbytes=nbytes)
