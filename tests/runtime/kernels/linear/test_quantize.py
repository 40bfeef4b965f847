"""x in eight bits as a kernel lays it out, against the reference of `formats.activations`."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from lowbit.formats.activations import quantize_activations, token_bounds
from lowbit.runtime.kernels.linear import digits as digits_module
from lowbit.runtime.kernels.linear import quantize as module
from lowbit.runtime.kernels.linear.norm import SQUARES
from lowbit.runtime.kernels.linear.program import global_digits, token_blocks
from lowbit.runtime.kernels.linear.quantize import arranged, quantize
from tests.runtime.kernels.emulator import run_kernel

Randn = Callable[..., Tensor]
EPS = 1e-6


@pytest.fixture(autouse=True)
def _emulated(device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    if device == "cpu":
        for each in (module, digits_module):
            monkeypatch.setattr(each, "run", run_kernel)


def check(x: Tensor, made: Tensor, bits: int, group: int, tokens: int) -> Tensor:
    """Codes, scales and bounds are those of the reference, in their places; returns the factors."""
    places = token_blocks(x.shape[1], group, tokens)
    blocks = -(-len(x) // tokens)
    rows = x[[min(row, len(x) - 1) for row in range(blocks * tokens)]]
    q, s = quantize_activations(rows, group)
    expected = arranged(q, s, bits, places).view(torch.int32)
    found = made[: expected.numel()].view(expected.shape)
    scales = places.SCALES // 4
    # Scales of columns past K meet codes of zero; of NaN the bits may differ.
    real = expected[..., scales:].view(torch.float32) != 0
    own, other = (each[..., scales:][real].view(torch.float32) for each in (found, expected))
    assert torch.equal(own.isnan(), other.isnan())
    assert torch.equal(own[~own.isnan()], other[~own.isnan()])
    assert bool(found[..., scales:][~real].view(torch.float32).isfinite().all())
    broken = ~rows.isfinite().all(1)
    codes = [each[..., :scales].view(*each.shape[:2], tokens, 32) for each in (found, expected)]
    sound = ~broken.view(blocks, tokens)
    assert torch.equal(codes[0][:, sound], codes[1][:, sound])
    behind = made[expected.numel() :].view(torch.float32).view(2, -1)
    assert torch.equal(behind[1], token_bounds(q, s, group))
    return behind[0]


@pytest.mark.parametrize(
    ("M", "K", "group", "tokens", "bits"),
    [
        (3, 512, 128, 16, 4),
        (17, 1120, 32, 16, 8),
        (40, 416, 64, 32, 3),
        (9, 2208, 128, 64, 2),
        (600, 640, 128, 128, 4),
        (300, 4096, 128, 256, 8),
    ],
)
def test_codes_and_scales(randn: Randn, M: int, K: int, group: int, tokens: int, bits: int) -> None:
    """Elements of all sizes, halves among them, groups of zeros, tokens with NaN or infinity."""
    x = randn(M, K) * torch.logspace(-6, 6, M).to(randn(1))[:, None]
    x[1, :group], x[0, 7], x[0, 9] = 0, 127, 2.5
    x[0, 32:64] = torch.arange(-32, 32, 2, device=x.device) / 4
    x[2, 3 * group // 2], x[2, 0] = torch.nan, 2.0**-126
    x[M - 1, 5] = -torch.inf
    check(x, quantize(x, bits, token_blocks(K, group, tokens)), bits, group, tokens)


@pytest.mark.parametrize(("tokens", "group"), [(16, 128), (64, 32)])
def test_scales_of_sixteens_lie_as_lanes_read_them(randn: Randn, tokens: int, group: int) -> None:
    K, x = 512, randn(70, 512)
    places = token_blocks(K, group, tokens, sixteens=True)
    made = quantize(x, 4, places)
    expected = arranged(*quantize_activations(x, group), 4, places)
    rows = 70 - 70 % tokens  # those of padding repeat the last one
    own = made.view(torch.uint8)[: expected.numel()].view(expected.shape)
    blocks = rows // tokens
    assert torch.equal(own[:, :blocks], expected[:, :blocks])
    scales = quantize_activations(x, group)[1][:tokens, 0]
    lane = own[0, 0, places.SCALES :][16:32].view(torch.float32)  # the second one's
    assert torch.equal(lane, scales[[2, 3, 10, 11]])
    with pytest.raises(ValueError, match="sixteens"):
        token_blocks(K, group, 8, sixteens=True)


@pytest.mark.parametrize(("K", "programs"), [(4160, 2), (10240, 3), (12544, 4)])
def test_programs_that_share_a_row_leave_a_bound_each(randn: Randn, K: int, programs: int) -> None:
    x = randn(3, K) * torch.logspace(-6, 6, 3).to(randn(1))[:, None]
    x[0, K // 2 :], x[1, :4096], x[2, 7] = 0, 0, torch.nan
    made = quantize(x, 4, token_blocks(K, 128, 8, programs))
    whole = quantize(x, 4, token_blocks(K, 128, 8))
    bounds = made[len(whole) - 8 :].view(programs, 8)
    assert not torch.equal(bounds[0], bounds.amax(0))
    check(x, torch.cat((made[: len(whole) - 8], bounds.amax(0))), 4, 128, 8)
    with pytest.raises(ValueError, match="do not norm"):
        quantize(x, 4, token_blocks(K, 128, 8, programs), norm=x[0])


@pytest.mark.parametrize("K", [768, 4160])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
def test_norms(randn: Randn, dtype: torch.dtype, K: int) -> None:
    """The product with the gain is rounded to BF16, and factors have the bits of `digits`."""
    x, gain = randn(20, K), (1 + 0.3 * randn(K)).to(dtype)
    made = quantize(x, 4, token_blocks(K, 64, 16), norm=gain, eps=EPS)
    factors = check((x.float() * gain.float()).bfloat16(), made, 4, 64, 16)
    places = global_digits(K, 4, 32)
    exact = digits_module.digits(x, 4, places, norm=gain, eps=EPS)[places.FACTORS // 4 :]
    assert torch.equal(factors[:20].view(torch.int32), exact[:20])
    assert torch.equal(factors[20:], factors[19:20].expand(12))


@pytest.mark.parametrize(("K", "heads", "group"), [(1024, 8, 128), (96, 6, 32)])
def test_norms_of_heads(randn: Randn, K: int, heads: int, group: int) -> None:
    x = randn(5, K)
    squares = (x.float() * 3).square().view(5, heads, SQUARES, -1).sum(-1)
    made = quantize(x, 8, token_blocks(K, group, 16), squares=squares, eps=EPS)
    sums = (squares[..., 0] + squares[..., 1]) + (squares[..., 2] + squares[..., 3])
    factors = torch.rsqrt(sums / (K // heads) + EPS)
    scaled = (x.float().view(5, heads, -1) * factors[..., None]).view(5, K)
    if x.is_cuda:  # whose reciprocal roots are approximate
        places = token_blocks(K, group, 16)
        expected = arranged(*quantize_activations(scaled, group), 8, places).view(torch.int8)
        own = made.view(torch.int8)[: expected.numel()].view(expected.shape)
        codes = slice(0, places.SCALES)
        apart = own[..., codes].int() - expected[..., codes].int()
        assert int(apart.view(-1, 16, 128)[:, :5].abs().max()) <= 1
    else:
        check(scaled, made, 8, group, 16)


@pytest.mark.parametrize("bits", [4, 8])
@pytest.mark.parametrize("K", [416, 4160])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
def test_tokens_with_one_scale(randn: Randn, dtype: torch.dtype, K: int, bits: int) -> None:
    """Scales are factors, times those of norms, and bounds are left out."""
    x, gain = randn(20, K) * 3, (1 + 0.3 * randn(K)).to(dtype)
    x[1], x[2, 7], x[3, K - 1] = 0, torch.nan, torch.inf
    places = token_blocks(K, 128, 16, whole=True)
    assert places.SIZE == 16 * 128
    made = quantize(x, bits, places, norm=gain, eps=EPS)
    rows = x[[*range(20), *[19] * 12]]
    q, s = quantize_activations((rows.float() * gain.float()).bfloat16(), K)
    expected = arranged(q, torch.zeros(32, -(-K // 128)).to(s), bits, token_blocks(K, 128, 16))
    expected = expected[..., : places.SIZE].contiguous().view(torch.int32)
    found = made[: expected.numel()].view(expected.shape)
    sound = torch.tensor([n not in (2, 3) for n in range(32)], device=x.device).view(2, 16)
    own, other = (each.view(*each.shape[:2], 16, 32)[:, sound] for each in (found, expected))
    assert torch.equal(own, other)
    factors = made[expected.numel() :].view(torch.float32)[:32]
    norms = quantize(rows, bits, token_blocks(K, 128, 16), norm=gain, eps=EPS)[-64:-32]
    assert torch.equal(factors.isnan(), s[:, 0].isnan())
    assert torch.equal(factors.nan_to_num(), (s[:, 0] * norms.view(torch.float32)).nan_to_num())
    with pytest.raises(ValueError, match="normed"):
        quantize(x, bits, places)
