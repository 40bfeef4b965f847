"""Verified rounds: steps that send the last token of each sequence and drafts behind it.

The host knows the drafts: copies of earlier tokens, or tokens that a constraint forces. A round
chooses behind every draft the token that a plain step would choose there; drafts are accepted up to
the first one that differs from the chosen token.
"""

from collections.abc import Iterable
from collections.abc import Sequence as Numbers
from dataclasses import dataclass, field

import torch
from torch import Tensor

from lowbit.runtime.engine.constraints import mask_of, restrict
from lowbit.runtime.engine.draft.policy import Stake
from lowbit.runtime.engine.draft.state import drafts_of
from lowbit.runtime.engine.graphs import Graphs, longest_for, width_for
from lowbit.runtime.engine.runner import Runner
from lowbit.runtime.engine.sequence import Ended, Sequence
from lowbit.runtime.engine.stats import Source
from lowbit.runtime.state.decode_inputs import DecodeInputs
from lowbit.runtime.state.host_rings import RING
from lowbit.runtime.state.sampler import SamplerRows
from lowbit.runtime.state.step import Span, StepPlan
from lowbit.runtime.text.constraint import Constraint


@dataclass(frozen=True, slots=True)
class Part:
    """Tokens of one sequence in a round."""

    sequence: Sequence  # without steps under way
    drafts: tuple[int, ...]  # tokens behind its last token
    # Slots for the recurrent states after the last token and after each draft
    writes: tuple[int, ...]
    source: Source | None = None  # of its drafts; None without

    @property
    def ids(self) -> tuple[int, ...]:
        """Tokens of the sequence in the round."""
        return (self.sequence.output[-1], *self.drafts)

    @property
    def ordered(self) -> bool:
        """True if a chosen token depends on the chosen ones before it, by penalties."""
        return bool(self.drafts) and self.sequence.request.sampling.penalized

    @property
    def span(self) -> Span:
        """Span of these tokens in a step."""
        each = self.sequence
        pages = tuple(each.pages)
        return Span(each.row, each.last, len(self.writes), pages, each.slot, self.writes)


@dataclass(slots=True)
class VerifiedRound:
    """A round whose drafts the host knows."""

    verifier: "Verifier"  # runs it
    parts: list[Part]  # one for each sequence, ROUND_TOKENS tokens at most
    stake: Stake  # what it may lose
    # False, since the next drafts follow its last tokens
    ahead: bool = field(default=False, init=False)
    _drafts: list[tuple[int, ...]] = field(default_factory=list)  # by part, checked ones
    _failed: Ended = field(default_factory=list)
    _done: "torch.cuda.Event | None" = None

    @property
    def sequences(self) -> list[Sequence]:
        """Sequences that get tokens from it."""
        return [part.sequence for part in self.parts]

    @property
    def finished(self) -> bool:
        """True if a GPU has finished it; see `PlainStep.finished`."""
        return self._done is not None and self._done.query()  # type: ignore[no-untyped-call]

    def run(self) -> None:
        """Send the round; masks are computed while the layers run."""
        verifier, parts = self.verifier, self.parts
        self._drafts = [part.drafts for part in parts]
        if any(part.sequence.constrained for part in parts):
            plan = verifier.send_layers(parts)
            self._failed, self._drafts = restrict_round(parts, verifier.runner.sampler)
            verifier.send_choice(plan)
        else:
            verifier.send(parts)
        self._done = verifier.runner.results.record()

    def commit(self) -> Ended:
        """Wait for the round and append its tokens; the sequences that end with them."""
        results, ended = self.verifier.runner.results, list(self._failed)
        results.wait(self._done)
        failed = {sequence for sequence, _ in self._failed}
        chosen = [
            self._chosen(part.sequence, drafts)
            for part, drafts in zip(self.parts, self._drafts, strict=True)
        ]
        self.verifier.uncount(self.parts, [len(tokens) - 1 for tokens in chosen])
        for part, tokens in zip(self.parts, chosen, strict=True):
            sequence = part.sequence
            if sequence in failed:
                continue
            _note(part, count_accepted(tokens, sequence.request.stop_ids))
            for slot, token in zip(part.writes, tokens, strict=False):
                sequence.advance(slot)
                end = results.append(sequence, token)
                if end is not None:
                    ended.append((sequence, end))
                    break
        return ended

    def _chosen(self, sequence: Sequence, drafts: Numbers[int]) -> list[int]:
        """Chosen tokens behind a sequence's output, up to the first that differs from its draft."""
        ring, tokens = self.verifier.runner.results.tokens, []
        for position, draft in enumerate((*drafts, None), sequence.last + 1):
            tokens.append(int(ring[position % RING, sequence.row]))
            if tokens[-1] != draft:
                break
        return tokens


def count_accepted(tokens: Numbers[int], stop_ids: frozenset[int]) -> int:
    """Number of accepted drafts: all tokens but the last, or up to the first stop token."""
    ends = (place for place, token in enumerate(tokens) if token in stop_ids)
    return min(next(ends, len(tokens)) + 1, len(tokens) - 1)


def _note(part: Part, accepted: int) -> None:
    """Count the drafts of a part, and tell their source how many were accepted."""
    state, drafted = drafts_of(part.sequence), len(part.drafts)
    if part.source is not None:
        part.sequence.tally.count(drafted, accepted, part.source)
    if part.source == "copied" and state.drafter is not None:
        state.drafter.note(drafted, accepted)
        state.full = state.full + 1 if accepted == drafted else 0


