"""Products on Hopper's warpgroups, emulated: a token has the bits that it has alone."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from lowbit.runtime.kernels.launch.card import H200
from lowbit.runtime.kernels.launch.choose import choose
from lowbit.runtime.kernels.linear import digits as digits_module
from lowbit.runtime.kernels.linear import gemv as gemv_module
from lowbit.runtime.kernels.linear import wgmma as wgmma_module
from lowbit.runtime.kernels.linear.gemv import gemv, gemv_ref
from lowbit.runtime.kernels.linear.tiles import TiledLinear
from tests.lanes import in_kernels
from tests.runtime.kernels.emulator import run_kernel

MakeTiled = Callable[..., TiledLinear]
Randn = Callable[..., Tensor]

EPS = 1e-6
MOST = 40
kernels = pytest.mark.kernels  # make test-kernels runs them
ALONE = torch.tensor([0, 1, 7, 8, 15, 16, 17, 31, 32, 33, 39])  # at the ends of tiles and blocks


@pytest.fixture
def launches(device: str, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Names of the kernels that have run, as if on a Hopper GPU."""
    if device == "cuda":
        pytest.skip("a GPU runs the kernels itself")
    found: list[str] = []

    def run(kernel: Any, *arguments: Any, **named: Any) -> None:
        found.append(kernel.__name__)
        run_kernel(kernel, *arguments, **named)

    for module in (gemv_module, digits_module, wgmma_module):
        monkeypatch.setattr(module, "run", run)
    monkeypatch.setattr(gemv_module, "card_of", lambda x: H200)
    return found


@in_kernels("2-72-1280-640-*")
@in_kernels("4-200-1120-32-*", "8-72-1280-640-*", "3-200-*")
@pytest.mark.parametrize(
    ("bits", "N", "K", "G", "scales"),
    [
        (4, 144, 1024, 128, torch.bfloat16),
        # Tails of rows, steps and parts; half of a step.
        (3, 200, 2176, 128, torch.float16),
        pytest.param(4, 200, 2176, 128, torch.float16, marks=kernels),
        # Groups within a step; tails of K and of the last of them.
        (4, 72, 1024, 64, torch.bfloat16),
        (4, 200, 1120, 32, torch.float16),
        (8, 72, 608, 32, torch.bfloat16),
        pytest.param(4, 144, 2304, 192, torch.bfloat16, marks=kernels),
        pytest.param(4, 144, 1056, 96, torch.bfloat16, marks=kernels),
        # A group over several steps.
        *((bits, 72, 1280, 640, torch.bfloat16) for bits in (2, 8)),
    ],
)
def test_a_token_has_its_bits_in_any_company(
    make_tiled: MakeTiled,
    randn: Randn,
    launches: list[str],
    bits: int,
    N: int,
    K: int,
    G: int,
    scales: torch.dtype,
) -> None:
    w = make_tiled(bits, N, K, G, False, scales)
    x, norm, residual = randn(MOST, K), randn(K), randn(MOST, N)

    def compute(tokens: slice) -> Tensor:
        return gemv(x[tokens], w, norm=norm, eps=EPS, added=residual[tokens], dtype=torch.float32)

    alone = torch.cat([compute(slice(i, i + 1)) for i in ALONE.tolist()])
    expected = gemv_ref(x, w, norm=norm, eps=EPS, added=residual)[ALONE]
    assert float((alone.double() - expected).norm() / expected.norm()) < 5e-3  # x * gain rounded
    launches.clear()
    sixteen = replace(choose(w, 17, H200), room=16)  # which small weights leave to `gemv`
    one_block = gemv(x[:16], w, sixteen, norm, None, EPS, residual[:16], torch.float32)
    assert torch.equal(one_block[ALONE[ALONE < 16]], alone[ALONE < 16])
    assert launches == ["_digits_kernel", "_wgmma_kernel", "gemv_join_kernel"]
    launches.clear()
    for count in (17, 33, MOST):
        inside = count > ALONE
        assert torch.equal(compute(slice(0, count))[ALONE[inside]], alone[inside]), count
        assert launches == ["_digits_kernel", "_wgmma_kernel", "gemv_join_kernel"]
        launches.clear()
