"""Rounds with drafts that the device makes, by the model's head (`mtp`) or a drafter (`block`).

A round makes k drafts of every sequence, runs them through the model and accepts the right ones;
the next round starts from the inputs that it leaves (`DecodeInputs`). On a GPU a round is one CUDA
graph, and the host reads its tokens while the next one runs.
"""

from collections.abc import Sequence as Numbers
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING

from torch import Tensor

from lowbit.runtime.engine.draft.lookup import Copy
from lowbit.runtime.engine.draft.policy import Stake
from lowbit.runtime.engine.draft.state import drafts_of
from lowbit.runtime.engine.draft.verify import Part, Verifier, count_accepted
from lowbit.runtime.engine.parallel.tasks import RunStep
from lowbit.runtime.engine.runner import Runner
from lowbit.runtime.engine.sequence import Ended, Sequence
from lowbit.runtime.engine.stats import Source
from lowbit.runtime.state.decode_inputs import DecodeInputs
from lowbit.runtime.state.host_rings import RING, new_ring
from lowbit.runtime.state.step import NO_SLOT, StepPlan

if TYPE_CHECKING:
    import torch


@dataclass(slots=True)
class MadeRound:
    """A round with drafts that were made on the device."""

    rounds: "MadeRounds"  # sends it
    sequences: list[Sequence]  # that get tokens from it
    drafts: int  # number for each sequence
    first: bool  # its inputs come from the host, not from the round before
    stake: Stake  # what it may lose
    copies: Numbers[Copy | None] = ()  # for each sequence; see `MadeRounds.write_copies`
    # True, since the next round starts from what it leaves on the device
    ahead: bool = field(default=True, init=False)
    _writes: list[tuple[int, ...]] = field(default_factory=list)  # by sequence, see `Part`
    _joined: bool = False  # copies may have taken the place of drafts
    _done: "torch.cuda.Event | None" = None

    @property
    def finished(self) -> bool:
        """True if a GPU has finished it; see `PlainStep.finished`."""
        return self._done is not None and self._done.query()  # type: ignore[no-untyped-call]

    def run(self) -> None:
        """Send the round, before earlier ones are read unless it is the first."""
        if self.first:
            self.rounds.enter(self.sequences, self.drafts)
        self._writes = [part.writes for part in self.rounds.parts]
        self._joined = self.rounds.send(self.copies)
        self._done = self.rounds.runner.results.record()

    def commit(self) -> Ended:
        """Wait for the round and append its tokens; returns the sequences that end.

        A later round under way has already sent the last token and overwritten the recurrent states
        after the others.
        """
        ended: Ended = []
        results = self.rounds.runner.results
        results.wait(self._done)
        for sequence, writes in zip(self.sequences, self._writes, strict=True):
            state = drafts_of(sequence)
            state.due -= 1 + self.drafts
            if sequence.ended:
                continue
            tokens = self._accepted(sequence)
            state.seen = sequence.last
            self._note(sequence, count_accepted(tokens, sequence.request.stop_ids))
            for place, token in enumerate(tokens):
                if state.due == 0:
                    sequence.advance(writes[place])
                elif place + 1 == len(tokens):
                    sequence.advance(sequence.row, next_sent=True)
                else:
                    sequence.advance(NO_SLOT)
                end = results.append(sequence, token)
                if end is not None:
                    ended.append((sequence, end))
                    break
        return ended

    def _note(self, sequence: Sequence, accepted: int) -> None:
        """Count the drafts of a sequence, and tell their source how many were accepted."""
        rounds, state = self.rounds, drafts_of(sequence)
        copied = self._joined and rounds.copied(sequence.last, sequence.row)
        drafted = self.drafts if copied else min(self.drafts, len(rounds.guesses))
        accepted = min(accepted, drafted)
        sequence.tally.count(drafted, accepted, "copied" if copied else rounds.source)
        state.full = state.full + 1 if accepted == drafted else 0
        if copied and state.drafter is not None:
            state.drafter.note(drafted, accepted)
        elif state.rates is not None:
            state.rates.note(drafted, accepted)

    def _accepted(self, sequence: Sequence) -> list[int]:
        first, ring = sequence.last, self.rounds.runner.results.tokens
        count = 1 + int(self.rounds.inputs.right[first % RING, sequence.row])
        found = ring[[(first + 1 + place) % RING for place in range(count)], sequence.row]
        return [int(token) for token in found]


