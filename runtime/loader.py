"""A checkpoint folder becomes a model: every tensor checked against the table, then read."""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import torch

from lowbit.formats.architectures import SUPPORTED, is_tied, qwen3, tensor_table
from lowbit.formats.architectures.qwen3 import Qwen3Config
from lowbit.formats.architectures.table import TensorSpec
from lowbit.formats.checkpoint import Checkpoint, open_checkpoint
from lowbit.formats.errors import FormatError, UnsupportedModelError
from lowbit.formats.manifest import read_manifest
from lowbit.formats.packing import GROUP_INDEX, PACKED, SCALE, SHAPE, ZERO_POINT, packed_shapes
from lowbit.formats.quantization_config import read_quantization_config, unserved
from lowbit.formats.scheme import SERVED_BITS, Scheme
from lowbit.runtime import cpu
from lowbit.runtime.linear import Linear
from lowbit.runtime.models.qwen3 import Qwen3, build
from lowbit.runtime.weights import Weights

Decoder = Qwen3[cpu.CpuLinear] | Qwen3[Linear]

FLOATS: Final = (torch.bfloat16, torch.float16, torch.float32)
PACKED_DTYPES: Final[Mapping[str, tuple[torch.dtype, ...]]] = {
    PACKED: (torch.int32,),
    SCALE: FLOATS,
    SHAPE: (torch.int64, torch.int32),
}
UNSERVED_TENSORS: Final[Mapping[str, str]] = {
    ZERO_POINT: "asymmetric weights are not served",
    GROUP_INDEX: "activation-ordered groups are not served",
}


@dataclass(frozen=True, slots=True)
class OpenedModel:
    """A folder whose headers have all been checked; no weight has been read.

    Attributes:
        checkpoint: the headers.
        config: sizes of the model.
        schemes: of every linear module that the model will read; None where it is dense.
        shapes: [N, K] of the same modules.
        dense_elements: elements of all other tensors (embedding, norms).
    """

    checkpoint: Checkpoint
    config: Qwen3Config
    schemes: Mapping[str, Scheme | None]
    shapes: Mapping[str, tuple[int, int]]
    dense_elements: int

    def weight_bytes(self, device: str, dtype: torch.dtype) -> int:
        """Memory the weights will take on `cpu` or `cuda`."""
        size = self.dense_elements * dtype.itemsize
        for module, scheme in self.schemes.items():
            N, K = self.shapes[module]
            if device == "cpu":
                size += cpu.prepared_bytes(N, K, scheme, dtype)
            elif scheme is None:
                size += N * K * dtype.itemsize
            else:
                size += N * K * scheme.bits // 8 + N * scheme.groups(module, K) * 2
        return size


def open_model(folder: Path) -> OpenedModel:
    """Read the headers of a packed (or plain BF16) checkpoint and check every tensor once.

    Raises:
        CheckpointError: no checkpoint, or a damaged one.
        UnsupportedModelError: the architecture, or a feature of it, is not implemented.
        FormatError: a foreign manifest, a scheme that cannot be served, or a tensor that is
            missing, extra, misshapen or of an unexpected dtype.
    """
    checkpoint = open_checkpoint(folder)
    read_manifest(folder)  # refuses a version this release does not know
    config = checkpoint.config
    specs = tensor_table(config)
    if is_tied(config):
        specs = [spec for spec in specs if spec.role != "head"]
    quantization = read_quantization_config(config)
    schemes = {
        spec.module: None if quantization is None else quantization.scheme_for(spec.module)
        for spec in specs
        if spec.quantizable
    }
    _check_schemes(specs, schemes)
    _check_tensors(checkpoint, specs, schemes)
    return OpenedModel(
        checkpoint=checkpoint,
        config=Qwen3Config.from_hf(config),
        schemes=schemes,
        shapes={spec.module: _matrix(spec) for spec in specs if spec.quantizable},
        dense_elements=sum(
            torch.Size(spec.shape).numel() for spec in specs if not spec.quantizable
        ),
    )


