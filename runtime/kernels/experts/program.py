"""Constants of the kernels that take tokens of a step through their experts one by one.

A cached function makes each record once; see `linear.program`.
"""

from dataclasses import dataclass
from functools import cache

from lowbit.runtime.kernels.launch.experts import ExpertsDownLaunch
from lowbit.runtime.kernels.launch.linear import GemvLaunch
from lowbit.runtime.kernels.linear.program import Digits, Packed


@dataclass(frozen=True, slots=True, eq=False)
class Choice:
    """The experts from which a token's are chosen.

    Attributes:
        EXPERTS: that may be chosen; the number of the shared one follows theirs.
        CHOSEN: of a token.
        SLOTS: of a token, that of the shared one included, which is the last.
        NORMED: shares of the chosen ones sum to one; else a softmax over all EXPERTS has them.
    """

    EXPERTS: int
    CHOSEN: int
    SLOTS: int
    NORMED: bool


@cache
def choice_of(experts: int, chosen: int, shared: bool, normed: bool = True) -> Choice:
    """The choice of `chosen` among so many experts, of which the last may be every token's."""
    return Choice(experts - shared, chosen, chosen + shared, normed)


@dataclass(frozen=True, slots=True, eq=False)
class ExpertsPlan:
    """Constants of `experts_gate_up` or of `experts_down`.

    Attributes:
        CHOICE: of experts.
        W: weight of an expert.
        X: places of the digits.
        LAUNCH: share of a program.
        INNER: width of an expert.
        WIDTH: elements from one slot of `act` to the next.
        SUMS: bytes before the sums of warps in shared memory.
        SHARED: bytes of shared memory.
        PDL: whether the kernel takes part in programmatic launch.
    """

    CHOICE: Choice
    W: Packed
    X: Digits
    LAUNCH: GemvLaunch | ExpertsDownLaunch
    INNER: int
    WIDTH: int
    SUMS: int
    SHARED: int
    PDL: bool


def padded_width(inner: int) -> int:
    """Columns of `act` for experts of a width: whole blocks, so that slots share no unit."""
    return -(-inner // 256) * 256
