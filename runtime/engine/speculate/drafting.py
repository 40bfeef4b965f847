"""Drafts of an engine's sequences: how each step is made, by a round with drafts or without."""

import time
from collections.abc import Collection, Iterable
from collections.abc import Sequence as Numbers
from dataclasses import dataclass, field
from typing import Literal

from torch import Tensor

from lowbit.runtime.engine.constraints import explained
from lowbit.runtime.engine.graphs import width_for
from lowbit.runtime.engine.load_options import MOST_DRAFTS, LoadOptions
from lowbit.runtime.engine.results import Sent
from lowbit.runtime.engine.runner import Runner
from lowbit.runtime.engine.sequence import Ended, Sequence
from lowbit.runtime.engine.speculate.dflash import Blocks
from lowbit.runtime.engine.speculate.handover import slots_after
from lowbit.runtime.engine.speculate.mtp import (
    MOST_BEHIND,
    MtpRound,
    MtpRounds,
    behind,
    new_mtp_rounds,
)
from lowbit.runtime.engine.speculate.proposals import (
    Cost,
    Costs,
    NewDrafter,
    NgramDrafter,
    PlacedPace,
    Plan,
    common_plan,
    new_costs,
)
from lowbit.runtime.engine.speculate.verify import Part, Source, VerifiedRound, Verifier
from lowbit.runtime.text.constraint import Constraint
from lowbit.runtime.thresholds import EXACT_TOKENS

# Chance that a draft of the head is right behind right ones, by its place, before any of the
# sequence has been checked.
MTP_GUESSES = (0.8, 0.7, 0.6, 0.5, 0.45, 0.4, 0.35)
BLOCK_GUESSES = (0.75,) * MOST_DRAFTS  # the same of a drafter's blocks
LONG = 64  # tokens without a mask for which it is worthwhile that the model's head sees the prompt

Proposal = tuple[Numbers[int], Source]


