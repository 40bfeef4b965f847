"""Block drafts: a drafter beside the model reads every step and drafts a block in one pass.

The drafter has pages of its own, numbered as the model's and written in the same steps. So it can
reuse whatever the model reuses of a prompt. Its pass is part of the round, on a GPU of one graph:
from the last token of each sequence, which the round before has left on the device, to the drafts.
"""

from collections.abc import Sequence as Numbers
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from lowbit.runtime.backends.cpu_linear import CpuLinear
from lowbit.runtime.engine.draft.lookup import COPIED, Copy
from lowbit.runtime.engine.draft.made import MadeRounds
from lowbit.runtime.engine.graphs import fills_step
from lowbit.runtime.engine.load_options import MOST_DRAFTS
from lowbit.runtime.engine.stats import Source
from lowbit.runtime.models.architectures import BlockDrafter
from lowbit.runtime.models.block_head import Choice
from lowbit.runtime.models.draft_output import DraftOutput
from lowbit.runtime.models.selected_rows import SelectedRows
from lowbit.runtime.state.block_inputs import BlockInputs, new_block_inputs
from lowbit.runtime.state.decode_inputs import HIDDEN_RING, new_hidden_ring
from lowbit.runtime.state.host_rings import RING, new_ring, write_rows
from lowbit.runtime.state.pages import KVPages
from lowbit.runtime.state.step import Span, Step, StepPlan
from lowbit.runtime.state.step_buffers import step_of
from lowbit.runtime.thresholds import ROUND_SEQUENCES

if TYPE_CHECKING:
    from lowbit.runtime.kernels.linear.tiles import GpuLinear  # needs triton, which a CPU may lack

    Drafter = BlockDrafter[CpuLinear] | BlockDrafter[GpuLinear]
    Rows = SelectedRows[CpuLinear] | SelectedRows[GpuLinear]

GUESS = 0.75  # of how often a draft is accepted behind accepted ones, before any was checked


@dataclass(frozen=True, slots=True)
class Blocks:
    """A drafter with the keys and values of its context, which reads every step."""

    drafter: "Drafter"  # loaded
    target: Any  # the model with its whole head, over ops that exchange nothing between ranks
    pages: KVPages  # keys and values of its context
    rows: "Rows | None" = None  # of the model's head, that drafts are chosen from; None for all
    # [R, HIDDEN_RING, h] context of the last positions of each row; None where no head reads it
    contexts: Tensor | None = None

    @property
    def layers(self) -> tuple[int, ...]:
        """Layers of the model whose outputs it reads, in this order."""
        return self.drafter.blocks.target_layers

    def read(self, outputs: Numbers[Tensor], step: Step) -> None:
        """Write keys and values of a step's positions from outputs [M, h] of these layers."""
        context = self.drafter.read(torch.cat(tuple(outputs), dim=1), self.pages, step)
        if self.contexts is None:
            return
        for first in range(0, len(context), HIDDEN_RING):  # a place of the ring once in each
            part = slice(first, first + HIDDEN_RING)
            at = step.rows[part], step.positions[part]
            self.drafter.ops.store_hidden(context[part], *at, self.contexts)


def new_blocks(
    drafter: "Drafter",
    target: Any,
    pages: KVPages,
    rows: "Rows | None",
    sequences: int,
    dtype: torch.dtype,
) -> Blocks:
    """A drafter beside a model.

    Args:
        target: the model; of several ranks see `load_target`.
        sequences: rows of the model's sequences, the scratch row included.
        dtype: of activations.
    """
    if not drafter.blocks.keeps_context:
        return Blocks(drafter, target, pages, rows)
    hidden, device = drafter.config.hidden_size, str(drafter.norm.device)
    return Blocks(drafter, target, pages, rows, new_hidden_ring(sequences, hidden, dtype, device))


