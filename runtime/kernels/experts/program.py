"""Constants of the kernels that take tokens of a step through their experts one by one.

A cached function makes each record once; see `linear.program`.
"""

from dataclasses import dataclass
from functools import cache

from lowbit.runtime.kernels.launch.experts import ExpertsDownLaunch
from lowbit.runtime.kernels.launch.linear import GemvLaunch
from lowbit.runtime.kernels.linear.program import Digits, Packed
from lowbit.runtime.kernels.linear.tiles import GpuLinear
from lowbit.runtime.weights.linear import ExpertWeights


@dataclass(frozen=True, slots=True, eq=False)
class Choice:
    """The experts from which a token's are chosen."""

    EXPERTS: int  # that may be chosen; the number of the shared one follows theirs
    CHOSEN: int  # of a token
    SLOTS: int  # of a token, that of the shared one included, which is the last
    NORMED: bool  # shares of the chosen ones sum to one; else a softmax over all EXPERTS has them


def choice_of(experts: ExpertWeights[GpuLinear]) -> Choice:
    """The choice of a token's experts."""
    return _choice(len(experts.gate_up), experts.chosen, experts.shared, experts.normed)


@cache
def _choice(experts: int, chosen: int, shared: bool, normed: bool) -> Choice:
    return Choice(experts - shared, chosen, chosen + shared, normed)


@dataclass(frozen=True, slots=True, eq=False)
class ExpertsPlan:
    """Constants of `experts_gate_up` or of `experts_down`."""

    CHOICE: Choice  # of experts
    W: Packed  # weight of an expert
    X: Digits  # places of the digits
    LAUNCH: GemvLaunch | ExpertsDownLaunch  # share of a program
    INNER: int  # width of an expert
    WIDTH: int  # elements from one slot of `act` to the next
    SUMS: int  # bytes before the sums of warps in shared memory
    SHARED: int  # bytes of shared memory
    PDL: bool  # whether the kernel takes part in programmatic launch


def padded_width(inner: int) -> int:
    """Columns of `act` for experts of a width: whole blocks, so that slots share no unit."""
    return -(-inner // 256) * 256
