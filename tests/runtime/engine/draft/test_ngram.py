"""Drafts: where they come from, how many are made, and what is counted."""

import random
from collections.abc import Sequence
from itertools import takewhile

import pytest

from lowbit.runtime.engine.draft.ngram import (
    FORGET,
    GUESSES,
    LEAST_MATCH,
    LONGEST_MATCH,
    GrowingText,
    NgramDrafter,
)
from lowbit.runtime.engine.stats import OfSource, Source, Speculated, Tally


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


def test_copies_are_proposed_and_random_text_is_left_alone() -> None:
    draw = random.Random(5)
    lines = [draw.randrange(1000) for _ in range(200)]
    drafter = NgramDrafter(lines)
    steps, at, rates = 0, 0, []
    while at < len(lines):
        drafts, rate = drafter.propose(15)
        truth = lines[at : at + len(drafts)]
        right = sum(takewhile(bool, (a == b for a, b in zip(drafts, truth, strict=False))))
        if drafts:
            rates.append(rate)
            drafter.note(len(drafts), right)
        for id in lines[at : at + right + 1]:
            drafter.append(id)
        at += right + 1
        steps += 1
    assert steps < 30
    assert GUESSES[3] <= rates[0] < rates[-1] > 0.95
    assert not any(NgramDrafter(lines[:n]).propose(15)[0] for n in range(1, 200))


def test_wrong_copies_lower_the_rate_and_steps_without_them_bring_it_back() -> None:
    """Matches of this length alone count; asking changes nothing."""
    lines = list(range(20)) * 2
    drafter, short = NgramDrafter(lines), NgramDrafter([1, 2, 3, 4, 1, 2, 3])
    assert short.propose(4) == ([4, 1, 2, 3], GUESSES[3])
    found, first = drafter.propose(15)
    assert found
    assert first == GUESSES[12]
    for _ in range(40):
        drafter.note(3, 0)
    low = drafter.propose(15)[1]
    assert low < 0.01
    assert drafter.propose(15)[1] == low
    drafter.skip()
    assert drafter.propose(15)[1] == pytest.approx(low + FORGET * (first - low))
    for id in (50, 51, 52, 53, 50, 51, 52):
        drafter.append(id)
    assert drafter.propose(2) == ([53, 50], GUESSES[3])


def test_a_tally_counts_by_place() -> None:
    tally = Tally()
    for drafted, accepted in ((3, 1), (0, 0), (1, 1), (4, 4)):
        tally.count(drafted, accepted, "copied")
    # The last of the first three stood behind a wrong one.
    sources: dict[Source, OfSource] = {"copied": OfSource(3, 8, 7, 6)}
    assert tally == Tally(3, [3, 2, 2, 1], [3, 1, 1, 1], sources)
    assert tally.tokens_a_round == 1 + 6 / 3
    assert tally.speculated == Speculated(3, (3, 2, 2, 1), (3, 1, 1, 1), 3.0, sources)
    assert tally.speculated.words == "3.0 tokens a round"
    assert Tally().tokens_a_round is None
    assert Tally().speculated.words == ""
    both = Tally()
    both.count(1, 0, "drafter")
    both.add(tally.speculated)
    both.add(tally)
    assert both == Tally(
        7,
        [7, 4, 4, 2],
        [6, 2, 2, 2],
        {"drafter": OfSource(1, 1, 1, 0), "copied": OfSource(6, 16, 14, 12)},
    )
    assert tally.sources == sources
