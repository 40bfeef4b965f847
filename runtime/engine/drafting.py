"""Drafts of the sequences of an engine: who makes them, and how many are checked in a step."""

import time
from collections.abc import Sequence as Numbers
from dataclasses import dataclass, field, replace

from torch import Tensor

from lowbit.runtime.engine.blocks import Blocks
from lowbit.runtime.engine.checks import Checks, Restrict
from lowbit.runtime.engine.head_cache import MOST_BEHIND
from lowbit.runtime.engine.head_rounds import HeadRounds, new_head_rounds
from lowbit.runtime.engine.load_options import LoadOptions
from lowbit.runtime.engine.restrict import allowed
from lowbit.runtime.engine.rounds import Part, new_round
from lowbit.runtime.engine.runner import Runner
from lowbit.runtime.engine.sent import Sent
from lowbit.runtime.engine.sequence import Sequence
from lowbit.runtime.engine.widths import width_for
from lowbit.runtime.speculation.costs import Costs, new_costs
from lowbit.runtime.speculation.drafter import NewDrafter, NgramDrafter
from lowbit.runtime.speculation.modes import MOST_DRAFTS
from lowbit.runtime.speculation.pace import PlacedPace, Plan, common_plan
from lowbit.runtime.state.step import EXACT_TOKENS

# Chance that a draft of the head is right behind right ones, by its place, before any of the
# sequence has been checked.
HEAD_GUESSES = (0.8, 0.7, 0.6, 0.5, 0.45, 0.4, 0.35)
BLOCK_GUESSES = (0.75,) * MOST_DRAFTS  # the same of a drafter's blocks


