"""Drafts of the sequences of an engine: who makes them, and how many are checked in a step."""

import time
from collections.abc import Sequence as Numbers
from dataclasses import dataclass

from torch import Tensor

from lowbit.runtime.engine.head_drafts import MOST_BEHIND, HeadDrafts, head_drafts
from lowbit.runtime.engine.rounds import Part, new_round
from lowbit.runtime.engine.runner import Runner
from lowbit.runtime.engine.sequence import Sequence
from lowbit.runtime.speculation.costs import Costs
from lowbit.runtime.speculation.drafter import NewDrafter
from lowbit.runtime.speculation.pace import PlacedPace, Plan
from lowbit.runtime.speculation.settings import Speculation
from lowbit.runtime.state.step import EXACT_TOKENS

# Chance that a draft of the head is right behind right ones, by its place, before any of the
# sequence has been checked.
HEAD_GUESSES = (0.8, 0.7, 0.6, 0.5, 0.45, 0.4, 0.35)


@dataclass(slots=True)
class Drafting:
    """Drafts of all sequences of an engine.

    Attributes:
        runner: of the engine.
        most: drafts of a sequence in a step.
        new_drafter: makes the drafter of a sequence; None for none.
        head: of the model; None for none.
        costs: of drafts.
    """

    runner: Runner
    most: int
    new_drafter: NewDrafter | None
    head: HeadDrafts | None
    costs: Costs

    def begin(self, sequence: Sequence) -> None:
        """Take up a sequence whose first token is being chosen."""
        if not sequence.predictable:
            return
        if self.new_drafter is not None:
            sequence.drafter = self.new_drafter(sequence.request.prompt)
        if self.head is not None:
            sequence.head_pace = PlacedPace(HEAD_GUESSES[: self.most])

    def read_prompt(self, sequence: Sequence, first: int, hidden: Tensor) -> None:
        """Let the head see a part of a prompt, from a position on."""
        if self.head is not None and sequence.predictable:
            self.head.read_prompt(sequence, first, hidden)

    def worth_reading(self, sequences: Numbers[Sequence]) -> bool:
        """True if there may be drafts once all tokens have been read; some are under way."""
        most = self._most(sequences)
        plans = self._head_plans(sequences, most)
        cost = self.costs.checking(len(sequences))
        return any(plan.drafts for plan in plans) or any(
            each.propose(most, cost, 1.0) or self._late(each) for each in sequences
        )

    def round(self, sequences: Numbers[Sequence]) -> list[Part]:
        """A round with the drafts of sequences, empty where there are none.

        sequences: that are being decoded, all of them, and all of whose tokens have been read.
        """
        most = self._most(sequences)
        cost, plans = self.costs.checking(len(sequences)), self._head_plans(sequences, most)
        drafts: list[Numbers[int]] = []
        by_head = {}
        for place, (each, plan) in enumerate(zip(sequences, plans, strict=True)):
            drafts.append(each.propose(most, cost, plan.gain))
            each.by_head = not drafts[place] and plan.drafts > 0
            if each.by_head or self._late(each):
                by_head[place] = plan.drafts if each.by_head else 0
            elif plan.drafts == 0 and each.head_pace is not None:
                each.head_pace.skip()
        if by_head and self.head is not None:
            started = time.perf_counter()
            found = self.head.propose([sequences[place] for place in by_head], by_head.values())
            self.costs.note_head(max(by_head.values()), time.perf_counter() - started)
            for place, tokens in zip(by_head, found, strict=True):
                drafts[place] = drafts[place] or tokens
        return new_round(sequences, drafts, self.runner.spare) if any(drafts) else []

    def check(self, parts: list[Part]) -> list[list[int]]:
        """Send a round and wait for it: the next tokens of each sequence."""
        started = time.perf_counter()
        chosen = self.runner.read(self.runner.verify(parts))
        tokens = sum(len(part.ids) for part in parts)
        self.costs.note_round(tokens, time.perf_counter() - started)
        self.runner.uncount(parts, [len(some) - 1 for some in chosen])
        return chosen

    def _most(self, sequences: Numbers[Sequence]) -> int:
        """Drafts of a sequence for which a step of all of them has places."""
        return min(self.most, EXACT_TOKENS // max(1, len(sequences)) - 1)

    def _head_plans(self, sequences: Numbers[Sequence], most: int) -> list[Plan]:
        cost = self.costs.drafting(len(sequences))
        return [
            each.head_pace.plan(each.most_drafts(most), cost) if each.head_pace else Plan()
            for each in sequences
        ]

    def _late(self, sequence: Sequence) -> bool:
        """True if the head must catch up before the trail of hidden states is overwritten."""
        return sequence.head_pace is not None and sequence.behind >= MOST_BEHIND


def new_drafting(
    runner: Runner, speculation: Speculation, drafts: int, device: str
) -> Drafting | None:
    """The drafts of a runner's sequences, up to `drafts` a step; None where nothing drafts."""
    if speculation.mode == "off":
        return None
    return Drafting(
        runner=runner,
        most=drafts,
        new_drafter=speculation.new_drafter(),
        head=head_drafts(runner),
        costs=speculation.costs(device),
    )
