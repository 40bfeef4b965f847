"""Cuts of a prompt: decided by its messages up to there alone, at the right distances."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lowbit.runtime.engine.plan import CHUNK, MOST_CHUNK
from lowbit.runtime.engine.scheduler import LEAST, chunk_ends_of

END = 9
ENDS = frozenset({END, 8})


def ends_of(ids: list[int], ends: frozenset[int] = ENDS) -> list[int]:
    return chunk_ends_of(ids, ends, CHUNK)


def ids_of(lengths: list[int]) -> list[int]:
    """Messages of such lengths, and the beginning of another one at the end."""
    return [id for n in lengths for id in [1] * n + [END]][: sum(lengths)]


MESSAGES = st.lists(st.integers(0, 3 * CHUNK) | st.integers(0, 2 * LEAST), min_size=1, max_size=12)


@given(MESSAGES, st.data())
def test_the_cuts_of_whole_messages_are_the_same_whatever_follows(
    lengths: list[int], data: st.DataObject
) -> None:
    ids = ids_of(lengths)
    chunk_ends = ends_of(ids)
    near = [n for cut in chunk_ends for n in (cut - 1, cut, cut + 1) if n <= len(ids)]
    stop = data.draw(st.integers(0, len(ids)) | st.sampled_from(near or [0]))
    other = [*ids[:stop], *data.draw(st.sampled_from([[], [1], [END], [1] * LEAST]))]
    behind = max((at for at, id in enumerate(ids[:stop], 1) if id in ENDS), default=0)
    for found in (ends_of(ids[:stop]), ends_of(other)):
        assert [c for c in found if c <= behind] == [c for c in chunk_ends if c <= behind]


@given(MESSAGES)
def test_chunks_have_the_right_lengths(lengths: list[int]) -> None:
    ids = ids_of(lengths)
    chunk_ends = ends_of(ids)
    assert chunk_ends == sorted(set(chunk_ends))
    behind = 0  # the last message that ends in a cut
    for first, cut in zip([0, *chunk_ends], chunk_ends, strict=False):
        assert 0 < cut - first <= MOST_CHUNK
        if cut - first != CHUNK:
            assert ids[cut - 1] in ENDS
            assert cut - behind >= LEAST
        behind = cut if ids[cut - 1] in ENDS else behind
    last = max(chunk_ends, default=0)
    assert len(ids) - last <= CHUNK
    assert not [at for at, id in enumerate(ids, start=1) if id in ENDS and at - last >= LEAST]


@pytest.mark.parametrize("more", [1, LEAST - 1, MOST_CHUNK - CHUNK])
@pytest.mark.parametrize("before", [0, 1, 2], ids=str)
def test_a_message_a_little_longer_than_a_chunk_is_one(more: int, before: int) -> None:
    """As a picture of a chunk and a question are: the next turn begins there."""
    ids = [1] * ((1 + before) * CHUNK + more - 1) + [END] + [1] * LEAST
    chunks = [CHUNK * each for each in range(1, 1 + before)]
    assert ends_of(ids) == [*chunks, (1 + before) * CHUNK + more]


def test_a_message_much_longer_than_a_chunk_is_two() -> None:
    ids = [1] * MOST_CHUNK + [END] + [1] * LEAST
    assert ends_of(ids) == [CHUNK, MOST_CHUNK + 1]


@pytest.mark.parametrize(
    ("tokens", "chunk_ends"),
    [
        (0, []),
        (CHUNK - 1, []),
        (CHUNK, [CHUNK]),
        (CHUNK + 1, [CHUNK]),
        (2 * CHUNK + 5, [CHUNK, 2 * CHUNK]),
    ],
)
def test_without_messages_every_chunk_is_full(tokens: int, chunk_ends: list[int]) -> None:
    assert ends_of([1] * tokens, frozenset()) == chunk_ends
    assert ends_of([1] * tokens) == chunk_ends
