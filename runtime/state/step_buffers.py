"""Inputs of a step on its device: what the host writes in one copy, and the step that reads it.

Decode steps keep their buffers, which a step updates for the next one; see `decode_inputs`.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import chain

import torch
from torch import Tensor

from lowbit.formats.page_counts import PAGE, SCRATCH, pages_for
from lowbit.runtime.state.host_rings import to_device, write_rows
from lowbit.runtime.state.step import (
    NO_SLOT,
    Embedded,
    Span,
    Step,
    StepPlan,
    starts_of,
    token_columns,
)

COLUMNS = 7  # of `StepBuffers.block`
# At least a number more than tokens, for the end of the last sequence; so many, since Triton
# specializes kernels for tensors that begin at multiples of 16 bytes: here all rows do.
PADDING = 4


@dataclass(frozen=True, slots=True)
class StepBuffers:
    """Inputs of a step of W - PADDING tokens at most."""

    block: Tensor  # [COLUMNS, W] int32, the others
    ids: Tensor  # [W] int32, the tokens
    positions: Tensor  # [W] int32 of them
    rows: Tensor  # [W] int32 of their sequences
    reads: Tensor  # [W] int32, slot with the recurrent state before the first token, by sequence
    writes: Tensor  # [W] int32, slot that takes the state after the token
    places: Tensor  # [W] int32 of the tokens, counted from the first of each sequence
    # [W] int32, the first token of each sequence, then of padding, then the number of all tokens
    starts: Tensor

    def write(
        self, spans: Sequence[Span], ids: Sequence[int], M: int, ends: Sequence[int] | None = None
    ) -> None:
        """Write the inputs of a step, padded to M tokens, without waiting; see `columns_of`."""
        write_rows(self.block, columns_of(spans, ids, M, ends=ends))

    def step(self, plan: StepPlan, tables: Tensor, shifts: Tensor | None = None) -> Step:
        """The step that finds its numbers here; shifts: see `step_of`.

        Starts count from the first token of the step, in a part of a plain one (`parts_of`) too:
        there each sequence has one token.
        """
        M, B = plan.tokens, plan.sequences
        tokens, sequences = slice(plan.first, plan.first + M), slice(plan.first, plan.first + B)
        starts, slots = self.starts[: B + 1], (self.reads[sequences], self.writes[tokens])
        columns = self.positions[tokens], self.rows[tokens], starts
        return step_of(plan, tables, *columns, slots, shifts)


@dataclass(frozen=True, slots=True)
class ChunkImages:
    """Embeddings and positions of the tokens of a chunk of at most W tokens."""

    rows: Tensor  # [W, h] embeddings of the image tokens, each in the place of its token
    # [4, W] int32 by token: its positions in time, row and column; 1 for an image token, else 0
    positions: Tensor

    def write(self, plan: StepPlan) -> None:
        """Write those of a chunk, behind the steps under way."""
        if plan.axes is None:
            raise ValueError("a chunk without a part of an image")
        is_image = [0] * plan.tokens
        for each in plan.embedded:
            stop = each.first + len(each.rows)
            self.rows[each.first : stop].copy_(each.rows.detach(), non_blocking=True)
            is_image[each.first : stop] = [1] * len(each.rows)
        write_rows(self.positions, (*plan.axes.tolist(), is_image))

    def step(self, step: Step) -> Step:
        """The step of text with the images that were written last."""
        M = len(step.positions)
        axes = self.positions[:3, :M].long()
        given = Embedded(0, self.rows[:M], self.positions[3, :M, None].bool())
        return replace(step, axes=axes, own_angles=axes[0].int(), embedded=(given,))


def new_chunk_images(hidden: Tensor) -> ChunkImages:
    """Buffers of zeros for chunks of up to W tokens, with `hidden` [W, h] for their sizes."""
    positions = torch.zeros(4, len(hidden), dtype=torch.int32, device=hidden.device)
    return ChunkImages(torch.zeros_like(hidden), positions)


def step_of(
    plan: StepPlan,
    tables: Tensor,
    positions: Tensor,
    rows: Tensor,
    starts: Tensor,
    slots: tuple[Tensor, Tensor] | None = None,
    shifts: Tensor | None = None,
) -> Step:
    """The step of a plan, which nobody else makes.

    Args:
        slots: to read and to write; None where no layer has a state.
        shifts: [R] int32 of a shifted plan: what is added to positions in a row for their angles.
    """
    read, write = (rows, rows) if slots is None else slots
    axes = angles = None
    if plan.axes is not None:
        axes = to_device(plan.axes.tolist(), torch.int64, rows.device)
        angles = axes[0].int()
    if plan.shifted and shifts is not None:
        angles = positions + shifts.index_select(0, rows)
    return Step(
        positions=positions,
        rows=rows,
        starts=starts,
        tables=tables,
        read=read,
        write=write,
        max_kv_len=plan.max_kv_len,
        longest=plan.longest,
        spans=plan.spans,
        prompt=plan.prompt,
        ending=plan.ending,
        own_angles=angles,
        embedded=plan.embedded,
        axes=axes,
    )


def new_step(
    plan: StepPlan, ids: Sequence[int], tables: Tensor, shifts: Tensor | None = None
) -> tuple[Tensor, Step]:
    """Ids [M] int32 of the tokens of a plan's spans, and its step, in buffers of their own.

    shifts: see `step_of`.
    """
    buffers = new_step_buffers(plan.tokens, tables.device)
    buffers.write(plan.spans, ids, plan.tokens)
    return buffers.ids[: plan.tokens], buffers.step(plan, tables, shifts)


def buffers_in(block: Tensor) -> StepBuffers:
    """Buffers in a tensor [COLUMNS, W] int32."""
    return StepBuffers(block, *block)


def new_step_buffers(tokens: int, device: torch.device) -> StepBuffers:
    """Zeros for steps of so many tokens."""
    width = -(-tokens // PADDING) * PADDING + PADDING
    return buffers_in(torch.zeros(COLUMNS, width, dtype=torch.int32, device=device))


def columns_of(
    spans: Sequence[Span],
    ids: Sequence[int],
    M: int,
    plain: bool = False,
    ends: Sequence[int] | None = None,
) -> tuple[Sequence[int], ...]:
    """Rows of `StepBuffers.block` for a step of M tokens, without the zeros behind.

    Padding is a last sequence of row SCRATCH, which is 0, and may be empty.

    Args:
        plain: each sequence has one token, padding too.
        ends: of several sequences of padding, tokens up to the end of each; see above for None.
    """
    rows, positions, places = token_columns(spans)
    reads = [span.read for span in spans]
    writes = list(chain.from_iterable(span.writes for span in spans))
    writes += [NO_SLOT] * (M - len(writes))
    starts = range(M + 1) if plain else [*starts_of(spans), *([M] if ends is None else ends)]
    return ids, positions, rows, reads, writes, places, starts


def lone_step(count: int, device: str | torch.device, first: int = 0, prompt: bool = True) -> Step:
    """Step of `count` tokens of one sequence from position `first` on.

    Its pages are 1, 2, 3 and so on, its recurrent state is in slot 1.
    """
    pages = tuple(range(1, 1 + pages_for(first + count)))
    span = Span(1, first, count, pages, 1, (*([NO_SLOT] * (count - 1)), 1))
    tables = torch.tensor([[SCRATCH] * len(pages), pages], dtype=torch.int32, device=device)
    plan = StepPlan(count, 1, len(pages) * PAGE, count, (span,), prompt=prompt)
    return new_step(plan, [0] * count, tables)[1]
