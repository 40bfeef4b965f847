"""A few tokens in eight bits on Hopper: the reference's bits, whatever the launch."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn.functional import silu

from lowbit.formats.activations import activation_group, with_remainders
from lowbit.runtime.backends import cuda
from lowbit.runtime.kernels.launch.int8 import SHARED, STEP_K
from lowbit.runtime.kernels.launch.stream import StreamLaunch, stream_launch, stream_shared
from lowbit.runtime.kernels.linear import gemv_int8, mma_int8, quantize
from lowbit.runtime.kernels.linear import stream_int8 as module
from lowbit.runtime.kernels.linear.gemv import gemv
from lowbit.runtime.kernels.linear.norm import SQUARES
from lowbit.runtime.kernels.linear.tiles import TiledLinear
from lowbit.runtime.weights.linear import PackedLinear
from tests.lanes import in_kernels
from tests.runtime.kernels.emulator import run_kernel
from tests.runtime.kernels.linear.test_gemv_int8 import (
    EPS,
    FP32,
    Case,
    made,
    product,
    whole_product,
)

MakePacked = Callable[[int, int, int, int], PackedLinear]
Randn = Callable[..., Tensor]

CASES = [
    Case(4, 80, 1024, 128),
    Case(8, 48, 576, 64, torch.float16),  # half a step
    Case(4, 48, 1120, 32, FP32),
    Case(8, 32, 640, 640),
]
ON_GPU = [
    Case(4, 6144, 4096, 128),
    Case(4, 4096, 12288, 128),
    Case(8, 24576, 1024, 1024),
    Case(8, 2560, 2560, 32, torch.float16),
    Case(4, 4112, 9728, 256),
    Case(4, 48, 11008, 64, FP32),
]
# More tiles than there are, some of which are nobody's; fewer steps than warps, and more.
LAUNCHES = [
    StreamLaunch(8, 8, 1, 3, 1, 2),
    StreamLaunch(16, 8, 2, 2, 2, 3),
    StreamLaunch(32, 8, 4, 1, 3, 2),
    StreamLaunch(16, 4, 1, 1, 2, 1),
    StreamLaunch(8, 2, 2, 2, 1, 9),
]
IDS = [str(case) for case in CASES]


@pytest.fixture(autouse=True)
def _emulated(device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    if device == "cpu":
        for each in (module, quantize, gemv_int8, mma_int8):
            monkeypatch.setattr(each, "run", run_kernel)


def prepared(w: PackedLinear, paired: bool = False, inputs: Any = "int8") -> TiledLinear:
    tiled = cuda.prepare(w, paired=paired, inputs=inputs)
    assert isinstance(tiled, TiledLinear)
    return tiled


def tokens_of(randn: Randn, case: Case, count: int) -> Tensor:
    """Tokens of many sizes, one of which begins with zeros and one with what is no number."""
    x = (randn(count, case.K) * torch.logspace(-2, 2, count).to(randn(1))[:, None]).bfloat16()
    x[0, : case.G // 2] = 0
    x[2, 40] = torch.nan
    return x


def check(w: PackedLinear, x: Tensor, launch: StreamLaunch) -> None:
    """The first tokens, or as many as there is room for, are the reference's to the bit."""
    tiled, sums = prepared(w), product(x, w)
    sums[2] = torch.nan
    for count in (3, launch.tokens):
        y = module.stream_int8(x[:count], tiled, launch, dtype=FP32)
        assert torch.equal(y.nan_to_num(7), sums[:count].nan_to_num(7)), launch
    y = module.stream_int8(x[: launch.tokens], tiled, launch)
    assert torch.equal(y.nan_to_num(7), sums[: launch.tokens].bfloat16().nan_to_num(7))


@in_kernels(
    "*tokens=32*-INT4-N80*",
    "*tokens=32*-INT8-N32*",
    "*tokens=16, warps=8*-INT8-N48*",
    "*tokens=16, warps=4*-INT4-N80*",
    "*tokens=16, warps=8*-INT4-N48*",
    "*tokens=8*-INT8-N48*",
)
@pytest.mark.parametrize("case", CASES, ids=IDS)
@pytest.mark.parametrize("launch", LAUNCHES, ids=str)
def test_every_launch_has_the_bits_of_the_reference(
    case: Case, launch: StreamLaunch, make_packed: MakePacked, randn: Randn
) -> None:
    check(made(case, make_packed), tokens_of(randn, case, launch.tokens), launch)


