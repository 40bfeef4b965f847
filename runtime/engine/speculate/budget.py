"""Budget: bounds what drafts may lose against plain decoding, whatever the text.

The unit is the time of a plain step, which gives every sequence a token. Drafts that save time fill
the budget, wrong ones empty it, and every step adds SHARE of its time up to BURST steps. A round
is sent only if the budget covers it with all drafts wrong.

**Bound.** Let N tokens of every sequence take the time T. A step of time t that gives n tokens
changes the level by at most SHARE t - (t - n), so the level at the end is at most
BURST + SHARE T - (T - N). It is never below -e, where e is what the last round took beyond its
estimate. Hence

    T <= (N + BURST + e) / (1 - SHARE),

for every request, since each begins with BURST steps at most: 256 tokens take 259.3 steps, 0.987 of
the speed of plain decoding, and long answers approach 0.995. Of a request that follows others whose
drafts were wrong, BURST is spent already. The recording of CUDA graphs, once for each size, is not
counted.

**Trials.** Where drafts do not pay by what was learnt, one is tried now and then. After a wrong one
the pause doubles, from FIRST_PAUSE to LONGEST_PAUSE steps; after a right one there is none.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

from lowbit.runtime.engine.speculate.proposals import MARGIN, Cost, Plan, common_plan

BURST = 2.0  # steps
SHARE = 0.005  # of all time
MOST_WON = 12.0  # steps that drafts have saved and may lose again in the same request
FIRST_PAUSE, LONGEST_PAUSE = 8, 128  # steps


@dataclass(frozen=True, slots=True)
class Budget:
    """Time that drafts may still lose, and the pause before the next trial.

    Attributes:
        level: steps that may be lost; infinite where drafts are not limited.
        pause: steps without drafts between two trials.
        waited: steps without drafts since the last trial.
    """

    level: float = BURST
    pause: int = 0
    waited: int = 0

    @property
    def limited(self) -> bool:
        """True if drafts may not lose more than the level."""
        return self.level < math.inf

    @property
    def due(self) -> bool:
        """True if it is time for a trial."""
        return self.waited >= self.pause


UNLIMITED = Budget(level=math.inf)


def spend(budget: Budget, time: float, tokens: float) -> Budget:
    """Count a step with drafts.

    Args:
        budget: before it.
        time: that it took, in plain steps.
        tokens: that it gave each sequence.
    """
    if not budget.limited:
        return budget
    level = min(MOST_WON, budget.level - time + tokens)
    return replace(budget, level=_with_share(level, time))


def wait(budget: Budget) -> Budget:
    """Count a step without drafts."""
    return Budget(_with_share(budget.level, 1.0), budget.pause, budget.waited + 1)


def _with_share(level: float, time: float) -> float:
    """The level with its share of a time; the share never lifts it above BURST."""
    return max(level, min(BURST, level + SHARE * time))


def begin_trial(budget: Budget) -> Budget:
    """Begin the pause behind a round whose result is not known yet."""
    return replace(budget, waited=0, pause=max(budget.pause, 1))


def end_trial(budget: Budget, right: bool) -> Budget:
    """Choose the pause by a result: none if a draft was right, else twice the one before."""
    if right:
        return replace(budget, pause=0)
    return replace(budget, waited=0, pause=min(LONGEST_PAUSE, max(FIRST_PAUSE, 2 * budget.pause)))


def begin_request(budget: Budget) -> Budget:
    """Take over the budget for another text: it may differ, so a trial comes soon."""
    level = min(budget.level, BURST) if budget.limited else budget.level
    return replace(budget, level=level, pause=min(budget.pause, FIRST_PAUSE))


def affordable(budget: Budget, most: int, cost: Cost, change: float = 0.0) -> int:
    """Most drafts, up to `most`, whose failure the budget covers.

    Args:
        budget: at present.
        most: drafts.
        cost: of a round by drafts, in plain steps; does not fall.
        change: cost of the change from plain steps to rounds and back.
    """
    if most == 0 or cost(1) - 1 + change > budget.level:  # often, so that it must be quick
        return 0
    return next(k for k in range(most, 0, -1) if cost(k) - 1 + change <= budget.level)


def plan_drafts(
    budget: Budget, chances: Sequence[Sequence[float]], most: int, cost: Cost, change: float = 0.0
) -> Plan:
    """Number of drafts for the next step: those that pay most, else one if a trial is due.

    Args:
        budget: at present.
        chances: see `common_plan`.
        most: drafts.
        cost: see `affordable`.
        change: see `affordable`.
    """
    within = affordable(budget, most, cost, change)
    least = 1.0 if budget.limited else MARGIN  # a budget covers wrong guesses of costs
    plan = common_plan(chances, within, cost, least)
    if plan.drafts == 0 and within and budget.due:
        return Plan(drafts=1)
    return plan
