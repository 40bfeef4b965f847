"""Keys and values of a model's head for multi-token prediction, up to where it drafts.

The head needs the trunk's hidden state of every position. Steps leave the last ones of each row in
a trail, from which the head catches up now and then, so that steps without drafts cost it little.
"""

from collections.abc import Sequence as Numbers
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from lowbit.runtime.backends.cpu_linear import CpuLinear
from lowbit.runtime.engine.graphs import Graphs
from lowbit.runtime.engine.rounds import rows_and_positions
from lowbit.runtime.engine.runner import Runner
from lowbit.runtime.engine.sequence import Sequence
from lowbit.runtime.engine.widths import reach_for
from lowbit.runtime.kernels.linear.tiles import GpuLinear
from lowbit.runtime.models.qwen3_5_mtp import MtpHead
from lowbit.runtime.state.links import TRAIL, trail_of
from lowbit.runtime.state.posted import write
from lowbit.runtime.state.sampler_rows import SCRATCH
from lowbit.runtime.state.step import EXACT_TOKENS, Span, Step

MOST_BEHIND = 2 * EXACT_TOKENS  # positions


@dataclass(frozen=True, slots=True)
class HeadCache:
    """The head of a model beside its trunk.

    Attributes:
        runner: of the model.
        head: of the model.
        trail: of the runner.
        graphs: recorded steps.
        block: [4, W] int32, rows, positions, places in the trails and ids of such a step.
        starts: [2] int32, 0 and W.
    """

    runner: Runner
    head: MtpHead[CpuLinear] | MtpHead[GpuLinear]
    trail: Tensor
    graphs: Graphs
    block: Tensor
    starts: Tensor

    def read_prompt(self, sequence: Sequence, first: int, hidden: Tensor) -> None:
        """Run a part of a prompt through the head, but for a position whose next token is unknown.

        Args:
            sequence: with that part sent through the layers.
            first: position of the part.
            hidden: [M, h] of the part, before the final norm.
        """
        count, prompt, ints = len(hidden), sequence.request.prompt, self.runner.ints
        stop = min(first + count, len(prompt) - 1)
        self.trail[sequence.row, (first + count - 1) % TRAIL] = hidden[-1]
        if stop > first:
            span = Span(sequence.row, first, stop - first, tuple(sequence.pages))
            rows, positions = ints(rows_and_positions([span]))
            reach = reach_for(stop, self.runner.context)
            step = self.step(rows, positions, ints([0, span.count]), reach, [span])
            ids = ints(prompt[first + 1 : stop + 1])
            self.head.hidden(ids, hidden[: span.count], self.runner.state, step)
        sequence.headed = stop

    def catch_up(self, sequence: Sequence, most: int) -> None:
        """Bring the head up to `most` positions before the last token that the host knows.

        On a GPU by recorded steps of W positions, the last of which may belong to nobody.
        """
        wide = self.block.shape[1]
        # What the trail has lost stays unseen. Two rounds may be under way beyond the last token.
        sequence.headed = max(sequence.headed, sequence.last + 2 * EXACT_TOKENS - TRAIL)
        while (count := min(wide, sequence.last - most - sequence.headed)) > 0:
            first = sequence.headed
            span = Span(sequence.row, first, count, tuple(sequence.pages))
            rows, positions = rows_and_positions([span])
            trails = [trail_of(sequence.row, position) for position in positions]
            ids = [sequence.id_at(position + 1) for position in positions]
            columns = [
                [*some, *[SCRATCH] * (wide - count)] for some in (rows, positions, trails, ids)
            ]
            write(self.block, columns)
            reach = reach_for(first + count, self.runner.context)
            if self.runner.on_gpu:
                self.graphs.run(("catch up", reach), partial(self.part, reach), (self.block,))
            else:
                self.part(reach, span)
            sequence.headed += count

    def part(self, reach: int, span: Span | None = None) -> None:
        """Run `block` through the head: all W positions, or the first `span.count` on a CPU."""
        count = self.block.shape[1] if span is None else span.count
        rows, positions, trails, ids = self.block[:, :count]
        starts = self.starts if span is None else self.runner.ints([0, count])
        step = self.step(rows, positions, starts, reach, [span or Span(SCRATCH, 0, count)])
        hidden = self.runner.decoder.ops.embed(trails, self.trail.flatten(0, 1))
        self.head.hidden(ids, hidden, self.runner.state, step)

    def step(
        self, rows: Tensor, positions: Tensor, starts: Tensor, reach: int, spans: Numbers[Span]
    ) -> Step:
        """A step of the head, whose layer has no recurrent state.

        spans: tokens of each sequence; of a recorded step their numbers alone count.
        """
        return Step(
            positions=positions,
            rows=rows,
            starts=starts,
            tables=self.runner.tables,
            read=rows,
            write=rows,
            reach=reach,
            longest=max(span.count for span in spans),
            spans=tuple(spans),
            prompt=len(spans) == 1 and len(rows) > EXACT_TOKENS,
        )


def new_head_cache(runner: Runner, graphs: Graphs) -> HeadCache | None:
    """The head of a runner's model, where it was read; its steps are recorded with others."""
    head, trail = runner.decoder.mtp, runner.trail
    if head is None or trail is None:
        return None
    block = torch.zeros(4, EXACT_TOKENS, dtype=torch.int32, device=trail.device)
    return HeadCache(runner, head, trail, graphs, block, runner.ints([0, EXACT_TOKENS]))
