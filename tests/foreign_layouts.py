"""Linears as GPTQ and AWQ files hold them, written from the published layouts with NumPy alone."""

from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

AWQ_ORDER = (0, 2, 4, 6, 1, 3, 5, 7)  # the output whose code lies in nibble i of a word

Integers = NDArray[np.int64]


@dataclass(frozen=True)
class Quantized:
    """Unsigned codes [N, K], unsigned zero points and scales [N, K/G] of a weight."""

    codes: Integers
    zeros: Integers
    scales: Tensor
    bits: int

    @property
    def weight(self) -> Tensor:
        """[N, K] float32: (code - zero point) * scale, every product rounded once."""
        group = self.codes.shape[1] // self.zeros.shape[1]
        steps = self.codes - self.zeros.repeat(group, axis=1)
        scales = self.scales.double().numpy().repeat(group, axis=1)
        return torch.from_numpy((steps * scales).astype(np.float32))


def draw(
    N: int,
    K: int,
    group: int,
    bits: int = 4,
    symmetric: bool = True,
    dtype: torch.dtype = torch.float16,
    seed: int = 0,
) -> Quantized:
    """Random codes of the whole range; zero points too, from 1 on, unless symmetric."""
    random = np.random.default_rng(seed)
    top = 1 << bits
    zeros = np.full((N, K // group), top // 2, dtype=np.int64)
    if not symmetric:
        zeros = random.integers(1, top, zeros.shape)
    codes = random.integers(0, top, (N, K))
    scales = torch.from_numpy(random.uniform(0.2, 1, zeros.shape) * 0.2 / top).to(dtype)
    return Quantized(codes, zeros, scales, bits)


def gptq(module: str, q: Quantized, version: int = 1, ordered: bool = True) -> dict[str, Tensor]:
    """`qweight` packed along K, `qzeros` along N; version 1 stores zero points minus one."""
    K, groups = q.codes.shape[1], q.zeros.shape[1]
    stored = q.zeros - 1 if version == 1 else q.zeros
    tensors = {
        f"{module}.qweight": words(q.codes.T, q.bits, axis=0),
        f"{module}.qzeros": words(stored.T, q.bits, axis=1),
        f"{module}.scales": q.scales.T.contiguous(),
    }
    if ordered:
        tensors[f"{module}.g_idx"] = torch.arange(K, dtype=torch.int32) // (K // groups)
    return tensors


def awq(module: str, q: Quantized) -> dict[str, Tensor]:
    """`qweight` and `qzeros` packed along N, 8 outputs a word in AWQ's order."""
    return {
        f"{module}.qweight": words(shuffled(q.codes.T), 4, axis=1),
        f"{module}.qzeros": words(shuffled(q.zeros.T), 4, axis=1),
        f"{module}.scales": q.scales.T.contiguous(),
    }


def shuffled(values: Integers) -> Integers:
    """Columns in the order in which they fill the nibbles of AWQ words."""
    rows, columns = values.shape
    return values.reshape(rows, columns // 8, 8)[:, :, AWQ_ORDER].reshape(rows, columns)


def words(values: Integers, bits: int, axis: int) -> Tensor:
    """Neighbours along an axis share a 32-bit word, the first in its low bits."""
    count = 32 // bits
    lanes = [values[i::count] if axis == 0 else values[:, i::count] for i in range(count)]
    out = np.zeros_like(lanes[0])
    for lane, part in enumerate(lanes):
        out |= part << (bits * lane)
    return torch.from_numpy(np.ascontiguousarray(out.astype(np.uint32).view(np.int32)))
