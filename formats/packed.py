"""Opening of a packed folder: every tensor is compared once with the architecture's table."""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import torch

from lowbit.formats.architectures import is_carried, tensor_table, unused
from lowbit.formats.architectures.names import expert_of
from lowbit.formats.architectures.table import TensorSpec
from lowbit.formats.errors import FormatError
from lowbit.formats.foreign.reader import open_native
from lowbit.formats.layout.manifest import Manifest, read_hashed_manifest
from lowbit.formats.layout.packing import FLOATS as FLOATS
from lowbit.formats.layout.packing import (
    GROUP_INDEX,
    PACKED,
    PACKED_DTYPES,
    SCALE,
    SHAPE,
    ZERO_POINT,
    fills_words,
    packed_shapes,
)
from lowbit.formats.layout.quantization_config import read_quantization_config, unserved
from lowbit.formats.layout.rtn import SCALE_DTYPE
from lowbit.formats.layout.scheme import Scheme
from lowbit.formats.machine.time_limit import time_limit
from lowbit.formats.safetensors.checkpoint import Checkpoint, TensorInfo
from lowbit.formats.safetensors.leftovers import leftovers

OUTPUT_DTYPES = {PACKED: torch.int32, SCALE: SCALE_DTYPE, SHAPE: torch.int64}  # as we write them


@dataclass(frozen=True, slots=True)
class PackedCheckpoint:
    """A packed folder whose headers have been checked; no weight has been read."""

    checkpoint: Checkpoint  # the headers and config.json
    specs: tuple[TensorSpec, ...]  # the architecture's tensors, without the head where it is tied
    # scheme of every linear module, None where its weight is dense; of a packed embedding too
    schemes: Mapping[str, Scheme | None]
    carried: tuple[TensorInfo, ...]  # tensors of the vision tower, which are copied unchecked
    manifest: Manifest | None  # None in a folder that another tool wrote
    # of the bytes that it was read from; None where they were not read here
    manifest_sha256: str | None = None

    @property
    def carried_bytes(self) -> int:
        """Bytes of the vision tower; 0 without one."""
        return sum(info.nbytes for info in self.carried)

    @property
    def carried_dtypes(self) -> str:
        """Names of the vision tower's dtypes: `BF16`; empty without one."""
        return " ".join(sorted({info.dtype_name for info in self.carried}))

    def tensors_of(self, spec: TensorSpec) -> list[TensorInfo]:
        """Stored tensors of a source tensor: itself, or its codes, scales and shape."""
        scheme = self.schemes.get(spec.module)
        names = [spec.name] if scheme is None else _packed_names(spec, scheme)
        return [self.checkpoint.tensors[name] for name in names]


def open_packed(folder: Path, served_bits: Collection[int] | None = None) -> PackedCheckpoint:
    """Read the headers of a packed (or plain) checkpoint and check every tensor once.

    Args:
        folder: made by lowbit-convert or another tool, GPTQ and AWQ included.
        served_bits: bits that the runtime has kernels for; others are refused.

    Raises:
        CheckpointError: no checkpoint, or a damaged one.
        UnsupportedModelError: the architecture, or a feature of it, is not implemented.
        FormatError: a foreign manifest, a scheme the layout does not have, a fused set of two
            schemes, or a tensor that is missing, extra, misshapen or of an unexpected dtype.
    """
    checkpoint = open_native(folder)
    manifest, digest = read_hashed_manifest(folder)
    return replace(check_packed(checkpoint, manifest, served_bits), manifest_sha256=digest)


def check_packed(
    checkpoint: Checkpoint, manifest: Manifest | None, served_bits: Collection[int] | None = None
) -> PackedCheckpoint:
    """Check the headers of a packed (or plain) checkpoint, wherever its files are.

    Args:
        manifest: its lowbit.json, None where there is none.
        served_bits: bits that the runtime has kernels for; others are refused.

    Raises:
        LowbitError: as `open_packed`.
    """
    specs = tensor_table(checkpoint.config, checkpoint.tensors)
    if checkpoint.tied:
        specs = [spec for spec in specs if spec.role != "head"]
    quantization = read_quantization_config(checkpoint.config)
    with time_limit("config.json: matching the patterns of `quantization_config`"):
        schemes = {
            spec.module: None if quantization is None else quantization.scheme_for(spec.module)
            for spec in specs
            if spec.quantizable or _holds_packed_embedding(checkpoint, spec)
        }
    if served_bits is not None:
        for spec in specs:
            _check_served(spec, schemes.get(spec.module), served_bits)
    _check_fused_sets(specs, schemes)
    _check_tensors(checkpoint, specs, schemes)
    carried = tuple(
        info for name, info in checkpoint.tensors.items() if is_carried(checkpoint.config, name)
    )
    return PackedCheckpoint(checkpoint, tuple(specs), schemes, carried, manifest)


def _holds_packed_embedding(checkpoint: Checkpoint, spec: TensorSpec) -> bool:
    """Tell if a tensor is an embedding that is packed.

    The file decides: a pattern of another tool may match the embedding that it leaves alone.
    """
    return spec.is_embedding and f"{spec.module}.{PACKED}" in checkpoint.tensors


