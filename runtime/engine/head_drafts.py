"""Drafts by the model's own head for multi-token prediction.

The head needs the trunk's hidden state of every position. Steps leave the last ones of each row in
a trail, from which the head's keys and values are brought up to date before it drafts, so that
steps without drafts cost it nothing.
"""

from collections.abc import Collection
from collections.abc import Sequence as Numbers
from dataclasses import dataclass

import torch
from torch import Tensor

from lowbit.runtime.backends.cpu_linear import CpuLinear
from lowbit.runtime.engine.rounds import rows_and_positions, starts_of
from lowbit.runtime.engine.runner import TRAIL, Runner
from lowbit.runtime.engine.sequence import Sequence
from lowbit.runtime.engine.widths import reach_for
from lowbit.runtime.kernels.tiles import GpuLinear
from lowbit.runtime.models.qwen3_5_mtp import MtpHead
from lowbit.runtime.state.posted import new_places
from lowbit.runtime.state.step import EXACT_TOKENS, Span, Step

MOST_BEHIND = TRAIL // 2  # positions; steps under way add to them before the head has caught up
TOGETHER = 64  # positions of several sequences that the head takes at once


@dataclass(frozen=True, slots=True)
class HeadDrafts:
    """The head of a model.

    Attributes:
        runner: of the model.
        head: of the model.
        trail: of the runner.
        places: takes what the drafts' kernels leave for the host, who does not read it.
    """

    runner: Runner
    head: MtpHead[CpuLinear] | MtpHead[GpuLinear]
    trail: Tensor
    places: Tensor

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
            after = self.head.after_trunk(hidden[: stop - first])
            ids = torch.tensor(prompt[first + 1 : stop + 1], dtype=torch.int64)
            self._run(ids.to(hidden.device), after, [_span(sequence, first, stop - first)])
        sequence.headed = stop

    def propose(self, sequences: Numbers[Sequence], counts: Collection[int]) -> list[list[int]]:
        """Draft so many tokens of each sequence, all of whose tokens have been read.

        A draft is drawn with the random number of its place, as the token itself will be, which
        makes the two meet more often than if each had its own.
        """
        hidden = torch.cat([self._catch_up(some) for some in _groups(sequences)])
        runner, choose = self.runner, self.runner.decoder.ops.choose
        rows = self._ints([each.row for each in sequences])
        drafts = []
        for ahead in range(max(counts)):
            firsts = [each.last + ahead for each in sequences]
            token = torch.empty(len(sequences), dtype=torch.int64, device=rows.device)
            positions = self._ints(firsts)
            choose(self.head.logits(hidden), runner.sampler, rows, positions, token, self.places)
            drafts.append(token)
            if ahead + 1 < max(counts):
                spans = [_span(*each, 1) for each in zip(sequences, firsts, strict=True)]
                hidden = self._run(token, self.head.after_head(hidden), spans)
        if runner.sampler.shape.adjusted:
            for token in drafts:
                runner.sampler.uncount(rows, token)
        if not drafts:
            return [[] for _ in sequences]
        found = torch.stack(drafts, dim=1).tolist()
        return [tokens[:count] for tokens, count in zip(found, counts, strict=True)]

    def _catch_up(self, sequences: Numbers[Sequence]) -> Tensor:
        """Bring the head up to the last token of each sequence: its output there, [B, h]."""
        spans = [_span(each, each.headed, each.behind) for each in sequences]
        ids = [
            each.id_at(position + 1)
            for each, span in zip(sequences, spans, strict=True)
            for position in range(span.first, span.first + span.count)
        ]
        rows, positions = self._ints(rows_and_positions(spans)).long()
        hidden = self.head.after_trunk(self.trail[rows, positions % TRAIL])
        tokens = torch.tensor(ids, dtype=torch.int64, device=hidden.device)
        found = self._run(tokens, hidden, spans)
        for each in sequences:
            each.headed = each.last
        return found[self._ints(starts_of(spans)[1:]).long() - 1]

    def _run(self, ids: Tensor, hidden: Tensor, spans: Numbers[Span]) -> Tensor:
        """Positions of several sequences through the head: [M, h]."""
        runner = self.runner
        rows, positions = self._ints(rows_and_positions(spans))
        stop = max(span.first + span.count for span in spans)
        step = Step(
            positions=positions,
            rows=rows,
            starts=self._ints(starts_of(spans)),
            tables=runner.tables,
            read=rows,
            write=rows,
            reach=reach_for(stop, runner.context),
            longest=max(span.count for span in spans),
            spans=tuple(spans),
            prompt=len(spans) == 1 and len(ids) > EXACT_TOKENS,
        )
        return self.head.hidden(ids, hidden, runner.state, step)

    def _ints(self, values: object) -> Tensor:
        return torch.tensor(values, dtype=torch.int32, device=self.runner.state.device)


def _groups(sequences: Numbers[Sequence]) -> list[list[Sequence]]:
    """Sequences in order, in groups that are behind by TOGETHER positions at most, or one alone."""
    groups: list[list[Sequence]] = []
    for each in sequences:
        if groups and sum(one.behind for one in groups[-1]) + each.behind <= TOGETHER:
            groups[-1].append(each)
        else:
            groups.append([each])
    return groups


def _span(sequence: Sequence, first: int, count: int) -> Span:
    return Span(sequence.row, first, count, tuple(sequence.pages))


def head_drafts(runner: Runner) -> HeadDrafts | None:
    """The head of a runner's model, where it was read."""
    head, trail = runner.decoder.mtp, runner.trail
    if head is None or trail is None:
        return None
    return HeadDrafts(runner, head, trail, new_places(runner.sampler.rows, runner.on_gpu))
