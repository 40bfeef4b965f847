"""Rounds whose drafts the model's head makes: they follow each other on the device alone.

A round brings the head up to the last token, drafts k tokens of every sequence, sends them through
the trunk and accepts those that are right; the next one begins with what it leaves (`Links`). On a
GPU a round is one CUDA graph, and the host reads its tokens while the next one runs.
"""

from dataclasses import dataclass, field
from functools import partial

import torch
from torch import Tensor

from lowbit.runtime.engine.checks import Checks
from lowbit.runtime.engine.head_cache import HeadCache, new_head_cache
from lowbit.runtime.engine.rounds import Part, rows_and_positions, starts_of
from lowbit.runtime.engine.runner import Runner
from lowbit.runtime.engine.sent import Flight, Sent
from lowbit.runtime.engine.sequence import Sequence
from lowbit.runtime.engine.widths import reach_for, width_for
from lowbit.runtime.state.links import Links, trail_of
from lowbit.runtime.state.posted import new_places
from lowbit.runtime.state.step import Span


@dataclass(slots=True)
class HeadRounds:
    """Rounds of the sequences of an engine.

    Attributes:
        cache: of the head.
        checks: of its drafts.
        batch: sequences of the last round.
        drafts: of each of them.
    """

    cache: HeadCache
    checks: Checks
    batch: list[Sequence] = field(default_factory=list)
    drafts: int = 0
    _parts: list[Part] = field(default_factory=list)
    _seen: list[Span] = field(default_factory=list)  # positions that the head takes first
    _seen_rows: Tensor = field(init=False)  # [W] int32, their rows
    _seen_starts: Tensor = field(init=False)  # [W + 1] int32
    _singles: Tensor = field(init=False)  # [W + 1] int32, 0, 1, 2...: a token a sequence
    _places: Tensor = field(init=False)  # of drafts, which nobody reads

    def __post_init__(self) -> None:
        """Make room for the head's own inputs."""
        rows = self.links.rows
        self._seen_rows = torch.zeros_like(self.links.seen)
        self._singles = torch.arange(len(rows) + 1, dtype=torch.int32, device=rows.device)
        self._seen_starts = self._singles.clone()
        self._places = new_places(self.runner.sampler.rows, self.runner.on_gpu)

    @property
    def runner(self) -> Runner:
        """Of the trunk."""
        return self.cache.runner

    @property
    def links(self) -> Links:
        """Between a round and the next one."""
        return self.checks.links

    def goes_on(self, sequences: list[Sequence], drafts: int) -> bool:
        """True if the inputs of the next round of these sequences are on the device already."""
        here = (
            self.runner.on_gpu and self.checks.linked and all(each.verified for each in sequences)
        )
        return here and sequences == self.batch and drafts == self.drafts

    def enter(self, sequences: list[Sequence], drafts: int) -> None:
        """Put the inputs of a first round in place, of sequences whose tokens have been read."""
        runner = self.runner
        runner.leave_rounds(sequences)
        each_has = len(runner.spare) // len(sequences) if runner.spare is not None else 0
        self.batch, self.drafts, self._parts = list(sequences), drafts, []
        for index, each in enumerate(sequences):
            self.cache.catch_up(each, most=1 + drafts)
            spare = [each.row] * drafts
            if runner.spare is not None:
                first = runner.spare.start + index * each_has
                spare = list(range(first, first + drafts))
            self._parts.append(Part(each, (0,) * drafts, (each.row, *spare)))
        self.checks.compose(self._parts, self._width(len(sequences), drafts))
        self._compose_head(sequences, drafts)
        self.checks.linked = True

    def send(self) -> Sent:
        """Send a round behind those under way."""
        runner, k, B = self.runner, self.drafts, len(self.batch)
        M = self._width(B, k)
        stop = max(each.last + each.due for each in self.batch) + k + 1
        reach = reach_for(stop, runner.context)
        ordered = any(part.ordered for part in self._parts)
        if runner.on_gpu:
            key = ("head", M, B, k, reach, runner.sampler.shape, ordered)
            links = self.links
            kept = (links.chosen, links.seen, links.trails, links.ends)
            run = partial(self.round, M, B, k, reach, ordered)
            self.checks.graphs.run(key, run, (links.block[:5],), kept)
        else:
            self.round(M, B, k, reach, ordered)
        for each in self.batch:
            if each.due == 0:
                each.go_on(each.row)
            each.due += 1 + k
        writes = tuple(part.writes for part in self._parts)
        return runner.sent(self.batch, flight=Flight(k, writes, self.links.right))

    def round(self, M: int, B: int, k: int, reach: int, ordered: bool) -> None:
        """Draft, send through the trunk, accept: M tokens, padding included, of B sequences."""
        runner, links = self.runner, self.links
        drafts = self.draft(B, k, reach)
        links.ids[: B * (k + 1)].view(B, k + 1)[:, 1:] = drafts
        adjusted = runner.sampler.shape.adjusted
        if adjusted:  # so that penalties count them once, when they are chosen
            rows = links.rows[: B * (k + 1)].view(B, k + 1)[:, 1:]
            runner.sampler.uncount(rows.flatten(), drafts.flatten())
        spans = () if runner.on_gpu else tuple(part.span for part in self._parts)
        self.checks.check_tokens(M, reach, B + (B * (k + 1) < M), k + 1, ordered, spans)
        runner.decoder.ops.accept(links, B, k)
        if adjusted:
            count = B * (k + 1)
            runner.sampler.uncount(links.wrong[:count], links.chosen[:count])

    def draft(self, B: int, k: int, reach: int) -> Tensor:
        """Draft k tokens of each sequence: [B, k] int64.

        A draft is drawn with the random number of its place, as the token itself will be, which
        makes the two meet more often than if each had its own.
        """
        runner, head, links = self.runner, self.cache.head, self.links
        hidden = self._first(B, k, reach)
        firsts = (
            each[: B * (k + 1)].view(B, k + 1)[:, 0] for each in (links.rows, links.positions)
        )
        rows, first = (each.contiguous() for each in firsts)
        positions = first + self._singles[:k, None]  # [k, B]
        moved = positions.clone()  # by choosing
        drafts = torch.empty(k, B, dtype=torch.int64, device=hidden.device)
        for ahead, token in enumerate(drafts):
            head.choose(hidden, runner.sampler, rows, moved[ahead], token, self._places)
            if ahead + 1 < k:
                spans = [
                    Span(part.sequence.row, part.sequence.last + ahead, 1, part.span.pages)
                    for part in self._parts
                ]
                step = self.cache.step(rows, positions[ahead], self._singles[: B + 1], reach, spans)
                hidden = head.hidden(token, hidden, runner.state, step, own=True)
        return drafts.T

    def _first(self, B: int, k: int, reach: int) -> Tensor:
        """Bring the head up to the last token of each sequence: its output there, [B, h]."""
        links, runner, embed = self.links, self.runner, self.runner.decoder.ops.embed
        count = B * (k + 1) if runner.on_gpu else sum(span.count for span in self._seen)
        rows, seen = self._seen_rows[:count], links.seen[:count]
        step = self.cache.step(rows, seen, self._seen_starts[: B + 1], reach, self._seen)
        hidden = embed(links.trails[:count], self.cache.trail.flatten(0, 1))
        found = self.cache.head.hidden(links.chosen[:count], hidden, runner.state, step)
        return embed(links.ends[:B], found)

    def _compose_head(self, sequences: list[Sequence], drafts: int) -> None:
        """Put in place what the head reads first: positions that it has not seen.

        A recorded round takes as many of each sequence as the round before had tokens. Those beyond
        the right ones are overwritten before anything reads them.
        """
        links, self._seen = self.links, []
        ids: list[int] = []
        ends: list[int] = []
        for each in sequences:
            count = 1 + drafts if self.runner.on_gpu else each.behind
            known = [each.id_at(each.headed + 1 + place) for place in range(each.behind)]
            ends.append(len(ids) + each.behind - 1)
            ids += known + [0] * (count - each.behind)
            self._seen.append(Span(each.row, each.headed, count, tuple(each.pages)))
        count, starts = len(ids), starts_of(self._seen)
        rows, seen = rows_and_positions(self._seen)
        trails = [trail_of(*each) for each in zip(rows, seen, strict=True)]
        block = self.runner.ints([rows, seen, trails, ids])
        self._seen_rows[:count], links.seen[:count] = block[:2]
        links.trails[:count], links.chosen[:count] = block[2:]
        self._seen_starts[: len(starts)] = self.runner.ints(starts)
        links.ends[: len(ends)] = self.runner.ints(ends)

    def _width(self, B: int, k: int) -> int:
        """Tokens of a round, padding included."""
        return width_for(B * (k + 1)) if self.runner.on_gpu else B * (k + 1)


def new_head_rounds(checks: Checks) -> HeadRounds | None:
    """Rounds by the head of a runner's model, where it was read."""
    cache = new_head_cache(checks.runner, checks.graphs)
    return None if cache is None else HeadRounds(cache, checks)
