"""Drafting: chooses for every step between a plain one and a round that checks drafts."""

import time
from collections.abc import Collection, Iterable
from collections.abc import Sequence as Numbers
from dataclasses import dataclass, field
from typing import Literal

from torch import Tensor

from lowbit.runtime.engine.constraints import explained
from lowbit.runtime.engine.graphs import width_for
from lowbit.runtime.engine.load_options import MOST_DRAFTS, LoadOptions
from lowbit.runtime.engine.results import PlainStep, Sent
from lowbit.runtime.engine.runner import Runner
from lowbit.runtime.engine.sequence import Ended, Sequence
from lowbit.runtime.engine.speculate.budget import (
    UNLIMITED,
    Budget,
    affordable,
    begin_request,
    begin_trial,
    end_trial,
    plan_drafts,
    spend,
    wait,
)
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
    OUTLIER,
    Cost,
    Costs,
    NewDrafter,
    NgramDrafter,
    PlacedPace,
    Plan,
    new_costs,
)
from lowbit.runtime.engine.speculate.verify import Part, Source, VerifiedRound, Verifier
from lowbit.runtime.text.constraint import Constraint
from lowbit.runtime.thresholds import ROUND_TOKENS

# Chances of MTP drafts to be right behind right ones, by position, before any has been checked.
MTP_GUESSES = (0.8, 0.7, 0.6, 0.5, 0.45, 0.4, 0.35)
BLOCK_GUESSES = (0.75,) * MOST_DRAFTS  # of block drafts
QUIET = 7  # plain steps in a row for which nobody looks whether drafts pay now
LONG = 64  # tokens without a mask from which on the MTP head processes the prompt

Proposal = tuple[Numbers[int], Source]


