"""Launches of attention: what its kernels take for granted, for all sizes that are accepted."""

import itertools

import pytest

from lowbit.formats.page_counts import PAGE
from lowbit.runtime.kernels.launch.attention import (
    ANY_TOKENS,
    KEYS,
    MOST_SPLITS,
    NARROW,
    attention_launch,
    block_launch,
    join_bytes,
    key_split,
    prompt_way,
    prompt_ways,
)
from lowbit.runtime.kernels.launch.device import STATIC_SHARED
from lowbit.runtime.thresholds import PROMPT_TOKENS, SEQUENCE_TOKENS

REACHES = (1, 40, 129, 256, 257, 1024, 40960, 262144)


SIZES = tuple(itertools.product((1, 2, 4, 8, 10, 32, 64, 128, 300), range(1, 9)))


@pytest.mark.parametrize("coded", [False, True], ids=["bf16", "int8"])
@pytest.mark.parametrize("head_dim", [16, 32, 64, 128, 256])
def test_key_splits_fit_what_kernels_take_for_granted(head_dim: int, coded: bool) -> None:
    for kv_heads, shared in SIZES:
        keys = key_split(kv_heads, shared, head_dim, coded)
        assert keys.turn == KEYS * keys.blocks * keys.warps
        assert keys.whole % (keys.turn * keys.groups) == 0
        assert PAGE % (KEYS * keys.blocks) == 0  # the keys of a warp lie in one page
        assert keys.most & (keys.most - 1) == 0
        assert keys.most <= MOST_SPLITS
        needed = join_bytes(shared, head_dim, keys.warps, 1, SEQUENCE_TOKENS, coded)
        assert needed <= STATIC_SHARED
        assert not coded or KEYS * keys.blocks == 32  # the scales of a turn, one a lane


