"""Drafts: where they come from, how many are made, and what is counted."""

import random
from collections.abc import Sequence
from itertools import takewhile

import pytest

from lowbit.runtime.engine.speculate.proposals import (
    LEAST_MATCH,
    LONGEST_MATCH,
    MARGIN,
    Cost,
    Costs,
    GrowingText,
    Line,
    NgramDrafter,
    Pace,
    PlacedPace,
    Plan,
    common_plan,
    new_costs,
)
from lowbit.runtime.engine.stats import Speculated, Tally


def best_plan(chances: list[float], cost: Cost) -> Plan:
    """The plan for one sequence."""
    return common_plan([chances], len(chances), cost)


def linear_cost(slope: float) -> Cost:
    return lambda drafts: 1 + slope * drafts


def longest_match(ids: Sequence[int]) -> tuple[int, int] | None:
    """Length and stop of the match, by trying every place and every length."""
    best = (0, 0)
    for stop in range(1, len(ids)):
        length = 0
        end = min(stop, LONGEST_MATCH)
        while length < end and ids[stop - 1 - length] == ids[len(ids) - 1 - length]:
            length += 1
        best = max(best, (length, stop))
    return best if best[0] >= LEAST_MATCH else None


@pytest.mark.parametrize("kinds", [2, 3, 8])
def test_the_longest_match_wins_and_of_equals_the_last(kinds: int) -> None:
    draw = random.Random(kinds)
    ids = [draw.randrange(kinds) for _ in range(draw.randrange(1, 5))]
    text, found = GrowingText(ids), 0
    for _ in range(150):
        match, expected = text.match(), longest_match(ids)
        assert (match and (match.length, match.stop)) == expected
        found += expected is not None
        if match is not None:
            grown = list(ids)
            for id in text.following(match, 40):
                assert id == grown[match.stop + len(grown) - len(ids)]
                grown.append(id)
        ids.append(draw.randrange(kinds))
        text.append(ids[-1])
    assert found > 10
    assert len(text) == len(ids)


def test_a_text_of_one_token_has_no_match() -> None:
    assert GrowingText([7]).match() is None
    assert GrowingText([7, 7]).match() is None


@pytest.mark.parametrize("chance", [0.0, 0.05, 0.2, 0.5, 0.8, 0.95, 1.0])
@pytest.mark.parametrize("slope", [0.02, 0.1, 0.4])
def test_as_many_drafts_as_give_the_most_tokens_for_their_time(chance: float, slope: float) -> None:
    cost, most = linear_cost(slope), 15
    speeds = [
        sum(chance**right for right in range(drafts + 1)) / (1 + slope * drafts)
        for drafts in range(most + 1)
    ]
    count = Pace(chance).plan(most, cost).drafts
    assert speeds[count] == pytest.approx(max(speeds)) if max(speeds) > MARGIN else count == 0
    assert Pace(chance).plan(0, cost).drafts == 0


def test_wrong_drafts_stop_and_are_tried_again_later() -> None:
    pace, cost, tried = Pace(0.7), linear_cost(0.2), []
    for step in range(2000):
        if count := pace.plan(15, cost).drafts:
            tried.append(step)
            pace.note(count, 0)
        else:
            pace.skip()
    assert len([step for step in tried if step < 100]) <= 20
    assert 5 <= len([step for step in tried if step >= 1000]) <= 100  # of a thousand steps


def test_right_drafts_grow() -> None:
    pace, cost = Pace(0.5), linear_cost(0.1)
    counts = []
    for _ in range(30):
        counts.append(pace.plan(15, cost).drafts)
        pace.note(counts[-1], counts[-1])
    assert counts[0] < 4
    assert counts[-1] == 15
    assert counts == sorted(counts)


def test_places_are_told_apart() -> None:
    """The first is right four times in five, the second in half of these, the third never."""
    draw, pace, cost = random.Random(3), PlacedPace((0.5, 0.5, 0.5)), linear_cost(0.2)
    for _ in range(2000):
        right = 0 if draw.random() < 0.2 else 1 if draw.random() < 0.5 else 2
        pace.note(3, right)
    assert pace.chances[0] == pytest.approx(0.8, abs=0.25)
    assert pace.chances[1] == pytest.approx(0.5, abs=0.3)
    assert pace.chances[2] < 0.01
    plan = best_plan(pace.chances, cost)
    assert plan.drafts in (1, 2)
    assert plan.gain > 1.3
    three = common_plan([pace.chances] * 3, 3, cost)
    assert three.drafts == plan.drafts
    assert three.gain == pytest.approx(plan.gain)
    assert common_plan([pace.chances] * 3, 1, cost).drafts == 1
    # of one that is always right and one that never is, half the gain of the first alone
    both = common_plan([[1.0] * 3, [0.0] * 3], 3, cost)
    assert both.gain == pytest.approx((4 + 1) / 2 / 1.6)
    before = list(pace.chances)
    pace.note(1, 1)
    assert pace.chances[0] > before[0]
    assert pace.chances[1] > before[1]  # so that it is tried some time
    assert pace.chances[2] == before[2]  # nothing was said of it
    before = list(pace.chances)
    pace.note(1, 0)
    assert pace.chances[1:] == before[1:]