def _packed_names(spec: TensorSpec, scheme: Scheme) -> list[str]:
    N, K = spec.shape
    return [f"{spec.module}.{suffix}" for suffix in packed_shapes(N, K, scheme, spec.module)]


def _check_served(spec: TensorSpec, scheme: Scheme | None, served_bits: Collection[int]) -> None:
    """Refuse a scheme that has no kernel."""
    if scheme is None:
        return
    reason = unserved(scheme, served_bits)
    if spec.is_embedding and (scheme.bits != 8 or not scheme.symmetric):
        reason = f"an embedding in {scheme}"
    if reason is None and not fills_words(spec.shape[1], scheme.bits):
        reason = f"rows of {spec.shape[1]} weights that do not fill whole 32-bit words"
    if reason is not None:
        raise FormatError(
            f"`{spec.module}`: {reason} cannot be served",
            hint="convert from the original checkpoint with lowbit-convert",
        )


def _check_fused_sets(specs: Sequence[TensorSpec], schemes: Mapping[str, Scheme | None]) -> None:
    """Refuse fused sets of more than one scheme."""
    first: dict[str, str] = {}
    for spec in specs:
        if not spec.quantizable:
            continue
        other = first.setdefault(spec.fused_set or spec.module, spec.module)
        if schemes[other] != schemes[spec.module]:
            raise FormatError(
                f"`{spec.module}` is {schemes[spec.module] or 'not quantized'} but `{other}` is "
                f"{schemes[other] or 'not quantized'}: they are fused and need one scheme"
            )


def _check_tensors(
    checkpoint: Checkpoint, specs: Sequence[TensorSpec], schemes: Mapping[str, Scheme | None]
) -> None:
    """Compare the headers with the table: nothing missing, extra, misshapen or mistyped."""
    expected: dict[str, tuple[tuple[int, ...], tuple[torch.dtype, ...]]] = {}
    for spec in specs:
        scheme = schemes.get(spec.module)
        if scheme is None:
            expected[spec.name] = spec.shape, FLOATS
            continue
        N, K = spec.shape
        for suffix, shape in packed_shapes(N, K, scheme, spec.module).items():
            expected[f"{spec.module}.{suffix}"] = shape, PACKED_DTYPES[suffix]
    found = checkpoint.tensors
    unknown = _unknown(checkpoint, expected)
    for name, (shape, dtypes) in expected.items():
        if name not in found:
            raise FormatError(_missing(name, checkpoint, schemes))
        if found[name].shape != shape:
            raise FormatError(
                f"`{name}`: expected shape {list(shape)}, got {list(found[name].shape)}"
            )
        if found[name].dtype not in dtypes:
            names = " or ".join(str(dtype).removeprefix("torch.") for dtype in dtypes)
            got = str(found[name].dtype).removeprefix("torch.")
            raise FormatError(f"`{name}`: expected dtype {names}, got {got}")
    if unknown:
        more = f" (and {len(unknown) - 1} more)" if len(unknown) > 1 else ""
        raise FormatError(f"`{unknown[0]}`{more}: the architecture has no such tensor")


def _unknown(checkpoint: Checkpoint, expected: Collection[str]) -> list[str]:
    """Names of tensors that are not in the table; tensors of unsupported schemes are refused."""
    ignorable = {"lm_head.weight"} if checkpoint.tied else set()  # a stale copy
    aside = unused(checkpoint.config, checkpoint.tensors)
    known = ignorable.union(expected, leftovers(checkpoint.tensors), aside)
    unknown = [
        name
        for name in checkpoint.tensors
        if name not in known
        and not is_carried(checkpoint.config, name)
        and not _is_filler(checkpoint, name)
    ]
    for name in unknown:
        if name.endswith(f".{GROUP_INDEX}"):
            raise FormatError(f"`{name}`: activation-ordered groups are not supported")
        if name.endswith(f".{ZERO_POINT}"):
            raise FormatError(f"`{name}`: config.json says symmetric, the file has zero points")
    return unknown


def _is_filler(checkpoint: Checkpoint, name: str) -> bool:
    """Tell if a tensor is the bias of zeros that GPTQ tools add to linears without a bias."""
    module, _, suffix = name.rpartition(".")
    foreign = f"{module}.{PACKED}" in checkpoint.derived
    return suffix == "bias" and foreign and not bool(checkpoint.read(name).any())


def _missing(name: str, checkpoint: Checkpoint, schemes: Mapping[str, Scheme | None]) -> str:
    """Message for an absent tensor; it says if the file and config.json disagree."""
    module, _, suffix = name.rpartition(".")
    scheme = schemes.get(module)
    if expert_of(name) is not None:
        start = name.partition(".experts.")[0] + ".experts."
        beside = [other for other in checkpoint.tensors if other.startswith(start)]
        fused = min((other for other in beside if expert_of(other) is None), default=None)
        if fused is not None:
            return f"`{name}` is missing: `{fused}` is of no single expert, as packed ones must be"
    if scheme is not None and f"{module}.weight" in checkpoint.tensors:
        return f"`{name}` is missing: config.json says {scheme}, the file holds `{module}.weight`"
    if suffix == "weight" and f"{module}.{PACKED}" in checkpoint.tensors:
        return f"`{name}` is missing: config.json leaves `{module}` unquantized, the file does not"
    return f"`{name}` is missing from `{checkpoint.folder}`"