@pytest.mark.gpu
@pytest.mark.parametrize("tokens", [3, 8, 9, 16, 32])
@pytest.mark.parametrize("case", ON_GPU, ids=str)
def test_launches_that_are_chosen_have_the_bits_of_the_reference(
    case: Case, tokens: int, make_packed: MakePacked, randn: Randn
) -> None:
    steps, group = -(-case.K // STEP_K), activation_group(case.G, case.K)
    launch = stream_launch(case.bits, case.N // 16, steps, group, tokens, 132)
    if launch is None:
        assert tokens > 8
        return
    check(made(case, make_packed), tokens_of(randn, case, launch.tokens), launch)


@pytest.mark.parametrize("fused", ["norm", "paired", "bias", "whole"])
@pytest.mark.parametrize("launch", LAUNCHES[1:3], ids=str)
def test_norms_pairs_and_what_is_added(
    make_packed: MakePacked, randn: Randn, fused: str, launch: StreamLaunch
) -> None:
    """Values are near, since roots and exponentials are; bits are the same in any company."""
    w, x = make_packed(4, 64, 1024, 128), randn(13, 1024)
    given: dict[str, Any] = {"eps": EPS, "norm": (1 + 0.3 * randn(1024)).float()}
    factor = torch.rsqrt(x.float().square().mean(-1, keepdim=True) + EPS)
    gained = (x.float() * given["norm"]).bfloat16()
    expected = (whole_product if fused == "whole" else product)(gained, w) * factor
    if fused == "paired":
        gate, up = expected.chunk(2, -1)
        expected = silu(gate) * up
    elif fused == "bias":
        given["added"] = randn(1, 64)
        expected = expected + given["added"]
    else:
        given["added"] = randn(13, 64)
        expected = expected + given["added"]
    tiled = prepared(w, fused == "paired", "whole" if fused == "whole" else "int8")
    y = module.stream_int8(x, tiled, launch, dtype=FP32, **given)
    assert float((y - expected).norm()) < 2e-6 * float(expected.norm())
    if fused in ("norm", "whole"):
        given["added"] = given["added"][4:9]
    some = module.stream_int8(x[4:9], tiled, launch, dtype=FP32, **given)
    assert torch.equal(some, y[4:9])


def test_every_kernel_has_these_bits(make_packed: MakePacked, randn: Randn) -> None:
    """Tokens with normed heads, which several programs round, or one."""
    w, x = make_packed(4, 32, 4224, 32), randn(9, 4224)
    squares = x.float().square().view(9, -1, SQUARES, 8).sum(-1)
    x[:, 4096:] *= 64  # the second program's
    cases: tuple[tuple[bool, str, dict[str, Any]], ...] = (
        (False, "int8", {"squares": squares, "added": randn(9, 32)}),
        (True, "int8", {"norm": (1 + 0.3 * randn(4224)).float()}),
        (True, "whole", {"norm": (1 + 0.3 * randn(4224)).float()}),
    )
    for paired, inputs, given in cases:
        tiled = prepared(w, paired, inputs)
        y = module.stream_int8(x, tiled, LAUNCHES[1], eps=EPS, **given)
        assert torch.equal(mma_int8.mma_int8(x, tiled, eps=EPS, **given), y)
        lone = {name: v if name == "norm" else v[-1:] for name, v in given.items()}
        assert torch.equal(gemv(x[-1:], tiled, eps=EPS, **lone), y[-1:])


def test_nothing_that_a_step_writes_is_touched_before_the_wait(
    device: str, make_packed: MakePacked, randn: Randn, monkeypatch: pytest.MonkeyPatch
) -> None:
    if device == "cuda":
        pytest.skip("the emulator sees it")
    waits = list[bool]()

    def run(kernel: Any, grid: tuple[int, ...], *given: Any, **named: Any) -> None:
        x, words, scales, bounds, added, y = given[:6]
        run_kernel(kernel, grid, *given, late=(x, added, y), **named)
        with pytest.raises(AssertionError, match="before the programmatic wait"):
            run_kernel(kernel, grid, *given, late=(words, scales, bounds), **named)
        waits.append(True)

    monkeypatch.setattr(module, "run", run)
    tiled = prepared(make_packed(4, 80, 1024, 128))
    x, norm, added = randn(9, 1024), randn(1024), randn(9, 80)
    module.stream_int8(x, tiled, LAUNCHES[1], norm=norm, eps=EPS, added=added)
    assert waits == [True]


def test_rows_that_are_a_token_are_added(make_packed: MakePacked, randn: Randn) -> None:
    w, x = make_packed(8, 48, 1024, 128), randn(7, 1024)
    both = with_remainders(x, 128)
    sums = product(both, w)
    y = module.stream_int8(both, prepared(w, inputs="int16"), LAUNCHES[1], dtype=FP32)
    assert torch.equal(y, sums[::2] + sums[1::2])


def test_refuses_more_tokens_than_there_is_room_for(make_packed: MakePacked, randn: Randn) -> None:
    w, x = make_packed(4, 48, 1024, 128), randn(9, 1024)
    with pytest.raises(ValueError, match="9 tokens"):
        module.stream_int8(x, prepared(w), LAUNCHES[0])
    with pytest.raises(ValueError, match="exact inputs"):
        module.stream_int8(x[:8], prepared(w, inputs="exact"), LAUNCHES[0])


@pytest.mark.parametrize("bits", [4, 8])
@pytest.mark.parametrize("tokens", [3, 8, 16, 32])
@pytest.mark.parametrize("count", [114, 132])
def test_launches_take_all_tiles_and_fit(bits: int, tokens: int, count: int) -> None:
    sizes = [
        (N, K) for N in (16, 1024, 6144, 18432, 51200, 151936) for K in (128, 1024, 2560, 5120)
    ]
    for (N, K), group in ((size, group) for size in sizes for group in (32, 128)):
        steps, tiles = K // STEP_K, N // 16
        launch = stream_launch(bits, tiles, steps, group, tokens, count)
        if launch is None:
            assert tokens == 32, (N, K)
            continue
        assert launch.tokens >= tokens
        assert launch.program_tiles * count >= tiles
        assert launch.program_tiles < max(4, 2 * tiles / count)
        assert 1 <= launch.ahead <= -(-steps // launch.parts)
        assert stream_shared(steps, group, launch).size <= SHARED


def test_long_rows_and_many_tokens_have_no_launch() -> None:
    assert stream_launch(4, 256, 96, 128, 16, 132) is not None
    assert stream_launch(4, 256, 96, 128, 32, 132) is None
    assert stream_launch(4, 320, 200, 128, 16, 132) is None
    assert stream_launch(4, 320, 200, 128, 8, 132) is not None
    assert stream_launch(4, 384, 32, 128, 33, 132) is None
    assert stream_launch(4, 1536, 32, 128, 17, 132) is None
    assert replace(LAUNCHES[0], rounds=2).program_tiles == 6
