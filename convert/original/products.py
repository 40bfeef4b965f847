"""FP32 matrix products on a GPU's tensor cores, of operands that are sums of two BF16 numbers.

    a = a1 + a2 + r     a1 = bf16(a), a2 = bf16(a - a1), |r| <= 2^-18 |a|
    a b = a1 b1 + a1 b2 + a2 b1, where each term is off by 3 * 2^-18 of itself at most

The three products are one, of operands three times as long. On an H200 it makes 235 TFLOP/s of
products in FP32 where FP32's own units make 51 and TF32 398, and is off by 2e-5 of the result's
norm for 4,096 columns and 6e-5 for 12,288 (tensor cores truncate their sums), TF32 by 3e-4.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import linear
from torch.overrides import TorchFunctionMode

# GPUs whose tensor cores multiply BF16 more than three times as fast as the other units FP32.
CAPABILITIES = frozenset({(8, 0), (9, 0), (10, 0), (10, 3)})
FIRST, SECOND = 0, 1  # parts of an operand
LEFT, RIGHT = (FIRST, FIRST, SECOND), (FIRST, SECOND, FIRST)  # products: 1 1, 1 2, 2 1
# Columns of a, and multiplications: parts of fewer take longer to make than they save. An H200's
# FP32 units take .25 ms for so many multiplications, the host .3 ms to have parts made.
LEAST_INNER, LEAST_WORK = 128, 5 << 30
MATMULS = (torch.Tensor.__matmul__, torch.Tensor.matmul, torch.matmul, torch.Tensor.mm, torch.mm)


def gains(device: torch.device) -> bool:
    """Tell whether products of parts are faster there than FP32's own."""
    return device.type == "cuda" and torch.cuda.get_device_capability(device) in CAPABILITIES


def product(a: Tensor, b: Tensor) -> Tensor:
    """`a b` but for rounding: [M, K] and [K, N] float32 on a GPU to [M, N] float32.

    What is infinite in an operand may be NaN in the result.
    """
    return _multiply(_parts(a, 1, LEFT), _parts(b, 0, RIGHT))


@contextmanager
def in_parts() -> Iterator[None]:
    """Make products of FP32 matrices on a GPU by `product` in this thread, linears included."""
    with _InParts():
        yield


def _add_product(out: Tensor, a: Tensor, b: Tensor, alpha: float = 1.0) -> Tensor:
    return _multiply_onto(out, _parts(a, 1, LEFT), _parts(b, 0, RIGHT), alpha)


def _multiply(a: Tensor, b: Tensor) -> Tensor:
    return torch.mm(a, b, out_dtype=torch.float32)


def _multiply_onto(out: Tensor, a: Tensor, b: Tensor, alpha: float) -> Tensor:
    """Add to a matrix in place, in one pass over it."""
    return torch.addmm(out, a, b, out_dtype=torch.float32, alpha=alpha, out=out)


def _parts(x: Tensor, dim: int, order: Sequence[int]) -> Tensor:
    """The BF16 parts of a matrix, concatenated along `dim`; row-major or column-major as it is."""
    if x.stride(0) < x.stride(1):
        return _parts(x.T, 1 - dim, order).T
    shape = list(x.shape)
    shape[dim] *= len(order)
    out = x.new_empty(shape, dtype=torch.bfloat16)
    pieces = out.tensor_split(len(order), dim)
    for piece, part in zip(pieces, order, strict=True):
        piece.copy_(x if part == FIRST else x - pieces[0])
    return out


class _InParts(TorchFunctionMode):
    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Sequence[type],
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        kwargs = kwargs or {}
        if func is linear and kwargs.keys() <= {"bias"} and _fit(*args[:2]):
            return _linear(*args, **kwargs)
        if func in MATMULS and not kwargs and _fit(*args):
            return _matmul(*args)
        if func is torch.Tensor.addmm_ and kwargs.keys() <= {"alpha"} and _fit(*args[1:]):
            return _add_product(*args, **kwargs)
        return func(*args, **kwargs)


def _fit(*operands: Any) -> bool:
    """Tell whether operands are two matrices, or many rows and a matrix, that `product` takes."""
    if len(operands) != 2:  # others are named, which no caller here does
        return False
    a, b = operands
    return (
        isinstance(a, Tensor)
        and isinstance(b, Tensor)
        and a.is_cuda
        and a.dtype == b.dtype == torch.float32
        and a.dim() >= 2
        and b.dim() == 2
        and a.shape[-1] >= LEAST_INNER
        and a.numel() * b.shape[1] >= LEAST_WORK
        and not (torch.is_grad_enabled() and (a.requires_grad or b.requires_grad))
    )


def _matmul(a: Tensor, b: Tensor) -> Tensor:
    return product(a.flatten(0, -2), b).view(*a.shape[:-1], b.shape[1])


def _linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    out = _matmul(x, weight.T)
    return out if bias is None else out.add_(bias)
