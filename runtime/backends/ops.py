"""The few operations a decoder needs, as one backend (`backends.cpu`, `.cuda`) gives them.

A backend is a module of plain functions; `Ops` is the protocol that type-checks it. W is the form
in which the backend keeps a linear layer: `GpuLinear` on a GPU, `CpuLinear` on a CPU.
Activations are [M, ...] in the model's dtype; M = 1 is a decode step.
"""

from typing import Protocol, TypeVar

from torch import Tensor

from lowbit.runtime.state.block_inputs import BlockInputs
from lowbit.runtime.state.decode_inputs import DecodeInputs
from lowbit.runtime.state.delta import LayerStates
from lowbit.runtime.state.host_rings import LogProbabilities
from lowbit.runtime.state.pages import KVPages
from lowbit.runtime.state.sampler import SamplerRows
from lowbit.runtime.state.step import Step
from lowbit.runtime.weights.layers import AttentionLayer, ContextLayers, DeltaLayer
from lowbit.runtime.weights.linear import ExpertWeights
from lowbit.runtime.weights.table import Table

W = TypeVar("W", contravariant=True)


class Ops(Protocol[W]):
    """Operations that `lowbit.runtime.models` calls."""

    def embed(self, ids: Tensor, table: Table) -> Tensor:
        """Rows of table [V, h] for ids [M]: [M, h]."""

    def rms_norm(self, x: Tensor, norm: Tensor, eps: float) -> Tensor:
        """`x / rms(x) * norm`: [M, K] to [M, K]."""

    def product(
        self,
        x: Tensor,
        w: W,
        *,
        norm: Tensor | None = None,
        eps: float = 0.0,
        added: Tensor | None = None,
        swiglu: bool = False,
        logits: bool = False,
    ) -> Tensor:
        """`added + rms_norm(x) @ w.T`, a linear layer and what stands around it.

        A gain in FP32 is applied in FP32; one in the model's dtype to the rounded `rms_norm(x)`.

        Args:
            x: [M, K].
            w: [N, K].
            norm: [K] gain of the RMS norm; None leaves x as it is.
            added: residual [M, N] or bias [N].
            swiglu: `silu(gate) * up`; gate is the first N / 2 rows of w. Without `added`.
            logits: float32, not rounded where the kernel allows.

        Returns:
            [M, N], or [M, N / 2] of gate and up; a new tensor.
        """

    def two_products(
        self, x: Tensor, w: W, small: W, norm: Tensor, eps: float, few: bool = False
    ) -> tuple[Tensor, Tensor]:
        """`product` of two weights for the same normed x, the second of few rows.

        few: a decode step's: a token's bits by the second do not depend on the number of tokens. On
            a GPU they never do.
        """

    def moe(self, x: Tensor, norm: Tensor, eps: float, experts: ExpertWeights[W]) -> Tensor:
        """Add the output of a mixture of experts for the normed x, h, to x: [M, h].

        With p = softmax(h @ router.T) over all E experts, in float32, and C the k likeliest of them
        (of equal ones those of lower number), a token gets

            sum over e in C of p[e] / sum(p[C]) * (silu(h @ gate[e].T) * (h @ up[e].T)) @ down[e].T

        and sigmoid(h @ router[E].T) times the same of the shared expert, where there is one. Sums
        over experts are float32, in an order that does not depend on the other tokens.

        Args:
            x: [M, h].
            norm: [h] gain.
            experts: router [E or E + 1, h], gate and up [E, 2 * I, h], down [E, h, I], and the
                shared expert's [2 * S, h] and [h, S] behind them.
        """

    def attention(self, qkv: Tensor, layer: AttentionLayer, pages: KVPages, step: Step) -> Tensor:
        """Norm and rotate q and k, append k and v to the sequences' pages, attend causally.

        Args:
            qkv: [M, (Hq + 2 * Hkv) * D], q heads first, then k, then v; where gated, a q head is
                2 * D wide: its query, then its gate.
            pages: written at every token's position.

        Returns:
            [M, Hq * D].
        """

    def delta_linear(
        self,
        qkvz: Tensor,
        ba: Tensor,
        layer: DeltaLayer,
        states: LayerStates,
        step: Step,
        w: W,
        residual: Tensor,
    ) -> Tensor:
        """Gated DeltaNet after its first linears, then the output linear added to the residual.

        That is convolution, gates, delta rule, gated norm, and `product`.

        Args:
            qkvz: [M, C + Hv * Dv], the channels of q, k, v (see `DeltaLayer.conv`), then z.
            ba: [M, 2 * Hv], b of every value head, then a.
            states: of this layer, read and written where the step says.
            w: [h, Hv * Dv].
            residual: [M, h].

        Returns:
            [M, h].
        """

    def choose(
        self,
        logits: Tensor,
        sampler: SamplerRows,
        rows: Tensor,
        positions: Tensor,
        token: Tensor,
        ring: Tensor,
        masks: Tensor | None = None,
        ids: Tensor | None = None,
    ) -> None:
        """Choose the next token of several rows and move them on, without waiting.

        The operations are those of `sampler.shape`. A row's token depends on its own logits,
        parameters and position alone.

        Args:
            logits: [M, V or more] float32, M at most 64; columns from the sampler's vocabulary on
                are ignored.
            sampler: of R rows; the counts of these rows are updated.
            rows: [M] int32, row of each line of logits. A row other than SCRATCH may stand there
                repeatedly, at as many positions, if it has no penalties: its counts are then wrong.
            positions: [M] int32 of the tokens that the logits come from; one is added, but for
                SCRATCH.
            token: [M] int64, written.
            ring: [RING, R] int64 on the host, page-locked beside a GPU; [p % RING, row] takes
                the token at position p, or -1 where the row's largest logit is not finite.
            masks: [M] int32, mask of the sampler for each line whose row is masked; None for those
                of the rows.
            ids: [V] int64, the token of each column, of a sampler whose shape is not adjusted;
                None where a column is a token.
        """

    def log_probabilities(
        self,
        logits: Tensor,
        vocabulary: int,
        rows: Tensor,
        positions: Tensor,
        token: Tensor,
        out: LogProbabilities,
    ) -> None:
        """Leave log-probabilities of tokens where the host reads them.

        Args:
            logits: [M, V or more] float32, those that `choose` was given.
            vocabulary: V; logits of ids from here on are ignored.
            rows: [M] int32.
            positions: [M] int32 of the tokens, as `choose` leaves them.
            token: [M] int64, as `choose` leaves them.
            out: written; before temperature, penalties, bias and mask.
        """

    def accept(self, inputs: DecodeInputs, B: int, k: int) -> None:
        """Find the drafts of a round that were right, and begin the next round behind them.

        Drafts before the first one that differs from what was chosen in its place are right.

        Args:
            inputs: of a round whose tokens have been chosen, which moved its positions on by one;
                ids, positions and reads become those of the next round, but for its drafts.
            B: sequences.
            k: drafts of each.
        """

    def place_drafts(self, inputs: DecodeInputs, drafts: Tensor, B: int, k: int) -> None:
        """Put drafts behind the last token of each sequence of a round, zeros where there are none.

        Args:
            inputs: of the round; its ids behind the last tokens are written.
            drafts: [B, k or fewer] int64.
            B: sequences.
            k: drafts of each that the round checks.
        """

    def head_input(
        self,
        ids: Tensor,
        table: Tensor,
        x: Tensor,
        gains: tuple[Tensor, Tensor, Tensor],
        eps: float,
    ) -> Tensor:
        """Input of the first linear of a head for multi-token prediction.

        Args:
            ids: [M], the token behind each position.
            table: [V, h] embedding.
            x: [M, h], hidden state of each position.
            gains: [h] each: of the embedding's norm, of the norm that ends what x comes from, and
                of the norm of that.

        Returns:
            [M, 2 * h], the embedding's part first.
        """

    def store_hidden(self, x: Tensor, rows: Tensor, positions: Tensor, hidden_ring: Tensor) -> None:
        """Write x [M, h] to the ring [R, T, h], each token at its row and its position modulo T."""


