"""A drafter whose drafts are right as often as a test wants."""

import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

from torch import Tensor

from lowbit.runtime.engine.draft.mtp import MtpRounds, new_mtp_rounds
from lowbit.runtime.engine.draft.ngram import NewDrafter, NgramDrafter
from lowbit.runtime.engine.draft.policy import Policy, StepCosts
from lowbit.runtime.engine.draft.source import Drafts
from lowbit.runtime.engine.draft.verify import Verifier
from lowbit.runtime.engine.model import Model
from lowbit.runtime.engine.runner import Runner
from tests.short_models import SHORT_VOCABULARY

VOCABULARY = SHORT_VOCABULARY


@dataclass
class Guesser:
    """Knows what will be chosen, and proposes it with a mistake somewhere or none.

    Attributes:
        truth: tokens that will be chosen.
        counts: gives the number of drafts, and of those before the first wrong one, of at most so
            many.
        wrong: a token that stands in for a right one; another where it would be right.
        at: tokens that have been chosen.
    """

    truth: Sequence[int]
    counts: Callable[[int], tuple[int, int]]
    wrong: int = 3
    at: int = 0
    notes: list[tuple[int, int]] | None = None
    match_length: int = 0  # copies join no made drafts

    def append(self, id: int) -> None:
        assert id == self.truth[self.at]
        self.at += 1

    def propose(self, most: int) -> tuple[list[int], float]:
        count, right = self.counts(most)
        drafts = [*self.truth[self.at : self.at + count]]
        drafts += [self.wrong] * (count - len(drafts))
        if right < count:
            drafts[right] = self.wrong + (drafts[right] == self.wrong)
        return drafts, 1.0

    def skip(self) -> None:
        pass

    def note(self, drafted: int, right: int) -> None:
        if self.notes is not None:
            self.notes.append((drafted, right))


def guessers(
    truths: Mapping[tuple[int, ...], Sequence[int]], seed: int, wrong: int = 3
) -> Callable[[Sequence[int]], Guesser]:
    """Makes drafters that know the answers to these prompts and propose some at random."""
    draw = random.Random(seed)

    def counts(most: int) -> tuple[int, int]:
        count = draw.randint(0, most)
        return count, draw.randint(0, count)

    return lambda ids: Guesser(truths[tuple(ids)], counts, wrong)


@dataclass(slots=True)
class KnownRounds(MtpRounds):
    """Rounds by a head whose drafts are replaced by those of a known text, right or all wrong.

    Attributes:
        text: prompt and output, for one sequence.
        right: drafts are those of the text.
    """

    text: Tensor = field(kw_only=True)
    right: bool = field(kw_only=True)

    def draft(self, B: int, k: int, max_kv_len: int) -> Tensor:
        MtpRounds.draft(self, B, k, max_kv_len)
        first = int(self.inputs.step.positions[0])
        return (self.text[first + 1 : first + 1 + k] + (not self.right))[None] % VOCABULARY


def costs_by_tokens(given: float, made: float, change: float = 0.0) -> StepCosts:
    """Costs that are not measured: what each further token takes, and each draft of a head."""
    return StepCosts(
        start={"plain": 1.0, "given": 1.0, "made": 1.0},
        each={"plain": given, "given": given, "made": made},
        change=change,
    )


def join_copies(model: Model, new_drafter: NewDrafter = NgramDrafter) -> None:
    """Let copies join the drafts of a model's drafter; rounds of copies alone cost too much."""
    source, nothing = model.engine.drafting, costs_by_tokens(0.0, 0.0)
    assert isinstance(source, Drafts)
    source.new_drafter = new_drafter
    source.policy.costs = StepCosts({**nothing.start, "given": 99.0}, nothing.each)


def drafting_by(new_drafter: NewDrafter | None, runner: Runner, most: int) -> Drafts:
    """Drafts of these drafters, and of the model's head where it has one."""
    checks = Verifier(runner)
    policy = Policy(costs_by_tokens(0.1, 0.2))
    return Drafts(checks, most, new_drafter, new_mtp_rounds(checks), policy)
