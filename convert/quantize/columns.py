"""The two loops over columns that choose codes one after the other, on blocks of columns.

Columns lie as rows, so that a step works on contiguous memory. On a GPU one kernel takes a whole
block (`columns_cuda`); these are its specification and the path of the CPU.
"""

import torch
from torch import Tensor

from lowbit.formats.layout.scheme import Scheme


def compensate(block: Tensor, steps: Tensor, U: Tensor, scheme: Scheme) -> tuple[Tensor, Tensor]:
    """Round column after column, each one's error made up for by those after it in the block.

    Args:
        block: [B, N] float32, weights of B columns; overwritten.
        steps: [B, N] float32, the scale of each weight.
        U: [B, B] float32 upper triangular, of `Factor`.

    Returns:
        codes [B, N] float32, and errors [B, N] float32 in units of U's diagonal.
    """
    if block.is_cuda:
        from lowbit.convert.quantize import columns_cuda

        return columns_cuda.compensate(block, steps, U, scheme)
    codes, errors = torch.empty_like(block), torch.empty_like(block)
    for i in range(len(block)):
        torch.div(block[i], steps[i], out=codes[i])
        codes[i].round_().clamp_(scheme.code_min, scheme.code_max)
        errors[i] = (block[i] - codes[i] * steps[i]) / U[i, i]
        block[i + 1 :].addr_(U[i, i + 1 :], errors[i], alpha=-1)
    return codes, errors


def polish(slope: Tensor, codes: Tensor, steps: Tensor, H: Tensor, scheme: Scheme) -> Tensor:
    """Set column after column to its best codes given all others: [B, N] float32, the codes after.

    Args:
        slope: [B, N] float32, minus half of the objective's gradient; overwritten.
        codes: [B, N] float32 before.
        steps: [B, N] float32, the scale of each weight.
        H: [B, B] float32, damped second moments of the block's columns.
    """
    if slope.is_cuda:
        from lowbit.convert.quantize import columns_cuda

        return columns_cuda.polish(slope, codes, steps, H, scheme)
    new = codes.clone()
    for i in range(len(codes)):
        best = slope[i] / (H[i, i] * steps[i])
        best.add_(codes[i]).round_().clamp_(scheme.code_min, scheme.code_max)
        slope[i + 1 :].addr_(H[i, i + 1 :], (best - codes[i]) * steps[i], alpha=-1)
        new[i] = best
    return new