@dataclass(slots=True)
class BlockRounds(MadeRounds):
    """Rounds with drafts of a block drafter.

    A block has its full size even for few drafts, as in training: cut to half, a drafter of blocks
    of 8 had .46 of its first drafts accepted in place of .74 (LOG.md).
    """

    blocks: Blocks  # of the runner
    _block: BlockInputs = field(init=False)  # of a block of each of S sequences
    _starts: Tensor = field(init=False)  # [S + 1] int32, the first token of each block
    _copies: Tensor = field(init=False)  # [S, 2 + COPIED] int32, see `DraftOps.join_copies`
    _copied: Tensor = field(init=False)  # [RING, R] int64 on the host, as `DecodeInputs.right`

    def __post_init__(self) -> None:
        """Allocate the inputs of the drafter."""
        MadeRounds.__post_init__(self)
        mask = self.blocks.drafter.blocks.mask_token
        device = self.runner.state.device
        self._block = new_block_inputs(mask, self.size, ROUND_SEQUENCES, device)
        self._starts = self.runner.ints(range(ROUND_SEQUENCES + 1)) * self.size
        self._copies = self._starts.new_zeros(ROUND_SEQUENCES, 2 + COPIED)
        self._copied = new_ring(self.runner.sampler.rows, self.runner.on_gpu)

    @property
    def source(self) -> Source:
        """See `MadeRounds.source`."""
        return "drafter"

    @property
    def guesses(self) -> tuple[float, ...]:
        """See `MadeRounds.guesses`; as many as a block has drafts that a round has room for."""
        return (GUESS,) * min(self.blocks.drafter.blocks.drafts, MOST_DRAFTS)

    @property
    def size(self) -> int:
        """Tokens of a block."""
        return self.blocks.drafter.blocks.size

    @property
    def joins(self) -> bool:
        """See `MadeRounds.joins`: what a draft is leaves no trace in the drafter's context."""
        return True

    def write_copies(self, copies: Numbers[Copy | None]) -> bool:
        """See `MadeRounds.write_copies`."""
        if not any(copies):
            return False
        made = min(self.drafts, len(self.guesses))
        rows = [() if each is None else each.row(made) for each in copies]
        write_rows(self._copies[: len(rows)], rows)
        return True

    def join(self, B: int, k: int) -> None:
        """See `MadeRounds.join`."""
        self.blocks.target.ops.join_copies(self.inputs, self._copies, self._copied, B, k)

    def copied(self, last: int, row: int) -> bool:
        """See `MadeRounds.copied`."""
        return bool(self._copied[last % RING, row])

    def fitting(self, most: int, sequences: int) -> int:
        """On a GPU as many as fill a step: at the end of an answer fewer graphs are recorded.

        A draft in the place of padding costs nothing, so elsewhere no other number pays.
        """
        if not self.runner.on_gpu:
            return most
        return next((k for k in range(most, 0, -1) if fills_step(sequences, k)), most)

    def draft(self, B: int, k: int, max_kv_len: int) -> Tensor:
        """Draft k tokens of each sequence by one pass over blocks; see `MadeRounds.draft`.

        Fewer where a block has fewer drafts.
        """
        target, size, drafter = self.blocks.target, self.size, self.blocks.drafter
        block, tokens = self._block, B * size
        first_draft = drafter.blocks.first
        made = min(k, size - first_draft)
        target.ops.begin_blocks(self.inputs, block, B, k, made)
        spans = [
            Span(part.sequence.row, part.sequence.last, size, part.span.pages)
            for part in self.parts
        ]
        step = self.step(spans, max_kv_len, block.rows[:tokens], block.positions[:tokens])
        x = target.ops.embed(block.ids[:tokens], target.embedding)
        hidden = drafter.hidden(x, self.blocks.pages, step).view(B, size, -1)
        ids, rows, _ = self.firsts(B, k)
        positions = block.draft_positions[: B * made].view(B, made)
        if drafter.head is None:
            return self._choose(hidden[:, first_draft : first_draft + made], rows, positions)
        choice: Choice[Any] = self._choice(rows, positions, ids)
        return drafter.head.draft(hidden, choice)

    def step(self, spans: Numbers[Span], max_kv_len: int, rows: Tensor, positions: Tensor) -> Step:
        """Step of the drafter, a block of each sequence; in a graph only their number matters."""
        B = len(spans)
        M, starts, runner = B * self.size, self._starts[: B + 1], self.runner
        plan = StepPlan(
            M, B, max_kv_len, longest=self.size, spans=tuple(spans), shifted=self.shifted
        )
        return step_of(plan, runner.tables, positions, rows, starts, shifts=runner.shifts)

    def _choose(self, hidden: Tensor, rows: Tensor, positions: Tensor) -> Tensor:
        """Choose drafts by hidden states [B, k, h]: all at once, or by place if some are counted.

        Args:
            rows: [B] int32.
            positions: [B, k] int32 of `BlockInputs`, moved on by choosing.

        Returns:
            [B, k] int64.
        """
        sampler, output = self.runner.sampler, self._output()
        B, k = hidden.shape[:2]
        drafts = torch.empty(B, k, dtype=torch.int64, device=hidden.device)
        if not sampler.shape.adjusted:
            each = hidden.flatten(0, 1).contiguous(), sampler, self._block.draft_rows[: B * k]
            output.choose(*each, positions.view(-1), drafts.view(-1), self.ring)
            return drafts
        rows, columns = rows.contiguous(), positions.T.contiguous()
        for place, token in enumerate(drafts.new_empty(k, B)):
            own = hidden[:, place].contiguous()
            output.choose(own, sampler, rows, columns[place], token, self.ring)
            drafts[:, place] = token
        return drafts

    def _choice(self, rows: Tensor, positions: Tensor, last: Tensor) -> Choice[Any]:
        """The `Choice` of the drafter's head."""
        target, runner = self.blocks.target, self.runner
        sampling = runner.sampler, rows, positions, last.contiguous(), self.ring
        contexts, context = self.blocks.contexts, None
        if contexts is not None:
            places = rows * HIDDEN_RING + (positions[:, 0] - 1) % HIDDEN_RING
            context = target.ops.embed(places, contexts.flatten(0, 1))
        return Choice(target.ops, self._output(), target.embedding, *sampling, context)

    def _output(self) -> DraftOutput[Any]:
        target, drafter = self.blocks.target, self.blocks.drafter
        sizes = drafter.config.rms_norm_eps, target.head, target.config.vocab_size
        return DraftOutput(target.ops, drafter.norm, *sizes, self.blocks.rows)
