"""Copies that join made drafts: when they stand alone, and how many there may be."""

import pytest

from lowbit.runtime.engine.draft.lookup import (
    AGREEING,
    ALONE,
    COPIED,
    Copy,
    copy_of,
    expected_tokens,
    rates_of,
)
from lowbit.runtime.engine.draft.ngram import NgramDrafter
from lowbit.runtime.engine.draft.policy import AcceptanceRates
from lowbit.runtime.engine.draft.state import DraftState


def state_of(text: list[int], rate: float = 0.5, drafts: int = 7) -> DraftState:
    return DraftState(NgramDrafter(text), rates=AcceptanceRates((rate,) * drafts))


@pytest.mark.parametrize(("length", "alone"), [(3, False), (ALONE - 1, False), (ALONE, True)])
def test_a_long_match_stands_alone(length: int, alone: bool) -> None:
    text = [*range(50), 77, *range(50 - length, 50)]
    found = copy_of(state_of(text), last=len(text) - 1)
    assert found is not None
    assert (found.start, found.alone) == (len(text), alone)
    assert found.ids[: 1 + length] == (77, *range(50 - length, 50))
    assert found.row(7) == (len(text), 0 if alone else AGREEING, *found.ids)
    assert found.row(1)[1] == (0 if alone else 1)
    assert len(found.ids) == COPIED


def test_without_a_match_nothing_is_copied() -> None:
    assert copy_of(state_of(list(range(50))), last=49) is None
    assert copy_of(DraftState(), last=49) is None


def test_copies_that_were_wrong_more_often_than_the_drafter_need_agreement() -> None:
    state = state_of(list(range(20)) * 2, rate=0.8)
    for _ in range(20):
        assert state.drafter is not None
        state.drafter.note(3, 0)
    found = copy_of(state, last=39)
    assert found is not None
    assert found.rate < 0.1
    assert not found.alone


def test_a_long_block_follows_two_full_rounds() -> None:
    state, copy = state_of(list(range(20)) * 2), Copy(40, (1,) * COPIED, 0.9, alone=True)
    for full, count in ((0, 7), (1, 7), (2, 15), (9, 15)):
        state.full = full
        assert rates_of(state, copy, 15) == [0.9] * count
        assert rates_of(state, None, 15) == [0.5] * 7
        assert rates_of(state, Copy(40, copy.ids, 0.9, alone=False), 15) == [0.5] * 7
    assert rates_of(state, copy, 3) == [0.9] * 7
    assert rates_of(DraftState(), copy, 15) == ()


def test_tokens_of_a_round_are_expected_by_its_rates() -> None:
    assert expected_tokens(()) == 1
    assert expected_tokens([0.5, 0.5]) == 1.75
