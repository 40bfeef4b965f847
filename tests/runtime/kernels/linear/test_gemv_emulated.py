"""GEMVs of long rows, and by launches measured on a card, in NumPy: alone as in company."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from lowbit.runtime.kernels.launch.linear import GemvLaunch, Tuned, gemv_launch
from lowbit.runtime.kernels.linear import digits, gemv
from lowbit.runtime.kernels.linear.tiles import TiledLinear
from tests.lanes import in_kernels
from tests.runtime.kernels.emulator import run_kernel

pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="kernels run there")

MakeTiled = Callable[..., TiledLinear]
LONG = (17408, 25600)  # of Qwen3-14B and Qwen3.5-27B, and of Qwen3-32B
MOST = 16


@pytest.fixture(autouse=True)
def _emulated(monkeypatch: pytest.MonkeyPatch) -> None:
    for module in (gemv, digits):
        monkeypatch.setattr(module, "run", run_kernel)


def check(w: TiledLinear, x: Tensor, counts: tuple[int, ...]) -> Tensor:
    """Results near FP64, with the same bits however many tokens there are."""
    alone = torch.cat([gemv.gemv(row[None], w) for row in x])
    expected = gemv.gemv_ref(x, w)
    error = (alone.double() - expected).abs().max() / expected.abs().max()
    assert error < 2.0**-8
    for count in counts:
        assert torch.equal(gemv.gemv(x[:count], w), alone[:count]), count
    return alone


@pytest.mark.parametrize(
    ("bits", "K"), [(4, LONG[0]), pytest.param(8, LONG[1], marks=pytest.mark.kernels)]
)
def test_long_rows(make_tiled: MakeTiled, bits: int, K: int) -> None:
    w = make_tiled(bits, 24, K, 128)
    real = gemv_launch(bits, 320, K * bits // 512, 1, False)  # 5120 rows share K as these do
    most = MOST // 2 + 1  # take the launch for MOST
    x = (torch.randn(most, K) * torch.logspace(-2, 2, most)[:, None]).bfloat16()
    check(replace(w, tuned=((1, real),)), x, (2, 3, 4, 7, most))


@in_kernels("tuned1")
@pytest.mark.parametrize(
    "tuned",
    [
        ((1, GemvLaunch(2, 2, 4, registers=128)),),
        (
            (1, GemvLaunch(1, 3, 8, early=True, warp_groups=4)),
            (2, GemvLaunch(2, 1, 8, warp_groups=4)),
        ),
        ((1, GemvLaunch(1, 4, 16)), (4, GemvLaunch(1, 2, 16, rounds=2))),
    ],
)
def test_launches_of_a_card(make_tiled: MakeTiled, tuned: Tuned) -> None:
    """They are taken for any number of tokens; with another share of K sums are others."""
    w, x = make_tiled(4, 80, 4096, 128), torch.randn(MOST, 4096).bfloat16()
    usual = gemv.gemv(x[:1], w, dtype=torch.float32)
    found = replace(w, tuned=tuned)
    check(found, x, (2, 4, 16))
    one = dict(tuned)[1]
    assert one.parts != gemv_launch(4, w.tiles, w.steps, 1, False).parts
    assert not torch.equal(gemv.gemv(x[:1], found, dtype=torch.float32), usual)


SHARED = [
    (4, GemvLaunch(1, 2, 4, split=2), 4096),
    (4, GemvLaunch(2, 3, 8, warp_groups=2, rounds=2, split=4), 2208),
    (8, GemvLaunch(1, 3, 8, early=True, rounds=3, split=2), 4096),
    (8, GemvLaunch(1, 4, 4, rounds=8), 2208),
    (3, GemvLaunch(1, 2, 4, warp_groups=4, rounds=2, split=4), 4096),
    (2, GemvLaunch(1, 1, 2, rounds=3, split=2), 2208),
]


@in_kernels("8-*-2208", "3-*", "*staged=True)-2208")
@pytest.mark.parametrize(("bits", "launch", "K"), SHARED, ids=str)
def test_programs_that_share_a_tile(
    make_tiled: MakeTiled, bits: int, launch: GemvLaunch, K: int
) -> None:
    """The last of them has the sums of all; nothing divides evenly, and blocks may have no step."""
    w, x = make_tiled(bits, 104, K, 32), torch.randn(3, K).bfloat16()
    shared, squares = replace(w, tuned=((1, launch),)), torch.rand(1, K // 16, 4)
    together = replace(launch, warps=launch.parts, warp_groups=1, rounds=1, split=1)
    whole = replace(w, tuned=((1, together),))
    check(shared, x, (2, 3))
    ways: list[dict[str, Any]] = [
        {"added": torch.randn(1, 104)}, {"squares": squares}, {"norm": torch.rand(K)}
    ]  # fmt: skip
    for fused in ways:
        found = gemv.gemv(x[:1], shared, eps=1e-6, **fused)
        assert torch.equal(found, gemv.gemv(x[:1], whole, eps=1e-6, **fused))
    assert shared.arrived is not None
    assert not shared.arrived.any()


def test_a_launch_of_other_parts_is_passed_over() -> None:
    one, other = GemvLaunch(1, 2, 8), GemvLaunch(1, 2, 4)
    fitting = replace(one, steps=1)
    assert gemv_launch(4, 64, 16, 2, False, ((1, one), (2, other))).parts == one.parts
    assert gemv_launch(4, 64, 16, 2, False, ((1, one), (2, fitting))) is fitting
    assert gemv_launch(4, 64, 16, 1, False, ((2, fitting),)) == gemv_launch(4, 64, 16, 1, False)
