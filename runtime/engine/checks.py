"""Rounds: steps that send the last token of each sequence and drafts behind it."""

from collections.abc import Callable
from collections.abc import Sequence as Numbers
from dataclasses import dataclass, field
from functools import partial

import torch
from torch import Tensor

from lowbit.runtime.engine.graphs import Graphs
from lowbit.runtime.engine.rounds import Part, columns_of
from lowbit.runtime.engine.runner import Runner
from lowbit.runtime.engine.sent import Sent
from lowbit.runtime.engine.widths import longest_for, reach_for, width_for
from lowbit.runtime.state.links import Links, new_links
from lowbit.runtime.state.posted import write
from lowbit.runtime.state.sampler_rows import SCRATCH
from lowbit.runtime.state.step import EXACT_TOKENS, Span, Step

# Makes a mask for every token of a round; returns the drafts of each part that can be checked.
Restrict = Callable[[list[Part]], list[tuple[int, ...]]]


@dataclass(slots=True)
class Checks:
    """Rounds of a runner's sequences.

    Attributes:
        runner: of the model.
        links: inputs of a round.
        graphs: recorded rounds.
        masks: [EXACT_TOKENS] int32, the sampler's mask of each token of a restricted round.
        linked: `links` holds what the last round by the head has left, so that the next one needs
            nothing from the host.
    """

    runner: Runner
    links: Links = field(init=False)
    graphs: Graphs = field(init=False)
    masks: Tensor = field(init=False)
    linked: bool = False

    def __post_init__(self) -> None:
        """Make room for inputs."""
        rows = self.runner.sampler.rows
        self.links = new_links(rows, self.runner.state.device)
        self.masks = self.runner.ints(range(rows, rows + EXACT_TOKENS))
        self.graphs = Graphs(self.runner.graphs)

    def verify(self, parts: list[Part], restrict: Restrict | None = None) -> Sent:
        """Send the last token of every sequence and drafts behind it, and choose after each.

        Args:
            parts: of a round, EXACT_TOKENS tokens at most.
            restrict: makes masks while the layers run; None where no sequence has any.
        """
        runner, spans = self.runner, tuple(part.span for part in parts)
        M, B = sum(span.count for span in spans), len(spans)
        longest = max(span.count for span in spans)
        reach = reach_for(max(span.first + span.count for span in spans), runner.context)
        if runner.on_gpu:  # rounded up, so that few steps are recorded
            M, longest = width_for(M), longest_for(longest)
            B += 1  # padding, if any
        self.compose(parts, M)
        ordered = any(part.ordered for part in parts)
        drafts = [part.drafts for part in parts]
        if restrict is not None:
            self._send_layers(M, reach, B, longest, spans)
            drafts = restrict(parts)
            self._send_choice(M, longest, ordered)
        elif runner.on_gpu:
            key = (M, B, longest, reach, runner.sampler.shape, ordered)
            inputs = (self.links.block[:5],)
            step = partial(self.check_tokens, M, reach, B, longest, ordered)
            self.graphs.run(key, step, inputs)
        else:
            self.check_tokens(M, reach, B, longest, ordered, spans)
        return runner.sent([part.sequence for part in parts], drafts)

    def compose(self, parts: list[Part], M: int) -> None:
        """Put the inputs of a round in place, up to M tokens with padding; the host goes on."""
        block = self.links.block
        write(block, columns_of(parts, M, block.shape[1]))
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
        logits = self._logits_of(M, reach, B, longest, spans)
        self._choose(logits, M, longest, ordered, None)

    def keep_logits(
        self, M: int, reach: int, B: int, longest: int, spans: tuple[Span, ...] = ()
    ) -> None:
        """The first half of `check_tokens`: up to the logits, for `choose_restricted`."""
        self.runner.keep(self._logits_of(M, reach, B, longest, spans))

    def choose_restricted(self, M: int, longest: int, ordered: bool) -> None:
        """The second half, under a mask for each token."""
        self._choose(self.runner.kept(M), M, longest, ordered, self.masks[:M])

    def _send_layers(
        self, M: int, reach: int, B: int, longest: int, spans: tuple[Span, ...]
    ) -> None:
        if self.runner.on_gpu:
            self.runner.make_room_to_keep()
            step = partial(self.keep_logits, M, reach, B, longest)
            self.graphs.run(("layers", M, reach, B, longest), step, (self.links.block[:5],))
        else:
            self.keep_logits(M, reach, B, longest, spans)

    def _send_choice(self, M: int, longest: int, ordered: bool) -> None:
        if self.runner.on_gpu:
            places = longest if ordered else 1
            key = ("choice", M, places, self.runner.sampler.shape, ordered)
            step = partial(self.choose_restricted, M, places, ordered)
            self.graphs.run(key, step, (self.links.block[:5],))
        else:
            self.choose_restricted(M, longest, ordered)

    def _logits_of(
        self, M: int, reach: int, B: int, longest: int, spans: tuple[Span, ...]
    ) -> Tensor:
        """Logits after each of M tokens of B sequences."""
        runner, links = self.runner, self.links
        step = Step(
            positions=links.positions[:M],
            rows=links.rows[:M],
            starts=links.starts[: B + 1],
            tables=runner.tables,
            read=links.reads[:B],
            write=links.writes[:M],
            reach=reach,
            longest=longest,
            spans=spans,
        )
        return runner.logits_of(links.ids[:M], step)

    def _choose(
        self, logits: Tensor, M: int, longest: int, ordered: bool, masks: Tensor | None
    ) -> None:
        """Choose behind each token of a round, see `check_tokens`."""
        runner, links = self.runner, self.links
        rows, positions, chosen = links.rows[:M], links.positions[:M], links.chosen[:M]
        if not ordered:
            runner.choose_tokens(logits, rows, positions, chosen, masks)
            return
        tokens = torch.empty_like(chosen)
        for place in range(longest):
            now = links.places[:M] == place
            if runner.on_gpu:  # of one size, whatever the drafts
                these = rows.masked_fill(~now, SCRATCH)
                runner.choose_tokens(logits, these, positions, tokens, masks)
                chosen.copy_(torch.where(now, tokens, chosen))
                continue
            moved, token = positions[now], chosen[now]
            used = None if masks is None else masks[now]
            runner.choose_tokens(logits[now], rows[now], moved, token, used)
            positions[now], chosen[now] = moved, token

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
