"""More than eight tokens in eight bits on Hopper: the reference's bits, whatever the launch."""

from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from lowbit.formats.activations import activation_group
from lowbit.runtime.backends import cuda
from lowbit.runtime.kernels.launch.int8 import (
    COUNTERS,
    LAUNCHES,
    STEP_K,
    Int8Launch,
    int8_launch,
    int8_shared,
)
from lowbit.runtime.kernels.linear.gemm_int8 import gemm_int8
from lowbit.runtime.kernels.linear.tiles import TiledLinear
from lowbit.runtime.weights.linear import PackedLinear
from tests.runtime.kernels.linear.test_gemv_int8 import Case, made, product

MakePacked = Callable[[int, int, int, int], PackedLinear]
Randn = Callable[..., Tensor]

TOKENS = 300
CASES = [
    Case(4, 272, 1024, 128),
    Case(8, 144, 1024, 1024),
    Case(4, 80, 576, 64, torch.float16),
    Case(8, 80, 576, 192),
    Case(4, 48, 416, 32, torch.float32),
    Case(8, 4096, 2560, 256),
    Case(4, 1024, 9728, 128),
]


def fitting(launch: Int8Launch, N: int, tokens: int) -> Int8Launch:
    """The launch with no more sharers than there are programs for."""
    programs = torch.cuda.get_device_properties().multi_processor_count * launch.programs
    divided = -(-N // (64 * launch.row_groups)) * -(-tokens // launch.tokens) % programs
    return replace(launch, sharers=max(1, min(launch.sharers, programs // max(1, divided))))


@pytest.mark.gpu
@pytest.mark.parametrize("case", CASES, ids=str)
def test_every_launch_has_the_bits_of_the_reference(
    case: Case, make_packed: MakePacked, randn: Randn
) -> None:
    w = made(case, make_packed)
    x = (randn(TOKENS, case.K) * torch.logspace(-2, 2, TOKENS).to(randn(1))[:, None]).bfloat16()
    x[0, : case.G // 2] = 0
    x[2, 40] = torch.nan
    sums = product(x, w)
    sums[2] = torch.nan
    expected = sums.bfloat16()
    tiled = cuda.prepare(w, inputs="int8")
    assert isinstance(tiled, TiledLinear)
    wide, group = case.scales == torch.float32, activation_group(case.G, case.K)
    steps = -(-case.K // STEP_K)
    tried = 0
    for each, _ in LAUNCHES:
        for own in (each, replace(each, steps=1, ahead=2), replace(each, sharers=3)):
            turns = steps % own.steps == 0 and steps // own.steps >= own.ahead
            if not turns or int8_shared(case.bits, steps, group, wide, own) is None:
                continue
            tried += 1
            for count in (min(TOKENS, COUNTERS * own.tokens), 9):
                launch = fitting(own, case.N, count)
                y = gemm_int8(x[:count], tiled, launch)
                assert torch.equal(y.nan_to_num(7), expected[:count].nan_to_num(7)), own
                y = gemm_int8(x[:count], tiled, launch, dtype=torch.float32)
                assert torch.equal(y.nan_to_num(7), sums[:count].nan_to_num(7)), own
    assert tried > len(LAUNCHES) // 2


SIZES = [
    *((6144, 4096), (4096, 12288), (24576, 4096), (1024, 1024), (2560, 9728), (896, 576)),
    (151936, 4096),
]


@pytest.mark.parametrize("whole", [False, True])
@pytest.mark.parametrize("bits", [4, 8])
@pytest.mark.parametrize("tokens", [9, 16, 33, 64, 200, 4096])
@pytest.mark.parametrize(("N", "K"), SIZES)
def test_there_is_a_launch_for_every_size(
    bits: int, tokens: int, N: int, K: int, whole: bool
) -> None:
    steps = -(-K // STEP_K)
    for group, wide in ((128, False), (64, True), (32, False)):
        launch = int8_launch(bits, N, steps, group, wide, tokens, 132, whole)
        assert launch is not None
        assert steps % launch.steps == 0
        shared = int8_shared(bits, steps, group, wide, launch, whole)
        assert shared is not None
        assert 2 <= shared.ring <= steps // launch.steps
        assert launch.ahead * launch.steps <= steps
        assert shared.size * launch.programs <= 227 << 10


def test_a_weight_of_one_step_has_no_launch() -> None:
    assert int8_launch(4, 4096, 1, 128, False, 64, 132) is None


def test_many_rows_and_tokens_take_large_blocks() -> None:
    def blocks(rows: int, tokens: int) -> Int8Launch | None:
        return int8_launch(4, rows, 32, 128, False, tokens, 132)

    prompt, step = blocks(24576, 4096), blocks(4096, 16)
    assert prompt is not None
    assert prompt.tokens == 256
    assert prompt.sharers == 1
    assert step is not None
    assert step.sharers > 1
