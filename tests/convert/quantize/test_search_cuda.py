"""The kernel of the scale search against the specification of the format: the same bits."""

import pytest
import torch
from torch import Tensor

from lowbit.convert.quantize.search_cuda import search
from lowbit.formats.layout.rtn import TINY, quantize, search_scales, weighted_scales
from lowbit.formats.layout.scheme import Scheme


def weights(N: int, K: int) -> Tensor:
    """Rows of ordinary weights, of outliers, of tiny and huge ones, of zeros and of ties."""
    generator = torch.Generator().manual_seed(N + K)
    w = torch.randn(N, K, generator=generator) * 0.02
    w[1::8] *= torch.rand(w[1::8].shape, generator=generator).pow(-1).clamp(max=100)
    w[2::8] *= 2.0**-60
    w[3::8] *= 2.0**50
    w[4::8] = 0
    w[5::8] = torch.randint(-3, 4, w[5::8].shape, generator=generator).float()
    w[6::8] *= TINY
    return w


def check(N: int, K: int, scheme: Scheme, device: str) -> None:
    w = weights(N, K)
    for rule in ("signed", "positive"):
        expected = quantize(w, scheme, rule, search_scales)
        found = quantize(w.to(device), scheme, rule, search)
        for a, b in zip(expected, found, strict=True):
            assert torch.equal(a, b.cpu())
    power = torch.rand(K, generator=torch.Generator().manual_seed(1)).pow(8) * 1e4
    plain = weighted_scales(w, scheme, "signed", power)
    assert torch.equal(
        plain, weighted_scales(w.to(device), scheme, "signed", power.to(device), search).cpu()
    )
    assert not torch.equal(plain, quantize(w, scheme)[1])


@pytest.mark.skipif(torch.cuda.is_available(), reason="the test below runs the kernel itself")
def test_the_kernel_interpreted() -> None:
    check(16, 64, Scheme(4, 32), "cpu")


@pytest.mark.gpu
@pytest.mark.parametrize("group", [32, 64, 128, 256, 512])
@pytest.mark.parametrize("bits", [3, 4, 6])
def test_the_kernel(bits: int, group: int) -> None:
    check(1000, 1536, Scheme(bits, group), "cuda")
