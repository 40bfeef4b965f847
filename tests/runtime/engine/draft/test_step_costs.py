"""Costs of rounds in plain steps, as they are measured, forgotten and estimated."""

from typing import get_args

import pytest

from lowbit.runtime.engine.draft.policy import (
    BURST,
    LAST_ROUNDS,
    Kind,
    Policy,
    StepCosts,
    new_costs,
)

KINDS: tuple[Kind, ...] = get_args(Kind)


def learned(measured: bool = True, late: float = 1.0) -> StepCosts:
    """A token takes 10 ms, a given round of n tokens 13 + 2 n, a draft of a head 3 more."""
    costs = new_costs("cuda", measured)
    for number in range(400):
        held = late if number % 10 == 0 else 1.0
        drafts = 1 + 2 * (number % 2)
        costs.note("plain", 1, 1, 0.010 * held)
        costs.note("given", 1, 1 + drafts, (0.013 + 0.002 * (1 + drafts)) * held)
        costs.note("made", 1, 1 + drafts, (0.010 + 0.003 * drafts) * held)
    return costs


@pytest.mark.parametrize("late", [1.0, 50.0])
def test_costs_are_learned_from_steps(late: float) -> None:
    costs = learned(late=late)
    for drafts in (1, 2, 3):  # of which the second was not measured
        assert costs.cost("given", 1)(drafts) == pytest.approx(1.5 + 0.2 * drafts, rel=0.12)
        assert costs.cost("made", 1)(drafts) == pytest.approx(1 + 0.3 * drafts, rel=0.12)
    assert costs.in_steps(1, 0.030) == pytest.approx(3.0, rel=0.12)
    beyond = costs.cost("made", 1)(5)  # grows, by less than up to there
    assert 1.9 < beyond < 2.5


def test_a_lone_round_that_was_held_up_does_not_count() -> None:
    costs, guess = new_costs("cuda", True), new_costs("cuda", True)
    for each in (costs, guess):
        for _ in range(3):
            each.note("plain", 1, 1, 0.010)
    costs.note("made", 1, 4, 0.5)
    assert costs.time("made", 1, 4) == guess.time("made", 1, 4)
    for seconds, found in ((0.021, 0.021), (0.022, 0.022), (0.023, 0.022), (0.5, 0.023)):
        costs.note("made", 1, 4, seconds)
        assert costs.time("made", 1, 4) == found
    costs.note("made", 1, 2, 0.0105)  # faster than the estimate, at once
    assert costs.time("made", 1, 2) == 0.0105
    costs.note("made", 1, 8, 0.0)  # as a coarse clock has it
    assert costs.time("made", 1, 8) == 0.010


def test_rounds_that_nobody_sends_any_more_are_forgotten() -> None:
    costs, guess = learned(), new_costs("cuda", True)
    dear = {drafts: costs.time("made", 1, 1 + drafts) for drafts in (1, 3)}
    for _ in range(20):
        costs.note("made", 1, 2, dear[1])
        costs.forget_some()
    assert costs.time("made", 1, 2) == dear[1]  # is sent
    assert costs.time("made", 1, 4) != dear[3]
    for _ in range(20):
        costs.forget_some()
    ratio = guess.time("made", 1, 4) / guess.time("plain", 1, 1)
    assert costs.cost("made", 1)(3) == pytest.approx(ratio)


def test_other_numbers_of_sequences_are_scaled_by_what_is_known() -> None:
    costs, guess = learned(), new_costs("cuda", True)
    for kind in KINDS:
        tokens = 1 if kind == "plain" else 4
        near, assumed = (each.time(kind, 1, tokens) for each in (costs, guess))
        assert costs.time(kind, 3, 4) == pytest.approx(guess.time(kind, 3, 4) * near / assumed)


def test_costs_stay_where_nobody_measures() -> None:
    costs, guess = learned(measured=False), new_costs("cuda", False)
    assert costs.ready
    for kind in KINDS:
        found, first = costs.cost(kind, 2), guess.cost(kind, 2)
        assert [found(k) for k in range(8)] == [first(k) for k in range(8)]
    costs.note_change(5.0)
    assert costs.change == 0.0


def test_padding_costs_as_tokens_do() -> None:
    costs = new_costs("cuda", False, width=lambda tokens: -(-tokens // 4) * 4)
    assert costs.cost("given", 1)(1) == costs.cost("given", 1)(3) < costs.cost("given", 1)(4)


def test_the_first_steps_give_the_unit_by_the_fastest() -> None:
    costs = new_costs("cuda", True)
    for seconds in (0.5, 0.010, 0.012):
        assert not costs.ready
        assert Policy(costs).affordable("made", 1, 3) == 0
        costs.note("plain", 1, 1, seconds)
    assert costs.ready
    assert costs.in_steps(1, 0.02) == pytest.approx(2.0)


def test_the_cost_of_a_change_is_learned() -> None:
    costs = new_costs("cuda", True)
    for number in range(60):
        costs.note_change(90.0 if number % 20 == 0 else 0.8)  # now and then held up
    assert costs.change == pytest.approx(0.8, abs=0.1)
    for _ in range(60):
        costs.note_change(-0.5)
    assert costs.change == pytest.approx(0.0, abs=0.01)


def test_rounds_between_plain_steps_are_timed_where_each_waits_for_the_host() -> None:
    """A head's first round takes longer than those that follow it; a copied one does not."""
    costs = learned()
    kinds: tuple[tuple[Kind, bool], ...] = (("given", True), ("made", False))
    for kind, learns in kinds:
        policy = Policy(costs, BURST)
        before = costs.time(kind, 1, 4)
        for _ in range(LAST_ROUNDS):
            policy.in_rounds = False
            policy.read_round(policy.send(kind, 1, 4), 4, 1.5 * before)
        assert (costs.time(kind, 1, 4) > before) == learns
        for _ in range(LAST_ROUNDS):
            policy.read_round(policy.send(kind, 1, 4), 4, 1.5 * before)
        assert costs.time(kind, 1, 4) > before


def test_first_guesses_of_a_drafters_rounds_are_near_those_of_an_h200() -> None:
    """Rounds of an 8B with DFlash in plain steps of as many sequences, exact and in eight bits."""
    measured = {
        (1, 3): (1.65, 1.51), (1, 7): (1.87, 1.51), (1, 15): (2.12, 1.72),
        (4, 1): (1.63, 1.47), (4, 3): (1.81, 1.62), (4, 7): (2.39, 2.17), (4, 15): (3.66, 2.86),
        (8, 1): (1.56, 1.63), (8, 3): (2.04, 2.14), (8, 7): (3.13, 2.84),
        (16, 1): (1.89, 1.98), (16, 3): (3.00, 2.68),
    }  # fmt: skip
    costs = new_costs("cuda", False, drafter=True)
    for (sequences, drafts), (exact, coded) in measured.items():
        found = costs.cost("made", sequences)(drafts)
        assert 0.87 * min(exact, coded) < found < 1.12 * max(exact, coded), (sequences, drafts)
