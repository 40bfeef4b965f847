"""Keys and values of a model's head for multi-token prediction, up to where it drafts.

The head needs the trunk's hidden state of every position. Steps leave the last ones of each row in
a trail, from which the head catches up now and then, so that steps without drafts cost it little.
"""

from collections.abc import Sequence as Numbers
from dataclasses import dataclass

import torch
from torch import Tensor

from lowbit.runtime.backends.cpu_linear import CpuLinear
from lowbit.runtime.engine.rounds import rows_and_positions, starts_of
from lowbit.runtime.engine.runner import Runner
from lowbit.runtime.engine.sequence import Sequence
from lowbit.runtime.engine.widths import reach_for
from lowbit.runtime.kernels.tiles import GpuLinear
from lowbit.runtime.models.qwen3_5_mtp import MtpHead
from lowbit.runtime.state.links import TRAIL
from lowbit.runtime.state.step import EXACT_TOKENS, Span, Step

MOST_BEHIND = TRAIL - 2 * EXACT_TOKENS  # positions; two rounds may be under way beyond them


@dataclass(frozen=True, slots=True)
class HeadCache:
    """The head of a model beside its trunk.

    Attributes:
        runner: of the model.
        head: of the model.
        trail: of the runner.
    """

    runner: Runner
    head: MtpHead[CpuLinear] | MtpHead[GpuLinear]
    trail: Tensor

    def read_prompt(self, sequence: Sequence, first: int, hidden: Tensor) -> None:
        """Run a part of a prompt through the head, whose last token waits for the one behind it.

        Args:
            sequence: with that part sent through the layers.
            first: position of the part.
            hidden: [M, h] of the part, before the final norm.
        """
        count, prompt = len(hidden), sequence.request.prompt
        stop = min(first + count, len(prompt) - 1)
        self.trail[sequence.row, (first + count - 1) % TRAIL] = hidden[-1]
        if stop > first:
            self._run(sequence, first, prompt[first + 1 : stop + 1], hidden[: stop - first])
        sequence.headed = stop

    def catch_up(self, sequence: Sequence, most: int) -> None:
        """Bring the head up to `most` positions before the last token that the host knows."""
        first, stop = sequence.headed, sequence.last - most
        if stop > first:
            places = torch.arange(first, stop, device=self.trail.device) % TRAIL
            ids = [sequence.id_at(position + 1) for position in range(first, stop)]
            self._run(sequence, first, ids, self.trail[sequence.row, places])
            sequence.headed = stop

    def _run(self, sequence: Sequence, first: int, ids: Numbers[int], hidden: Tensor) -> None:
        """Run positions of a sequence through the head, given the tokens behind them."""
        span = Span(sequence.row, first, len(ids), tuple(sequence.pages))
        columns = torch.tensor(rows_and_positions([span]), dtype=torch.int32).to(hidden.device)
        tokens = torch.tensor(ids, dtype=torch.int64).to(hidden.device)
        step = self.step_of(columns[0], columns[1], self.runner.ints(starts_of([span])), [span])
        self.head.hidden(tokens, hidden, self.runner.state, step)

    def step_of(
        self, rows: Tensor, positions: Tensor, starts: Tensor, spans: Numbers[Span]
    ) -> Step:
        """A step of the head, whose layer has no recurrent state."""
        return Step(
            positions=positions,
            rows=rows,
            starts=starts,
            tables=self.runner.tables,
            read=rows,
            write=rows,
            reach=reach_for(max(each.first + each.count for each in spans), self.runner.context),
            longest=max(each.count for each in spans),
            spans=tuple(spans),
            prompt=len(spans) == 1 and len(rows) > EXACT_TOKENS,
        )
