"""Launches that are tried: those that trials on an H200 found are among them."""

from dataclasses import replace

import pytest

from lowbit.runtime.kernels.codec import CODECS
from lowbit.runtime.kernels.launch.card import H200, Card
from lowbit.runtime.kernels.launch.device import STATIC_SHARED
from lowbit.runtime.kernels.launch.linear import GemvLaunch, measured
from lowbit.runtime.kernels.launch.tuned import MOST_SUMS
from lowbit.runtime.kernels.linear.program import staged_bytes
from lowbit.runtime.lab.tuning.candidates import (
    MOST_AHEAD,
    capped,
    for_one,
    several,
    spread,
)

RTX_4060, RTX_5090 = Card((8, 9), 24), Card((12, 0), 170)
MEASURED = [*measured("one").items(), *measured("unpaired").items()]


def shape(launch: GemvLaunch) -> GemvLaunch:
    return replace(launch, registers=None, shared=0)


def found_for(size: tuple[int, int, int], card: Card = H200) -> list[GemvLaunch]:
    bits, tiles, steps = size
    return for_one(bits, tiles, steps, steps * CODECS[bits].STEP_K, card, 20)


def test_most_of_the_measured_launches_are_among_the_first() -> None:
    found = [shape(launch) in map(shape, found_for(size)) for size, launch in MEASURED]
    assert sum(found) / len(found) > 0.84  # 70 of 83


@pytest.mark.parametrize("card", [H200, RTX_4060])
def test_launches_for_one_leave_nothing_idle(card: Card) -> None:
    for size, _ in MEASURED:
        bits, tiles, steps = size
        found = found_for(size, card)
        assert 2 <= len(found) == len(set(found)) <= 20
        for launch in found:
            assert launch.steps * launch.tiles <= MOST_AHEAD
            assert launch.parts <= max(steps, 16)
            programs = -(-tiles // launch.program_tiles) * launch.split
            assert launch.program_tiles == 1 or programs >= 0.8 * card.multiprocessors
            assert launch.staged
            if launch.split > 1:
                assert launch.shares(bits)
                assert steps * CODECS[bits].STEP_K >= 16 * tiles  # not behind a norm
        assert sum(launch.split > 1 for launch in found) <= 4
        assert any(launch.split == 1 for launch in found)


@pytest.mark.parametrize("tokens", [2, 4, 8, 16, 32])
def test_launches_for_several_have_the_parts_of_one(tokens: int) -> None:
    for size, one in MEASURED:
        _, tiles, steps = size
        found = several(tokens, tiles, steps, one, H200)
        least = 0 if tokens == 32 and one.parts == 16 else 2  # which leaves only shared tiles
        assert least <= len(found) == len(set(found))
        for launch in found:
            assert launch.parts == one.parts
            assert launch.sums_bytes(tokens) <= MOST_SUMS
            assert launch.registers is not None
            assert launch.registers * 32 * launch.warps <= 65536


def test_caps_and_spread_change_nothing_else() -> None:
    one = GemvLaunch(2, 2, 8, early=True)
    found = list(capped(one, H200))
    assert {launch.registers for launch in found} == {None, 80, 96, 128, 168}
    assert {replace(launch, registers=None) for launch in found} == {one}
    needed = staged_bytes(5120, 1, normed=True) + one.sums_bytes(1)
    found = list(spread(one, 5120, H200))
    assert [launch.shared for launch in found] == [kb for kb in (16, 32, 48) if kb << 10 > needed]
    assert {replace(launch, shared=0) for launch in found} == {one}
    assert max(launch.shared for launch in found) << 10 <= STATIC_SHARED
    assert list(spread(one, 17408, H200)) == []
    needed = staged_bytes(2048, 1, normed=True) + one.sums_bytes(1)
    assert [each.shared for each in spread(one, 2048, H200)] == [16, 32, 48]
    assert [each.shared for each in spread(one, 2048, RTX_5090)] == [
        kb for kb in (16, 32, 48) if kb * 1024 * 99 // 227 > needed
    ]


def test_what_a_card_ignores_is_not_tried() -> None:
    assert list(capped(GemvLaunch(1, 2, 8), RTX_5090)) == []
    assert list(spread(GemvLaunch(1, 2, 8), 2048, RTX_4060)) == []
    assert not any(launch.early for launch in found_for((4, 384, 32), RTX_4060))
    assert any(launch.early for launch in found_for((4, 384, 32), RTX_5090))
