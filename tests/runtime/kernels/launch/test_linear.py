"""Launches of linear layers: what their kernels take for granted, for all sizes."""

import itertools
from dataclasses import replace

import pytest

from lowbit.runtime.kernels.codec import CODECS
from lowbit.runtime.kernels.launch.choose import Variant
from lowbit.runtime.kernels.launch.device import STATIC_SHARED
from lowbit.runtime.kernels.launch.linear import (
    GEMV_SHARES,
    MOST_ROUNDS,
    GemmShare,
    GemvLaunch,
    gemm_share,
    gemv_int8_launch,
    gemv_launch,
    groups_of_step,
    measured,
    several_measured,
    wgmma_launch,
)
from lowbit.runtime.kernels.linear.gemv import Fused, _plan
from lowbit.runtime.kernels.linear.program import packed, places_of, shared_bytes

KB = 1024
ONE = [*measured("one").values(), *(launch for _, _, launch in GEMV_SHARES)]
COUNTS = (1, 2, 4, 8, 16, 32)
GEMV_SIZES = [
    (2, 384, 16),
    (3, 256, 48),
    (3, 4, 3),
    (4, 1, 1),
    (4, 64, 3),
    (8, 500, 20),
    (4, 2000, 30),
    (8, 2000, 70),
    (4, 20000, 130),
]


def test_gemv_programs_ask_for_what_a_kernel_may_declare() -> None:
    assert any(launch.shared for launch in ONE)
    for launch in ONE:
        assert launch.shared * KB <= STATIC_SHARED
        assert launch.warps % launch.warp_groups == 0
        assert launch.staged  # for one token


@pytest.mark.parametrize("count", [1, 58, 132, 188])
def test_a_program_of_gemv_int8_may_have_its_registers(count: int) -> None:
    many = 0
    for (bits, tiles, steps), one in measured("one").items():
        K = steps * CODECS[bits].STEP_K
        for tokens in (1, 2, 8):
            launch = gemv_int8_launch(one, bits, tiles, K, tokens, count)
            assert launch.registers is not None
            assert launch.registers * 32 * launch.warps <= 65536
            many += launch.warps > 8
    assert many


