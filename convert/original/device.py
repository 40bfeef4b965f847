"""The device that a command names, and the precision of FP32 matrix products there."""

from collections.abc import Iterator
from contextlib import contextmanager, nullcontext

import torch

from lowbit.convert.original.products import gains, in_parts
from lowbit.formats.machine.gpu import no_gpu


def open_device(name: str) -> torch.device:
    """The torch device of that name.

    Raises:
        ResourceError: a GPU is asked for where there is none.
    """
    if name == "cuda" and not torch.cuda.is_available():
        raise no_gpu()
    return torch.device(name)


def device_name(device: torch.device) -> str:
    """`an NVIDIA H200`, or `2 cores`."""
    if device.type == "cpu":
        cores = torch.get_num_threads()
        return "1 core" if cores == 1 else f"{cores} cores"
    name = torch.cuda.get_device_name(device)
    return f"{'an' if name.startswith('NVIDIA') else 'a'} {name}"


@contextmanager
def tensor_cores(device: torch.device) -> Iterator[None]:
    """Multiply on tensor cores: operands keep 10 bits of mantissa, sums are FP32 (TF32).

    That is finer than the BF16 in which models are trained and run, and several times faster.
    """
    with _products(device, "high"):
        yield


@contextmanager
def fine_products(device: torch.device) -> Iterator[None]:
    """Multiply with 16 bits of mantissa or more, for systems of equations and for figures."""
    with _products(device, "highest"), in_parts() if gains(device) else nullcontext():
        yield


@contextmanager
def _products(device: torch.device, precision: str) -> Iterator[None]:
    if device.type == "cpu":  # where the setting would choose other kernels
        yield
        return
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision(precision)
    try:
        yield
    finally:
        torch.set_float32_matmul_precision(before)
