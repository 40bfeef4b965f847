"""Round-to-nearest with searched scales: the same codes on CPU and GPU, with any block size.

Operations that decide a code are those that IEEE 754 defines exactly: elementwise FP32, division by
a tensor, round-half-even, and sums as explicit pairwise adds (library reductions differ between
devices). Codes are computed against the scale as stored, rounded to BF16.

Scale rules, relative L2 error on Gaussian weights at INT4 g128:
    absmax     |w|max / 7.5, the default of compressed-tensors                          .1110
    positive   best of RATIOS by squared error, scale positive                          .1010
    signed     same search, signed so that the largest weight lies on the code -8 side   .0968
"""

from collections.abc import Callable, Iterator
from typing import Literal

import torch
from torch import Tensor

from lowbit.formats.layout.scheme import Scheme

ScaleRule = Literal["signed", "positive", "absmax"]
# Weights [groups, G], extremes [groups, 1], half the codes, importance [column groups, G] or None
# to scales [groups, 1]; groups take the rows of importance in turn.
Search = Callable[[Tensor, Tensor, int, Tensor | None], Tensor]

SCALE_DTYPE = torch.bfloat16

# Ratios |w|max / scale in units of 2^(bits-1), tried in this order; the first of equals wins.
# Above 1 the largest weights are clipped in exchange for finer steps.
STEPS = (0, -2, -1, *range(1, 15))
RATIOS = (*(1 + step / 32 for step in STEPS), 1.5, 1.625, 1.75, 2.0, 2.5)

# From 8 bits on, the search gains nothing measurable: clipping costs more than finer steps gain.
SEARCHED_BITS = range(2, 8)

# Groups whose largest weight is below this are stored as zeros: division by scales near the
# subnormal range differs between devices.
TINY = 2.0**-100

CACHE_ELEMENTS = 1 << 20  # FP32 block that stays in cache during the search