@dataclass(slots=True)
class Verifier:
    """Sends rounds whose drafts the host knows.

    Attributes:
        runner: of the model.
        inputs: of the next decode step, the runner's.
        graphs: recorded rounds.
        linked: the last round, by the head, has left `inputs` such that the next one needs nothing
            from the host.
    """

    runner: Runner
    graphs: Graphs = field(init=False)
    linked: bool = False

    def __post_init__(self) -> None:
        """Share the memory of the runner's graphs."""
        self.graphs = Graphs(self.runner.graphs)

    @property
    def inputs(self) -> DecodeInputs:
        """Inputs of a round."""
        return self.runner.inputs

    def send(self, parts: list[Part]) -> None:
        """Run the last token and the drafts of every sequence, and choose behind each."""
        plan, runner = self._prepare(parts), self.runner
        runner.send(self.graphs, ("round", plan, runner.sampler.shape), runner.run_step, plan)

    def send_layers(self, parts: list[Part]) -> StepPlan:
        """Send the first half of `send`, up to the logits; returns what `send_choice` takes."""
        plan = self._prepare(parts)
        self.runner.make_room_to_keep()
        self.runner.send(self.graphs, ("layers", plan), self.runner.run_layers, plan)
        return plan

    def send_choice(self, plan: StepPlan) -> None:
        """Send the second half of `send`: choose under a mask for each token."""
        runner, places = self.runner, plan.longest if plan.ordered else 1
        key = ("choice", plan.tokens, places, runner.sampler.shape, plan.ordered)
        runner.send_choice(self.graphs, key, plan)

    def _prepare(self, parts: list[Part]) -> StepPlan:
        spans = tuple(part.span for part in parts)
        M, B = sum(span.count for span in spans), len(spans)
        longest = max(span.count for span in spans)
        if self.runner.on_gpu:  # rounded up, so that few steps are recorded
            M, longest = width_for(M), longest_for(longest)
            B, spans = B + 1, ()  # padding, if any
        stop = max(part.span.first + part.span.count for part in parts)
        self.compose(parts, M)
        return StepPlan(
            tokens=M,
            sequences=B,
            max_kv_len=self.runner.kv_len_for(stop, M),
            longest=longest,
            spans=spans,
            drafts=True,
            ordered=any(part.ordered for part in parts),
            shifted=any(part.sequence.shift for part in parts),
        )

    def compose(self, parts: list[Part], M: int, head: Numbers[Numbers[int]] = ()) -> None:
        """Write the inputs of a round, padded to M tokens; see `DecodeInputs.write_round`."""
        ids = [id for part in parts for id in part.ids]
        self.inputs.write_round([part.span for part in parts], ids, M, head)
        self.runner.batch = []  # the inputs of the last plain step are no longer those of the next
        self.linked = False

    def uncount(self, parts: list[Part], accepted: Numbers[int]) -> None:
        """Take tokens chosen behind wrong drafts back from the counts of penalties.

        accepted: number of accepted drafts of each part.
        """
        wrong: list[int] = []
        first = 0
        for part, count in zip(parts, accepted, strict=True):
            if part.ordered:
                wrong += range(first + count + 1, first + len(part.ids))
            first += len(part.ids)
        if wrong:
            columns, inputs = self.runner.ints(wrong).long(), self.inputs
            self.runner.sampler.uncount(inputs.step.rows[columns], inputs.chosen[columns])


def slots_after(
    spare: range | None, sequences: Numbers[Sequence], drafts: Numbers[int]
) -> list[tuple[int, ...]]:
    """Slots for the recurrent states after the last token of each sequence and after its drafts.

    The state after the last token goes to the slot of the row, those after drafts to spare slots in
    which no other sequence has its state. If these run short, a sequence gets fewer slots.

    Args:
        spare: slots; None for a model without recurrent states.
    """
    if spare is None:
        return [(each.row,) * (1 + count) for each, count in zip(sequences, drafts, strict=True)]
    taken = {each.slot for each in sequences}
    free = [slot for slot in spare if slot not in taken]
    slots = []
    for each, count in zip(sequences, drafts, strict=True):
        own = [each.slot] if each.slot in spare else []
        usable = (own + free)[:count]
        free = [slot for slot in free if slot not in usable]
        slots.append((each.row, *usable))
    return slots


def restrict_round(
    parts: Iterable[Part], sampler: SamplerRows
) -> tuple[Ended, list[tuple[int, ...]]]:
    """Set the masks behind every token of a round for constrained sequences.

    Returns:
        The sequences whose constraint failed, and the drafts of each part that can be checked:
        those with a mask behind them.
    """
    failed: Ended = []
    checked = []
    start = sampler.rows
    for part in parts:
        masks, drafts = sampler.mask[start : start + len(part.ids)], part.drafts
        start += len(part.ids)
        if part.sequence.constrained:
            failed += restrict([part.sequence], sampler)
            masks[0] = sampler.mask[part.sequence.row]
            drafts = drafts[: _set_masks(drafts_of(part.sequence).ahead, drafts, masks[1:])]
        elif part.sequence.request.constraint is not None:  # done; its masks are still read
            masks.fill_(-1)
        checked.append(drafts)
    return failed, checked


def _set_masks(ahead: Constraint | None, drafts: Numbers[int], masks: Tensor) -> int:
    """Set the masks behind drafts; returns the number of drafts that got one."""
    for count, (draft, place) in enumerate(zip(drafts, masks, strict=True)):
        if ahead is None:
            return count
        try:
            if not ahead.done:
                ahead.accept(draft)
            mask = mask_of(ahead, len(place))
        except Exception:  # a copy: if the constraint itself fails here, its request ends
            return count
        place.copy_(torch.tensor(-1) if mask is None else mask)
    return len(drafts)