def test_programs_that_share_a_token_take_whole_blocks_of_it() -> None:
    sharing = {size: launch for size, launch in measured("one").items() if launch.split > 1}
    assert sharing
    for (bits, _, steps), launch in sharing.items():
        assert launch.shares(bits)
        places = places_of(steps * 512 // bits, launch, 1, CODECS[bits].STEP_K)
        assert places.BLOCKS * launch.split >= steps * 2 // bits
        assert places.BLOCKS % places.RUN == 0
    assert not GemvLaunch(1, 2, 4, warp_groups=2, split=2).shares(8)  # 128 columns each
    assert GemvLaunch(1, 2, 4, warp_groups=2, split=2).shares(4)


@pytest.mark.parametrize("count", [20, 58, 84, 108, 132, 170])
def test_rounds_fit_the_multiprocessors(count: int) -> None:
    """As many programs for each as on an H200, or fewer: none waits for another to end."""
    rounds = {size: launch for size, launch in measured("one").items() if launch.rounds > 1}
    assert rounds
    for size, launch in rounds.items():
        found = gemv_launch(*size, 1, True, count=count)
        each = -(-(-(-size[1] // launch.program_tiles) * launch.split) // 132)
        programs = -(-size[1] // found.program_tiles) * found.split
        assert replace(found, rounds=launch.rounds) == launch
        assert programs <= each * count
        assert found.sums_bytes(1) <= 99 * KB
        tuned = ((1, launch),)  # measured on the card
        assert gemv_launch(*size, 1, True, tuned, count) is launch


def test_more_shared_memory_is_more_than_needed() -> None:
    for (bits, _, steps), launch in (*measured("one").items(), *measured("unpaired").items()):
        needed = shared_bytes(steps * 512 // bits, launch, 1, True)
        assert needed <= 99 * KB  # of every card; long rows need more than STATIC_SHARED
        assert launch.shared == 0 or launch.shared * KB > needed


@pytest.mark.parametrize("kb", [16, 32, 48])
def test_as_many_spread_programs_fit_where_shared_memory_is_small(kb: int) -> None:
    """1 KB of each program is the driver's."""
    launch = GemvLaunch(1, 4, 8, shared=kb)
    assert launch.spread_bytes(227 * KB) == kb * KB
    on_hopper = 228 // (kb + 1)
    assert 100 // (kb + 1) < on_hopper - 1  # as the kernel would ask for without
    assert 0 <= on_hopper - 100 * KB // (launch.spread_bytes(99 * KB) + KB) <= 1


def test_programs_spread_only_where_kernels_overlap() -> None:
    launch, W = GemvLaunch(1, 4, 8, shared=48), packed(2048, 128, 4, "bf16")
    one = Variant("gemv", 1, 1, launch, launch.parts, staged=True)
    fused, needed = Fused(True, 0, False, 0), shared_bytes(2048, launch, 1, True)
    taken = [
        _plan(W, one, False, fused, pdl, kb * KB).SHARED
        for pdl, kb in ((True, 227), (True, 99), (False, 99))
    ]
    assert taken == [48 * KB, 48 * KB * 99 // 227, needed]


@pytest.mark.parametrize("paired", [False, True])
def test_as_many_warps_share_a_tile_for_any_number_of_tokens(paired: bool) -> None:
    """Their sums are joined in order, so their number decides about the bits."""
    for size in (*measured("one"), *GEMV_SIZES):
        launches = [gemv_launch(*size, tokens, paired) for tokens in COUNTS]
        assert {launch.parts for launch in launches} == {launches[0].parts}
        for launch in launches:
            assert launch.warps & (launch.warps - 1) == 0
            assert launch.warps <= 16
            assert launch.parts * launch.warp_groups == launch.warps * launch.split


@pytest.mark.parametrize("paired", [False, True])
def test_sums_of_several_tokens_fit_every_card(paired: bool) -> None:
    """Digits that do not fit are made by a kernel before, but every program needs its sums."""
    for size in (*measured("one"), *GEMV_SIZES):
        for tokens in COUNTS:
            launch = gemv_launch(*size, tokens, paired)
            assert launch.split > 1 or launch.sums_bytes(tokens) <= 99 * KB


@pytest.mark.parametrize("bits", [4, 8])
def test_measured_launches_leave_no_warp_without_steps(bits: int) -> None:
    for table, paired in ((measured("one"), True), (measured("unpaired"), False)):
        for _, tiles, steps in (key for key in table if key[0] == bits):
            launch = gemv_launch(bits, tiles, steps, 1, paired)
            assert launch is table[bits, tiles, steps]
            assert launch.parts <= steps
            assert launch.tiles * launch.warp_groups <= tiles


@pytest.mark.parametrize("bits", [2, 3])
def test_fewer_bits_have_as_many_parts_as_the_same_columns_in_4_bits(bits: int) -> None:
    for _, tiles, steps in (key for key in measured("one") if key[0] == 4 and key[2] % 2 == 0):
        for tokens in COUNTS:
            launch = gemv_launch(bits, tiles, steps // 2, tokens, True)
            assert launch.parts == gemv_launch(4, tiles, steps, 1, True).parts <= steps // 2
            assert launch.registers is None or launch.registers >= (96 if bits == 3 else 80)


@pytest.mark.parametrize(("size", "launch"), several_measured().items(), ids=str)
def test_launches_measured_for_several_tokens_are_taken(
    size: tuple[int, int, int, int], launch: GemvLaunch
) -> None:
    """`gemv_launch` passes over a row with other parts than the launch of a lone token."""
    assert any(gemv_launch(*size, paired) is launch for paired in (False, True))


@pytest.mark.parametrize("tokens", [16, 32, 64])
def test_programs_of_wgmma_have_whole_parts_of_all_steps_in_shared_memory(tokens: int) -> None:
    """A slice that has a power of two of neighboring parts adds them as one program does it."""
    for size in (*measured("one"), *GEMV_SIZES, (4, 40, 76)):
        bits, tiles, steps = size
        parts = gemv_launch(*size, 1, False).parts
        launch = wgmma_launch(bits, tiles, steps, 128, tokens, parts)
        if launch is None:
            step_k = CODECS[bits].STEP_K
            deep = steps * step_k >= 4096 and tiles * steps >= 8192
            part = -(-steps // parts) * tokens * 3 * step_k  # bytes of digits
            assert (tokens == 16 and not deep) or part > 180 * KB
            continue
        assert parts % launch.slices == 0
        assert parts // launch.slices in (1, 2, 4)
        assert launch.part_steps * parts >= steps
        assert launch.part_steps % launch.ahead == 0
        assert launch.columns * launch.slices <= 132
        assert launch.shared_bytes(bits, parts, tokens) <= 226 * KB


def test_wgmma_takes_the_groups_that_it_sums_as_a_lone_token_does() -> None:
    for bits, group_size in itertools.product((4, 8), (32, 64, 96, 128, 192, 256)):
        assert wgmma_launch(bits, 1536, 8 * bits, group_size, 64, 4) is not None
    for bits in (2, 3):  # each half of a step is a group of its own, as in `gemv`
        assert wgmma_launch(bits, 1536, 16, 128, 64, 4) is not None
        assert wgmma_launch(bits, 1536, 16, 384, 64, 4) is not None
        for group_size in (64, 256, 512):
            assert wgmma_launch(bits, 1536, 16, group_size, 64, 4) is None


@pytest.mark.parametrize(
    ("bits", "groups"),
    [
        (2, {64: 2, 128: 1, 256: 1, 384: 1}),
        (4, {32: 4, 64: 2, 96: 4, 128: 1, 192: 2, 4096: 1}),
        (8, {32: 2, 64: 1, 96: 2, 192: 1}),
    ],
)
def test_sums_of_a_step_have_columns_that_surely_share_a_scale(
    bits: int, groups: dict[int, int]
) -> None:
    assert {size: groups_of_step(bits, size) for size in groups} == groups


def test_64_tokens_in_groups_within_a_step_have_registers_for_one_step_ahead() -> None:
    for group_size, ahead in ((32, 1), (64, 1), (192, 1), (128, 2)):
        launch = wgmma_launch(4, 1536, 32, group_size, 64, 4)
        assert launch is not None
        assert launch.ahead == ahead
    odd = wgmma_launch(4, 1536, 12, 64, 64, 4)
    assert odd is not None
    assert odd.part_steps == 3


@pytest.mark.parametrize(
    ("rows", "columns", "tokens", "share"),
    [
        (24576, 4096, 1024, GemmShare(256)),
        (4096, 4096, 1024, GemmShare(256)),
        (4096, 4096, 512, GemmShare(128)),
        (4096, 4096, 128, GemmShare(128, 4)),
        (4096, 12288, 128, GemmShare(128, 4)),
        (4096, 12288, 256, GemmShare(256, 4)),
        (6144, 4096, 512, GemmShare(256)),
        (2560, 4096, 1024, GemmShare(192)),
    ],
)
def test_gemm_takes_programs_that_fill_the_gpu(
    rows: int, columns: int, tokens: int, share: GemmShare
) -> None:
    assert gemm_share(rows // 128, tokens, columns // 128) == share


@pytest.mark.parametrize("steps", [2, 3, 7, 16, 20, 32, 85, 96, 136, 200])
def test_splits_of_gemm_have_as_many_steps_and_tokens(steps: int) -> None:
    """Two steps at least, since a program loads that many ahead; 8 tokens, which it stores."""
    for row_blocks, tokens in itertools.product((1, 8, 20, 32, 48, 272), (65, 128, 300, 1024)):
        share = gemm_share(row_blocks, tokens, steps)
        assert steps % share.splits == 0
        assert steps // share.splits >= 2
        assert share.tokens % (8 * share.splits) == 0


@pytest.mark.parametrize("count", [24, 84, 170])
def test_cards_of_another_size_share_no_less(count: int) -> None:
    """A token's bits do not depend on the card's multiprocessors; programs find room at once."""
    for size in (*measured("one"), *GEMV_SIZES):
        bits, tiles, steps = size
        one = gemv_launch(bits, tiles, steps, 1, False, count=count)
        assert one.parts == gemv_launch(bits, tiles, steps, 1, False).parts
        for tokens in COUNTS[1:]:
            launch = gemv_launch(bits, tiles, steps, tokens, False, count=count)
            assert launch.parts == one.parts
            assert launch.split > 1 or launch.sums_bytes(tokens) <= 99 * KB
            rule = (*size, tokens) not in several_measured()
            if rule and launch.split == 1 and launch.rounds < MOST_ROUNDS[tokens]:
                assert -(-tiles // launch.program_tiles) <= count


def test_programs_of_wgmma_are_at_most_as_many_as_multiprocessors() -> None:
    for count in (78, 114, 132):
        launch = wgmma_launch(4, 1536, 32, 128, 32, 4, count)
        assert launch is not None
        assert launch.columns * launch.slices <= count


def test_gemm_fills_a_smaller_card() -> None:
    assert gemm_share(1024 // 128, 1024, 32, 132) == GemmShare(128, 2)
    assert gemm_share(1024 // 128, 1024, 32, 32) == GemmShare(256)
