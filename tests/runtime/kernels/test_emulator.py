"""The emulator finds what kernels compute that a GPU has proven, and notices their errors."""

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from lowbit.runtime.backends import cuda
from lowbit.runtime.kernels.launch.card import Card
from lowbit.runtime.kernels.launch.linear import DenseLaunch
from lowbit.runtime.kernels.linear import dense as dense_module
from lowbit.runtime.kernels.linear import digits as digits_module
from lowbit.runtime.kernels.linear import gemv as gemv_module
from lowbit.runtime.kernels.linear import widen as widen_module
from lowbit.runtime.kernels.linear.dense import dense_gemv, dense_gemv_ref
from lowbit.runtime.kernels.linear.gemv import gemv, gemv_ref
from lowbit.runtime.kernels.linear.tiles import TiledLinear
from lowbit.runtime.kernels.linear.widen import widen, widen_ref
from lowbit.runtime.thresholds import DENSE_TOKENS
from lowbit.runtime.weights.linear import DenseLinear
from tests.lanes import in_kernels
from tests.runtime.kernels.emulated_lanes import INT, BranchApartError, lanes
from tests.runtime.kernels.emulator import Copies, Memory, even_range, run_kernel

MakeTiled = Callable[..., TiledLinear]
Randn = Callable[..., Tensor]

EPS = 1e-6
FP32_ERROR = 5e-6