@dataclass(slots=True)
class Drafting:
    """Drafts of all sequences of an engine.

    Attributes:
        verifier: of drafts.
        most: drafts of a sequence in a step.
        new_drafter: makes the drafter of a sequence; None for none.
        mtp: rounds by the model's head; None where it has none.
        costs: of drafts.
        blocks: of a drafter; None without one.
    """

    verifier: Verifier
    most: int
    new_drafter: NewDrafter | None
    mtp: MtpRounds | None
    costs: Costs
    blocks: Blocks | None = None
    _last_pace: PlacedPace = field(init=False)  # of the sequence whose drafts were checked last

    def __post_init__(self) -> None:
        """Begin with the guesses."""
        guesses = MTP_GUESSES if self.blocks is None else BLOCK_GUESSES[: self.blocks.most]
        self._last_pace = PlacedPace(guesses[: self.most])

    def begin(self, sequence: Sequence) -> None:
        """Take up a sequence whose first token is being chosen."""
        if self.new_drafter is not None:
            sequence.drafts.drafter = self.new_drafter(sequence.request.prompt)
        modelled = self.mtp is not None or self.blocks is not None
        if modelled and _predictable(sequence):
            sequence.drafts.pace = self._last_pace.successor()

    def read_prompt(self, sequence: Sequence, first: int, hidden: Tensor) -> None:
        """Let the head see a part of a prompt, from a position on."""
        if self.mtp is not None and _predictable(sequence):
            self.mtp.cache.read_prompt(sequence, first, hidden)

    def choose(
        self, sequences: list[Sequence], sent: Collection[Sent]
    ) -> VerifiedRound | MtpRound | Literal["plain", "read"]:
        """Choose how sequences go on.

        Args:
            sequences: that are being decoded, all of them.
            sent: steps under way. Drafts that the host makes follow the last token: where they
                promise anything, these steps must be read first.

        Returns:
            A round to run; "plain" for a step without drafts; "read" to be asked again once all
            steps under way have been read.
        """
        started = time.perf_counter()
        plan = self._plan(sequences)
        made = 0 if plan is None else plan.drafts
        copies = self._proposals(sequences, 1.0 if plan is None else plan.gain)
        if self.mtp is not None and made:
            if 2 * sum(bool(ids) for ids, _ in copies) <= len(sequences):
                follows = self.mtp.follows(sequences, made)
                if sent and not follows:
                    return "read"
                _skip_copies(sequences, copies)
                return MtpRound(self.mtp, sequences, made, first=not follows)
            copies = self._proposals(sequences, 1.0)
        promising = (self.blocks is not None and made) or any(ids for ids, _ in copies)
        if sent and (promising or any(isinstance(each, MtpRound) for each in sent)):
            return "read"
        _skip_copies(sequences, copies)
        self._keep_up(sequences)
        parts = [] if sent else self._parts(sequences, copies, made)
        blocked = any(part.source == "block" for part in parts)
        if plan is not None and not blocked and (made == 0 or self.blocks is not None):
            for each in sequences:
                if each.drafts.pace is not None:
                    each.drafts.pace.skip()
        if not any(part.drafts for part in parts):
            return "plain"
        return VerifiedRound(self.verifier, parts, started if blocked else None)

    def learn(self, step: Sent) -> None:
        """Learn from a step that has been read what its drafts have cost."""
        if isinstance(step, MtpRound):
            self._last_pace = step.sequences[0].drafts.pace or self._last_pace
            if step.seconds is not None:
                self.costs.note_head(step.drafts, len(step.sequences), step.seconds)
        elif isinstance(step, VerifiedRound):
            blocks = [part for part in step.parts if part.source == "block"]
            if blocks:
                self._last_pace = blocks[0].sequence.drafts.pace or self._last_pace
            if step.seconds is None:
                return
            if not blocks:
                self.costs.note_round(sum(len(part.ids) for part in step.parts), step.seconds)
            elif len(blocks) == len(step.parts):
                most = max(len(part.drafts) for part in blocks)
                self.costs.note_head(most, len(blocks), step.seconds)

    def foresee(self, sequences: Iterable[Sequence]) -> Ended:
        """Copy the constraints of sequences, and ask the copies for the tokens that come next.

        Args:
            sequences: whose constraints know every token that the host knows.

        Returns:
            Those whose constraint has failed.
        """
        failed: Ended = []
        for each in sequences:
            drafts, constraint = each.drafts, each.request.constraint
            drafts.ahead, drafts.forced = None, ()
            if constraint is None or each.ended or not each.limited:
                continue
            try:
                drafts.ahead = None if constraint.done else constraint.copy()
            except Exception as error:  # whatever a foreign object does
                failed.append((each, explained(error)))
            if drafts.ahead is not None:
                drafts.forced = _forced(drafts.ahead, self.most + 1)
        return failed

    def _plan(self, sequences: Numbers[Sequence]) -> Plan | None:
        """Drafts of each sequence that the head, or a drafter, should make; None if it cannot."""
        paces = [each.drafts.pace for each in sequences if each.drafts.pace is not None]
        most = self._most(sequences)
        if self.mtp is not None and len(paces) == len(sequences):
            most = min(_most_free_drafts(each, most) for each in sequences)
            spare = self.verifier.runner.spare
            if spare is not None:
                most = min(most, len(spare) // len(sequences))
        elif self.blocks is not None and paces:
            most = max(_most_free_drafts(each, most) for each in sequences)
        else:
            return None
        chances = [pace.chances for pace in paces]
        most = min(most, *map(len, chances))
        return common_plan(chances, most, self.costs.drafting(len(sequences)))

    def _proposals(self, sequences: Numbers[Sequence], least_gain: float) -> list[Proposal]:
        """Drafts of what follows each: what its constraint forces, else what its drafter copies."""
        cost, most = self.costs.checking(len(sequences)), self._most(sequences)
        return [_propose(each, most, cost, least_gain) for each in sequences]

    def _parts(
        self, sequences: list[Sequence], copies: Numbers[Proposal], blocked: int
    ) -> list[Part]:
        """The parts of a round, with up to `blocked` drafts of a block where nothing is copied."""
        found = [
            (_allowed(each, ids), source)
            for each, (ids, source) in zip(sequences, copies, strict=True)
        ]
        if self.blocks is not None:
            empty = [
                place
                for place, each in enumerate(sequences)
                if not found[place][0]
                and each.drafts.pace is not None
                and _most_free_drafts(each, blocked) > 0
            ]
            asked = [sequences[place] for place in empty]
            made = self.blocks.draft(self.verifier.runner.decoder, asked, blocked) if asked else []
            for place, each, ids in zip(empty, asked, made, strict=True):
                found[place] = ids[: _most_free_drafts(each, blocked)], "block"
        counts = [len(ids) for ids, _ in found]
        slots = slots_after(self.verifier.runner.spare, sequences, counts)
        return [
            Part(each, tuple(ids[: len(writes) - 1]), writes, source if writes[1:] else "none")
            for each, (ids, source), writes in zip(sequences, found, slots, strict=True)
        ]

    def _most(self, sequences: Numbers[Sequence]) -> int:
        """Drafts of a sequence for which a step of all of them has places."""
        return min(self.most, EXACT_TOKENS // max(1, len(sequences)) - 1)

    def _keep_up(self, sequences: Numbers[Sequence]) -> None:
        """Keep the head from falling behind its trail in steps without drafts of its own."""
        if self.mtp is not None:
            for each in sequences:
                if each.drafts.pace is not None and behind(each) >= MOST_BEHIND:
                    self.mtp.cache.catch_up(each, most=MOST_BEHIND // 2)


def _predictable(sequence: Sequence) -> bool:
    """True if the model's head or a block drafter may draft: no masks come soon."""
    return sequence.request.constraint is None or sequence.unbound >= LONG


def _most_drafts(sequence: Sequence, most: int) -> int:
    """Drafts that the request has tokens left for, up to `most`."""
    left = sequence.count - len(sequence.output) - sequence.drafts.due - 1
    return max(0, min(most, left))


def _most_free_drafts(sequence: Sequence, most: int) -> int:
    """The same where neither the drafts nor the token behind them may need a mask."""
    if sequence.limited:
        sent = sequence.drafts.due or sequence.under_way
        free = 0 if sequence.masked else sequence.unbound - sent
        most = min(most, free - 1)
    return _most_drafts(sequence, most)


def _propose(sequence: Sequence, most: int, cost: Cost, least_gain: float) -> Proposal:
    """Drafts of one sequence; none of source "copied" where its drafter was asked in vain."""
    most, drafts = _most_drafts(sequence, most), sequence.drafts
    if most == 0 or (sequence.limited and drafts.ahead is None):
        return (), "none"
    if sequence.limited and (forced := drafts.forced[sequence.under_way :]):
        return forced[:most], "forced"
    if drafts.drafter is None:
        return (), "none"
    for token in sequence.output[drafts.told :]:
        drafts.drafter.append(token)
    drafts.told = len(sequence.output)
    return drafts.drafter.propose(most, cost, least_gain), "copied"


def _skip_copies(sequences: Numbers[Sequence], copies: Numbers[Proposal]) -> None:
    """Tell the drafters that were asked in vain that a step goes by without their drafts."""
    for each, (ids, source) in zip(sequences, copies, strict=True):
        if source == "copied" and not ids and each.drafts.drafter is not None:
            each.drafts.drafter.skip()


def _allowed(sequence: Sequence, drafts: Numbers[int]) -> Numbers[int]:
    """The drafts before the first one that the constraint of a sequence does not take."""
    if not drafts or not sequence.limited or sequence.drafts.forced:
        return drafts
    ahead = sequence.drafts.ahead
    try:
        probe = None if ahead is None else ahead.copy()
    except Exception:  # of a copy
        return ()
    if probe is None:
        return ()
    for count, draft in enumerate(drafts):
        try:
            probe.accept(draft)
        except Exception:  # of a copy
            return drafts[:count]
    return drafts


def _forced(ahead: Constraint, most: int) -> tuple[int, ...]:
    """Tokens that a copy of a constraint forces next, none if it fails."""
    try:
        return tuple(ahead.forced(most))
    except Exception:  # of a copy
        return ()


def new_drafting(runner: Runner, options: LoadOptions, drafts: int, device: str) -> Drafting | None:
    """The drafts of a runner's sequences, up to `drafts` a step; None where nothing drafts."""
    mode = options.speculate
    if mode == "off":
        return None
    verifier = Verifier(runner)
    width = width_for if runner.on_gpu else None
    return Drafting(
        verifier=verifier,
        most=drafts,
        new_drafter=NgramDrafter if mode in ("ngram", "auto") else None,
        mtp=new_mtp_rounds(verifier),
        costs=new_costs(device, mode == "auto", width, drafter=options.drafter is not None),
        blocks=runner.blocks,
    )
