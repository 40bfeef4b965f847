"""Block drafts: a drafter beside the model reads every step and drafts a block in one pass.

The drafter has pages of its own, numbered as the model's and written in the same steps. So it can
reuse whatever the model reuses of a prompt.
"""

from collections.abc import Sequence as Numbers
from dataclasses import dataclass, field

import torch
from torch import Tensor

from lowbit.runtime.backends.cpu_linear import CpuLinear
from lowbit.runtime.engine.sequence import Sequence
from lowbit.runtime.models.architectures import BlockDrafter
from lowbit.runtime.models.layer_parts import HiddenTaps, new_hidden_taps
from lowbit.runtime.models.loader import Decoder
from lowbit.runtime.state.host_rings import new_ring
from lowbit.runtime.state.pages import KVPages
from lowbit.runtime.state.sampler import SamplerRows
from lowbit.runtime.state.step import Span, Step, StepPlan, token_columns
from lowbit.runtime.state.step_buffers import new_step


@dataclass(frozen=True, slots=True)
class Blocks:
    """Block drafts for a runner's sequences, on a CPU."""

    drafter: BlockDrafter[CpuLinear]  # loaded
    pages: KVPages  # keys and values of its context
    tables: Tensor  # of the runner
    sampler: SamplerRows  # of the runner
    _ring: Tensor = field(init=False)  # takes drafts; never read

    def __post_init__(self) -> None:
        """Allocate the ring that `Ops.choose` writes to."""
        object.__setattr__(self, "_ring", new_ring(self.sampler.rows, False))

    @property
    def most(self) -> int:
        """Most drafts of a block."""
        return self.drafter.blocks.size - 1

    def hidden_taps(self, tokens: int) -> HiddenTaps:
        """Tensor for the hidden states that the drafter reads of a step of so many tokens."""
        layers, h = self.drafter.blocks.target_layers, self.drafter.config.hidden_size
        return new_hidden_taps(layers, tokens, h, self.drafter.norm.dtype)

    def read(self, hidden_taps: HiddenTaps, step: Step) -> None:
        """Write keys and values of a step's positions from their hidden states."""
        self.drafter.read(hidden_taps.out, self.pages, step)

    def draft(self, decoder: Decoder, sequences: Numbers[Sequence], k: int) -> list[list[int]]:
        """Draft k tokens of each sequence; all steps under way have been read.

        A draft is drawn with the random number of its position, as the token itself will be. A
        block has its full size even for few drafts, as in training.
        """
        size, mask, B = self.drafter.blocks.size, self.drafter.blocks.mask_token, len(sequences)
        ids = [id for each in sequences for id in (each.output[-1], *[mask] * (size - 1))]
        ops, eps = decoder.ops, self.drafter.config.rms_norm_eps
        spans = tuple(Span(each.row, each.last, size, tuple(each.pages)) for each in sequences)
        max_kv_len = max(span.first for span in spans) + size
        plan = StepPlan(len(ids), B, max_kv_len, longest=size, spans=spans)
        tokens, step = new_step(plan, ids, self.tables)
        hidden = self.drafter.hidden(ops.embed(tokens, decoder.embedding), self.pages, step)
        some = hidden.view(B, size, -1)[:, 1 : 1 + k].flatten(0, 1)  # [B * k, h]
        logits = ops.product(
            some,
            decoder.head,  # type: ignore[arg-type]
            norm=self.drafter.norm,
            eps=eps,
            logits=True,
        )
        before = [Span(each.row, each.last, k) for each in sequences]
        rows, positions, _ = torch.tensor(token_columns(before), dtype=torch.int32)
        drafts = torch.empty(B * k, dtype=torch.int64)
        ops.choose(logits, self.sampler, rows, positions, drafts, self._ring)
        if self.sampler.shape.adjusted:  # penalties count a token once, when it is chosen
            self.sampler.uncount(rows, drafts)
        return [[int(draft) for draft in some] for some in drafts.view(B, k)]
