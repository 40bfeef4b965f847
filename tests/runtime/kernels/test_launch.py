"""Launch sizes: what every kernel takes for granted of them, for all sizes that are accepted."""

import itertools

import pytest

from lowbit.runtime.kernels.gemv import MOST_STAGED, shared_bytes
from lowbit.runtime.kernels.launch import (
    GEMV_MEASURED,
    GEMV_SHARES,
    STATIC_SHARED,
    AttentionLaunch,
    attention_launch,
    gemv_launch,
    join_bytes,
)
from lowbit.runtime.state.cache import FIRST_REACH

KB = 1024
REACHES = (1, 40, 129, FIRST_REACH, FIRST_REACH + 1, 1024, 40960, 262144)
KEYS = 8  # of a block
H200 = 132  # multiprocessors


@pytest.mark.parametrize("head_dim", [16, 32, 64, 128, 256])
@pytest.mark.parametrize("reach", REACHES)
@pytest.mark.parametrize("multiprocessors", [28, H200])
def test_attention_takes_every_key_and_column_once(
    head_dim: int, reach: int, multiprocessors: int
) -> None:
    for kv_heads, shared in itertools.product((1, 2, 4, 8, 10, 32, 64, 128, 300), range(1, 9)):
        launch = attention_launch(kv_heads, shared, reach, head_dim, multiprocessors)
        assert launch.turn == KEYS * launch.blocks * launch.warps
        assert launch.splits == 1 or launch.splits * kv_heads * launch.warps <= 8 * multiprocessors
        assert launch.splits == 1 or launch.parts == 1
        assert launch.splits & (launch.splits - 1) == 0
        columns = head_dim // launch.parts
        assert columns * launch.parts == head_dim
        assert launch.parts == 1 or columns % 64 == 0  # what lanes load of a row at a time
        if launch.ahead:
            assert launch.splits == 1
            assert reach <= 2 * launch.turn
        assert join_bytes(shared, head_dim, launch.warps, launch.parts) <= STATIC_SHARED


# kv heads, query heads of each, size, reach
MEASURED = {
    (8, 2, 128, 1024): AttentionLaunch(16, 4, 2, early=True),
    (8, 2, 128, 40960): AttentionLaunch(32, 4, 2),
    (8, 4, 128, 1024): AttentionLaunch(16, 4, 2, early=True),
    (8, 4, 128, 40960): AttentionLaunch(32, 4, 2, early=True),
    (2, 4, 256, 1024): AttentionLaunch(16, 8, 1, early=True),
    (2, 4, 256, 40960): AttentionLaunch(64, 8, 1, early=True),
    (4, 4, 256, 40960): AttentionLaunch(32, 8, 1, early=True),
}


@pytest.mark.parametrize(("sizes", "launch"), MEASURED.items(), ids=str)
def test_attention_is_split_as_was_measured(
    sizes: tuple[int, int, int, int], launch: AttentionLaunch
) -> None:
    kv_heads, shared, head_dim, reach = sizes
    assert attention_launch(kv_heads, shared, reach, head_dim, H200) == launch


def test_more_query_heads_than_shared_memory_allows_take_fewer_warps() -> None:
    assert attention_launch(4, 6, 40960, 256, H200) == AttentionLaunch(64, 4, 1, early=True)


def test_gemv_programs_ask_for_what_a_kernel_may_declare() -> None:
    launches = [*GEMV_MEASURED.values(), *(launch for _, _, launch in GEMV_SHARES)]
    assert any(launch.shared for launch in launches)
    for launch in launches:
        assert launch.shared * KB <= STATIC_SHARED
        assert launch.warps % launch.abreast == 0


def test_more_shared_memory_is_more_than_needed() -> None:
    for (bits, _, steps), launch in GEMV_MEASURED.items():
        needed = shared_bytes(steps * 512 // bits, launch, 1, True)
        assert needed <= STATIC_SHARED
        assert launch.shared == 0 or launch.shared * KB > needed


@pytest.mark.parametrize("bits", [4, 8])
def test_every_length_that_is_staged_fits(bits: int) -> None:
    for tiles, steps in itertools.product(
        (1, 64, 500, 2000, 20000), range(1, MOST_STAGED * bits // 512 + 1)
    ):
        launch = gemv_launch(bits, tiles, steps, 1)
        assert shared_bytes(steps * 512 // bits, launch, 1, True) <= STATIC_SHARED


@pytest.mark.parametrize("bits", [4, 8])
def test_measured_launches_leave_no_warp_without_steps(bits: int) -> None:
    for _, tiles, steps in (key for key in GEMV_MEASURED if key[0] == bits):
        launch = gemv_launch(bits, tiles, steps, 1)
        assert launch is GEMV_MEASURED[bits, tiles, steps]
        assert launch.warps // launch.abreast <= steps
        assert launch.tiles * launch.abreast <= tiles
