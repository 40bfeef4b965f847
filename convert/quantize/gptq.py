"""GPTQ: quantize columns in order, each column's error propagated to those after it.

    minimize tr((W - S*Q) H (W - S*Q)^T)    over codes Q, the scales S fixed

GPTQ (Frantar et al., arXiv 2210.17323): with U the upper Cholesky factor of H^-1, rounding column i
leaves the error e = (w_i - s_i q_i) / U_ii, and the columns j > i move by -e U_ij. Columns are
visited by falling H_ii, so that the loudest inputs get the most freedom; groups and their scales
are those of the stored order ("static groups"), and no permutation is written.

What that greedy order leaves is polished: scales refitted to the codes by least squares, then each
code set to its best value given all others, which can only lower the objective.
"""

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from lowbit.convert.plan.calibration_memory import NORMAL_ELEMENTS
from lowbit.convert.quantize.columns import compensate, polish
from lowbit.formats.errors import QuantizationError
from lowbit.formats.layout.rtn import SCALE_DTYPE, TINY
from lowbit.formats.layout.scheme import Scheme

BLOCK = 128  # columns whose changes are applied to all others at once
SWEEPS = 2  # over the columns, when codes are polished
SOLVED = 1024  # columns of a triangular matrix that is inverted by solving
RIDGE = 1e-6  # of the diagonal, where a row's groups are refitted together


@dataclass(frozen=True, slots=True)
class Factor:
    """H, factorized once for all linears that read the same input."""

    H: Tensor  # [K, K] float32, damped, positive definite
    order: Tensor  # [K] int64, columns by falling H_ii
    U: Tensor  # [K, K] float32 upper triangular, U^T U = H^-1 with rows and columns in that order

    @property
    def importance(self) -> Tensor:
        """Cost of an error in each column that later columns have made up for: 1 / U_ii^2, [K]."""
        out = torch.empty_like(self.H[0])
        out[self.order] = self.U.diagonal().square().reciprocal()
        return out

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
    back = order.flip(0)
    for dtype in (torch.float32, torch.float64):
        lower, failed = torch.linalg.cholesky_ex(H[back][:, back].to(dtype))
        if failed:
            continue
        # In the order itself H = R R^T with R upper triangular, so U = R^-1.
        return Factor(H, order, _inverse(lower.flip(0, 1)).to(torch.float32).contiguous())
    raise QuantizationError(
        "the second moments of a linear's input are not positive definite",
        hint="calibrate on more text",
    )


def _inverse(R: Tensor) -> Tensor:
    """The inverse of an upper triangular matrix, by halves: [K, K].

    So most of it is products of matrices, of a third of the multiplications that solving for the
    columns of the identity takes.
    """
    K = len(R)
    if K <= SOLVED:
        one = torch.eye(K, dtype=R.dtype, device=R.device)
        solved: Tensor = torch.linalg.solve_triangular(R, one, upper=True)
        return solved
    half = K // 2
    out = torch.zeros_like(R, memory_format=torch.contiguous_format)
    first, second = _inverse(R[:half, :half]), _inverse(R[half:, half:])
    out[:half, :half], out[half:, half:] = first, second
    out[:half, half:] = (first @ R[:half, half:].contiguous() @ second).neg_()
    return out


def compensated_codes(w: Tensor, scale: Tensor, scheme: Scheme, factor: Factor) -> Tensor:
    """Codes that make up for one another's rounding errors: [N, K] int8.

    Args:
        w: [N, K] float32, what to approximate.
        scale: [N, K/G] as stored.
    """
    U, order = factor.U, factor.order
    rest = w.T[order].contiguous()  # [K, N]: what the columns still have to represent
    steps = _steps(scale, len(rest))[order]
    codes = torch.empty(rest.shape, dtype=torch.int8, device=w.device)
    for start, stop in _blocks(len(rest)):
        part = slice(start, stop)
        q, errors = compensate(rest[part], steps[part], U[part, part], scheme)
        codes[order[part]] = q.to(torch.int8)
        rest[stop:].addmm_(U[part, stop:].T, errors, alpha=-1)
    return codes.T.contiguous()


