"""Codes chosen one column at a time, each column's error made up for by the columns after it.

    minimize tr((W - S*Q) H (W - S*Q)^T)    over codes Q, the scales S fixed

GPTQ (Frantar et al., arXiv 2210.17323): with U the upper Cholesky factor of H^-1, rounding column i
leaves the error e = (w_i - s_i q_i) / U_ii, and the columns j > i move by -e U_ij. Columns are
visited by falling H_ii, so that the loudest inputs get the most freedom; groups and their scales
are those of the stored order ("static groups"), and no permutation is written.

What that greedy order leaves is polished: scales refitted to the codes by least squares, then each
code set to its best value given all others, which can only lower the objective.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from lowbit.formats.errors import QuantizationError
from lowbit.formats.layout.rtn import SCALE_DTYPE, TINY
from lowbit.formats.layout.scheme import Scheme

BLOCK = 128  # columns whose changes are applied to all others at once
SWEEPS = 2  # over the columns, when codes are polished
NORMAL_ELEMENTS = 1 << 26  # of the normal equations of the rows that are refitted at once
RIDGE = 1e-6  # of the diagonal, where a row's groups are refitted together


@dataclass(frozen=True, slots=True)
class Factor:
    """H, factorized once for all linears that read the same input.

    Attributes:
        H: [K, K] float32, damped, positive definite.
        order: [K] int64, columns by falling H_ii.
        U: [K, K] float32 upper triangular, U^T U = H^-1 with rows and columns in that order.
    """

    H: Tensor
    order: Tensor
    U: Tensor

    def solve(self, rows: Tensor) -> Tensor:
        """`rows` H^-1: [N, K]."""
        out = torch.empty_like(rows)
        out[:, self.order] = (rows[:, self.order] @ self.U.T) @ self.U
        return out


def factorize(H: Tensor) -> Factor:
    """The factor of damped second moments, in FP64 where FP32 does not suffice.

    Raises:
        QuantizationError: they are not positive definite.
    """
    order = torch.argsort(H.diagonal(), descending=True, stable=True)
    for dtype in (torch.float32, torch.float64):
        lower, failed = torch.linalg.cholesky_ex(H[order][:, order].to(dtype))
        if failed:
            continue
        U, failed = torch.linalg.cholesky_ex(torch.cholesky_inverse(lower), upper=True)
        if not failed:
            return Factor(H, order, U.to(torch.float32))
    raise QuantizationError(
        "the second moments of a linear's input are not positive definite",
        hint="calibrate on more text",
    )


def compensated_codes(w: Tensor, scale: Tensor, scheme: Scheme, factor: Factor) -> Tensor:
    """Codes that make up for one another's rounding errors.

    Args:
        w: [N, K] float32, what to approximate.
        scale: [N, K/G] as stored.
        scheme: code range.
        factor: of the input's damped second moments.

    Returns:
        [N, K] int8.
    """
    N, K = w.shape
    U = factor.U
    steps = _steps(scale, K)[:, factor.order]
    rest = w[:, factor.order]  # what the columns still have to represent
    codes = torch.empty_like(rest)
    for start in range(0, K, BLOCK):
        stop = min(start + BLOCK, K)
        # Columns as rows: a step of the loop then works on contiguous memory.
        block = rest[:, start:stop].T.contiguous()
        step = steps[:, start:stop].T.contiguous()
        diagonal = U[start:stop, start:stop]
        errors = torch.empty_like(block)
        for i in range(stop - start):
            q = (block[i] / step[i]).round_().clamp_(scheme.code_min, scheme.code_max)
            errors[i] = (block[i] - q * step[i]) / diagonal[i, i]
            block[i + 1 :].addr_(diagonal[i, i + 1 :], errors[i], alpha=-1)
            codes[:, start + i] = q
        rest[:, stop:] -= errors.T @ U[start:stop, stop:]
    out = torch.empty(N, K, dtype=torch.int8, device=w.device)
    out[:, factor.order] = codes.to(torch.int8)
    return out


def refitted_scales(w: Tensor, codes: Tensor, scale: Tensor, factor: Factor) -> Tensor:
    """The scales that are best for given codes, by least squares over all groups of a row.

    Args:
        w: [N, K] float32, what to approximate.
        codes: [N, K] int8.
        scale: [N, K/G] bfloat16; kept where the best one would vanish or change its sign.
        factor: of the input's damped second moments.

    Returns:
        [N, K/G] bfloat16.
    """
    rows = max(1, NORMAL_ELEMENTS // scale.shape[1] ** 2)
    blocks = [slice(start, start + rows) for start in range(0, len(w), rows)]
    return torch.cat([_refitted(w[b], codes[b], scale[b], factor) for b in blocks])


def _refitted(w: Tensor, codes: Tensor, scale: Tensor, factor: Factor) -> Tensor:
    N, K = w.shape
    groups = scale.shape[1]
    G = K // groups
    q = codes.to(torch.float32)
    normal = torch.empty(N, groups, groups, device=w.device)
    for g in range(groups):
        part = slice(g * G, (g + 1) * G)
        normal[:, g] = (q[:, part] @ factor.H[part]).mul_(q).view(N, groups, G).sum(-1)
    right = (w @ factor.H).mul_(q).view(N, groups, G).sum(-1)
    diagonal = normal.diagonal(dim1=1, dim2=2)
    diagonal += RIDGE * diagonal.mean(1, keepdim=True) + TINY  # a group of zeros has no best scale
    fitted = torch.linalg.solve(normal, right[:, :, None])[:, :, 0].to(SCALE_DTYPE)
    usable = (fitted * scale > 0) & (fitted.abs() > TINY) & fitted.isfinite()
    return torch.where(usable, fitted, scale)


def polished_codes(
    w: Tensor, codes: Tensor, scale: Tensor, scheme: Scheme, factor: Factor
) -> Tensor:
    """Codes after sweeps that set each to its best value given all others in its row.

    Args:
        w: [N, K] float32, what to approximate.
        codes: [N, K] int8.
        scale: [N, K/G] as stored.
        scheme: code range.
        factor: of the input's damped second moments.

    Returns:
        [N, K] int8.
    """
    K = w.shape[1]
    H = factor.H
    steps = _steps(scale, K)
    q = codes.to(torch.float32)
    slope = (w - q * steps) @ H  # minus half of the objective's gradient
    for _ in range(SWEEPS):
        for start in range(0, K, BLOCK):
            part = slice(start, min(start + BLOCK, K))
            here, step = slope[:, part].T.contiguous(), steps[:, part].T.contiguous()
            old = q[:, part].T.contiguous()
            new, square = old.clone(), H[part, part]
            for i in range(len(old)):
                best = new[i] + here[i] / (square[i, i] * step[i])
                best.round_().clamp_(scheme.code_min, scheme.code_max)
                here.addr_(square[i], (best - new[i]) * step[i], alpha=-1)
                new[i] = best
            slope -= ((new - old) * step).T @ H[part]
            q[:, part] = new.T
    return q.to(torch.int8)


def _steps(scale: Tensor, K: int) -> Tensor:
    """A scale for every weight: [N, K] float32."""
    return scale.to(torch.float32).repeat_interleave(K // scale.shape[1], dim=1)
