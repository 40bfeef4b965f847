"""Constants of attention's kernels: the sizes of its heads, and a plan for each launch.

A kernel takes them as one constant. What follows from other numbers is a field too: Triton finds
what it has compiled by the text of its constants, which must change with a formula here. Each plan
is made once, and so compared by identity, which is quick.
"""

from dataclasses import dataclass, replace
from functools import cache

import torch
from torch import Tensor

from lowbit.runtime.kernels.launch.attention import (
    KEYS,
    AttentionLaunch,
    KeySplit,
    head_row_bytes,
    heads_bytes,
    join_bytes,
    ring_of,
)
from lowbit.runtime.kernels.ptx.memory import declaration
from lowbit.runtime.state.pages import KVPages
from lowbit.runtime.weights.layers import AttentionLayer

MOST_SHARED = 8  # query heads of a program: rows of half a tile


@dataclass(frozen=True, slots=True)
class Heads:
    """Heads of a layer."""

    kv: int  # heads of keys and of values
    shared: int  # query heads of each
    dim: int  # elements of a head, a power of two
    rotated: int  # elements that the position turns, an even number
    gated: bool  # a gate follows every query

    @property
    def queries(self) -> int:
        """Query heads."""
        return self.kv * self.shared


def heads_of(qkv: Tensor, layer: AttentionLayer, pages: KVPages) -> Heads:
    """Sizes of the heads in qkv [M, width], whose keys and values go to these pages."""
    kv, dim = pages.heads, pages.head_dim
    shared = (qkv.shape[1] // dim // kv - 2) // (2 if layer.gated else 1)
    return Heads(kv, shared, dim, 2 * layer.rope.cos.shape[1], layer.gated)


def in_programs(heads: Heads) -> Heads:
    """The heads as programs of a decode step take them.

    Where more query heads than MOST_SHARED share a kv head, several programs read it, with the same
    number of query heads each; it counts once for each of them.
    """
    readers = next(
        n
        for n in range(1, heads.shared + 1)
        if heads.shared % n == 0 and heads.shared // n <= MOST_SHARED
    )
    return replace(heads, kv=heads.kv * readers, shared=heads.shared // readers)


@dataclass(frozen=True, slots=True, eq=False)
class Plan:
    """Constants of a launch of a kernel of `attention_decode`."""

    heads: Heads  # as programs take them, see `in_programs`
    stored: int  # kv heads in pages
    readers: int  # programs that share one of them
    keys: KeySplit  # the order in which keys are added up
    normed: bool  # queries and keys are normed, by gains in FP32 where `wide_gains`, else in BF16
    wide_gains: bool  # see `normed`
    quantized: bool  # pages hold INT8 codes with a scale of each vector, not BF16
    tokens_per_sequence: int  # most tokens of one sequence in the step, a power of two
    # heads in shared memory: queries, the new key, the keys of earlier tokens of this step; of
    # codes as many values too
    held: int
    most_row: int  # up to which of them lanes look for their query
    key_row: int  # of the new key in shared memory
    scales_at: int  # bytes from the heads in shared memory to their scales, of codes
    heads_bytes: int  # of shared memory that the heads take
    query: int  # elements from one query to the next
    width: int  # elements from one token to the next
    size: int  # bytes of an element in pages
    row: int  # bytes from one key to the next, in pages
    staged: int  # bytes from one head to the next, in shared memory
    chunks: int  # of 64 bytes of a key, four lanes' 16 bytes each
    columns: int  # of the values that a program takes
    sets: int  # of 64 columns
    piece: int  # bytes of a value that a lane loads at a time
    loads: int  # pieces of a lane
    splits: int  # that a program takes beside each other, a warp each, where the keys are split
    groups: int  # of warps in a program, each with a softmax of its own
    warps: int  # that add up keys, in order
    running: int  # warps of a program; fewer than `warps` take the keys of several in turn
    turn: int  # keys that all of them take at a time
    # turns whose keys and values are all loaded at first; 0 loads each during the one before
    ahead: int
    early: bool  # the next kernel may start before this one has its input
    pdl: bool  # the kernel may start before the one that feeds it ends
    ring: int  # blocks of a warp's ring in shared memory; 0 loads them into registers
    entry: int  # bytes of a block in the ring
    ring_at: int  # bytes from the shared memory's begin to the first warp's ring
    ring_bytes: int  # from one warp's ring to the next
    scales_in_ring: int  # bytes from a ring to the words with its scales
    shared: int  # bytes of shared memory, with rings
    buffer: str  # the declaration of the shared memory without rings


@cache
def plan(
    heads: Heads,
    gains: torch.dtype | None,
    launch: AttentionLaunch,
    tokens_per_sequence: int,
    pdl: bool,
    quantized: bool = False,
) -> Plan:
    """The constants of a launch.

    Args:
        gains: dtype of those of queries and keys; None where they are not normed.
        tokens_per_sequence: most tokens of one sequence, a power of two.
    """
    stored, heads = heads.kv, in_programs(heads)
    keys, split = launch.keys, launch.splits > 1 and not launch.joined
    groups = 1 if split else keys.groups
    warps, columns = keys.warps * groups, heads.dim // launch.parts
    sums = max(warps, launch.splits) if launch.joined else warps
    query = 2 * heads.dim if heads.gated else heads.dim
    size = 1 if quantized else 2
    running = launch.warps or warps
    own = join_bytes(heads.shared, heads.dim, sums, launch.parts, tokens_per_sequence, quantized)
    ring = ring_of(launch, heads.dim, quantized)
    piece = 8 if quantized and columns < 128 else 16
    return Plan(
        heads=heads,
        stored=stored,
        readers=heads.kv // stored,
        keys=keys,
        normed=gains is not None,
        wide_gains=gains == torch.float32,
        quantized=quantized,
        tokens_per_sequence=tokens_per_sequence,
        held=heads.shared + (2 if quantized else 1) * tokens_per_sequence,
        most_row=heads.shared - 1 if quantized else heads.shared,
        key_row=2 * heads.shared if quantized else heads.shared,
        scales_at=2 * (heads.shared + tokens_per_sequence) * head_row_bytes(heads.dim, quantized),
        heads_bytes=heads_bytes(heads.shared, heads.dim, tokens_per_sequence, quantized),
        query=query,
        width=heads.queries * query + 2 * stored * heads.dim,
        size=size,
        row=stored * heads.dim * size,
        staged=head_row_bytes(heads.dim, quantized),
        chunks=-(-heads.dim * size // 64),
        columns=columns,
        sets=-(-columns // 64),
        piece=piece,
        loads=-(-columns * size // (8 * piece)),
        splits=launch.splits if launch.joined else 1,
        groups=groups,
        warps=warps,
        running=running,
        turn=warps * KEYS * keys.blocks,
        ahead=launch.ahead,
        early=launch.early and not split,
        pdl=pdl,
        ring=launch.ring,
        entry=ring.entry,
        ring_at=-(-own // 128) * 128,
        ring_bytes=ring.bytes,
        scales_in_ring=ring.scales,
        shared=-(-own // 128) * 128 + running * ring.bytes if launch.ring else own,
        buffer=declaration(own),
    )
