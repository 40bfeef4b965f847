"""Constants of the delta rule's kernels: sizes of a layer, and one program's share of a step.

A kernel takes them as one constant. What follows from other numbers is a field too: Triton finds
what it has compiled by the text of its constants, which must change with a formula here. Each is
made once, and so compared by identity, which is quick.
"""

from dataclasses import dataclass
from functools import cache

from triton.experimental.gluon import language as gl

from lowbit.runtime.kernels.launch.delta import (
    CROWD,
    MOST_SPLITS,
    MOST_TURN,
    WARPS,
    delta_splits,
)
from lowbit.runtime.kernels.launch.device import STATIC_SHARED
from lowbit.runtime.kernels.ptx.memory import declaration
from lowbit.runtime.state import delta
from lowbit.runtime.weights.layers import DeltaLayer

L2_EPS = gl.constexpr(delta.L2_EPS)


@dataclass(frozen=True, slots=True, eq=False)
class Sizes:
    """Sizes of a layer."""

    Hk: int  # heads of q and k
    Hv: int  # heads of v and z, each with a state of its own
    Dk: int  # channels of a head of q or k, rows of S
    Dv: int  # channels of a head of v or z, columns of S
    W: int  # taps of the convolution
    C: int  # channels of the convolution: q, k, v
    width: int  # elements of a token in qkvz: the channels, then z
    shared: int  # value heads that share a head of q and k


def sizes_of(layer: DeltaLayer) -> Sizes:
    """Sizes of a layer."""
    heads = layer.key_heads, layer.value_heads
    return _sizes(*heads, layer.key_dim, layer.value_dim, layer.conv.shape[1])


@cache
def _sizes(Hk: int, Hv: int, Dk: int, Dv: int, W: int) -> Sizes:
    C = 2 * Hk * Dk + Hv * Dv
    return Sizes(Hk, Hv, Dk, Dv, W, C, width=C + Hv * Dv, shared=Hv // Hk)


@dataclass(frozen=True, slots=True, eq=False)
class DeltaPlan:
    """A program of `recurrence_kernel`: some columns of S of one value head and sequence.

    A thread has four columns of some rows of S. Tokens are taken in turns of a few.
    """

    sizes: Sizes  # of the layer
    warps: int  # of a program
    half: int  # threads that convolve q; as many convolve k
    splits: int  # programs of a value head
    sharers: int  # programs that convolve the same q and k
    columns: int  # of S that a program has
    lanes: int  # that have a row of S between them
    rows: int  # of S that a thread has
    unit: int  # rows whose products a thread sums one after another, before it sums units in pairs
    group: int  # columns that one sum of squares is of
    turn: int  # tokens that are convolved at a time
    normed: bool  # the program has a whole head, and norms it; else it leaves sums of squares
    key_bytes: int  # of a token in shared memory, its q and k
    value_bytes: int  # of a token in shared memory, v and gain * silu(z), or S^T k and S^T q
    pdl: bool  # the kernel may start before the one that feeds it ends
    buffer: str  # the declaration of the shared memory


def plan(sizes: Sizes, sequences: int, normed: bool, pdl: bool) -> DeltaPlan:
    """The constants of a step of so many sequences; `normed`: whole heads are to be normed."""
    splits = delta_splits(sizes.Dk, sizes.Dv, sizes.Hv * sequences)
    return _plan(sizes, splits, normed, pdl, pdl and sizes.Hv * splits * sequences >= CROWD)


@cache
def _plan(sizes: Sizes, splits: int, normed: bool, pdl: bool, crowded: bool) -> DeltaPlan:
    Dk, Dv = sizes.Dk, sizes.Dv
    columns, half = Dv // splits, WARPS * 16
    unit = max(1, Dk * Dv // (WARPS * 512))  # rows of a thread where splits are most
    turn = min(MOST_TURN, half // columns)
    key_bytes, value_bytes = 8 * half, 8 * columns
    used = turn * (key_bytes + 2 * value_bytes + 48) + 16 + WARPS * value_bytes
    return DeltaPlan(
        sizes=sizes,
        warps=WARPS,
        half=half,
        splits=splits,
        sharers=sizes.shared * splits,
        columns=columns,
        lanes=columns // 4,
        rows=unit * MOST_SPLITS // splits,
        unit=unit,
        group=Dv // MOST_SPLITS,
        turn=turn,
        normed=normed,
        key_bytes=key_bytes,
        value_bytes=value_bytes,
        pdl=pdl,
        buffer=declaration(max(used, STATIC_SHARED if crowded else 0)),
    )