class DraftOps(Ops[W], Protocol[W]):
    """Operations that a drafter of blocks calls beside these."""

    def begin_blocks(
        self, inputs: DecodeInputs, blocks: BlockInputs, B: int, k: int, made: int
    ) -> None:
        """Write the inputs of a block of each sequence, by its last token in a round.

        Args:
            inputs: of a round, whose last tokens are read.
            blocks: [B * size] numbers of tokens and [B * made] of drafts are written.
            B: sequences.
            k: drafts of each that the round checks.
            made: drafts of each that are chosen, fewer than a block has tokens.
        """

    def write_context(self, kv: Tensor, layers: ContextLayers, pages: KVPages, step: Step) -> None:
        """Norm and rotate k, write k and v of several layers to the sequences' pages.

        Args:
            kv: [M, L * 2 * Hkv * D]; of each layer k heads, then v.
            layers: these L layers.
            pages: written at every token's position.
            step: sequence and position of every token.
        """

    def attend_block(
        self, qkv: Tensor, layer: AttentionLayer, pages: KVPages, step: Step
    ) -> Tensor:
        """Norm and rotate q and k, attend to what stands before a block and to the block itself.

        Args:
            qkv: [M, (Hq + 2 * Hkv) * D] of the blocks, q heads first, then k, then v; k and v are
                not kept.
            layer: gains, rotation, and what a token of a block sees.
            pages: read up to the first position of each block.
            step: sequence and position of every token; those of a sequence are a block, all of
                one size.

        Returns:
            [M, Hq * D].
        """

    def convolve(
        self,
        x: Tensor,
        coefficients: Tensor,
        base: Tensor,
        side: int,
        size: int,
        added: Tensor | None = None,
    ) -> Tensor:
        """Convolve the tokens of each block, by taps that are part fixed and part of each token.

        Channel c of token m, which is in group g of its G, becomes

            sum over t <= place of m in its block of
                (base[side, t, c] + coefficients[m, side, t, g]) * x[m - t, c]

        Args:
            x: [M, h], blocks of `size` tokens side by side.
            coefficients: [M, 2 * T * G] of both sides and T taps.
            base: [2, T, h].
            side: 0 before a layer's part, 1 behind it.
            size: tokens of a block.
            added: [M, h], a residual.

        Returns:
            [M, h].
        """

    def join_copies(
        self, inputs: DecodeInputs, copies: Tensor, copied: Tensor, B: int, k: int
    ) -> None:
        """Put copied tokens in the place of a round's drafts, for sequences whose copy holds.

        A copy holds if it reaches far enough, if it has the sequence's last token where it is
        continued behind it, and if enough of the drafts agree.

        Args:
            inputs: of a round, its drafts among the ids.
            copies: [B or more, 2 + N] int32; for each sequence the position of its first copied
                token, 0 without a copy, the number of first drafts that must agree, and N tokens.
            copied: [RING, R] int64 on the host; takes 1 for a sequence whose copy holds, else 0, by
                its last position modulo RING and its row.
            B: sequences.
            k: drafts of each.
        """