@dataclass(slots=True)
class Drafting:
    """Drafts for all sequences of an engine.

    Attributes:
        verifier: checks drafts that the host knows.
        most: most drafts of a sequence in a step.
        new_drafter: makes the n-gram drafter of a sequence; None without.
        mtp: rounds by the MTP head; None without.
        costs: of rounds.
        blocks: block drafter; None without.
        budget: steps that drafts may still lose.
        resting: the head or the drafter would not pay by the last plan, or nothing is known yet, so
            that it reads the ends of prompts alone and does not keep up.
    """

    verifier: Verifier
    most: int
    new_drafter: NewDrafter | None
    mtp: MtpRounds | None
    costs: Costs
    blocks: Blocks | None = None
    budget: Budget = UNLIMITED
    resting: bool = field(init=False)
    _in_rounds: bool = False  # the last step of the engine checked drafts
    _idle: bool = False  # no number of drafts would have paid in this step
    _quiet: int = 0  # plain steps to take before anything is planned
    _left: bool = False  # this step of the engine is no plain one, or waited for all before it
    _ended_at: float | None = (
        None  # when the last step ended; None unless it was seen to, a plain one
    )
    _between: float | None = None  # seconds from the end of the plain step before to that
    _estimate: float = 1.0  # cost of the last round
    _excess: float = 0.0  # cost since the last plain step beyond that of its rounds
    _rounds: int = 0  # since the last plain step
    _last_pace: PlacedPace = field(init=False)  # of the last sequence with checked drafts

    def __post_init__(self) -> None:
        """Begin with the guesses."""
        self.resting = self.budget.limited  # until something shows that drafts pay
        guesses = MTP_GUESSES if self.blocks is None else BLOCK_GUESSES[: self.blocks.most]
        self._last_pace = PlacedPace(guesses[: self.most])

    def begin(self, sequence: Sequence) -> None:
        """Take up a sequence whose first token is being chosen."""
        self.budget, self._quiet = begin_request(self.budget), 0
        if self.new_drafter is not None:
            sequence.drafts.drafter = self.new_drafter(sequence.request.prompt)
        modelled = self.mtp is not None or self.blocks is not None
        if modelled and _predictable(sequence):
            sequence.drafts.pace = self._last_pace.successor()

    def read_prompt(self, sequence: Sequence, first: int, hidden: Tensor) -> None:
        """Let the MTP head process a part of a prompt, from a position on; its end while it rests.

        Drafts behind a prompt of which the head knows the end alone are right nearly as often.
        """
        if self.mtp is not None and _predictable(sequence):
            cache = self.mtp.cache
            (cache.skip_prompt if self.resting else cache.read_prompt)(sequence, first, hidden)

    def choose(
        self, sequences: list[Sequence], sent: Collection[Sent]
    ) -> VerifiedRound | MtpRound | Literal["plain", "read"]:
        """Choose the next step of the sequences.

        Args:
            sequences: all that are being decoded.
            sent: steps under way. Drafts that the host makes follow the last token, so these steps
                must be read before drafts that may pay.

        Returns:
            A round to run; "plain" for a step without drafts; "read" to ask again once all steps
            under way have been read.
        """
        if self._quiet > 0:
            self._quiet -= 1
            if not self._copying(sequences):
                return "plain"
        choice = self._choose(sequences, sent)
        free = not any(each.limited for each in sequences)
        self._quiet = QUIET if choice == "plain" and self._idle and free else 0
        self._left = self._left or choice != "plain"
        if isinstance(choice, MtpRound):
            self._estimate = self.costs.drafting(len(sequences))(choice.drafts)
            self.budget = begin_trial(self.budget)
        elif isinstance(choice, VerifiedRound):
            blocked = any(part.source == "block" for part in choice.parts)
            cost = (self.costs.drafting if blocked else self.costs.checking)(len(sequences))
            self._estimate = cost(max(len(part.drafts) for part in choice.parts))
            if blocked:
                self.budget = begin_trial(self.budget)
        return choice

    def settle(self, sequences: int, plain: bool, seconds: float | None, tokens: int) -> None:
        """Count a step of the engine in the budget, and learn from its time.

        Args:
            sequences: in the step.
            plain: it sent a step without drafts.
            seconds: until the steps before it were read; None if anything but rounds held it up.
            tokens: of all sequences, that it read.
        """
        if not (self._left or self._in_rounds):
            self.budget = wait(self.budget)
            if seconds is None:
                self._ended_at = None
            elif tokens >= sequences:
                self._note_step(sequences, seconds)
            return
        expected = 1.0 if plain else self._estimate
        taken = self.costs.in_steps(sequences, seconds)
        taken = expected if taken is None else min(taken, OUTLIER * (1 + self._estimate))
        self.budget = spend(self.budget, taken, tokens / sequences)
        self._excess += taken - expected
        self._rounds += not plain
        if plain:
            if self._rounds == 1:
                self.costs.note_change(self._excess)
            self._excess, self._rounds = 0.0, 0
        self._in_rounds, self._left = not plain, False

    def _note_step(self, sequences: int, seconds: float) -> None:
        """Learn the time of a plain step.

        On a GPU it is the time from the end of the step before to its own; `seconds` is less where
        the reader of an answer keeps the host busy meanwhile.
        """
        found = self._between if self.verifier.runner.on_gpu else seconds
        if found is not None:
            self.costs.note_step(sequences, found)

    def _choose(
        self, sequences: list[Sequence], sent: Collection[Sent]
    ) -> VerifiedRound | MtpRound | Literal["plain", "read"]:
        """Choose the next step; see `choose`."""
        started = time.perf_counter()
        plan = self._plan(sequences)
        made = 0 if plan is None else plan.drafts
        self._idle = self.budget.limited and plan is not None and not made
        if plan is not None:
            self.resting = self._idle
        copies = self._proposals(sequences, 1.0 if plan is None else plan.gain)
        if self.mtp is not None and made:
            if 2 * sum(bool(ids) for ids, _ in copies) <= len(sequences):
                follows = self.mtp.follows(sequences, made)
                if sent and not follows:
                    return "read"
                _skip_copies(sequences, copies)
                if not self._in_rounds and self.budget.limited:
                    self.mtp.cache.skip(sequences)
                return MtpRound(self.mtp, sequences, made, first=not follows)
            copies = self._proposals(sequences, 1.0)
        promising = (self.blocks is not None and made) or any(ids for ids, _ in copies)
        if sent and (promising or any(isinstance(each, MtpRound) for each in sent)):
            return "read"
        _skip_copies(sequences, copies)
        if not self.resting:
            self._keep_up(sequences)
        parts = [] if sent else self._parts(sequences, copies, made)
        blocked = any(part.source == "block" for part in parts)
        if not any(part.drafts for part in parts):
            return "plain"
        return VerifiedRound(self.verifier, parts, started if blocked else None)

    def commit(self, step: Sent) -> Ended:
        """Wait for a step, append its tokens and learn from it; the sequences that end with it."""
        seen = isinstance(step, PlainStep) and not step.finished
        ended = step.commit()
        now = time.perf_counter() if seen else None
        before, self._ended_at = self._ended_at, now
        self._between = None if now is None or before is None else now - before
        self._learn(step)
        return ended

    def _learn(self, step: Sent) -> None:
        """Learn the costs of drafts from a step that has been read."""
        if isinstance(step, MtpRound):
            self.budget = end_trial(self.budget, step.right > 0)
            self._last_pace = step.sequences[0].drafts.pace or self._last_pace
            if step.seconds is not None:
                self.costs.note_head(step.drafts, len(step.sequences), step.seconds)
        elif isinstance(step, VerifiedRound):
            blocks = [part for part in step.parts if part.source == "block"]
            if blocks:
                self.budget = end_trial(self.budget, step.right > 0)
                self._last_pace = blocks[0].sequence.drafts.pace or self._last_pace
            if step.seconds is None:
                return
            if not blocks:
                self.costs.note_round(sum(len(part.ids) for part in step.parts), step.seconds)
            elif len(blocks) == len(step.parts):
                most = max(len(part.drafts) for part in blocks)
                self.costs.note_head(most, len(blocks), step.seconds)

    def foresee(self, sequences: Iterable[Sequence]) -> Ended:
        """Copy the constraints of sequences, and ask the copies for forced tokens.

        Args:
            sequences: whose constraints have accepted all tokens on the host.

        Returns:
            Sequences whose constraint failed.
        """
        failed: Ended = []
        for each in sequences:
            drafts, constraint = each.drafts, each.request.constraint
            drafts.ahead, drafts.forced = None, ()
            if constraint is None or each.ended or not each.limited:
                continue
            try:
                drafts.ahead = None if constraint.done else constraint.copy()
            except Exception as error:  # constraints may be foreign objects
                failed.append((each, explained(error)))
            if drafts.ahead is not None:
                drafts.forced = _forced(drafts.ahead, self.most + 1)
        return failed

    def _plan(self, sequences: Numbers[Sequence]) -> Plan | None:
        """Number of drafts that the MTP head or block drafter should make; None if it cannot."""
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
        if most == 0 or not self.costs.ready:
            return None
        chances = [pace.chances for pace in paces]
        most, cost = min(most, *map(len, chances)), self.costs.drafting(len(sequences))
        return plan_drafts(self.budget, chances, most, cost, self._change)

    @property
    def _change(self) -> float:
        """Cost of the change to rounds and back; 0 in rounds."""
        return 0.0 if self._in_rounds else self.costs.change

    def _proposals(self, sequences: Numbers[Sequence], least_gain: float) -> list[Proposal]:
        """Drafts of each sequence: tokens that its constraint forces, else n-gram drafts."""
        cost, most = self.costs.checking(len(sequences)), self._most(sequences)
        copies = self._most_copies(sequences)
        return [_propose(each, most, copies, cost, least_gain) for each in sequences]

    def _most_copies(self, sequences: Numbers[Sequence]) -> int:
        """Most n-gram drafts of a sequence, which may all be wrong."""
        if not self.costs.ready:
            return 0
        cost = self.costs.checking(len(sequences))
        return affordable(self.budget, self._most(sequences), cost, self._change)

    def _copying(self, sequences: Numbers[Sequence]) -> bool:
        """True if a sequence has n-gram drafts now; else the step passes without them."""
        if self.new_drafter is None or self._most_copies(sequences) == 0:
            return False
        copies = self._proposals(sequences, 1.0)
        if any(ids for ids, _ in copies):
            return True
        _skip_copies(sequences, copies)
        return False

    def _parts(
        self, sequences: list[Sequence], copies: Numbers[Proposal], blocked: int
    ) -> list[Part]:
        """Parts of a round; sequences without drafts get up to `blocked` of a block."""
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
        """Most drafts of a sequence, so that a step of all has at most ROUND_TOKENS tokens."""
        return min(self.most, ROUND_TOKENS // max(1, len(sequences)) - 1)

    def _keep_up(self, sequences: Numbers[Sequence]) -> None:
        """Let the MTP head catch up before its trail is overwritten."""
        if self.mtp is not None:
            for each in sequences:
                if each.drafts.pace is not None and behind(each) >= MOST_BEHIND:
                    self.mtp.cache.catch_up(each, most=MOST_BEHIND // 2)


def _predictable(sequence: Sequence) -> bool:
    """True if the MTP head or a block drafter may draft: no masks are needed soon."""
    return sequence.request.constraint is None or sequence.unbound >= LONG


def _most_drafts(sequence: Sequence, most: int) -> int:
    """Drafts that the request has tokens left for, up to `most`."""
    left = sequence.count - len(sequence.output) - sequence.drafts.due - 1
    return max(0, min(most, left))


def _most_free_drafts(sequence: Sequence, most: int) -> int:
    """Most drafts such that neither they nor the token behind them may need a mask."""
    if sequence.limited:
        sent = sequence.drafts.due or sequence.under_way
        free = 0 if sequence.masked else sequence.unbound - sent
        most = min(most, free - 1)
    return _most_drafts(sequence, most)


def _propose(sequence: Sequence, most: int, copies: int, cost: Cost, least_gain: float) -> Proposal:
    """Forced or copied drafts of one sequence; none, "copied", if its drafter found none.

    Args:
        sequence: without steps under way, or with those that drafts would wait for.
        most: drafts that the step has room for; forced ones are always right.
        copies: that may be wrong.
        cost: of checking drafts.
        least_gain: see `Drafter.propose`.
    """
    most, drafts = _most_drafts(sequence, most), sequence.drafts
    if most == 0 or (sequence.limited and drafts.ahead is None):
        return (), "none"
    if sequence.limited and (forced := drafts.forced[sequence.under_way :]):
        return forced[:most], "forced"
    if drafts.drafter is None or copies == 0:
        return (), "none"
    for token in sequence.output[drafts.told :]:
        drafts.drafter.append(token)
    drafts.told = len(sequence.output)
    return drafts.drafter.propose(min(copies, most), cost, least_gain), "copied"


def _skip_copies(sequences: Numbers[Sequence], copies: Numbers[Proposal]) -> None:
    """Tell n-gram drafters that found nothing that a step passes without their drafts."""
    for each, (ids, source) in zip(sequences, copies, strict=True):
        if source == "copied" and not ids and each.drafts.drafter is not None:
            each.drafts.drafter.skip()


def _allowed(sequence: Sequence, drafts: Numbers[int]) -> Numbers[int]:
    """Drafts before the first one that the constraint of a sequence refuses."""
    if not drafts or not sequence.limited or sequence.drafts.forced:
        return drafts
    ahead = sequence.drafts.ahead
    try:
        probe = None if ahead is None else ahead.copy()
    except Exception:  # foreign; a copy, so no request fails
        return ()
    if probe is None:
        return ()
    for count, draft in enumerate(drafts):
        try:
            probe.accept(draft)
        except Exception:  # foreign; a copy, so no request fails
            return drafts[:count]
    return drafts


def _forced(ahead: Constraint, most: int) -> tuple[int, ...]:
    """Tokens that a copy of a constraint forces next; none if it fails."""
    try:
        return tuple(ahead.forced(most))
    except Exception:  # foreign; a copy, so no request fails
        return ()


def new_drafting(runner: Runner, options: LoadOptions, drafts: int, device: str) -> Drafting | None:
    """Drafting of up to `drafts` tokens a step; None without speculation."""
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
        budget=Budget() if mode == "auto" else UNLIMITED,
    )
