"""Views of layers: all that an op needs beside input, state and step, made once at load."""

from dataclasses import dataclass

from torch import Tensor

from lowbit.runtime.state.rope import Rope


@dataclass(frozen=True, slots=True)
class AttentionLayer:
    """Attention of a layer."""

    index: int  # of the layer among those of the pages
    rope: Rope  # tables for every position of the context
    eps: float  # of the norms
    q_norm: Tensor | None = None  # [D] gain of every q head; None leaves q as it is
    k_norm: Tensor | None = None  # [D] gain of every k head; None leaves k as it is
    # a gate follows the query of each head, whose sigmoid multiplies the head's output
    gated: bool = False
    # a token of a block of drafts sees so many positions, itself included; None for all
    window: int | None = None
    causal: bool = True  # a token of a block sees those before it alone


@dataclass(frozen=True, slots=True)
class ContextLayers:
    """Keys and values of a drafter's context, for layers that follow one another."""

    first: int  # index of the first of them among those of the pages
    rope: Rope  # tables for every position of the context
    eps: float  # of the norm
    k_norms: Tensor  # [L, D] gain of every k head of each layer


@dataclass(frozen=True, slots=True)
class DeltaLayer:
    """Gated DeltaNet around the recurrence of a layer; tensors are FP32 whatever is stored."""

    index: int  # of the layer among those of the slots
    # [C, W] taps of the causal depthwise convolution, the last one for the current token; channels
    # in the order q, k, v: C = 2 * Hk * Dk + Hv * Dv
    conv: Tensor
    decay: Tensor  # [Hv], `-exp(A_log)`
    dt_bias: Tensor  # [Hv]
    norm: Tensor  # [Dv], gain of the norm of each head's output
    key_heads: int  # Hk; value head i reads q and k of head i // (Hv / Hk)
    key_dim: int  # Dk
    eps: float  # of the norm

    @property
    def value_heads(self) -> int:
        """Hv."""
        return self.decay.shape[0]

    @property
    def value_dim(self) -> int:
        """Dv."""
        return self.norm.shape[0]
