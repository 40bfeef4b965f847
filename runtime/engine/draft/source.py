"""The source of drafts: chooses for every step between a plain one and a round.

Drafts come from the host (forced by a constraint, or copied) or are made on the device, by the
model's head or by a drafter, which excludes the head. A step has drafts of one of both: where most
sequences have drafts of the host, the others get none, else all get made ones. Copies also join the
drafts of a drafter (`lookup`).
"""

import time
from collections.abc import Collection, Iterable
from collections.abc import Sequence as Numbers
from dataclasses import dataclass, field
from typing import Literal

from torch import Tensor

from lowbit.runtime.engine.constraints import explained
from lowbit.runtime.engine.draft.block import BlockRounds, Blocks
from lowbit.runtime.engine.draft.lookup import Copy, copy_of, rates_of
from lowbit.runtime.engine.draft.made import MadeRound, MadeRounds
from lowbit.runtime.engine.draft.mtp import new_mtp_rounds
from lowbit.runtime.engine.draft.ngram import NewDrafter, NgramDrafter
from lowbit.runtime.engine.draft.policy import BURST, AcceptanceRates, Plan, Policy, new_costs
from lowbit.runtime.engine.draft.state import drafts_of
from lowbit.runtime.engine.draft.verify import (
    Part,
    VerifiedRound,
    Verifier,
    slots_after,
)
from lowbit.runtime.engine.graphs import most_drafts, width_for
from lowbit.runtime.engine.load_options import LoadOptions
from lowbit.runtime.engine.results import PendingStep
from lowbit.runtime.engine.runner import Runner
from lowbit.runtime.engine.sequence import Ended, Sequence
from lowbit.runtime.engine.stats import Source
from lowbit.runtime.text.constraint import Constraint
from lowbit.runtime.thresholds import EXACT_TOKENS, ROUND_SEQUENCES

BACKOFF = 7  # steps behind a plan without drafts, whose making takes the host some time
UNTIMED = 3  # steps behind a chunk of a prompt, or a recorded graph, whose time says nothing
LONG = 64  # tokens without a mask from which on drafts may be made

Proposal = tuple[Numbers[int], Source | None]


