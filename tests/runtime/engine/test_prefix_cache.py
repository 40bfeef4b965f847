"""Kept prefixes: what a prompt takes over, who owns pages and snapshots, who goes first."""

import random
from collections.abc import Sequence

import numpy as np
import pytest

from lowbit.formats.page_counts import PAGE, pages_for
from lowbit.runtime.engine.plan import CHUNK, Capacity
from lowbit.runtime.engine.prefix_cache import (
    BLOCK,
    MOST_PREFIXES,
    Hit,
    Prefix,
    PrefixCache,
    _common,
    new_prefix,
    shared_pages,
)
from lowbit.runtime.engine.scheduler import BlockManager
from lowbit.runtime.state.pool import Pool

PROMPT = 200
IDS = list(range(1000, 1000 + 300))
CUTS = (70, 150)


@pytest.fixture
def pools() -> tuple[Pool, Pool]:
    """Pages, and slots for snapshots."""
    return Pool(40), Pool(7, first=3)


def held(
    cache: PrefixCache,
    pools: tuple[Pool, Pool],
    ids: Sequence[int],
    chunk_ends: Sequence[int] = (),
    snapshots: Sequence[int] = (),
    decoded: int | None = None,
) -> Prefix:
    """Insert the prefix of a sequence that has ended, of which the cache alone owns the pages."""
    decoded = len(ids) if decoded is None else decoded
    pages = pools[0].take(pages_for(len(ids)))
    prefix = new_prefix(ids, pages, chunk_ends, decoded, decoded)
    prefix.snapshots = {at: slot for at in snapshots if (slot := cache.take_snapshot()) is not None}
    cache.insert(prefix)
    pools[0].drop(pages)
    return prefix


def test_what_a_prompt_may_take_over() -> None:
    prefix = new_prefix(IDS, list(range(1, 6)), CUTS, PROMPT, PROMPT)
    takes = {69: 0, 70: 70, 149: 70, 150: 150, 199: 150, 200: 150, 201: 201, 300: 300}
    assert {n: prefix.reusable(n, False, CUTS) for n in takes} == takes
    assert prefix.reusable(300, False, (70, 150, 260)) == 300  # a cut that was never made
    assert prefix.reusable(300, False, (70, 140)) == 70  # from there on its chunks are others
    assert prefix.reusable(300, False, (60, 150)) == 0
    assert prefix.reusable(100, False) == 70
    assert prefix.reusable(200, False) == 200  # logits take what there is
    prefix.snapshots = {70: 9, 299: 8, 180: 7}
    takes = {69: 0, 199: 70, 298: 70, 299: 299}
    assert {n: prefix.reusable(n, True, CUTS) for n in takes} == takes
    assert prefix.reusable(199, True) == 180


def test_what_may_be_taken_over_is_what_a_plain_search_finds() -> None:
    """Random cuts and snapshots: up to `fresh` both must have been cut alike."""
    draw = random.Random(3)

    def plain(prefix: Prefix, shared: int, recurrent: bool, cuts: Sequence[int]) -> int:
        lengths = set(prefix.snapshots if recurrent else prefix.chunk_ends)
        if not recurrent and shared >= prefix.decoded:
            lengths.add(shared)
        for n in sorted(lengths, reverse=True):
            own, others = (
                {c for c in ends if c <= min(n, prefix.fresh)} for ends in (prefix.chunk_ends, cuts)
            )
            if n <= shared and (n > prefix.fresh or n in cuts) and own == others:
                return n
        return 0

    found = set()
    for _ in range(2000):
        own_cuts, cuts = (sorted(draw.sample(range(1, 12), draw.randrange(5))) for _ in range(2))
        if draw.random() < 0.6:
            cuts = own_cuts[: draw.randrange(5)] + [c for c in cuts if c > 6]
        fresh, decoded = draw.randrange(13), draw.randrange(13)
        prefix = new_prefix(range(12), [1], own_cuts, decoded, fresh)
        prefix.snapshots = dict.fromkeys(draw.sample(range(1, 13), 3), 0)
        shared, recurrent = draw.randrange(13), draw.random() < 0.5
        expected = plain(prefix, shared, recurrent, sorted({*cuts}))
        assert prefix.reusable(shared, recurrent, sorted({*cuts})) == expected
        found.add(expected)
    assert found == set(range(13))


def test_keys_are_compared_to_the_first_that_differs() -> None:
    """Whichever block it is in."""
    keys = np.arange(2 * BLOCK + 5)
    for at in (0, 1, BLOCK - 1, BLOCK, BLOCK + 1, 2 * BLOCK, len(keys) - 1):
        other = keys.copy()
        other[at] = -1
        assert _common(keys, other) == _common(keys, keys[:at]) == at
    assert _common(keys, keys) == len(keys)
    assert _common(keys[:0], keys) == 0


