"""Launch sizes: what every kernel takes for granted of them, for all sizes that are accepted."""

import itertools

import pytest

from lowbit.runtime.cache import FIRST_REACH
from lowbit.runtime.kernels.gemv import MOST_STAGED, shared_bytes
from lowbit.runtime.kernels.launch import (
    GEMV_MEASURED,
    GEMV_SHARES,
    STATIC_SHARED,
    attention_launch,
    gemv_launch,
    join_bytes,
)

KB = 1024
REACHES = (1, 40, 129, FIRST_REACH, FIRST_REACH + 1, 1024, 40960, 262144)
KEYS = 8  # of a block


@pytest.mark.parametrize("head_dim", [16, 32, 64, 128, 256])
@pytest.mark.parametrize("reach", REACHES)
def test_attention_takes_every_key_and_column_once(head_dim: int, reach: int) -> None:
    for kv_heads, shared in itertools.product((1, 2, 4, 8, 10, 32, 64, 128, 300), range(1, 9)):
        launch = attention_launch(kv_heads, shared, reach, head_dim)
        assert launch.splits == 1 or launch.parts == 1
        assert launch.splits & (launch.splits - 1) == 0
        columns = head_dim // launch.parts
        assert columns * launch.parts == head_dim
        assert launch.parts == 1 or columns % 64 == 0  # what lanes load of a row at a time
        if launch.ahead:
            assert launch.splits == 1
            assert reach <= 2 * KEYS * launch.blocks * launch.warps
        assert join_bytes(shared, head_dim, launch.warps, launch.parts) <= STATIC_SHARED


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