@dataclass(slots=True)
class MadeRounds:
    """Sends rounds with drafts that the device makes; subclasses say how, by `draft`."""

    verifier: Verifier  # checks the drafts
    batch: list[Sequence] = field(default_factory=list, init=False)  # sequences of the last round
    drafts: int = field(default=0, init=False)  # number for each of them
    parts: list[Part] = field(default_factory=list, init=False)  # of these sequences
    shifted: bool = field(default=False, init=False)  # one of these sequences has images
    ring: Tensor = field(init=False)  # takes drafts; never read

    def __post_init__(self) -> None:
        """Allocate the ring that `Ops.choose` writes to."""
        self.ring = new_ring(self.runner.sampler.rows, self.runner.on_gpu)

    @property
    def source(self) -> Source:
        """Source of the drafts."""
        raise NotImplementedError

    @property
    def guesses(self) -> tuple[float, ...]:
        """First guess of how often a draft is accepted behind accepted ones, by place."""
        raise NotImplementedError

    @property
    def runner(self) -> Runner:
        """Runner of the model."""
        return self.verifier.runner

    @property
    def inputs(self) -> DecodeInputs:
        """Inputs of a round, left by the one before."""
        return self.verifier.inputs

    @property
    def joins(self) -> bool:
        """True if copies may take the place of drafts."""
        return False

    def write_copies(self, copies: Numbers[Copy | None]) -> bool:
        """Write copies for the next round where the device finds them; False if there are none."""
        return False

    def join(self, B: int, k: int) -> None:
        """Put copies in the place of k drafts of each sequence where they hold."""

    def copied(self, last: int, row: int) -> bool:
        """True if the drafts behind this last token, at its position, were copies."""
        return False

    def fitting(self, most: int, sequences: int) -> int:
        """Most drafts of each of so many sequences, up to `most`, that a graph is recorded for."""
        return most

    def read_prompt(self, sequence: Sequence, first: int, hidden: Tensor, suspended: bool) -> None:
        """Take hidden states [M, h] of a part of a prompt, from position `first` on.

        suspended: drafts do not pay by what is known.
        """

    def keep_up(self, sequences: Numbers[Sequence]) -> None:
        """Take up what plain steps have left, beside them."""

    def skip(self, sequences: Numbers[Sequence]) -> None:
        """Give up what would take long to be taken up before a first round."""

    def prepare(self, sequences: list[Sequence], drafts: int) -> Numbers[Numbers[int]]:
        """Get ready for a first round; what `Verifier.compose` takes beside its parts."""
        return ()

    def draft(self, B: int, k: int, max_kv_len: int) -> Tensor:
        """Draft k tokens of each sequence, or as many as can be made: [B, k or fewer] int64.

        A draft is drawn with the random number of its position, as the token itself will be, so the
        two agree more often than independent draws.
        """
        raise NotImplementedError

    def firsts(self, B: int, k: int) -> tuple[Tensor, Tensor, Tensor]:
        """Id, row and position of the last token of each sequence of a round, [B] int32 each."""
        step = self.inputs.step
        columns = (step.ids, step.rows, step.positions)
        ids, rows, positions = (each[: B * (k + 1)].view(B, k + 1)[:, 0] for each in columns)
        return ids, rows, positions

    def follows(self, sequences: list[Sequence], drafts: int) -> bool:
        """True if the last round has left the inputs of a round of these sequences."""
        here = (
            self.runner.on_gpu and self.verifier.linked and all(each.verified for each in sequences)
        )
        return here and sequences == self.batch and drafts == self.drafts

    def enter(self, sequences: list[Sequence], drafts: int) -> None:
        """Write the inputs of a first round; no steps are under way."""
        runner = self.runner
        runner.leave_rounds(sequences)
        each_has = len(runner.spare) // len(sequences) if runner.spare is not None else 0
        self.batch, self.drafts, self.parts = list(sequences), drafts, []
        self.shifted = any(each.shift for each in sequences)
        for index, each in enumerate(sequences):
            spare = [each.row] * drafts
            if runner.spare is not None:
                first = runner.spare.start + index * each_has
                spare = list(range(first, first + drafts))
            self.parts.append(Part(each, (0,) * drafts, (each.row, *spare)))
        columns = self.prepare(sequences, drafts)
        width = self.runner.width(len(sequences) * (drafts + 1))
        self.verifier.compose(self.parts, width, columns)
        self.verifier.linked = True

    def send(self, copies: Numbers[Copy | None] = ()) -> bool:
        """Queue a round before the last one is read; returns True if copies are joined."""
        runner, k, B = self.runner, self.drafts, len(self.batch)
        M = runner.width(B * (k + 1))
        stop = max(each.last + drafts_of(each).due for each in self.batch) + k + 1
        max_kv_len = runner.kv_len_for(stop, M)
        ordered = any(part.ordered for part in self.parts)
        joined = self.write_copies(copies)
        key = ("made", M, B, k, max_kv_len, runner.sampler.shape, ordered, self.shifted, joined)
        inputs, run = self.inputs, partial(self.round, M, B, k, max_kv_len, ordered, joined)
        kept = (inputs.seen, inputs.longs[:3])
        graphs, plan = self.verifier.graphs, self._plan(M, B, k, max_kv_len, ordered)
        task = RunStep(plan, fresh=runner.on_gpu and key not in graphs)
        launch = partial(runner.launch, graphs, key, run, (inputs.step.block[:5],), kept)
        runner.together(task, launch)
        for each in self.batch:
            state = drafts_of(each)
            if state.due == 0:
                each.advance(each.row)
            state.due += 1 + k
        return joined

    def _plan(self, M: int, B: int, k: int, max_kv_len: int, ordered: bool) -> StepPlan:
        """Plan of the step that checks the drafts."""
        return StepPlan(
            tokens=M,
            sequences=B + (B * (k + 1) < M),
            max_kv_len=max_kv_len,
            longest=k + 1,
            spans=() if self.runner.on_gpu else tuple(part.span for part in self.parts),
            drafts=True,
            ordered=ordered,
            shifted=self.shifted,
        )

    def round(
        self, M: int, B: int, k: int, max_kv_len: int, ordered: bool, joined: bool = False
    ) -> None:
        """Draft, run through the model, accept: M tokens, padding included, of B sequences."""
        runner, inputs, step = self.runner, self.inputs, self.inputs.step
        drafts = self.draft(B, k, max_kv_len)
        made = drafts.shape[1]  # where fewer, copies alone go on; elsewhere any token is checked
        runner.decoder.ops.place_drafts(inputs, drafts, B, k)
        adjusted = runner.sampler.shape.adjusted
        if adjusted:  # penalties count a token once, when it is chosen
            rows = step.rows[: B * (k + 1)].view(B, k + 1)[:, 1 : 1 + made]
            runner.sampler.uncount(rows.flatten(), drafts.flatten())
        if joined:
            self.join(B, k)
        runner.run_step(self._plan(M, B, k, max_kv_len, ordered))
        runner.decoder.ops.accept(inputs, B, k)
        if adjusted:
            count = B * (k + 1)
            runner.sampler.uncount(inputs.wrong[:count], inputs.chosen[:count])