def test_the_longest_hit_wins_and_leaves_room_for_a_token(pools: tuple[Pool, Pool]) -> None:
    cache = PrefixCache(*pools, recurrent=False)
    held(cache, pools, [*IDS[:150], 1, 2], CUTS)
    second = held(cache, pools, [*IDS[:160], 3, 4], CUTS, decoded=160)
    third = held(cache, pools, IDS[:80], CUTS[:1])
    assert len(cache) == 3
    hit = cache.find(IDS, 299, CUTS)
    assert hit is not None
    assert hit.length == 150
    assert hit.prefix is not third
    assert cache.find([*IDS[:160], 3, 4, 5], 162, CUTS) == Hit(second, 162)
    short = cache.find(IDS[:150], 149, CUTS)
    assert short is not None
    assert short.length == 70
    assert cache.find([5, *IDS], 300, CUTS) is None


def test_a_longer_prefix_takes_the_place_of_those_it_begins_with(
    pools: tuple[Pool, Pool],
) -> None:
    cache = PrefixCache(*pools, recurrent=True)
    held(cache, pools, [*IDS[:70], 5], CUTS[:1])
    held(cache, pools, IDS[:70], CUTS[:1], [70])
    whole = held(cache, pools, IDS, CUTS, [150], decoded=PROMPT)
    assert len(cache) == 2
    assert sorted(whole.snapshots) == [70, 150]
    assert pools[0].free == 39 - pages_for(len(IDS)) - 2
    cache.clear()
    assert (pools[0].free, pools[1].free) == (39, 4)


def test_one_of_other_chunks_does_not(pools: tuple[Pool, Pool]) -> None:
    cache = PrefixCache(*pools, recurrent=False)
    short = held(cache, pools, IDS[:70], CUTS[:1])
    held(cache, pools, IDS, (33,))
    assert len(cache) == 2
    assert cache.find(IDS, 299, CUTS) == Hit(short, 70)


def test_the_last_page_is_copied_where_the_prompt_goes_on_in_it() -> None:
    prefix = new_prefix(IDS, [5, 4, 9, 8, 7, 6], CUTS, PROMPT, PROMPT)
    assert prefix.pages == [5, 4, 9, 8, 7]
    assert shared_pages(Hit(prefix, 2 * PAGE)) == ([5, 4], None)
    assert shared_pages(Hit(prefix, 2 * PAGE + 1)) == ([5, 4], 9)
    assert shared_pages(Hit(prefix, 1)) == ([], 5)


def test_the_least_recently_used_goes_first(pools: tuple[Pool, Pool]) -> None:
    cache = PrefixCache(*pools, recurrent=False)
    texts = [[n, *IDS[:PAGE]] for n in range(4)]
    for text in texts:
        held(cache, pools, text, (PAGE,))
    assert pools[0].free == 39 - 8
    assert cache.find(texts[0], PAGE, (PAGE,)) is not None
    assert cache.make_room(33)
    assert pools[0].free == 33
    assert [cache.find(text, PAGE, (PAGE,)) is None for text in texts] == [0, 1, 0, 0]
    assert cache.make_room(33)
    assert len(cache) == 3


def test_nothing_is_given_back_where_it_would_not_suffice(pools: tuple[Pool, Pool]) -> None:
    cache = PrefixCache(*pools, recurrent=False)
    prefix = held(cache, pools, IDS, CUTS)
    free = pools[0].free
    pools[0].share(prefix.pages[:2])  # by a sequence that runs
    assert not cache.make_room(38)
    assert (len(cache), pools[0].free) == (1, free)
    pools[0].drop(prefix.pages[:2])
    assert cache.make_room(39)
    assert len(cache) == 0


def test_snapshots_of_the_least_recently_used_go_first(pools: tuple[Pool, Pool]) -> None:
    cache = PrefixCache(*pools, recurrent=True)
    first = held(cache, pools, [1, *IDS], CUTS, [70, 150])
    second = held(cache, pools, [2, *IDS], CUTS, [70, 150])
    assert pools[1].free == 0
    assert cache.find([1, *IDS], 150, CUTS) == Hit(first, 150)
    assert cache.take_snapshot() is not None
    assert (len(first.snapshots), len(second.snapshots)) == (2, 1)
    assert list(second.snapshots) == [150]  # the end of a conversation is worth more
    for _ in range(3):
        assert cache.take_snapshot() is not None
    assert not first.snapshots
    assert not second.snapshots
    assert cache.take_snapshot() is None


def test_there_are_never_too_many(pools: tuple[Pool, Pool]) -> None:
    pages = Pool(2 * MOST_PREFIXES)
    cache = PrefixCache(pages, pools[1], recurrent=False)
    for number in range(MOST_PREFIXES + 3):
        held(cache, (pages, pools[1]), [number, 5])
    assert len(cache) == MOST_PREFIXES
    assert pages.free == 2 * MOST_PREFIXES - 1 - MOST_PREFIXES
    assert cache.find([0, 5, 6], 2) is None
    assert cache.find([MOST_PREFIXES, 5, 6], 2) is not None


def test_as_many_prefixes_are_kept_as_there_are_rows() -> None:
    for rows, most in ((4, MOST_PREFIXES), (64, MOST_PREFIXES), (200, 200)):
        blocks = BlockManager(Capacity(rows, 300, 0, False, CHUNK))
        for first in range(210):
            keys = [first, *IDS[: PAGE - 1]]
            blocks.prefixes.insert(new_prefix(keys, blocks.pages.take(1), (PAGE,), PAGE, PAGE))
        assert len(blocks.prefixes) == most