@dataclass(slots=True)
class Drafts:
    """Drafts for all sequences of an engine; a `DraftSource`."""

    verifier: Verifier  # checks drafts that the host knows
    most: int  # most drafts of a sequence in a step
    new_drafter: NewDrafter | None  # makes the n-gram drafter of a sequence; None without
    made: MadeRounds | None  # rounds by the model's head or a drafter; None without both
    policy: Policy  # says how many drafts pay
    # Made drafts would not pay by the last plan, or nothing is known yet, so that the head reads
    # the ends of prompts alone and does not keep up
    suspended: bool = field(init=False)
    _rates: AcceptanceRates = field(init=False)  # of the last sequence with checked drafts
    _backoff: int = 0  # plain steps for which nobody asks whether made drafts pay
    _ended_at: float | None = None  # when the last step ended; None if nobody saw it
    _untimed: int = 0  # steps to come whose time says nothing
    _crowded: bool = False  # the last step had more than ROUND_SEQUENCES sequences
    _recordings: int = 0  # of graphs, so far

    def __post_init__(self) -> None:
        """Begin with the guesses."""
        self.suspended = self.policy.limited  # until something shows that drafts pay
        guesses = () if self.made is None else self.made.guesses[: self.most]
        self._rates = AcceptanceRates(guesses)

    @property
    def positions(self) -> int:
        """See `DraftSource.positions`; a block may have fewer drafts than may be copied."""
        if self.made is None or self.new_drafter is not None:
            return self.most
        return min(self.most, len(self.made.guesses))

    def begin(self, sequence: Sequence) -> None:
        """Take up a sequence whose first token is being chosen."""
        self.policy.begin_request()
        self._backoff = 0
        state = drafts_of(sequence)
        if self.new_drafter is not None:
            state.drafter = self.new_drafter(sequence.request.prompt)
        if self.made is not None and _predictable(sequence):
            state.rates = self._rates.inherit()

    def read_prompt(self, sequence: Sequence, first: int, hidden: Tensor) -> None:
        """Show a part of a prompt to what makes drafts; see `MadeRounds.read_prompt`."""
        self._untimed = UNTIMED
        if self.made is not None and _predictable(sequence):
            self.made.read_prompt(sequence, first, hidden, self.suspended)

    def choose(
        self, sequences: list[Sequence], sent: Collection[PendingStep]
    ) -> VerifiedRound | MadeRound | Literal["plain", "read"]:
        """Choose the next step; see `DraftSource.choose`."""
        if not self.verifier.runner.on_gpu:
            self._ended_at = time.perf_counter()
        self._crowded = len(sequences) > ROUND_SEQUENCES
        if len(sequences) > EXACT_TOKENS:
            return self._plain_step(sent)
        plan, joined = None, list[Copy | None]()
        if self._backoff > 0:
            self._backoff -= 1
        else:
            joined = self._joined(sequences)
            plan = self._plan(sequences, joined)
        if plan is not None:
            self.suspended = self.policy.limited and plan.drafts == 0
        if self.made is not None and plan is not None and plan.drafts:
            copies = self._proposals(sequences, plan.gain)
            if 2 * sum(bool(ids) for ids, _ in copies) <= len(sequences):
                chosen = self._made_round(self.made, sequences, plan.drafts, joined, bool(sent))
                if chosen != "read":
                    _skip_copies(sequences, copies, joined)
                return chosen
        copies = self._proposals(sequences, 1.0)
        promising = any(ids for ids, _ in copies)
        if sent and (promising or any(isinstance(each, MadeRound) for each in sent)):
            return "read"
        _skip_copies(sequences, copies)
        if self.made is not None and not self.suspended:
            self.made.keep_up(sequences)
        parts = self._parts(sequences, copies) if promising else []
        if not any(part.drafts for part in parts):
            if plan is not None and self.suspended:
                self._backoff = BACKOFF
            self.policy.in_rounds = False
            return "plain"
        tokens = sum(len(part.ids) for part in parts)
        stake = self.policy.send("given", len(parts), tokens)
        return VerifiedRound(self.verifier, parts, stake)

    def _plain_step(self, sent: Collection[PendingStep]) -> Literal["plain", "read"]:
        """A plain step of more sequences than pass the layers together with exact inputs.

        The head does not keep up with so many; `auto` suspends it until few are left.
        """
        if any(isinstance(each, MadeRound) for each in sent):
            return "read"
        self.suspended = self.suspended or self.policy.limited
        self.policy.in_rounds = False
        return "plain"

    def _made_round(
        self,
        made: MadeRounds,
        sequences: list[Sequence],
        drafts: int,
        copies: Numbers[Copy | None],
        waiting: bool,
    ) -> MadeRound | Literal["read"]:
        """A round with made drafts; "read" if steps are under way that it does not follow.

        copies: that join them, for each sequence; () for none.
        """
        follows = made.follows(sequences, drafts)
        if waiting and not follows:
            return "read"
        if not self.policy.in_rounds and self.policy.limited:
            made.skip(sequences)
        steady = follows or not made.runner.on_gpu
        stake = self.policy.send("made", len(sequences), len(sequences) * (1 + drafts), steady)
        return MadeRound(made, sequences, drafts, not follows, stake, copies)

    def commit(self, step: PendingStep) -> Ended:
        """Wait for a step, append its tokens and learn from it; the sequences that end with it."""
        sequences, waited = step.sequences, not step.finished
        before = [len(each.output) for each in sequences]
        ended = step.commit()
        seconds = self._time(waited)
        if isinstance(step, MadeRound | VerifiedRound):
            if step.stake.kind == "made":
                self._rates = drafts_of(sequences[0]).rates or self._rates
            tokens = sum(len(each.output) for each in sequences) - sum(before)
            self.policy.read_round(step.stake, tokens / len(sequences), seconds)
        elif all(before):  # else its tokens follow prompts
            self.policy.read_plain(len(sequences), seconds)
        return ended

    def _time(self, waited: bool) -> float | None:
        """Seconds from the end of the step before to that of the step just read.

        None if the host has not waited for both, or if anything but them took time.
        """
        now = time.perf_counter() if waited else None
        before, self._ended_at = self._ended_at, now
        graphs = self.verifier.runner.graphs, self.verifier.graphs
        recordings = sum(each.recordings for each in graphs)
        if recordings != self._recordings:  # which take long
            self._recordings, self._untimed = recordings, UNTIMED
        if self._untimed:
            self._untimed -= 1
            return None
        return None if now is None or before is None else now - before

    def compute_forced_tokens(self, sequences: Iterable[Sequence]) -> Ended:
        """Copy the constraints of sequences, and ask the copies for forced tokens.

        Not beside many sequences, whose steps have no drafts.

        Returns:
            Sequences whose constraint failed.
        """
        failed: Ended = []
        for each in sequences:
            state, constraint = drafts_of(each), each.request.constraint
            state.ahead, state.forced = None, ()
            if self._crowded or constraint is None or each.ended or not each.constrained:
                continue
            try:
                state.ahead = None if constraint.done else constraint.copy()
            except Exception as error:  # constraints may be foreign objects
                failed.append((each, explained(error)))
            if state.ahead is not None:
                state.forced = _forced(state.ahead, self.most + 1)
        return failed

    def _joined(self, sequences: Numbers[Sequence]) -> list[Copy | None]:
        """Copies for each sequence that may join made drafts; [] where they join none."""
        if self.made is None or not self.made.joins or self.new_drafter is None:
            return []
        for each in sequences:
            _tell(each)
        return [copy_of(drafts_of(each), each.last) for each in sequences]

    def _plan(self, sequences: Numbers[Sequence], copies: Numbers[Copy | None]) -> Plan | None:
        """Number of drafts of each sequence that are to be made; None if they cannot be.

        copies: that join them, for each sequence; () for none.
        """
        most, states = self._most(sequences), [drafts_of(each) for each in sequences]
        pairs = zip(states, copies or [None] * len(states), strict=True)
        rates = [rates_of(state, copy, most) for state, copy in pairs]
        if self.made is None or not all(rates):
            return None
        most = min(_most_free_drafts(each, most) for each in sequences)
        spare = self.verifier.runner.spare
        if spare is not None:
            most = min(most, len(spare) // len(sequences))
        most = self.made.fitting(min(most, *map(len, rates)), len(sequences))
        if most == 0 or not self.policy.costs.ready:
            return None
        most = self.policy.affordable("made", len(sequences), most)
        cost = self.policy.costs.cost("made", len(sequences))
        return self.policy.plan(cost, rates, most, probe=True)

    def _proposals(self, sequences: Numbers[Sequence], least_gain: float) -> list[Proposal]:
        """Drafts of each sequence: tokens that its constraint forces, else n-gram drafts.

        least_gain: of the alternative (see `Plan`); copies below it are left out.
        """
        most = self._most(sequences)
        copies = self.policy.affordable("given", len(sequences), most)
        cost = self.policy.costs.cost("given", len(sequences))
        found = []
        for each in sequences:
            ids, source, rate = _propose(each, most, copies)
            if source == "copied" and ids:
                plan = self.policy.plan(cost, [[rate] * len(ids)], len(ids))
                ids = ids[: plan.drafts] if plan.gain > least_gain else ()
            found.append((ids, source))
        return found

    def _parts(self, sequences: list[Sequence], copies: Numbers[Proposal]) -> list[Part]:
        """Parts of a round with drafts of the host."""
        found = [
            (_allowed(each, ids), source)
            for each, (ids, source) in zip(sequences, copies, strict=True)
        ]
        counts = [len(ids) for ids, _ in found]
        slots = slots_after(self.verifier.runner.spare, sequences, counts)
        return [
            Part(each, tuple(ids[: len(writes) - 1]), writes, source if writes[1:] else None)
            for each, (ids, source), writes in zip(sequences, found, slots, strict=True)
        ]

    def _most(self, sequences: Numbers[Sequence]) -> int:
        """Most drafts of a sequence in a step of all; see `most_drafts`."""
        return most_drafts(max(1, len(sequences)), self.most)


def _predictable(sequence: Sequence) -> bool:
    """True if drafts may be made: no masks are needed soon."""
    return sequence.request.constraint is None or sequence.free_tokens >= LONG


def _most_drafts(sequence: Sequence, most: int) -> int:
    """Drafts that the request has tokens left for, up to `most`."""
    left = sequence.count - len(sequence.output) - drafts_of(sequence).due - 1
    return max(0, min(most, left))


def _most_free_drafts(sequence: Sequence, most: int) -> int:
    """Most drafts such that neither they nor the token behind them may need a mask."""
    if sequence.constrained:
        sent = drafts_of(sequence).due or sequence.under_way
        free = 0 if sequence.masked else sequence.free_tokens - sent
        most = min(most, free - 1)
    return _most_drafts(sequence, most)


def _propose(
    sequence: Sequence, most: int, copies: int
) -> tuple[Numbers[int], Source | None, float]:
    """Forced or copied drafts of one sequence, and how often such a draft is accepted.

    Args:
        sequence: without steps under way, or with those that drafts would wait for.
        most: drafts that the step has room for; forced ones are always right.
        copies: that may be wrong.
    """
    most, state = _most_drafts(sequence, most), drafts_of(sequence)
    if most == 0 or (sequence.constrained and state.ahead is None):
        return (), None, 0.0
    if sequence.constrained and (forced := state.forced[sequence.under_way :]):
        return forced[:most], "forced", 1.0
    if state.drafter is None or copies == 0:
        return (), None, 0.0
    _tell(sequence)
    ids, rate = state.drafter.propose(min(copies, most))
    return ids, "copied", rate


def _tell(sequence: Sequence) -> None:
    """Tell an n-gram drafter the tokens that it does not know yet."""
    state = drafts_of(sequence)
    if state.drafter is not None:
        for token in sequence.output[state.told :]:
            state.drafter.append(token)
        state.told = len(sequence.output)


def _skip_copies(
    sequences: Numbers[Sequence],
    copies: Numbers[Proposal],
    joined: Numbers[Copy | None] = (),
) -> None:
    """Tell n-gram drafters that found nothing that a step passes without their drafts.

    joined: copies that a round of made drafts checks beside them, for each sequence.
    """
    beside = joined or [None] * len(sequences)
    for each, (ids, source), copy in zip(sequences, copies, beside, strict=True):
        drafter = drafts_of(each).drafter
        if source == "copied" and not ids and copy is None and drafter is not None:
            drafter.skip()


def _allowed(sequence: Sequence, drafts: Numbers[int]) -> Numbers[int]:
    """Drafts before the first one that the constraint of a sequence refuses."""
    state = drafts_of(sequence)
    if not drafts or not sequence.constrained or state.forced:
        return drafts
    ahead = state.ahead
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
    try:
        return tuple(ahead.forced(most))
    except Exception:  # foreign; a copy, so no request fails
        return ()


def new_drafts(runner: Runner, options: LoadOptions, drafts: int, device: str) -> Drafts | None:
    """Drafts of up to `drafts` tokens a step; None without speculation."""
    mode, drafter = options.speculate, runner.blocks
    if mode == "off":
        return None
    verifier = Verifier(runner)
    width = width_for if runner.on_gpu else None
    costs = new_costs(device, mode == "auto", width, drafter is not None)
    made: MadeRounds | None = new_mtp_rounds(verifier)
    if isinstance(drafter, Blocks):
        made = BlockRounds(verifier, drafter)
    return Drafts(
        verifier=verifier,
        most=drafts,
        new_drafter=NgramDrafter if mode in ("ngram", "auto") else None,
        made=made,
        policy=Policy(costs, BURST) if mode == "auto" else Policy(costs),
    )