def load_decoder(opened: OpenedModel, device: str, dtype: torch.dtype, context: int) -> Decoder:
    """Read the weights onto `cpu` or `cuda`, for sequences of up to `context` tokens."""
    if opened.checkpoint.config.get("model_type") != qwen3.MODEL_TYPE:
        raise UnsupportedModelError("no runtime model", hint=f"supported: {', '.join(SUPPORTED)}")
    if device == "cpu":
        to_cpu = Weights(
            opened.checkpoint, opened.schemes, device, dtype, lambda w: cpu.prepare(w, dtype)
        )
        return build(opened.config, to_cpu, cpu, context)
    from lowbit.runtime import cuda  # needs triton and a GPU

    to_cuda = Weights(opened.checkpoint, opened.schemes, device, dtype, cuda.prepare)
    return build(opened.config, to_cuda, cuda, context)


def _matrix(spec: TensorSpec) -> tuple[int, int]:
    N, K = spec.shape
    return N, K


def _check_schemes(specs: list[TensorSpec], schemes: Mapping[str, Scheme | None]) -> None:
    """Refuse schemes that have no kernel, and fused sets of more than one scheme."""
    first: dict[str, TensorSpec] = {}
    for spec in specs:
        if not spec.quantizable:
            continue
        scheme, K = schemes[spec.module], spec.shape[1]
        if scheme is not None:
            reason = unserved(scheme, SERVED_BITS)
            if reason is None and K * scheme.bits % 32:
                reason = f"rows of {K} weights that do not fill whole 32-bit words"
            if reason is not None:
                raise FormatError(
                    f"`{spec.module}`: {reason} cannot be served",
                    hint="convert from the original checkpoint with lowbit-convert",
                )
            scheme.groups(spec.module, K)
        other = first.setdefault(spec.fused_set or spec.module, spec)
        if schemes[other.module] != scheme:
            raise FormatError(
                f"`{spec.module}` is {scheme or 'not quantized'} but `{other.module}` is "
                f"{schemes[other.module] or 'not quantized'}: they are fused and need one scheme"
            )


def _check_tensors(
    checkpoint: Checkpoint, specs: list[TensorSpec], schemes: Mapping[str, Scheme | None]
) -> None:
    """Compare the headers with the table: nothing missing, extra, misshapen or mistyped."""
    expected: dict[str, tuple[tuple[int, ...], tuple[torch.dtype, ...]]] = {}
    for spec in specs:
        scheme = schemes.get(spec.module)
        if scheme is None:
            expected[spec.name] = spec.shape, FLOATS
            continue
        shapes = packed_shapes(*_matrix(spec), scheme, spec.module)
        for suffix, shape in shapes.items():
            expected[f"{spec.module}.{suffix}"] = shape, PACKED_DTYPES[suffix]
    found = checkpoint.tensors
    ignorable = {"lm_head.weight"} if is_tied(checkpoint.config) else set()  # a stale copy
    extra = [name for name in found if name not in expected and name not in ignorable]
    for name in extra:
        for suffix, reason in UNSERVED_TENSORS.items():
            if name.endswith(f".{suffix}"):
                raise FormatError(f"`{name}`: {reason}")
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
    if extra:
        more = f" (and {len(extra) - 1} more)" if len(extra) > 1 else ""
        raise FormatError(f"`{extra[0]}`{more}: the architecture has no such tensor")


def _missing(name: str, checkpoint: Checkpoint, schemes: Mapping[str, Scheme | None]) -> str:
    """Message for an absent tensor; says so where the file and config.json disagree."""
    module, _, suffix = name.rpartition(".")
    scheme = schemes.get(module)
    if scheme is not None and f"{module}.weight" in checkpoint.tensors:
        return f"`{name}` is missing: config.json says {scheme}, the file holds `{module}.weight`"
    if suffix == "weight" and f"{module}.{PACKED}" in checkpoint.tensors:
        return f"`{name}` is missing: config.json leaves `{module}` unquantized, the file does not"
    return f"`{name}` is missing from `{checkpoint.folder}`"
