"""A drafter beside a model: it reads every step of the model, and drafts a block in one pass.

Keys and values of its context stand in pages of its own with the numbers of the model's, and are
written in the step that writes those. So whatever the model can reuse of a prompt, it can too.
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
from lowbit.runtime.state.step import Span, Step, rows_and_positions, starts_of


@dataclass(frozen=True, slots=True)
class Blocks:
    """Blocks of a runner's sequences, on a CPU.

    Attributes:
        drafter: with its weights.
        pages: of its context.
        tables: of the runner.
        sampler: of the runner.
    """

    drafter: BlockDrafter[CpuLinear]
    pages: KVPages
    tables: Tensor
    sampler: SamplerRows
    _ring: Tensor = field(init=False)  # of drafts, which nobody reads

    def __post_init__(self) -> None:
        """Make room for the tokens that choosing leaves."""
        object.__setattr__(self, "_ring", new_ring(self.sampler.rows, False))

    @property
    def most(self) -> int:
        """Drafts of a block."""
        return self.drafter.blocks.size - 1

    def hidden_taps(self, tokens: int) -> HiddenTaps:
        """Room for what the model leaves for the drafter in a step of so many tokens."""
        layers, h = self.drafter.blocks.target_layers, self.drafter.config.hidden_size
        return new_hidden_taps(layers, tokens, h, self.drafter.norm.dtype)

    def read(self, hidden_taps: HiddenTaps, step: Step) -> None:
        """Write the context of a step's positions, whose hidden states have been taken."""
        self.drafter.read(hidden_taps.out, self.pages, step)

    def draft(self, decoder: Decoder, sequences: Numbers[Sequence], k: int) -> list[list[int]]:
        """Draft k tokens of each sequence, all of whose tokens have been read.

        A draft is drawn with the random number of its place, as the token itself will be. A block
        has its whole size even for few drafts, as in training.
        """
        size, mask, B = self.drafter.blocks.size, self.drafter.blocks.mask_token, len(sequences)
        ids = [id for each in sequences for id in (each.output[-1], *[mask] * (size - 1))]
        ops, eps = decoder.ops, self.drafter.config.rms_norm_eps
        x = ops.embed(torch.tensor(ids), decoder.embedding)
        hidden = self.drafter.hidden(x, self.pages, self._step(sequences))
        some = hidden.view(B, size, -1)[:, 1 : 1 + k].flatten(0, 1)  # [B * k, h]
        logits = ops.product(
            some,
            decoder.head,  # type: ignore[arg-type]
            norm=self.drafter.norm,
            eps=eps,
            logits=True,
        )
        before = [Span(each.row, each.last, k) for each in sequences]
        rows, positions = torch.tensor(rows_and_positions(before), dtype=torch.int32)
        tokens = torch.empty(B * k, dtype=torch.int64)
        ops.choose(logits, self.sampler, rows, positions, tokens, self._ring)
        if self.sampler.shape.adjusted:  # so that penalties count them once, when they are chosen
            self.sampler.uncount(rows, tokens)
        return [[int(token) for token in some] for some in tokens.view(B, k)]

    def _step(self, sequences: Numbers[Sequence]) -> Step:
        """The blocks of sequences as a step, from their last tokens on."""
        size = self.drafter.blocks.size
        spans = [Span(each.row, each.last, size, tuple(each.pages)) for each in sequences]
        rows, positions = torch.tensor(rows_and_positions(spans), dtype=torch.int32)
        return Step(
            positions=positions,
            rows=rows,
            starts=torch.tensor(starts_of(spans), dtype=torch.int32),
            tables=self.tables,
            read=rows,
            write=rows,
            reach=max(span.first + span.count for span in spans),
            longest=size,
            spans=tuple(spans),
        )
