"""Kernels over blocks of columns against the plain loops that specify them."""

import pytest
import torch
from torch import Tensor

from lowbit.convert.quantize import columns, columns_cuda
from lowbit.formats.layout.scheme import Scheme


def block(B: int, N: int, device: str) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Weights, steps, a triangular factor and its moments; some weights lie beyond the codes."""
    generator = torch.Generator().manual_seed(B)
    weights = torch.randn(B, N, generator=generator)
    steps = torch.rand(B, N, generator=generator) * 0.2 + 0.05
    steps[:, ::2] *= -1
    U = torch.triu(torch.randn(B, B, generator=generator) * 0.1) + torch.eye(B)
    made = weights, steps, U.T.contiguous().T, U.T @ U  # U column by column, as a GPU gives it
    return tuple(tensor.to(device) for tensor in made)  # type: ignore[return-value]


def check(B: int, N: int, device: str, scheme: Scheme) -> None:
    weights, steps, U, H = block(B, N, device)
    plain = [tensor.cpu() for tensor in (weights, steps, U, H)]
    codes, errors = columns.compensate(plain[0].clone(), plain[1], plain[2], scheme)
    found = columns_cuda.compensate(weights.clone(), steps, U, scheme)
    # The order of the multiply-adds may differ in the last bit: a code at the border of its cell.
    assert (found[0].cpu() != codes).float().mean() < 1e-3
    same = (found[0].cpu() == codes).all(0)
    torch.testing.assert_close(found[1].cpu()[:, same], errors[:, same], rtol=1e-4, atol=1e-4)
    assert found[0].min() >= scheme.code_min
    assert found[0].max() <= scheme.code_max
    assert scheme.bits == 8 or (codes == scheme.code_min).any()
    slope = torch.randn(B, N, generator=torch.Generator().manual_seed(1))
    new = columns.polish(slope.clone(), codes, plain[1], plain[3], scheme)
    again = columns_cuda.polish(slope.to(device), codes.to(device), steps, H, scheme)
    assert (again.cpu() != new).float().mean() < 1e-3
    assert (new != codes).float().mean() > 0.1


@pytest.mark.skipif(torch.cuda.is_available(), reason="the test below runs the kernels themselves")
@pytest.mark.parametrize(("B", "N"), [(32, 33)])
def test_kernels_interpreted(B: int, N: int) -> None:
    check(B, N, "cpu", Scheme(4, 32))


@pytest.mark.gpu
@pytest.mark.parametrize("bits", [2, 4, 8])
@pytest.mark.parametrize(("B", "N"), [(128, 4096), (128, 1000), (64, 33)])
def test_kernels(B: int, N: int, bits: int) -> None:
    check(B, N, "cuda", Scheme(bits, 32))