@pytest.mark.parametrize("coded", [False, True], ids=["bf16", "int8"])
@pytest.mark.parametrize("head_dim", [16, 32, 64, 128, 256])
def test_attention_takes_every_key_and_column_once(head_dim: int, coded: bool) -> None:
    for (kv_heads, shared), reach, tokens in itertools.product(SIZES, REACHES, (1, 4, 24, 64, 256)):
        launch = attention_launch(kv_heads, shared, head_dim, reach, tokens, 1, coded)
        keys = launch.keys
        assert keys == key_split(kv_heads, shared, head_dim, coded)
        if launch.splits > 1:
            assert launch.splits >= keys.groups
            assert launch.splits >= min(-(-(reach - 1) // keys.turn), keys.most)
        assert launch.splits > 1 or reach <= keys.whole
        assert launch.splits == 1 or launch.parts == 1 or launch.joined
        if launch.joined:
            assert tokens > 1
            assert reach <= launch.splits * keys.turn  # a turn for each
            assert launch.splits % 4 == 0  # what a load from shared memory takes
        columns = head_dim // launch.parts
        assert columns * launch.parts == head_dim
        assert launch.parts == 1 or columns % 64 == 0  # what lanes load of a row at a time
        warps = keys.warps * (keys.groups if launch.splits == 1 or launch.joined else 1)
        sums = max(warps, launch.splits) if launch.joined else warps
        tokens_per_sequence = 1 if launch.joined else SEQUENCE_TOKENS
        needed = join_bytes(shared, head_dim, sums, launch.parts, tokens_per_sequence, coded)
        assert needed <= STATIC_SHARED
        if launch.ahead:
            assert launch.splits == 1
            assert reach <= launch.ahead * keys.turn * keys.groups


@pytest.mark.parametrize("reach", REACHES)
def test_company_does_not_change_the_order_of_keys(reach: int) -> None:
    launches = [
        attention_launch(8, 4, 128, reach, tokens) for tokens in (1, 2, 16, 17, 64, 100, 256)
    ]
    assert all(launch.keys == attention_launch(8, 4, 128, 1, 1).keys for launch in launches)


def test_tokens_of_one_sequence_are_not_joined_by_one_program() -> None:
    assert attention_launch(8, 4, 128, 1024, 64).joined
    assert not attention_launch(8, 4, 128, 1024, 64, 2).joined


# kv heads, query heads of each, size, reach, tokens
MEASURED = {
    (8, 2, 128, 1024, 1): (16, True),
    (8, 2, 128, 40960, 1): (32, False),
    (8, 4, 128, 1024, 1): (16, True),
    (8, 4, 128, 40960, 1): (32, True),
    (2, 4, 256, 1024, 1): (8, True),
    (2, 4, 256, 40960, 1): (64, True),
    (4, 4, 256, 40960, 1): (32, True),
}


@pytest.mark.parametrize(("sizes", "expected"), MEASURED.items(), ids=str)
def test_attention_is_split_as_was_measured(
    sizes: tuple[int, int, int, int, int], expected: tuple[int, bool]
) -> None:
    launch = attention_launch(*sizes)
    assert (launch.splits, launch.early) == expected


@pytest.mark.parametrize("head_dim", [32, 64, 128, 256])
@pytest.mark.parametrize("rows", [1, 16, 21, 64, 512])
@pytest.mark.parametrize("blocks", [1, 8])
def test_blocks_of_drafts(head_dim: int, rows: int, blocks: int) -> None:
    """Programs fit on a multiprocessor, and there are enough of them where there are many keys."""
    short, long = (block_launch(rows, 8 * blocks, head_dim, keys) for keys in (256, 32768))
    assert short.splits == 1
    for launch in (short, long):
        assert 16 <= launch.rows <= 8192 // head_dim
        assert launch.rows < 2 * rows or launch.rows == 16
        assert launch.keys >= 16
        programs = 8 * blocks * -(-rows // launch.rows) * launch.splits
        assert launch.splits == 1 or programs <= 256
    assert long.splits == 16 or 8 * blocks * -(-rows // long.rows) * long.splits > 64
    assert long.splits & (long.splits - 1) == 0  # they are joined as one block


def test_more_query_heads_than_shared_memory_allows_take_fewer_warps() -> None:
    assert key_split(4, 4, 256).warps == 8
    assert key_split(4, 6, 256).warps == 4


def test_narrow_programs_where_they_take_no_more_rounds_or_are_many() -> None:
    """Narrow programs have four warps; BF16 and codes, heads of 128 and 256."""
    assert attention_launch(8, 4, 128, 256, 64).warps == NARROW
    assert attention_launch(8, 4, 128, 256, 32).warps is None
    assert attention_launch(8, 4, 128, 256, 64, 2).warps is None
    assert attention_launch(8, 4, 128, 256, 64, quantized=True).warps == NARROW
    assert attention_launch(8, 4, 128, 1024, 64).warps == NARROW
    assert attention_launch(8, 4, 128, 1024, 32).warps is None
    assert attention_launch(8, 4, 128, 1024, 64, quantized=True).warps is None
    assert attention_launch(8, 4, 128, 512, 64, quantized=True).warps == NARROW
    assert attention_launch(4, 4, 256, 512, 64).warps == NARROW
    assert attention_launch(4, 4, 256, 1024, 64).warps is None


@pytest.mark.parametrize("head_dim", [32, 64, 128, 256])
@pytest.mark.parametrize("tokens", [17, 128, 129, 1024])
def test_sequences_of_a_chunk_go_the_way_that_each_goes_alone(tokens: int, head_dim: int) -> None:
    ways = prompt_ways(tokens, 16, head_dim, hopper=True)
    for count in (1, 17, 128, 129, 1000):
        if count <= tokens:
            taken = [way for way, packed in ways.items() if packed.fewest <= count <= packed.most]
            assert taken == [prompt_way(count, head_dim, hopper=True)]
    assert all(packed.sequences == 16 for packed in ways.values())
    assert all(packed.fewest > 0 for packed in ways.values())  # empty sequences go no way


@pytest.mark.parametrize("hopper", [False, True])
@pytest.mark.parametrize("tokens", [17, 128, 129])
def test_a_lone_sequence_goes_by_the_tokens_of_the_chunk(tokens: int, hopper: bool) -> None:
    ((way, packed),) = prompt_ways(tokens, 1, 128, hopper).items()
    assert way == prompt_way(tokens, 128, hopper)
    assert (packed.fewest, packed.most) == (1, ANY_TOKENS)
    assert packed.blocks(tokens, 16) == -(-tokens // 16)


def test_pytorch_attends_to_one_sequence() -> None:
    assert list(prompt_ways(PROMPT_TOKENS, 2, 128, hopper=False)) == ["blocks"]
    with pytest.raises(ValueError, match="2 sequences in 129 tokens"):
        prompt_ways(PROMPT_TOKENS + 1, 2, 128, hopper=False)