@dataclass(frozen=True, slots=True)
class Projected:
    """H w^T of some rows w [N, K], for all codes of theirs, in blocks of rows."""

    blocks: tuple[Tensor, ...]  # [K, rows] float32

    @classmethod
    def of(cls, w: Tensor, groups: int, factor: Factor) -> "Projected":
        """Multiply rows; groups: of each, for which equations are solved together."""
        rows = max(1, NORMAL_ELEMENTS // groups**2)
        return cls(tuple(factor.H @ part.T for part in torch.split(w, rows)))


def refitted_scales(w: Projected, codes: Tensor, scale: Tensor, factor: Factor) -> Tensor:
    """The scales that are best for given codes, by least squares over all groups of a row.

    Args:
        w: of what to approximate.
        codes: [N, K] int8.
        scale: [N, K/G] bfloat16; kept where the best one would vanish or change its sign.

    Returns:
        [N, K/G] bfloat16.
    """
    sizes = [block.shape[1] for block in w.blocks]
    parts = zip(w.blocks, torch.split(codes, sizes), torch.split(scale, sizes), strict=True)
    return torch.cat([_refitted(*part, factor) for part in parts])


def _refitted(projected: Tensor, codes: Tensor, scale: Tensor, factor: Factor) -> Tensor:
    N, K = codes.shape
    groups = scale.shape[1]
    G = K // groups
    H = factor.H
    q = codes.T.to(torch.float32)  # [K, N]
    normal = torch.empty(groups, groups, N, device=q.device)  # below the diagonal, and on it
    for g in range(groups):
        first = g * G
        later = (H[first:, first : first + G] @ q[first : first + G]).mul_(q[first:])
        normal[g:, g] = later.view(groups - g, G, N).sum(1)
    right = q.mul_(projected).view(groups, G, N).sum(1)
    diagonal = normal.diagonal(dim1=0, dim2=1)  # [N, groups]
    diagonal += RIDGE * diagonal.mean(1, keepdim=True) + TINY  # a group of zeros has no best scale
    lower, failed = torch.linalg.cholesky_ex(normal.permute(2, 0, 1))
    fitted = torch.cholesky_solve(right.T[:, :, None], lower)[:, :, 0].to(SCALE_DTYPE)
    usable = (fitted * scale > 0) & (fitted.abs() > TINY) & fitted.isfinite()
    return torch.where(usable & (failed == 0)[:, None], fitted, scale)


def coordinate_descent(
    w: Tensor, codes: Tensor, scale: Tensor, scheme: Scheme, factor: Factor
) -> Tensor:
    """Codes after sweeps that set each to its best value given all others in its row: [N, K] int8.

    Args:
        w: [N, K] float32, what to approximate.
        codes: [N, K] int8.
        scale: [N, K/G] as stored.
    """
    K = w.shape[1]
    H = factor.H
    steps = _steps(scale, K)
    q = codes.T.to(torch.float32).contiguous()  # [K, N]
    slope = H @ (w.T - q * steps)  # minus half of the objective's gradient
    for sweep in range(SWEEPS):
        for start, stop in _blocks(K):
            part = slice(start, stop)
            new = polish(slope[part].clone(), q[part], steps[part], H[part, part], scheme)
            rest = slice(stop if sweep == SWEEPS - 1 else 0, K)  # columns that are visited again
            slope[rest].addmm_(H[rest, part], (new - q[part]).mul_(steps[part]), alpha=-1)
            q[part] = new
    return q.T.to(torch.int8).contiguous()


def _blocks(K: int) -> Iterator[tuple[int, int]]:
    """Borders of blocks of columns, each a power of two long."""
    start = 0
    while start < K:
        stop = start + min(BLOCK, 1 << ((K - start).bit_length() - 1))
        yield start, stop
        start = stop


def _steps(scale: Tensor, K: int) -> Tensor:
    """A scale for every weight, columns as rows: [K, N] float32."""
    return scale.T.to(torch.float32).repeat_interleave(K // scale.shape[1], dim=0)