def test_costs_are_learnt_from_steps() -> None:
    """A token takes 10 ms, each further one 2; a round 5 more, and by the head 3 a draft."""
    costs = Costs(Line(0.5, 0.5), Line(0.5, 0.5), measured=True)
    for number in range(400):
        late = 50.0 if number % 10 == 0 else 1.0  # something held the device up
        drafts = 1 + number % 4
        costs.note_step(1, 0.010 * late)
        costs.note_round(1 + drafts, (0.015 + 0.002 * drafts) * late)
        costs.note_head(drafts, 1, (0.010 + 0.003 * drafts) * late)
    for drafts in (1, 4):
        assert costs.checking(1)(drafts) == pytest.approx(1.5 + 0.2 * drafts, rel=0.2)
        assert costs.drafting(1)(drafts) == pytest.approx(1 + 0.3 * drafts, rel=0.2)


def test_the_first_steps_give_the_unit_by_the_fastest() -> None:
    costs = Costs(Line(0.1, 0.2), Line(0.1, 0.3), measured=True)
    for seconds in (0.5, 0.010, 0.012):
        assert not costs.ready
        assert costs.in_steps(1, 0.02) is None
        costs.note_step(1, seconds)
    assert costs.ready
    assert costs.in_steps(1, 0.02) == pytest.approx(2.0)
    assert costs.in_steps(2, 0.02) == pytest.approx(2.0 / 1.2)  # a step of two tokens takes longer
    assert costs.in_steps(1, None) is None
    assert Costs(Line(0.1, 0.2), Line(0.1, 0.3)).ready


def test_the_cost_of_a_change_is_learnt() -> None:
    costs = new_costs("cuda", measured=True)
    for number in range(60):
        costs.note_change(90.0 if number % 20 == 0 else 0.8)  # now and then held up
    assert costs.change == pytest.approx(0.8, abs=0.1)
    for _ in range(60):
        costs.note_change(-0.5)
    assert costs.change == pytest.approx(0.0, abs=0.01)
    fixed = new_costs("cuda", measured=False)
    fixed.note_change(5.0)
    assert fixed.change == 0.0


def test_costs_of_several_sequences_are_those_of_their_tokens() -> None:
    costs = Costs(Line(0.5, 0.2), Line(0.1, 0.3), width=lambda tokens: -(-tokens // 4) * 4)
    # three with two drafts each: nine tokens that take twelve, against three that take four
    assert costs.checking(3)(2) == pytest.approx((1.5 + 11 * 0.2) / (1 + 3 * 0.2))
    assert costs.drafting(3)(2) == pytest.approx((1.1 + 9 * 0.3) / (1 + 3 * 0.2))
    assert costs.checking(1)(1) == costs.checking(1)(3) < costs.checking(1)(4)


def test_costs_stay_where_nobody_measures() -> None:
    costs = new_costs("cpu", measured=False)
    first = (costs.checking(1)(4), costs.drafting(1)(4))
    costs.note_step(1, 1.0)
    costs.note_round(4, 9.0)
    costs.note_head(4, 1, 9.0)
    assert (costs.checking(1)(4), costs.drafting(1)(4)) == first


def test_copies_are_proposed_and_random_text_is_left_alone() -> None:
    draw = random.Random(5)
    lines = [draw.randrange(1000) for _ in range(200)]
    drafter = NgramDrafter(lines)
    steps, at = 0, 0
    while at < len(lines):
        drafts = list(drafter.propose(15, linear_cost(0.1)))
        truth = lines[at : at + len(drafts)]
        right = sum(takewhile(bool, (a == b for a, b in zip(drafts, truth, strict=False))))
        if drafts:
            drafter.note(len(drafts), right)
        for id in lines[at : at + right + 1]:
            drafter.append(id)
        at += right + 1
        steps += 1
    assert steps < 30
    assert not any(NgramDrafter(lines[:n]).propose(15, linear_cost(0.1)) for n in range(1, 200))


def test_asking_for_copies_changes_nothing() -> None:
    """Only a step that goes by without them brings back a drafter that was wrong."""
    lines = list(range(20)) * 2
    drafter, cost = NgramDrafter(lines), linear_cost(0.3)
    expected = list(drafter.propose(15, cost))
    assert expected
    while drafter.propose(15, cost):
        drafter.note(1, 0)
    assert not any(drafter.propose(15, cost) for _ in range(5000))
    skipped = 0
    while not drafter.propose(15, cost):
        drafter.skip()
        skipped += 1
    assert 0 < skipped < 5000


def test_a_tally_counts_by_place() -> None:
    tally = Tally()
    for drafted, accepted in ((3, 1), (0, 0), (1, 1), (4, 4)):
        tally.count(drafted, accepted)
    assert tally == Tally(3, [3, 2, 2, 1], [3, 1, 1, 1])
    assert tally.tokens_a_round == 1 + 6 / 3
    assert tally.speculated == Speculated(3, (3, 2, 2, 1), (3, 1, 1, 1), 3.0)
    assert tally.speculated.words == "3.0 tokens a round"
    assert Tally().tokens_a_round is None
    assert Tally().speculated.words == ""
    both = Tally(1, [1], [0])
    both.add(tally.speculated)
    assert both == Tally(4, [4, 2, 2, 1], [3, 1, 1, 1])
