"""The kernel that joins splits as a formula: it works on blocks, which are not emulated."""

from collections.abc import Callable

import torch
from torch import Tensor
from torch.nn.functional import pad

from lowbit.runtime.kernels.launch.attention import AttentionLaunch, KeySplit
from tests.runtime.kernels.arithmetic import Array, exp, exp2


def running(position: int, keys: KeySplit) -> int:
    """Splits that have keys, at least one."""
    if position <= keys.whole:
        return max(1, min(-(-position // keys.turn), keys.groups))
    rows = -(-position // (keys.most * keys.turn)) * keys.turn
    return -(-position // rows)


def added(parts: Tensor) -> Tensor:
    """The sum of [splits, ...] as eight lanes add it: every eighth each, then across lanes."""
    lanes = min(8, len(parts))
    sums = parts[:lanes]
    for first in range(lanes, len(parts), lanes):
        sums = sums + parts[first : first + lanes]
    while len(sums) > 1:
        sums = sums[: len(sums) // 2] + sums[len(sums) // 2 :]
    return sums[0]


def join_splits(
    sums: Tensor, state: Tensor, qkv: Tensor, positions: Tensor, out: Tensor,
    launch: AttentionLaunch, gated: bool, pdl: bool,
) -> None:  # fmt: skip
    """In place of the kernel, which works on blocks and is not emulated."""
    M, D = len(positions), sums.shape[2]
    heads, keys = len(sums) // M, launch.keys
    for row, y in enumerate(out.view(M * heads, D)):
        count = running(int(positions[row // heads]), keys)
        missing = keys.most - count
        tops, totals = state[row, :count].unbind(1)
        weights = of_numpy(exp2, tops - tops.amax())
        whole = added(pad(weights * totals, (0, missing)))
        found = added(pad(weights[:, None] * sums[row, :count], (0, 0, 0, missing))) * (1.0 / whole)
        if gated:
            gate = qkv.view(M, -1, D)[row // heads, 2 * (row % heads) + 1].float()
            found = found / (1.0 + of_numpy(exp, -gate))
        y.copy_(found)


def of_numpy(function: Callable[[Array], Array], x: Tensor) -> Tensor:
    """The function of emulated kernels."""
    return torch.from_numpy(function(x.numpy()))
