"""A model whole in memory, as transformers runs it, to generate text with."""

from typing import Any

import torch

from lowbit.convert.original.model import store_frequencies, without_storage
from lowbit.convert.original.walk import HEAD_ROWS
from lowbit.convert.original.weights import Weights
from lowbit.formats.errors import CheckpointError

FAST_BF16 = "AVX512"  # of CPUs; on others BF16 products are many times slower than FP32


def dtype_on(device: torch.device) -> torch.dtype:
    """The dtype in which a device runs a model: BF16, but FP32 on a CPU without fast BF16."""
    if device.type == "cpu" and torch.backends.cpu.get_cpu_capability() != FAST_BF16:
        return torch.float32
    return torch.bfloat16


def build(weights: Weights, dtype: torch.dtype) -> Any:
    """The `...ForCausalLM` of a checkpoint without storage for its weights.

    Raises:
        UnsupportedModelError: transformers does not know the architecture.
        CheckpointError: config.json is not valid, or a weight is missing or has another shape.
    """
    model = without_storage(weights, dtype)
    for name, parameter in model.named_parameters():
        found = weights.shape(_in_file(name, weights))
        if found != tuple(parameter.shape):
            raise CheckpointError(
                f"`{weights.name}`: `{_in_file(name, weights)}` has shape {list(found)}, expected "
                f"{list(parameter.shape)}"
            )
    return model


def size_bytes(model: Any) -> int:
    """Bytes of the weights, those shared by two modules once."""
    return sum(weight.numel() * weight.element_size() for weight in model.parameters())


def fill(model: Any, weights: Weights, device: torch.device) -> None:
    """Give a model of `build` its weights, on the device.

    Raises:
        CheckpointError: a weight that is not of BF16, F16 or F32.
    """
    for name, parameter in list(model.named_parameters()):
        module = model.get_submodule(name.rpartition(".")[0])
        values = torch.empty(parameter.shape, dtype=parameter.dtype, device=device)
        stored = _in_file(name, weights)
        if values.ndim == 2:
            for first, rows in weights.rows(stored, HEAD_ROWS, device):
                values[first : first + len(rows)] = rows
        else:
            values.copy_(weights.read(stored, tuple(values.shape), device))
        whole = torch.nn.Parameter(values, requires_grad=False)
        setattr(module, name.rpartition(".")[2], whole)
    model.tie_weights()
    store_frequencies(model.model, device)


def _in_file(name: str, weights: Weights) -> str:
    """Name in the checkpoint of a parameter of the model."""
    if not name.startswith("model."):
        return name
    prefix = weights.checkpoint.prefix
    return prefix + name.removeprefix("model.")
