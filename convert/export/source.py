"""The folder to export: its packed linears, its other tensors, and checks of its scales."""

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from lowbit.convert.plan.method import Method
from lowbit.convert.plan.recipe import Override
from lowbit.formats.architectures import Config, Part, kind_of, part_of
from lowbit.formats.errors import FormatError
from lowbit.formats.layout.packing import PACKED, SCALE, WORD_BITS, unpack
from lowbit.formats.layout.quantization_config import KEY
from lowbit.formats.layout.scheme import COMMON_BITS, Scheme
from lowbit.formats.packed import PackedCheckpoint, open_packed
from lowbit.formats.safetensors.checkpoint import Checkpoint, TensorInfo

BLOCK_WEIGHTS = 1 << 22  # weights unpacked at once
HEAD = "lm_head"
PLAIN_HEAD = "--lm-head bf16"  # the option that leaves it unpacked


@dataclass(frozen=True, slots=True)
class Linear:
    """A packed linear: W [N, K] with a scale for every `group` weights of a row."""

    name: str  # of the weight in the source, `.weight` included
    module: str
    N: int
    K: int
    scheme: Scheme

    @property
    def bits(self) -> int:
        """Bits of a code: 4 or 8."""
        return self.scheme.bits

    @property
    def group(self) -> int:
        """Number of weights that share a scale."""
        return self.scheme.group_size or self.K

    @property
    def groups(self) -> int:
        """Number of scales of a row."""
        return self.K // self.group

    @property
    def block_rows(self) -> int:
        """Number of rows to work on at once."""
        return max(1, BLOCK_WEIGHTS // self.K)


@dataclass(frozen=True, slots=True)
class PackedSource:
    """A folder whose packed linears, if it has any, have symmetric 4- or 8-bit codes."""

    packed: PackedCheckpoint  # its checked headers
    config: Config  # the architecture's sizes
    linears: tuple[Linear, ...]  # in the order of the forward pass
    dense: tuple[TensorInfo, ...]  # every other tensor that is part of the model
    dequantized: tuple[Linear, ...] = ()  # packed linears that the export holds as plain matrices

    @property
    def checkpoint(self) -> Checkpoint:
        """The tensors as stored."""
        return self.packed.checkpoint

    @property
    def model_type(self) -> str:
        """The `model_type` of config.json; the class of a drafter."""
        return kind_of(self.checkpoint.config)

    @property
    def has_mtp(self) -> bool:
        """Tell if the folder holds a head for multi-token prediction."""
        return any(self.part_of(spec.name) == "mtp" for spec in self.packed.specs)

    def part_of(self, name: str) -> Part:
        """Part of the model that a tensor belongs to."""
        return part_of(self.checkpoint.config, name)

    @property
    def plain_config(self) -> dict[str, Any]:
        """config.json without its quantization."""
        config = self.checkpoint.config
        return {key: config[key] for key in config if key not in (KEY, "compression_config")}

    def words(self, linear: Linear) -> Tensor:
        """All packed words of a linear: [N, K * bits / 32] int32."""
        return self.checkpoint.read(f"{linear.module}.{PACKED}")

    def codes(self, linear: Linear, start: int, stop: int) -> Tensor:
        """Signed codes of some rows: [rows, K] int8."""
        words = self.checkpoint.read_rows(f"{linear.module}.{PACKED}", start, stop)
        return unpack(words, linear.bits, linear.K)

    def scales(self, linear: Linear, start: int, stop: int) -> Tensor:
        """Scales of some rows as stored: [rows, groups]."""
        return self.checkpoint.read_rows(f"{linear.module}.{SCALE}", start, stop)


def open_source(folder: Path, originals: bool = False) -> PackedSource:
    """Open a packed folder for export.

    Args:
        originals: take a folder in which nothing is packed, too.

    Raises:
        FormatError: nothing in it is packed, or a scheme is not symmetric INT4 or INT8.
        CheckpointError, UnsupportedModelError: see `open_packed`.
    """
    packed = open_packed(folder)
    linears = []
    dense = list(packed.carried)
    for spec in packed.specs:
        scheme = packed.schemes.get(spec.module)
        if scheme is None:
            dense.append(packed.checkpoint.tensors[spec.name])
            continue
        if spec.is_embedding:
            raise FormatError(
                f"`{spec.module}` is packed ({scheme}): exports take an embedding as stored",
                hint="convert again without --embedding int8",
            )
        N, K = spec.shape
        linear = Linear(spec.name, spec.module, N, K, scheme)
        _check_scheme(linear)
        linears.append(linear)
    if not linears and not originals:
        raise FormatError(
            f"`{folder}` holds no packed weight",
            hint="quantize it first: lowbit-convert SRC DIR; GGUF takes an original, too",
        )
    config = packed.checkpoint.sizes
    return PackedSource(packed, config, tuple(linears), tuple(dense))


def _check_scheme(linear: Linear) -> None:
    """Refuse codes that are not symmetric, not 4 or 8 bits, or do not fill whole words."""
    if not linear.scheme.symmetric:
        reason = "zero points are not exported"
    elif linear.bits not in COMMON_BITS:
        reason = f"{linear.bits}-bit codes have no place there"
    elif linear.K * linear.bits % WORD_BITS:
        reason = f"rows of {linear.K} codes do not fill whole 32-bit words"
    else:
        return
    raise FormatError(
        f"`{linear.module}` is {linear.scheme}: {reason}",
        hint="export takes symmetric INT4 and INT8",
    )


def check_scales(source: PackedSource, dtype: torch.dtype, most: float) -> None:
    """Refuse scales that another dtype would change.

    Args:
        most: largest magnitude that a scale may have there.

    Raises:
        FormatError: naming the first linear and scale that would be rounded, or overflow.
    """
    for linear in source.linears:
        wrong = wrong_scale(source, linear, dtype, most)
        if wrong is not None:
            raise FormatError(
                f"`{linear.module}`: {wrong}",
                hint="--to mlx keeps scales in BF16" if dtype == torch.float16 else None,
            )


def wrong_scale(
    source: PackedSource, linear: Linear, dtype: torch.dtype, most: float
) -> str | None:
    """The first scale of a linear that another dtype would change; None where there is none."""
    for start, stop in row_blocks(linear):
        s = source.scales(linear, start, stop)
        back = s.to(dtype).to(s.dtype)
        # NaN is unequal to itself; an infinite scale would survive the round trip.
        bad = (back != s) | ~(s.abs() <= most)
        if bad.any():
            row, group = bad.nonzero()[0].tolist()
            name = str(dtype).removeprefix("torch.")
            return (
                f"the scale {s[row, group].item():.9g} of row {start + row}, group {group} "
                f"cannot be kept in {name} exactly"
            )
    return None


def as_one(source: PackedSource, linear: Linear, bits: int) -> str | None:
    """Conversion options that give a linear the bits of the others; None if no option does."""
    if linear.module == HEAD:
        return PLAIN_HEAD
    given, method = _overrides_of(source)
    if given and all(one is not None and one.group_size is not None for one in given.values()):
        # Bits chosen by costs: --bits gives bits and groups to some linears, a choice to all.
        # A named method keeps the recipe's bits, of which the head has more than the layers.
        return f"--method {_beside_plain_head(source, method)} {PLAIN_HEAD}"
    own = given.get(linear.module)
    if linear.bits == bits and (own is None or own.group_size is None):
        return None  # the recipe's group size does not divide its rows
    return f"--bits '*.{linear.module.rpartition('.')[2]}={bits}'"


def _overrides_of(source: PackedSource) -> tuple[dict[str, Override | None], str]:
    """The override that decided each packed linear outside of MTP, and the recipe's method.

    Both are empty for a folder without a manifest.
    """
    packed = source.packed
    if packed.manifest is None:
        return {}, ""
    recipe = packed.manifest.recipe
    # The last one that matches counts.
    overrides = [Override.parse(text) for text in reversed(recipe["overrides"])]
    given = {
        spec.module: next((one for one in overrides if one.matches(spec)), None)
        for spec in packed.specs
        if packed.schemes.get(spec.module) is not None and spec.role != "mtp"
    }
    return given, recipe["method"]


def _beside_plain_head(source: PackedSource, method: str) -> str:
    """The method for a plain head: a head that stays the embedding rules out a rotation."""
    manifest = source.packed.manifest
    own = manifest is None or any(
        tensor.name == f"{HEAD}.weight" for tensor in manifest.source_tensors
    )
    return method if own else str(Method.parse(method).unrotated)


def row_blocks(linear: Linear) -> Iterator[tuple[int, int]]:
    """Blocks of a linear's rows as (start, stop)."""
    for start in range(0, linear.N, linear.block_rows):
        yield start, min(start + linear.block_rows, linear.N)
