"""A checkpoint folder becomes a model: every tensor checked against the table, then read."""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import torch

from lowbit.formats.architectures import SUPPORTED, qwen3
from lowbit.formats.architectures.qwen3 import Qwen3Config
from lowbit.formats.architectures.table import TensorSpec
from lowbit.formats.checkpoint import Checkpoint
from lowbit.formats.errors import UnsupportedModelError
from lowbit.formats.packed import open_packed
from lowbit.formats.scheme import SERVED_BITS, Scheme
from lowbit.runtime import cpu
from lowbit.runtime.linear import Linear
from lowbit.runtime.models.qwen3 import Qwen3, build
from lowbit.runtime.weights import Weights

Decoder = Qwen3[cpu.CpuLinear] | Qwen3[Linear]


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
    packed = open_packed(folder, SERVED_BITS)
    linears = [spec for spec in packed.specs if spec.quantizable]
    return OpenedModel(
        checkpoint=packed.checkpoint,
        config=Qwen3Config.from_hf(packed.checkpoint.config),
        schemes=packed.schemes,
        shapes={spec.module: _matrix(spec) for spec in linears},
        dense_elements=sum(
            torch.Size(spec.shape).numel() for spec in packed.specs if not spec.quantizable
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