@pytest.fixture(autouse=True)
def _emulated(device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    if device == "cuda":
        pytest.skip("a GPU runs the kernels itself")
    for module in (gemv_module, dense_module, digits_module, widen_module):
        monkeypatch.setattr(module, "run", run_kernel)


def relative_error(y: Tensor, ref: Tensor) -> float:
    return float((y.double() - ref).norm() / ref.norm())


@pytest.mark.parametrize("B", [1, 3, 8])
@pytest.mark.parametrize("bits", [2, 3, 4, 8])
def test_gemv(make_tiled: MakeTiled, randn: Randn, bits: int, B: int) -> None:
    w, x = make_tiled(bits, 40, 352, 32), randn(B, 352)
    residual = torch.randn(B, 40)
    y = gemv(x, w, added=residual, dtype=torch.float32)
    assert relative_error(y, gemv_ref(x, w, added=residual)) < FP32_ERROR
    norm = torch.exp2(torch.randint(-1, 2, (352,)).float())  # products with x are exact
    y = gemv(x, w, norm=norm, eps=EPS, dtype=torch.float32)
    assert relative_error(y, gemv_ref(x, w, norm=norm, eps=EPS)) < FP32_ERROR


@in_kernels("8-300-1056-32-*", "3-300-*")
@pytest.mark.parametrize(
    ("bits", "N", "K", "G", "scales"),
    [
        *((bits, 40, 512, 128, torch.bfloat16) for bits in (4, 8)),
        *((bits, 300, 1056, 32, torch.float16) for bits in (3, 8)),  # a last step that is not full
        *((bits, 33, 768, 768, torch.float32) for bits in (2, 4)),
    ],
)
def test_a_token_has_its_bits_in_any_company(
    make_tiled: MakeTiled,
    randn: Randn,
    bits: int,
    N: int,
    K: int,
    G: int,
    scales: torch.dtype,
) -> None:
    w, x, norm = make_tiled(bits, N, K, G, False, scales), randn(34, K), randn(K)
    residual = randn(34, N)

    def compute(tokens: slice) -> Tensor:
        return gemv(x[tokens], w, norm=norm, eps=EPS, added=residual[tokens])

    places = torch.tensor([0, 1, 2, 7, 8, 10, 15, 16, 32, 33])  # at the ends of tiles
    alone = torch.cat([compute(slice(i, i + 1)) for i in places.tolist()])
    for count in (2, 3, 11, 16, 34):
        inside = places < count
        assert torch.equal(compute(slice(0, count))[places[inside]], alone[inside]), count


@pytest.mark.parametrize("paired", [False, True], ids=["rows", "paired"])
@pytest.mark.parametrize("bits", [2, 3, 4, 8])
@pytest.mark.parametrize(("N", "K", "G"), [(20, 96, 32), (34, 768, 256), (50, 1056, 32)])
def test_widened(make_tiled: MakeTiled, bits: int, N: int, K: int, G: int, paired: bool) -> None:
    w = make_tiled(bits, N, K, G, paired)
    rows = widen(w)
    if paired:
        rows = torch.cat([half[: N // 2] for half in rows.chunk(2)])
    assert torch.equal(rows.view(torch.int16), widen_ref(w).view(torch.int16))


def test_a_row_too_long_for_shared_memory_has_the_same_bits(
    make_tiled: MakeTiled, randn: Randn, monkeypatch: pytest.MonkeyPatch
) -> None:
    w, x, norm = make_tiled(4, 40, 1056, 32), randn(1, 1056), randn(1056)
    staged = gemv(x, w, norm=norm, eps=EPS)
    kernels = []

    def run(kernel: Any, *arguments: Any, **named: Any) -> None:
        kernels.append(kernel.__name__)
        run_kernel(kernel, *arguments, **named)

    for module in (gemv_module, digits_module):
        monkeypatch.setattr(module, "run", run)
    monkeypatch.setattr(Card, "shared_bytes", 3 * 1056)
    monkeypatch.setattr(gemv_module, "card_of", lambda x: Card((0, 0), 7))  # none is cached
    assert torch.equal(gemv(x, w, norm=norm, eps=EPS), staged)
    assert kernels == ["_digits_kernel", "gemv_several_kernel"]


def test_dense_gemv(randn: Randn, monkeypatch: pytest.MonkeyPatch) -> None:
    """Alone a token is staged, in company it is not, nor are blocks alike: the same bits."""
    w, x, norm, residual = randn(37, 512), randn(70, 512), randn(512), randn(70, 37)

    def compute(tokens: slice) -> Tensor:
        return dense_gemv(x[tokens], w, norm=norm, eps=EPS, added=residual[tokens])

    alone = torch.cat([compute(slice(i, i + 1)) for i in range(70)])
    assert torch.equal(compute(slice(0, 70)), alone)
    for launch in (DenseLaunch(16), DenseLaunch(32), DenseLaunch(32, 2), DenseLaunch(64)):
        monkeypatch.setattr(dense_module, "dense_launch", lambda *sizes, launch=launch: launch)
        for count in (17, 33, 41):
            assert torch.equal(compute(slice(0, count)), alone[:count]), launch
    y = dense_gemv(x, w, dtype=torch.float32)
    assert relative_error(y, dense_gemv_ref(x, w)) < FP32_ERROR


def test_few_rows_of_a_prompt(randn: Randn) -> None:
    """A token's product does not depend on how many tokens pass with it, be it hundreds."""
    tokens = DENSE_TOKENS + 6
    w, small = DenseLinear(randn(32, 256)), DenseLinear(randn(20, 256))
    x, norm = randn(tokens, 256), randn(256)
    _, whole = cuda.two_products(x, w, small, norm, EPS)
    assert relative_error(whole, dense_gemv_ref(x, small.weight, norm=norm, eps=EPS)) < 2.0**-7
    for first, stop in ((0, 1), (3, 20), (2, tokens - 1)):
        _, part = cuda.two_products(x[first:stop], w, small, norm, EPS)
        assert torch.equal(part, whole[first:stop])


def test_what_lies_outside_of_memory_is_noticed(
    randn: Randn, monkeypatch: pytest.MonkeyPatch
) -> None:
    w = randn(32, 256)
    dense_gemv(randn(2, 256), w)

    def shorter(kernel: Any, grid: tuple[int, ...], x: Tensor, *rest: Any, **named: Any) -> None:
        run_kernel(kernel, grid, x.flatten()[:-8].clone(), *rest, **named)

    monkeypatch.setattr(dense_module, "run", shorter)
    with pytest.raises(AssertionError, match="behind the tensor"):
        dense_gemv(randn(2, 256), w)


def test_copies_arrive_when_a_kernel_has_waited_for_them() -> None:
    memory = Memory([])
    memory.shared = np.zeros((1, 64), np.uint8)
    copies = Copies(memory)
    addresses = lanes(np.arange(4).reshape(1, 1, 4) * 4)

    def held() -> list[list[int]]:
        return memory.shared.view(np.int32).reshape(4, 4).tolist()

    for batch in range(3):
        copies.begin(addresses + 16 * batch, (lanes(np.full((1, 1, 4), batch + 1, np.int32)),))
        if batch < 2:
            copies.commit()
    assert held() == [[-1] * 4, [-1] * 4, [-1] * 4, [0] * 4]
    copies.wait(2)
    assert held()[0] == [-1] * 4
    copies.wait(1)
    assert held()[:3] == [[1] * 4, [-1] * 4, [-1] * 4]
    copies.wait(0)  # the third is in the open batch
    assert held()[:3] == [[1] * 4, [2] * 4, [-1] * 4]


def test_programs_that_branch_apart_run_apart() -> None:
    both = lanes(np.arange(6).reshape(3, 1, 2) // 2 == 1)
    assert not both[:1]
    assert both[1:2]
    with pytest.raises(BranchApartError) as found:
        bool(both)
    assert found.value.branch.tolist() == [False, True, False]
    with pytest.raises(AssertionError, match="lanes of a program"):
        bool(both.reshape(1, 3, 2))


def test_programs_that_loop_as_often_run_together() -> None:
    """Wherever each begins; those that loop more often run apart."""
    start = lanes(np.array([0, 7, 30], np.int32).reshape(3, 1, 1))
    turns = [np.asarray(at).ravel().tolist() for at in even_range(start, start + 9, 4)]
    assert turns == [[0, 7, 30], [4, 11, 34], [8, 15, 38]]
    assert list(even_range(start[:1] + 2, 9, INT(3))) == [2, 5, 8]
    assert [np.asarray(at).item(0) for at in even_range(start - start + 2)] == [0, 1]
    assert not list(even_range(start, start - 1, 4))
    with pytest.raises(BranchApartError) as found:
        even_range(start, 9, 4)
    assert found.value.branch.tolist() == [3, 1, 0]
    with pytest.raises(AssertionError, match="lanes of a program"):
        even_range(start.reshape(1, 3, 1), 9, 4)
