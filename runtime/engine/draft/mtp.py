"""MTP rounds: the model's head for multi-token prediction makes the drafts of a round.

A round first brings the head up to the last token. The head needs the trunk's hidden state of every
position. Steps leave the last states of each row in a ring, from which the head catches up now and
then, so plain steps cost it little.
"""

from collections.abc import Sequence as Numbers
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

from lowbit.runtime.engine.draft.made import MadeRounds
from lowbit.runtime.engine.draft.state import drafts_of
from lowbit.runtime.engine.draft.verify import Verifier
from lowbit.runtime.engine.graphs import Graphs
from lowbit.runtime.engine.runner import Runner
from lowbit.runtime.engine.sequence import Sequence
from lowbit.runtime.engine.stats import Source
from lowbit.runtime.models.qwen3_5_mtp import MtpHead
from lowbit.runtime.state.decode_inputs import HIDDEN_RING, ring_place
from lowbit.runtime.state.host_rings import write_rows
from lowbit.runtime.state.sampler import SCRATCH
from lowbit.runtime.state.step import Span, Step, StepPlan, starts_of, token_columns
from lowbit.runtime.state.step_buffers import new_step, step_of
from lowbit.runtime.thresholds import SEQUENCE_TOKENS

# First guess of how often drafts are accepted behind accepted ones, by place.
MTP_GUESSES = (0.8, 0.7, 0.6, 0.5, 0.45, 0.4, 0.35)
MOST_BEHIND = 2 * SEQUENCE_TOKENS  # positions
PROBE_BEHIND = SEQUENCE_TOKENS  # positions that the head reads before a probe, in one pass


@dataclass(frozen=True, slots=True)
class MtpCache:
    """Keys and values of the MTP head."""

    runner: Runner  # of the model
    head: MtpHead[Any]  # of the model
    hidden_ring: Tensor  # of the runner
    graphs: Graphs  # recorded steps that catch up
    block: Tensor  # [4, W] int32 rows, positions, places in the hidden rings and ids of such a step
    starts: Tensor  # [2] int32, 0 and W

    def read_prompt(self, sequence: Sequence, first: int, hidden: Tensor) -> None:
        """Run a part of a prompt through the head, without a position whose next token is unknown.

        Args:
            hidden: [M, h] of the part, before the final norm.
        """
        count, prompt, runner = len(hidden), sequence.request.prompt, self.runner
        stop = min(first + count, len(prompt) - 1)
        self.hidden_ring[sequence.row, (first + count - 1) % HIDDEN_RING] = hidden[-1]
        if stop > first:
            span = Span(sequence.row, first, stop - first, tuple(sequence.pages))
            plan = self._plan_of(sequence, span)
            ids, step = new_step(plan, prompt[first + 1 : stop + 1], runner.tables, runner.shifts)
            self.head.hidden(ids, hidden[: span.count], runner.head_state, step)
        drafts_of(sequence).seen = stop

    def _plan_of(self, sequence: Sequence, span: Span) -> StepPlan:
        """Plan of a part of a prompt, with the angles of its tokens and the next ones' embeddings.

        The part is one of the trunk's, which has set the shift of its row.
        """
        runner, images = self.runner, sequence.images
        plan = _plan([span], runner.kv_len_for(span.first + span.count))
        if images is None:
            return plan
        axes = images.axes(span.first, span.count)
        shifted = axes is None and runner.shift(sequence, span.first)
        embedded = images.embedded(span.first + 1, span.count)
        return replace(plan, axes=axes, shifted=shifted, embedded=embedded)

    def skip_prompt(self, sequence: Sequence, first: int, hidden: Tensor) -> None:
        """Leave the end of a part of a prompt in the ring, for a later `catch_up`.

        Images are left out: what catches up knows tokens by their ids and angles by their row. Of a
        prompt that ends with an image it still takes the last token, from which drafts begin.
        """
        stop = first + len(hidden)
        start = max(first, stop - PROBE_BEHIND)
        if sequence.images is not None:
            last = len(sequence.request.prompt) - 1
            start = min(stop, max(start, min(sequence.images.stop, last)))
        drafts_of(sequence).seen = start
        if start < stop:
            places = self.runner.ints([ring_place(sequence.row, at) for at in range(start, stop)])
            self.hidden_ring.flatten(0, 1)[places.long()] = hidden[start - first :]

    def catch_up(self, sequence: Sequence, most: int) -> None:
        """Bring the head up to `most` positions before the last token on the host.

        On a GPU by graphs of W positions, the last of which may be padding.
        """
        wide, state = self.block.shape[1], drafts_of(sequence)
        # Positions that the ring has lost are skipped. Two rounds may be under way.
        state.seen = max(state.seen, sequence.last + 2 * SEQUENCE_TOKENS - HIDDEN_RING)
        while (count := min(wide, sequence.last - most - state.seen)) > 0:
            span = Span(sequence.row, state.seen, count, tuple(sequence.pages))
            rows, positions, _ = token_columns([span])
            places = [ring_place(sequence.row, position) for position in positions]
            ids = [sequence.id_at(position + 1) for position in positions]
            write_rows(self.block, (rows, positions, places, ids))  # padding has row 0, SCRATCH
            max_kv_len = self.runner.kv_len_for(state.seen + count)
            shifted = sequence.shift != 0
            part = partial(self.part, max_kv_len, None if self.runner.on_gpu else span, shifted)
            self.runner.launch(self.graphs, ("catch up", max_kv_len, shifted), part, (self.block,))
            state.seen += count

    def skip(self, sequences: Numbers[Sequence]) -> None:
        """Give up positions that are further behind than PROBE_BEHIND: reading them costs time."""
        for each in sequences:
            state = drafts_of(each)
            state.seen = max(state.seen, each.last - PROBE_BEHIND)

    def part(self, max_kv_len: int, span: Span | None = None, shifted: bool = False) -> None:
        """Run the positions in `block` through the head: all W, or `span.count` on a CPU.

        shifted: they stand behind an image.
        """
        count = self.block.shape[1] if span is None else span.count
        rows, positions, ring_places, ids = self.block[:, :count]
        starts = self.starts if span is None else self.runner.ints([0, count])
        plan = _plan([span or Span(SCRATCH, 0, count)], max_kv_len, shifted)
        step = self.step(plan, rows, positions, starts)
        hidden = self.runner.decoder.ops.embed(ring_places, self.hidden_ring.flatten(0, 1))
        self.head.hidden(ids, hidden, self.runner.head_state, step)

    def step(self, plan: StepPlan, rows: Tensor, positions: Tensor, starts: Tensor) -> Step:
        """Step of the head, whose layer has no recurrent state; see `_plan`."""
        runner = self.runner
        return step_of(plan, runner.tables, positions, rows, starts, shifts=runner.shifts)


