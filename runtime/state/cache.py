"""The static cache of a sequence: allocated once for the whole context, written in place."""

from dataclasses import dataclass, field

import torch
from torch import Tensor

from lowbit.runtime.state.delta import DeltaState, no_delta_state

FIRST_REACH = 256


@dataclass(slots=True)
class KVCache:
    """Keys after norm and RoPE, values, and the state of linear layers, of one sequence.

    A sequence of keys and values can be cut anywhere. A linear layer's state cannot go back, so a
    model that has one keeps a second state from some tokens earlier.

    Attributes:
        k: [L, B * Hkv, T, D], T the context, B = 1 but for a batch; L counts the layers that have
            keys.
        v: [L, B * Hkv, T, D].
        length: tokens held, as the host knows it (prefill slices by it); of the longest sequence.
        position: [B] int32 on the device, the row the next decoded token takes; decode kernels
            read it, so a captured graph follows the sequence without the host.
        delta: state of the linear layers after `length` tokens.
        saved: the same after `saved_length` tokens.
        saved_length: 0 where nothing is saved.
        reach: rows that decode kernels divide among themselves, more than `length`; they read none
            from there on, so a captured graph is good up to there. 0 is the context.
    """

    k: Tensor
    v: Tensor
    length: int
    position: Tensor
    delta: DeltaState = field(default_factory=no_delta_state)
    saved: DeltaState = field(default_factory=no_delta_state)
    saved_length: int = 0
    reach: int = 0

    @property
    def context(self) -> int:
        """Tokens the cache can hold."""
        return self.k.shape[2]

    @property
    def sequences(self) -> int:
        """How many are decoded together, a token each a step; more than one are never prefilled."""
        return self.position.shape[0]

    @property
    def recurrent(self) -> bool:
        """Whether the model has linear layers."""
        return self.delta.memory.numel() > 0

    def reach_for(self, tokens: int) -> int:
        """The reach of a step that brings the sequence to so many tokens: of few sizes in all."""
        reach = FIRST_REACH
        while reach < tokens:
            reach *= 4
        return min(reach, self.context)

    def reusable(self, shared: int) -> int:
        """How many tokens can be kept of the first `shared`."""
        if not self.recurrent:
            return min(shared, self.length)
        if shared >= self.length:
            return self.length
        return self.saved_length if shared >= self.saved_length else 0

    def truncate(self, length: int) -> None:
        """Keep the first `length` tokens, a number that `reusable` gives.

        Later rows are overwritten when reached.
        """
        if length == 0:
            self.delta.clear()
        elif self.recurrent and length != self.length:
            if length != self.saved_length:
                raise ValueError(f"no state of {length} tokens is held")
            self.delta.copy_(self.saved)
        if length < self.saved_length:
            self.saved_length = 0
        self.advance(length - self.length)

    def advance(self, tokens: int) -> None:
        """Count tokens that have been written."""
        self.length += tokens
        self.position.fill_(self.length)

    def put(self, index: int, single: "KVCache") -> None:
        """Take over what another cache holds of its one sequence, as sequence `index` of these."""
        heads = single.k.shape[1]
        rows = slice(index * heads, (index + 1) * heads)
        self.k[:, rows, : single.length] = single.k[:, :, : single.length]
        self.v[:, rows, : single.length] = single.v[:, :, : single.length]
        if self.recurrent:
            self.delta.of(index).copy_(single.delta)
        self.position[index] = single.length
        self.length = max(self.length, single.length)

    def save(self) -> None:
        """Make the present length one that `truncate` can go back to, instead of another."""
        self.saved_length = 0  # where the copy is interrupted, nothing is saved
        self.saved.copy_(self.delta)
        self.saved_length = self.length


def new_cache(
    layers: int,
    kv_heads: int,
    head_dim: int,
    context: int,
    dtype: torch.dtype,
    device: str,
    sequences: int = 1,
) -> KVCache:
    """An empty cache of the given sizes."""
    shape = (layers, sequences * kv_heads, context, head_dim)
    return KVCache(
        k=torch.zeros(shape, dtype=dtype, device=device),
        v=torch.zeros(shape, dtype=dtype, device=device),
        length=0,
        position=torch.zeros(sequences, dtype=torch.int32, device=device),
    )
