"""Rounds: steps that send the last token of each sequence and drafts behind it."""

from collections.abc import Sequence as Numbers
from dataclasses import dataclass, field
from functools import partial

import torch

from lowbit.runtime.engine.graphs import Graphs
from lowbit.runtime.engine.rounds import Part, columns_of
from lowbit.runtime.engine.runner import Runner
from lowbit.runtime.engine.sent import Sent
from lowbit.runtime.engine.widths import reach_for, width_for
from lowbit.runtime.state.links import Links, new_links
from lowbit.runtime.state.sampler_rows import SCRATCH
from lowbit.runtime.state.step import Span, Step


@dataclass(slots=True)
class Checks:
    """Rounds of a runner's sequences.

    Attributes:
        runner: of the model.
        links: inputs of a round.
        graphs: recorded rounds.
        linked: they are those that the last round by the head has left.
    """

    runner: Runner
    links: Links = field(init=False)
    graphs: Graphs = field(init=False)
    linked: bool = False

    def __post_init__(self) -> None:
        """Make room for inputs."""
        self.links = new_links(self.runner.sampler.rows, self.runner.state.device)
        self.graphs = Graphs(self.runner.graphs)

    def verify(self, parts: list[Part]) -> Sent:
        """Send the last token of every sequence and drafts behind it, and choose after each.

        parts: of a round, EXACT_TOKENS tokens at most.
        """
        runner, spans = self.runner, tuple(part.span for part in parts)
        M, B = sum(span.count for span in spans), len(spans)
        longest = max(span.count for span in spans)
        reach = reach_for(max(span.first + span.count for span in spans), runner.context)
        if runner.on_gpu:
            B += width_for(M) - M  # what is left belongs to nobody, each token for itself
            M = width_for(M)
        self.compose(parts, M)
        ordered = any(part.ordered for part in parts)
        if runner.on_gpu:
            key = (M, B, longest, reach, runner.sampler.shape, ordered)
            inputs = (self.links.block[:5],)
            step = partial(self.check_tokens, M, reach, B, longest, ordered)
            self.graphs.run(key, step, inputs)
        else:
            self.check_tokens(M, reach, B, longest, ordered, spans)
        return runner.sent([part.sequence for part in parts], [part.drafts for part in parts])

    def compose(self, parts: list[Part], M: int) -> None:
        """Put the inputs of a round in place, up to M tokens with padding; the host goes on."""
        block = self.links.block
        columns = columns_of(parts, M, block.shape[1])
        host = torch.tensor(columns, dtype=torch.int32, pin_memory=block.is_cuda)
        block.copy_(host, non_blocking=True)
        self.runner.batch, self.linked = [], False  # a step without drafts takes other inputs

    def check_tokens(
        self,
        M: int,
        reach: int,
        B: int,
        longest: int,
        ordered: bool,
        spans: tuple[Span, ...] = (),
    ) -> None:
        """Send a round of M tokens of B sequences.

        ordered: choose place by place, so that penalties know what was chosen before.
        """
        runner, links = self.runner, self.links
        rows, positions, chosen = links.rows[:M], links.positions[:M], links.chosen[:M]
        step = Step(
            positions=positions,
            rows=rows,
            starts=links.starts[: B + 1],
            tables=runner.tables,
            read=links.reads[:B],
            write=links.writes[:M],
            reach=reach,
            longest=longest,
            spans=spans,
        )
        logits = runner.logits_of(links.ids[:M], step)
        if not ordered:
            runner.choose_tokens(logits, rows, positions, chosen)
            return
        tokens = torch.empty_like(chosen)
        for place in range(longest):
            now = links.places[:M] == place
            runner.choose_tokens(logits, rows.masked_fill(~now, SCRATCH), positions, tokens)
            chosen.copy_(torch.where(now, tokens, chosen))

    def uncount(self, parts: list[Part], rights: Numbers[int]) -> None:
        """Take back from penalties what a round chose behind drafts that were wrong.

        rights: drafts of each part that were right.
        """
        wrong: list[int] = []
        first = 0
        for part, right in zip(parts, rights, strict=True):
            if part.ordered:
                wrong += range(first + right + 1, first + len(part.ids))
            first += len(part.ids)
        if wrong:
            columns = self.runner.ints(wrong).long()
            self.runner.sampler.uncount(self.links.rows[columns], self.links.chosen[columns])
