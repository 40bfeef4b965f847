"""Views of layers: all that an op needs beside input, state and step, made once at load."""

from dataclasses import dataclass

from torch import Tensor

from lowbit.runtime.state.rope import Rope


@dataclass(frozen=True, slots=True)
class AttentionLayer:
    """Attention of a layer.

    Attributes:
        index: of the layer among those of the pages.
        rope: tables for every position of the context.
        eps: of the norms.
        q_norm: [D] gain of every q head; None leaves q as it is.
        k_norm: [D] gain of every k head; None leaves k as it is.
        gated: a gate follows the query of each head, whose sigmoid multiplies the head's output.
        window: a token of a block of drafts sees so many positions, itself included; None for all.
        causal: a token of a block sees those before it alone.
    """

    index: int
    rope: Rope
    eps: float
    q_norm: Tensor | None = None
    k_norm: Tensor | None = None
    gated: bool = False
    window: int | None = None
    causal: bool = True


@dataclass(frozen=True, slots=True)
class DeltaLayer:
    """Gated DeltaNet around the recurrence of a layer; tensors are FP32 whatever is stored.

    Attributes:
        index: of the layer among those of the slots.
        conv: [C, W] taps of the causal depthwise convolution, the last one for the current token;
            channels in the order q, k, v: C = 2 * Hk * Dk + Hv * Dv.
        decay: [Hv], `-exp(A_log)`.
        dt_bias: [Hv].
        norm: [Dv], gain of the norm of each head's output.
        key_heads: Hk; value head i reads q and k of head i // (Hv / Hk).
        key_dim: Dk.
        eps: of the norm.
    """

    index: int
    conv: Tensor
    decay: Tensor
    dt_bias: Tensor
    norm: Tensor
    key_heads: int
    key_dim: int
    eps: float

    @property
    def value_heads(self) -> int:
        """Hv."""
        return self.decay.shape[0]

    @property
    def value_dim(self) -> int:
        """Dv."""
        return self.norm.shape[0]
