"""The few operations a decoder needs, as one backend (`backends.cpu`, `.cuda`) gives them.

A backend is a module of plain functions; `Ops` is the protocol that type-checks it. W is the form
in which the backend keeps a linear layer: `GpuLinear` on a GPU, `CpuLinear` on a CPU.
Activations are [M, ...] in the model's dtype; M = 1 is a decode step.
"""

from typing import Protocol, TypeVar

from torch import Tensor

from lowbit.runtime.state.cache import KVCache
from lowbit.runtime.state.delta import DeltaState, DeltaWeights
from lowbit.runtime.state.rope import Rope
from lowbit.runtime.state.sampling import Sampler

W = TypeVar("W", contravariant=True)


class Ops(Protocol[W]):
    """What `lowbit.runtime.models` calls."""

    def embed(self, ids: Tensor, table: Tensor) -> Tensor:
        """Rows of table [V, h] for ids [M]: [M, h]."""

    def norm_linear(
        self, x: Tensor, norm: Tensor, eps: float, w: W, bias: Tensor | None = None
    ) -> Tensor:
        """`rms_norm(x) * norm @ w.T + bias`: [M, K] to [M, N]; bias is [N] in x's dtype.

        A gain in FP32 is applied in FP32; one in the model's dtype to the rounded `rms_norm(x)`.
        """

    def norm_linears(
        self, x: Tensor, norm: Tensor, eps: float, w: W, small: W
    ) -> tuple[Tensor, Tensor]:
        """`norm_linear` of two weights for the same x, the second of few rows."""

    def norm_logits(self, x: Tensor, norm: Tensor, eps: float, w: W) -> Tensor:
        """The same for a head: [M, K] to [M, V] float32, not rounded where the kernel allows."""

    def norm_swiglu(self, x: Tensor, norm: Tensor, eps: float, gate_up: W) -> Tensor:
        """`silu(gate) * up` of the normed x: [M, K] to [M, N / 2]; gate is the first N / 2 rows."""

    def linear_add(self, x: Tensor, w: W, residual: Tensor) -> Tensor:
        """`residual + x @ w.T`: [M, N]; a new tensor or residual itself, updated."""

    def attention(
        self,
        qkv: Tensor,
        q_norm: Tensor | None,
        k_norm: Tensor | None,
        eps: float,
        rope: Rope,
        cache: KVCache,
        layer: int,
        gated: bool = False,
    ) -> Tensor:
        """Norm and rotate q and k, append k and v to the cache, attend causally.

        Args:
            qkv: [M, (Hq + 2 * Hkv) * D], q heads first, then k, then v; where gated, a q head is
                2 * D wide: its query, then its gate.
            q_norm: [D] gain of every q head; None leaves q as it is.
            k_norm: [D] gain of every k head; None leaves k as it is.
            eps: of the norms.
            rope: tables for every position of the context.
            cache: [L, Hkv, T, D]; token m takes row `length + m` (host) = `position + m` (device).
                Of several sequences, token m is the next one of sequence m.
            layer: which of the cache's L layers.
            gated: multiply each head's output by the sigmoid of its gate.

        Returns:
            [M, Hq * D].
        """

    def delta_linear(
        self,
        qkvz: Tensor,
        ba: Tensor,
        weights: DeltaWeights,
        eps: float,
        state: DeltaState,
        layer: int,
        w: W,
        residual: Tensor,
    ) -> Tensor:
        """Gated DeltaNet after its first linears, and `linear_add` of what it gives.

        That is convolution, gates, delta rule and gated norm, then the output linear.

        Args:
            qkvz: [M, C + Hv * Dv], the channels of q, k, v (see `DeltaWeights.conv`), then z.
            ba: [M, 2 * Hv], b of every value head, then a.
            weights: of this layer.
            eps: of the norm.
            state: brought forward by M tokens, in place; of several sequences, by one each.
            layer: which of the state's L layers.
            w: [h, Hv * Dv].
            residual: [M, h].

        Returns:
            [M, h].
        """

    def advance(
        self, logits: Tensor, sampler: Sampler, token: Tensor, position: Tensor, slots: Tensor
    ) -> None:
        """Choose the next token from logits [1, V] into token [1]; position [1] moves on by one.

        The token is also left in `slots` for that position, as by `post`; -1 where the largest
        logit is not finite.
        """

    def post(self, token: Tensor, nonfinite: Tensor, position: Tensor, slots: Tensor) -> None:
        """Leave token [1] in `slots[position % 2]`, [2] int64 on the host, without waiting.

        A nonfinite [1] int64 of -1 leaves -1 there instead; see `Sampler.nonfinite`.
        """