def quantize(
    w: Tensor, scheme: Scheme, rule: ScaleRule = "signed", search: Search | None = None
) -> tuple[Tensor, Tensor]:
    """Quantize a block of rows.

    Args:
        w: [N, K] of a float dtype, finite, on any device; the group size divides K.
        scheme: symmetric.
        search: another implementation of `search_scales`, with the same results.

    Returns:
        codes [N, K] int8 and scale [N, K/G] bfloat16, on w's device.
    """
    N, K = w.shape
    G = scheme.group_size or K
    codes = torch.empty((N * K // G, G), dtype=torch.int8, device=w.device)
    scale = torch.empty((N * K // G, 1), dtype=SCALE_DTYPE, device=w.device)
    for part, block in _blocks(w, G):
        scale[part] = s = _scales(block, scheme, rule, search or search_scales)
        q = block.div(s.to(torch.float32)).round_()
        codes[part] = q.clamp_(scheme.code_min, scheme.code_max)
    return codes.view(N, K), scale.view(N, K // G)


def weighted_scales(
    w: Tensor,
    scheme: Scheme,
    rule: ScaleRule,
    importance: Tensor,
    search: Search | None = None,
) -> Tensor:
    """Scales by the same search, with squared errors weighted by the importance of columns.

    Args:
        w: [N, K] of a float dtype, finite; the group size divides K.
        scheme: symmetric.
        importance: [K] float32, not negative; second moments of the input, for instance.
        search: another implementation of `search_scales`, with the same results.

    Returns:
        [N, K/G] bfloat16, on w's device.
    """
    N, K = w.shape
    G = scheme.group_size or K
    scale = torch.empty((N * K // G, 1), dtype=SCALE_DTYPE, device=w.device)
    columns = importance.view(K // G, G)
    for part, block in _blocks(w, G, K // G):
        scale[part] = _scales(block, scheme, rule, search or search_scales, columns)
    return scale.view(N, K // G)


def nearest_codes(w: Tensor, scale: Tensor, scheme: Scheme) -> Tensor:
    """Codes [N, K] int8 that are nearest to w [N, K] at scales [N, K/G]."""
    groups = w.to(torch.float32).view(len(w), scale.shape[1], -1)
    codes = groups.div(scale.to(torch.float32)[:, :, None]).round_()
    return codes.clamp_(scheme.code_min, scheme.code_max).to(torch.int8).view(w.shape)


def _blocks(w: Tensor, G: int, multiple: int = 1) -> Iterator[tuple[slice, Tensor]]:
    """Groups of [N, K] weights in FP32, [groups, G], as many at a time as stay in cache.

    Their number is a multiple of `multiple`, the last time too.
    """
    groups = w.reshape(-1, G)
    fitting = max(multiple, CACHE_ELEMENTS // G // multiple * multiple)
    step = fitting if w.device.type == "cpu" else max(1, len(groups))
    for start in range(0, len(groups), step):
        part = slice(start, start + step)
        yield part, groups[part].to(torch.float32)


def _scales(
    w: Tensor,
    scheme: Scheme,
    rule: ScaleRule,
    search: Search,
    importance: Tensor | None = None,
) -> Tensor:
    """Scale of each group: [groups, 1] bfloat16, never zero."""
    high, low = w.amax(1, keepdim=True), w.amin(1, keepdim=True)
    extreme = torch.where(-low >= high, low, high)  # largest magnitude, with its sign
    # Signed: the most negative code times a scale of the opposite sign gives the extreme.
    extreme = -extreme if rule == "signed" else extreme.abs()
    extreme = torch.where(extreme.abs() < TINY, 1.0, extreme)
    if rule == "absmax":
        return (extreme * _fp32(2 / (2**scheme.bits - 1))).to(SCALE_DTYPE)
    half = 1 << (scheme.bits - 1)
    if scheme.bits not in SEARCHED_BITS:
        # A positive scale that puts the extreme on the code range's larger side would clip it.
        codes = half if rule == "signed" else half - 0.5
        return (extreme * _fp32(1 / codes)).to(SCALE_DTYPE)
    return search(w, extreme, half, importance)


def ratio_factors(half: int) -> tuple[float, ...]:
    """1 / (half * ratio) in FP32: for the full code range, then for each of RATIOS."""
    return tuple(_fp32(1 / (half * ratio)) for ratio in (1, *RATIOS))


def search_scales(w: Tensor, extreme: Tensor, half: int, importance: Tensor | None) -> Tensor:
    """The scale among RATIOS with the smallest squared error, per group; see `Search`.

    Where the errors leave the range of FP32 (weights beyond 2^60 or below 2^-70) it is the one of
    the full code range.
    """
    first, *factors = ratio_factors(half)
    best = (extreme * first).to(SCALE_DTYPE)
    best_error = torch.full_like(extreme, torch.inf)
    scratch = torch.empty_like(w)
    weights = None if importance is None else importance.repeat(len(w) // len(importance), 1)
    for factor in factors:
        s = (extreme * factor).to(SCALE_DTYPE)
        wide = s.to(torch.float32)
        torch.mul(w, torch.ones_like(wide) / wide, out=scratch)
        scratch.round_().clamp_(-half, half - 1).mul_(wide).sub_(w)
        scratch.mul_(scratch)
        if weights is not None:
            scratch.mul_(weights)
        error = pairwise_sum(scratch)
        better = error < best_error
        best_error = torch.where(better, error, best_error)
        best = torch.where(better, s, best)
    return best


def pairwise_sum(x: Tensor) -> Tensor:
    """Sum over the last dimension in a fixed order of additions: [..., 1].

    Overwrites x.
    """
    n = x.shape[-1]
    while n > 1:
        half = n // 2
        x[..., :half] += x[..., half : 2 * half]
        if n % 2:
            x[..., :1] += x[..., n - 1 : n]
        n = half
    return x[..., :1].clone()


def _fp32(value: float) -> float:
    """The nearest FP32 number, so that every device multiplies by the same factor."""
    return torch.tensor(value, dtype=torch.float32).item()