@dataclass(slots=True)
class Drafting:
    """Drafts of all sequences of an engine.

    Attributes:
        checks: of drafts.
        most: drafts of a sequence in a step.
        new_drafter: makes the drafter of a sequence; None for none.
        head: rounds by the model's head; None where it has none.
        costs: of drafts.
        blocks: of a drafter; None without one.
    """

    checks: Checks
    most: int
    new_drafter: NewDrafter | None
    head: HeadRounds | None
    costs: Costs
    blocks: Blocks | None = None
    _last_pace: PlacedPace = field(init=False)  # of the sequence whose drafts were checked last
    _read_at: float | None = None  # when the last round by the head was read, one more under way
    _began: float = 0.0  # when drafts of the round to be checked were asked for

    def __post_init__(self) -> None:
        """Nothing has been checked."""
        guesses = HEAD_GUESSES if self.blocks is None else BLOCK_GUESSES[: self.blocks.most]
        self._last_pace = PlacedPace(guesses[: self.most])

    def begin(self, sequence: Sequence) -> None:
        """Take up a sequence whose first token is being chosen."""
        if self.new_drafter is not None:
            sequence.drafter = self.new_drafter(sequence.request.prompt)
        modelled = self.head is not None or self.blocks is not None
        if modelled and sequence.predictable:
            sequence.head_pace = self._last_pace.successor()

    def read_prompt(self, sequence: Sequence, first: int, hidden: Tensor) -> None:
        """Let the head see a part of a prompt, from a position on."""
        if self.head is not None and sequence.predictable:
            self.head.cache.read_prompt(sequence, first, hidden)

    def by_head(self, sequences: Numbers[Sequence]) -> int:
        """Drafts that the head should make for each sequence; 0 if other steps are better.

        sequences: that are being decoded, all of them; rounds may be under way.
        """
        if self.head is None or not sequences:
            return 0
        drafts = self._head_drafts(sequences)
        if drafts == 0:
            for each in sequences:
                self._keep_up(self.head, each)
        return drafts

    def _head_drafts(self, sequences: Numbers[Sequence]) -> int:
        """The number of `by_head`."""
        chances = [each.head_pace.chances for each in sequences if each.head_pace is not None]
        if len(chances) < len(sequences):
            return 0
        most = min(each.most_head_drafts(self._most(sequences)) for each in sequences)
        most = min(most, *map(len, chances))
        if self.checks.runner.spare is not None:
            most = min(most, len(self.checks.runner.spare) // len(sequences))
        plan = common_plan(chances, most, self.costs.drafting(len(sequences)))
        if plan.drafts == 0:
            for each in sequences:
                if each.head_pace is not None:
                    each.head_pace.skip()
            return 0
        cost = self.costs.checking(len(sequences))
        copied = [each.propose(self._most(sequences), cost, plan.gain) for each in sequences]
        return 0 if 2 * sum(map(bool, copied)) > len(sequences) else plan.drafts

    def send(self, sequences: list[Sequence], drafts: int) -> Sent | None:
        """Send a round by the head behind those under way.

        Returns:
            None where all steps under way must be read first.
        """
        if self.head is None or not self.head.goes_on(sequences, drafts):
            return None
        return self._send(self.head)

    def begin_rounds(self, sequences: list[Sequence], drafts: int) -> Sent | None:
        """Send the first round by the head, of sequences all of whose tokens have been read."""
        self._read_at = None
        if self.head is None:
            return None
        self.head.enter(sequences, drafts)
        return self._send(self.head)

    def take_down(self, sent: Sent) -> None:
        """Learn from a round by the head that has been read: its cost, and what was right."""
        now = time.perf_counter()
        if sent.flight is not None and sent.sequences[0].head_pace is not None:
            self._last_pace = sent.sequences[0].head_pace
        if sent.flight is not None and self._read_at is not None:
            drafts, sequences = sent.flight.drafts, len(sent.sequences)
            self.costs.note_head(drafts, sequences, now - self._read_at)
        self._read_at = now

    def worth_reading(self, sequences: Numbers[Sequence]) -> bool:
        """True if there may be drafts once all tokens have been read; some are under way."""
        cost, most = self.costs.checking(len(sequences)), self._most(sequences)
        copied = any(each.propose(most, cost, 1.0) for each in sequences)
        return copied or self._block_plan(sequences).drafts > 0

    def round(self, sequences: Numbers[Sequence]) -> list[Part]:
        """A round with the drafts of sequences, empty where there are none.

        sequences: that are being decoded, all of them, and all of whose tokens have been read.
        """
        self._began, plan = time.perf_counter(), self._block_plan(sequences)
        cost, most = self.costs.checking(len(sequences)), self._most(sequences)
        drafts = [allowed(each, each.propose(most, cost, plan.gain)) for each in sequences]
        blocked = self._draft_blocks(sequences, drafts, plan.drafts)
        if not any(drafts):
            return []
        parts = new_round(sequences, drafts, self.checks.runner.spare)
        return [
            replace(part, blocked=one and bool(part.drafts))
            for part, one in zip(parts, blocked, strict=True)
        ]

    def check(self, parts: list[Part], restrict: Restrict) -> list[list[int]]:
        """Send a round and wait for it: the next tokens of each sequence.

        restrict: makes the masks of constrained sequences; see `Checks.verify`.
        """
        started, recorded = time.perf_counter(), len(self.checks.graphs)
        if any(part.blocked for part in parts):
            started = self._began
        limited = any(part.sequence.limited for part in parts)
        chosen = self.checks.runner.read(self.checks.verify(parts, restrict if limited else None))
        if len(self.checks.graphs) == recorded:
            self._note_cost(parts, time.perf_counter() - started)
        self.checks.uncount(parts, [len(some) - 1 for some in chosen])
        return chosen

    def _block_plan(self, sequences: Numbers[Sequence]) -> Plan:
        """Drafts of each sequence in a block; none where the drafter promises nothing."""
        paces = [each.head_pace for each in sequences if each.head_pace is not None]
        if self.blocks is None or not paces:
            return Plan()
        most = max(each.most_head_drafts(self._most(sequences)) for each in sequences)
        most = min(most, len(paces[0].guesses))
        chances = [pace.chances for pace in paces]
        return common_plan(chances, most, self.costs.drafting(len(sequences)))

    def _draft_blocks(
        self, sequences: Numbers[Sequence], drafts: list[Numbers[int]], most: int
    ) -> list[bool]:
        """Fill up drafts of those that have none by blocks; which sequences these are."""
        empty = [
            not some and each.head_pace is not None and each.most_head_drafts(most) > 0
            for each, some in zip(sequences, drafts, strict=True)
        ]
        asked = [each for each, one in zip(sequences, empty, strict=True) if one]
        if self.blocks is None or not asked:
            for each in sequences:
                if self.blocks is not None and each.head_pace is not None:
                    each.head_pace.skip()
            return [False] * len(sequences)
        made = iter(self.blocks.draft(self.checks.runner.decoder, asked, most))
        for place, each in enumerate(sequences):
            if empty[place]:
                drafts[place] = next(made)[: each.most_head_drafts(most)]
        return empty

    def _note_cost(self, parts: list[Part], seconds: float) -> None:
        """Learn what a round has cost, that of blocks with the time of drafting."""
        blocked = [len(part.drafts) for part in parts if part.blocked]
        if not blocked:
            self.costs.note_round(sum(len(part.ids) for part in parts), seconds)
            return
        self._last_pace = next(
            part.sequence.head_pace or self._last_pace for part in parts if part.blocked
        )
        if len(blocked) == len(parts):
            self.costs.note_head(max(blocked), len(parts), seconds)

    def _send(self, head: HeadRounds) -> Sent:
        """Send a round; the time that its recording takes is no cost of rounds."""
        recorded = len(self.checks.graphs)
        sent = head.send()
        if len(self.checks.graphs) != recorded:
            self._read_at = None
        return sent

    def _most(self, sequences: Numbers[Sequence]) -> int:
        """Drafts of a sequence for which a step of all of them has places."""
        return min(self.most, EXACT_TOKENS // max(1, len(sequences)) - 1)

    def _keep_up(self, head: HeadRounds, sequence: Sequence) -> None:
        """Keep the head from falling behind its trail in steps without drafts of its own."""
        if sequence.head_pace is not None and sequence.behind >= MOST_BEHIND:
            head.cache.catch_up(sequence, most=MOST_BEHIND // 2)


def new_drafting(runner: Runner, options: LoadOptions, drafts: int, device: str) -> Drafting | None:
    """The drafts of a runner's sequences, up to `drafts` a step; None where nothing drafts."""
    mode = options.speculate
    if mode == "off":
        return None
    checks = Checks(runner)
    width = width_for if runner.on_gpu else None
    return Drafting(
        checks=checks,
        most=drafts,
        new_drafter=NgramDrafter if mode in ("ngram", "auto") else None,
        head=new_head_rounds(checks),
        costs=new_costs(device, mode == "auto", width, drafter=options.drafter is not None),
        blocks=runner.blocks,
    )