def _plan(spans: Numbers[Span], max_kv_len: int, shifted: bool = False) -> StepPlan:
    """Plan of a step of the head; in a graph only the counts of the spans matter."""
    counts = [span.count for span in spans]
    M, B = sum(counts), len(counts)
    prompt = B == 1 and M > SEQUENCE_TOKENS
    plan = StepPlan(M, B, max_kv_len, longest=max(counts), spans=tuple(spans), prompt=prompt)
    return replace(plan, shifted=True) if shifted else plan


@dataclass(slots=True)
class MtpRounds(MadeRounds):
    """Rounds with drafts of the MTP head."""

    cache: MtpCache  # keys and values of the head
    _seen: list[Span] = field(default_factory=list, init=False)  # that the head processes first
    _singles: Tensor = field(init=False)  # [W + 1] int32, 0, 1, 2...: a token a sequence

    def __post_init__(self) -> None:
        """Allocate the head's own inputs."""
        MadeRounds.__post_init__(self)
        rows = self.inputs.step.rows
        self._singles = torch.arange(len(rows) + 1, dtype=torch.int32, device=rows.device)

    @property
    def source(self) -> Source:
        """See `MadeRounds.source`."""
        return "head"

    @property
    def guesses(self) -> tuple[float, ...]:
        """See `MadeRounds.guesses`."""
        return MTP_GUESSES

    def read_prompt(self, sequence: Sequence, first: int, hidden: Tensor, suspended: bool) -> None:
        """Let the head process a part of a prompt; its end alone while drafts are suspended.

        Drafts behind a prompt of which the head knows the end alone are accepted nearly as often.
        """
        read = self.cache.skip_prompt if suspended else self.cache.read_prompt
        read(sequence, first, hidden)

    def keep_up(self, sequences: Numbers[Sequence]) -> None:
        """Bring the head up to sequences in plain steps."""
        for each in sequences:
            if drafts_of(each).rates is not None and behind(each) >= MOST_BEHIND:
                self.cache.catch_up(each, most=MOST_BEHIND // 2)

    def skip(self, sequences: Numbers[Sequence]) -> None:
        """Give up positions that are far behind; see `MtpCache.skip`."""
        self.cache.skip(sequences)

    def prepare(self, sequences: list[Sequence], drafts: int) -> Numbers[Numbers[int]]:
        """Bring the head up to a first round; columns of the positions that it takes within it."""
        for each in sequences:
            self.cache.catch_up(each, most=1 + drafts)
        return self._head_columns(sequences, drafts)

    def draft(self, B: int, k: int, max_kv_len: int) -> Tensor:
        """Draft k tokens of each sequence, one after another; see `MadeRounds.draft`."""
        runner, head, output = self.runner, self.cache.head, self.cache.head.output
        hidden = self._first(B, k, max_kv_len)
        rows, first = (each.contiguous() for each in self.firsts(B, k)[1:])
        positions = first + self._singles[:k, None]  # [k, B]
        moved = positions.clone()  # by choosing
        drafts = torch.empty(k, B, dtype=torch.int64, device=hidden.device)
        for ahead, token in enumerate(drafts):
            output.choose(hidden, runner.sampler, rows, moved[ahead], token, self.ring)
            if ahead + 1 < k:
                spans = [
                    Span(part.sequence.row, part.sequence.last + ahead, 1, part.span.pages)
                    for part in self.parts
                ]
                at, starts = positions[ahead], self._singles[: B + 1]
                plan = _plan(spans, max_kv_len, self.shifted)
                step = self.cache.step(plan, rows, at, starts)
                hidden = head.hidden(token, hidden, runner.head_state, step, own=True)
        return drafts.T

    def _first(self, B: int, k: int, max_kv_len: int) -> Tensor:
        """Bring the head up to the last token of each sequence: its output there, [B, h]."""
        inputs, runner, embed = self.inputs, self.runner, self.runner.decoder.ops.embed
        count = B * (k + 1) if runner.on_gpu else sum(span.count for span in self._seen)
        rows, seen = inputs.seen_rows[:count], inputs.seen[:count]
        plan = _plan(self._seen, max_kv_len, self.shifted)
        step = self.cache.step(plan, rows, seen, inputs.seen_starts[: B + 1])
        hidden = embed(inputs.ring_places[:count], self.cache.hidden_ring.flatten(0, 1))
        found = self.cache.head.hidden(inputs.chosen[:count], hidden, runner.head_state, step)
        return embed(inputs.ends[:B], found)

    def _head_columns(self, sequences: list[Sequence], drafts: int) -> list[list[int]]:
        """Positions that the head has not processed, which it takes first: what `compose` takes.

        A graph takes as many positions of each sequence as the round before had tokens. Keys and
        values beyond the accepted tokens are overwritten before anything reads them.
        """
        self._seen = []
        ids: list[int] = []
        ends: list[int] = []
        for each in sequences:
            seen, left = drafts_of(each).seen, behind(each)
            count = 1 + drafts if self.runner.on_gpu else left
            known = [each.id_at(seen + 1 + place) for place in range(left)]
            ends.append(len(ids) + left - 1)
            ids += known + [0] * (count - left)
            self._seen.append(Span(each.row, seen, count, tuple(each.pages)))
        rows, positions, _ = token_columns(self._seen)
        ring_places = [ring_place(*each) for each in zip(rows, positions, strict=True)]
        return [positions, rows, starts_of(self._seen), ids, ring_places, ends]


def behind(sequence: Sequence) -> int:
    """Positions before the last token that the head has not processed."""
    return sequence.last - drafts_of(sequence).seen


def new_mtp_rounds(verifier: Verifier) -> MtpRounds | None:
    """MTP rounds of a runner; None if its model has no head."""
    runner = verifier.runner
    head, hidden_ring = runner.decoder.mtp, runner.hidden_ring
    if head is None or hidden_ring is None:
        return None
    block = torch.zeros(4, SEQUENCE_TOKENS, dtype=torch.int32, device=hidden_ring.device)
    starts = runner.ints([0, SEQUENCE_TOKENS])
    return MtpRounds(verifier, MtpCache(runner, head, hidden_ring, verifier.graphs, block, starts))
