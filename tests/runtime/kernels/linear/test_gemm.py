"""Products of many tokens on Hopper against float64, and a token's bits in any company."""

from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from lowbit.runtime.kernels.launch.linear import GemmShare
from lowbit.runtime.kernels.linear import gemm as module
from lowbit.runtime.kernels.linear.gemm import STAGES, gemm
from lowbit.runtime.kernels.linear.tiles import TiledLinear
from lowbit.runtime.kernels.linear.widen import widen_ref
from lowbit.runtime.kernels.rows import rms_norm

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(
        not torch.cuda.is_available() or torch.cuda.get_device_capability()[0] != 9,
        reason="needs a Hopper GPU",
    ),
]

MakeTiled = Callable[..., TiledLinear]
Randn = Callable[..., Tensor]

EPS = 1e-6
# N, K, G: a lone tile, tails of 128 rows and of 128 k, groups of a chunk, across steps, of a row
SHAPES = [(16, 160, 32), (144, 1056, 96), (1040, 1152, 128), (272, 2624, 64), (4096, 4096, 512)]
SHAPES += [(256, 12288, 12288), (6144, 4096, 128)]
BITS = pytest.mark.parametrize("bits", [2, 3, 4, 8])
PROGRAMS = pytest.mark.parametrize("program", STAGES)


def relative_error(y: Tensor, ref: Tensor) -> float:
    return float((y.double() - ref).norm() / ref.norm())


def product(x: Tensor, w: TiledLinear) -> Tensor:
    """The value `gemm` approximates: [M, N] float64."""
    return x.double() @ widen_ref(w).double().T


def use_programs_of(monkeypatch: pytest.MonkeyPatch, tokens: int, splits: int = 1) -> None:
    """Blocks of so many tokens, in so many splits where they have a share each."""

    def share(row_blocks: int, M: int, steps: int, count: int) -> GemmShare:
        fits = steps % splits == 0 and tokens // 8 % splits == 0
        return GemmShare(tokens, splits if fits else 1)

    monkeypatch.setattr(module, "gemm_share", share)


@PROGRAMS
@BITS
@pytest.mark.parametrize(("N", "K", "G"), SHAPES)
@pytest.mark.parametrize("M", [65, 300, 1100])
def test_product(
    make_tiled: MakeTiled,
    randn: Randn,
    bf16_error: float,
    monkeypatch: pytest.MonkeyPatch,
    bits: int,
    N: int,
    K: int,
    G: int,
    M: int,
    program: int,
) -> None:
    use_programs_of(monkeypatch, program)
    w, x, residual, bias = make_tiled(bits, N, K, G), randn(M, K), randn(M, N), randn(1, N)
    expected = product(x, w)
    assert relative_error(gemm(x, w), expected) < bf16_error
    for added in (residual, bias):
        y = gemm(x, w, added=added)
        assert relative_error(y, expected + added.double()) < bf16_error


@PROGRAMS
@BITS
@pytest.mark.parametrize("N", [16, 6144])
def test_swiglu_of_normed_tokens(
    make_tiled: MakeTiled,
    randn: Randn,
    bf16_error: float,
    monkeypatch: pytest.MonkeyPatch,
    bits: int,
    N: int,
    program: int,
) -> None:
    """Gate comes before up, neither is rounded; x is normed as `rms_norm` does it."""
    use_programs_of(monkeypatch, program)
    w, x, gain = make_tiled(bits, N, 2560, 128, True), randn(300, 2560), randn(2560)
    gate, up = product(rms_norm(x, gain, EPS), w).chunk(2, 1)
    y = gemm(x, w, norm=gain, eps=EPS)
    assert y.shape == (300, N // 2)
    assert relative_error(y, torch.nn.functional.silu(gate) * up) < bf16_error


@BITS
@pytest.mark.parametrize("splits", [1, 2])
def test_a_token_has_the_same_bits_in_any_company_of_as_many_splits(
    make_tiled: MakeTiled, randn: Randn, monkeypatch: pytest.MonkeyPatch, bits: int, splits: int
) -> None:
    use_programs_of(monkeypatch, 256, splits)
    w, x, added = make_tiled(bits, 1040, 2560, 128), randn(1100, 2560), randn(1100, 1040)
    whole = gemm(x, w, added=added)
    for program in STAGES:
        use_programs_of(monkeypatch, program, splits)
        for first, last in ((0, 65), (1, 400), (129, 1100), (1000, 1100)):
            part = gemm(x[first:last].contiguous(), w, added=added[first:last].contiguous())
            assert torch.equal(part.view(torch.int16), whole[first:last].view(torch.int16))


@PROGRAMS
@BITS
@pytest.mark.parametrize("splits", [2, 3, 4])
@pytest.mark.parametrize(("N", "K", "paired"), [(1040, 3072, False), (6144, 3072, True)])
def test_blocks_that_several_programs_share(
    make_tiled: MakeTiled,
    randn: Randn,
    bf16_error: float,
    monkeypatch: pytest.MonkeyPatch,
    bits: int,
    N: int,
    K: int,
    paired: bool,
    splits: int,
    program: int,
) -> None:
    """Sums of all splits are added once, by the last to come, in one order: the same every time."""
    use_programs_of(monkeypatch, program, splits)
    w, x = make_tiled(bits, N, K, 128, paired), randn(300, K)
    added = None if paired else randn(300, N)
    expected = product(x, w)
    if added is None:
        gate, up = expected.chunk(2, 1)
        expected = torch.nn.functional.silu(gate) * up
    else:
        expected += added.double()
    y = gemm(x, w, added=added)
    assert relative_error(y, expected) < bf16_error
    for _ in range(20):
        assert torch.equal(gemm(x, w, added=added).view(torch.int16), y.view(torch.int16))


def test_a_graph_of_shared_blocks_is_replayed(
    make_tiled: MakeTiled, randn: Randn, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The counts of programs that have come are zero again at each replay."""
    use_programs_of(monkeypatch, 128, 4)
    w, x = make_tiled(4, 1040, 2048, 128), randn(300, 2048)
    expected, graph = gemm(x, w), torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        y = gemm(x, w)
    for _ in range(3):
        y.fill_(float("nan"))
        graph.replay()
        assert torch.equal(y.view(torch.int16), expected.view(torch.int16))


def test_many_blocks_of_one_program(
    make_tiled: MakeTiled, randn: Randn, bf16_error: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A program goes on to its next block with what it has begun to load."""
    card_of = module.card_of  # type: ignore[attr-defined]
    monkeypatch.setattr(module, "card_of", lambda x: replace(card_of(x), multiprocessors=3))
    w, x = make_tiled(4, 1040, 384, 128), randn(1500, 384)
    assert relative_error(gemm(x, w), product(x, w)) < bf16_error


def test_rows_do_not_mix(make_tiled: MakeTiled, randn: Randn) -> None:
    """A NaN token spoils its own row alone."""
    w, x = make_tiled(4, 48, 256, 64), randn(90, 256)
    clean = gemm(x, w)
    x[7] = float("nan")
    y = gemm(x, w)
    assert bool(y[7].isnan().all())
    others = [m for m in range(90) if m != 7]
    assert torch.equal(y[others], clean[others])
