"""Reference of inputs as INT8: FP32 scales for each token and group along K, or for each token.

In mode `int8` every packed linear but the head takes its input x [M, K] in eight bits; `exact` is
the default. The head of a GPU takes two rows for each token, x and what its codes leave
(`with_remainders`), whose products are added: 16 bits. A group of x has `activation_group`
elements and lies within one group of the weight; the last group of a row may be short. In FP32,
for each token and group:

    m = max(max|x|, 2^-100)
    q = rint(x * (127 / m)), halves to even
    s = m * fp32(1 / 127), with the last bit set

A group of zeros has codes 0. A group with NaN or an infinity has scale NaN and codes 0, so every
output of its token is NaN.

The product adds the groups in FP32, in any order, from a centre that follows from the token and the
row alone (`centres`), and takes it away again:

    y = centre
    y = fma(fp32(sum(code * q) * weight_scale), s, y)    for each group
    y = y - centre

The sum of a group is an exact integer below 2^24. The centre is three times a power of two, P,
that is above every sum of terms, so no sum leaves what lies between 2 P and 4 P: each term is
rounded to the same multiple of 2^-22 P, and all sums are exact after that. No term lies half way
between two multiples: one factor is odd, and the other is too small. So a token's result has the
same bits in any company, chunk and tile, however K is divided and whoever adds the parts.

Behind a rotation values are much alike along K, so what a norm makes of them has one scale a token
(`whole`). There the weight's scales are integers, too: multiples of one unit for each row, so that
all of K is one integer sum, which 32 bits hold however it is made (`integer_scales`):

    y = fp32(sum(multiple * sum(code * q))) * unit * s
"""

import math

import torch
from torch import Tensor

GROUP = 128  # elements of x that share a scale, where the weight's groups allow it
LARGEST_CODE = 127
SMALLEST_PEAK = 2.0**-100  # the reciprocal of a smaller one would overflow
SQUARES_UNIT = 32  # in which a token's bound counts the squares of eight codes, rounded up
BOUND_SLACK = 1 + 2.0**-8  # of roundings on the way
# Powers of two beyond which those of rows and tokens do not go, so that centres are numbers. Above
# the largest, inputs of 2^69 and more, the order of sums may show.
LEAST_ROW, LARGEST_POWER, LARGEST_POWER_BITS = 2.0**-19, 2.0**62, 0x5E800000
LARGEST_MULTIPLE = 32767  # of a row's unit: multiples are int16
MOST_COLUMNS = 1 << 16  # of a weight with such scales: of more the largest sums need 33 bits
RATIO_BITS = 15  # of the ratios of a row's scales that its sums are bounded by


def activation_group(group_size: int, K: int) -> int:
    """Elements of x that share a scale.

    Args:
        group_size: weights along K that share a scale; K or more for one scale a row.

    >>> [activation_group(size, 1024) for size in (32, 64, 128, 256, 512, 1024)]
    [32, 64, 128, 128, 128, 128]
    """
    return GROUP if group_size >= K else math.gcd(group_size, GROUP)


def quantize_activations(x: Tensor, group: int) -> tuple[Tensor, Tensor]:
    """Codes and scales of inputs.

    Args:
        x: [M, K] BF16 or FP32.
        group: elements along K that share a scale; the last group may be short.

    Returns:
        [M, K] int8 codes and [M, ceil(K / group)] float32 scales.
    """
    M, K = x.shape
    wide = torch.nn.functional.pad(x.float(), (0, -K % group)).view(M, -1, group)
    peaks = wide.abs().amax(-1)  # NaN where any is NaN
    finite = peaks < torch.inf
    used = torch.where(finite, peaks, 1.0).clamp(min=SMALLEST_PEAK)
    # A tensor over a tensor: PyTorch divides a number by a tensor through the reciprocal.
    inverses = torch.full_like(used, LARGEST_CODE) / used
    codes = torch.where(finite[..., None], wide * inverses[..., None], 0.0).round()
    scales = torch.where(finite, odd(used * (1 / LARGEST_CODE)), torch.nan)
    return codes.to(torch.int8).view(M, -1)[:, :K].contiguous(), scales


def odd(x: Tensor) -> Tensor:
    """FP32 numbers with their last bit set."""
    return (x.view(torch.int32) | 1).view(torch.float32)


def dequantize_activations(q: Tensor, s: Tensor, group: int) -> Tensor:
    """The inputs that codes stand for: `q * s`, [M, K] float32; see `quantize_activations`."""
    return q.float() * s.repeat_interleave(group, dim=1)[:, : q.shape[1]]


def with_remainders(x: Tensor, group: int) -> Tensor:
    """Each row of inputs and, behind it, what the row's codes leave of it: x - q * s.

    The sum of the products of both is that of x but for 2^-15 of a group's largest element.

    Args:
        x: [M, K] BF16.
        group: elements along K that share a scale.

    Returns:
        [2 * M, K] in x's dtype.
    """
    left = x.float() - dequantize_activations(*quantize_activations(x, group), group)
    return torch.stack((x, left.to(x.dtype)), dim=1).flatten(0, 1)


def row_bounds(squares: Tensor, groups: int) -> Tensor:
    """Three times a power of two for each row of a weight; see `centres`.

    The power is above |w| sqrt(groups), so by Cauchy and Schwarz times that of a token it is above
    every sum of terms.

    Args:
        squares: [N] float64, |w|^2 of the rows.
        groups: of a token.

    Returns:
        [N] float32.
    """
    bounds = (squares * groups).sqrt() * BOUND_SLACK
    return 3 * power_above(bounds.clamp(LEAST_ROW / 2, LARGEST_POWER / 2).float())


def squared_norms(codes: Tensor, scales: Tensor) -> Tensor:
    """|w|^2 of each row of a weight: codes [N, K] int8 and scales [N, K / G] to [N] float64."""
    groups = codes.double().square_().view(len(codes), scales.shape[1], -1).sum(-1)
    return (groups * scales.double().square()).sum(-1)


def token_bounds(q: Tensor, s: Tensor, group: int) -> Tensor:
    """A power of two above |x| of each group of a token: [M] float32 of its largest one.

    A group's is that above its scale, times one that is not below the root of the sum of q^2: its
    exponent is half of the sum's, rounded up. Of every eight codes the sum is counted in units of
    `SQUARES_UNIT`, rounded up, so that a group's fits 16 bits. Groups that are zero or not finite
    have none.

    Args:
        q: [M, K] int8.
        s: [M, groups] float32.
        group: elements along K that share a scale.
    """
    M, K = q.shape
    codes = torch.nn.functional.pad(q.int(), (0, -K % group)).view(M, -1, group // 8, 8)
    units = (codes.square().sum(-1) + (SQUARES_UNIT - 1)) // SQUARES_UNIT
    squares = units.sum(-1) * SQUARES_UNIT
    half = (squares.float().view(torch.int32) >> 23) - 125 >> 1
    words = (s.view(torch.int32) & 0x7F800000).clamp(max=LARGEST_POWER_BITS)
    words = (words + 0x00800000 + (half << 23)).clamp(max=LARGEST_POWER_BITS)
    return torch.where((squares == 0) | s.isnan(), 0, words).amax(-1).view(torch.float32)


def power_above(x: Tensor) -> Tensor:
    """The least power of two above each FP32 number: of its bits the exponent, and one more."""
    return ((x.view(torch.int32) & 0x7F800000) + 0x00800000).view(torch.float32)


def centres(rows: Tensor, tokens: Tensor) -> Tensor:
    """Starts of the sums of products.

    Args:
        rows: [N] of `row_bounds`.
        tokens: [M] of `token_bounds`.

    Returns:
        [M, N] float32.
    """
    return tokens[:, None] * rows


def grouped_product_ref(q: Tensor, s: Tensor, codes: Tensor, scales: Tensor) -> Tensor:
    """Product of rounded inputs with a packed weight, as the module states it.

    Args:
        q: [M, K] int8, of `quantize_activations` in groups of `activation_group`.
        s: [M, groups] float32.
        codes: [N, K] int8 of the weight.
        scales: [N, K / G] of the weight, in a float dtype; [N, 1] for one scale a row.

    Returns:
        [M, N] float32, neither times a norm's factor nor added to anything.
    """
    K = q.shape[1]
    group_size = K // scales.shape[1]
    group = activation_group(group_size, K)
    rows = row_bounds(squared_norms(codes, scales), s.shape[1])
    centre = centres(rows, token_bounds(q, s, group))
    y = centre
    for number, start in enumerate(range(0, K, group)):
        part = slice(start, start + group)
        sums = q[:, part].double() @ codes[:, part].double().T  # exact
        t = (sums * scales[:, start // group_size].double()).float()
        y = fma(t, s[:, number, None], y)
    return y - centre


def integer_scales(codes: Tensor, scales: Tensor, bits: int) -> tuple[Tensor, Tensor]:
    """Scales of a weight as multiples of a unit for each row, for inputs with one scale a token.

    The units are the least with which a row's sum fits int32 for any codes of x. Kernels multiply
    codes that lie in the upper bits of a byte, so 2^(8 - bits) times the sum has to fit. For rows
    of 4,096 codes of four bits a row's largest multiple is some 140: rounding to multiples errs by
    .3 % of a scale, where codes err by 9 % of a weight, and codes of eight bits by .6 %.

    Args:
        codes: [N, K] int8.
        scales: [N, K / G], in a float dtype; [N, 1] for one scale a row.
        bits: of a code.

    Returns:
        [N, K / G] int16 and [N] float32. The same on every device.

    Raises:
        ValueError: more than `MOST_COLUMNS` columns.
    """
    N, K = codes.shape
    if K > MOST_COLUMNS:
        raise ValueError(f"a weight of {K} columns, at most {MOST_COLUMNS} have integer scales")
    wide = scales.double()
    peaks = wide.abs().amax(1, keepdim=True)
    ratios = wide / torch.where(peaks > 0, peaks, 1.0)
    sizes = codes.short().abs().view(N, scales.shape[1], -1).sum(-1)  # int64
    # Rounding adds half a unit to a multiple at most, and integers make the rest exact.
    most = ((1 << 31) - 1 >> 8 - bits) // LARGEST_CODE
    room = (most - (sizes.sum(1) + 1) // 2) << RATIO_BITS
    weighed = ((ratios.abs() * (1 << RATIO_BITS)).ceil().long() * sizes).sum(1)
    tops = (room // weighed.clamp(min=1)).clamp(max=LARGEST_MULTIPLE)
    multiples = (ratios * tops[:, None]).round().to(torch.int16)
    return multiples, (peaks[:, 0] / tops).float()


def whole_product_ref(q: Tensor, s: Tensor, codes: Tensor, scales: Tensor, bits: int) -> Tensor:
    """Product of inputs with one scale a token with a packed weight, as the module states it.

    Args:
        q: [M, K] int8, of `quantize_activations` in one group.
        s: [M, 1] float32.
        codes: [N, K] int8 of the weight.
        scales: [N, K / G] of the weight, in a float dtype; [N, 1] for one scale a row.
        bits: of a code.

    Returns:
        [M, N] float32, neither times a norm's factor nor added to anything.
    """
    multiples, units = integer_scales(codes, scales, bits)
    weight = codes.double() * multiples.double().repeat_interleave(
        codes.shape[1] // scales.shape[1], 1
    )
    return (q.double() @ weight.T).float() * units * s  # sums are exact


def fma(a: Tensor, b: Tensor, c: Tensor) -> Tensor:
    """`a * b + c` of FP32 numbers, rounded to FP32 once.

    FP64 holds the product exactly. Its sum with c is rounded to odd, after which the rounding to
    FP32 gives what one rounding would.
    """
    product, addend = a.double() * b.double(), c.double()
    total = product + addend
    back = total - product
    error = (product - (total - back)) + (addend - back)  # exact: the two-sum of Knuth
    even = total.view(torch.int64) & 1 == 0
    towards = torch.copysign(torch.full_like(error, torch.inf), error)
    odd = torch.nextafter(total, towards)
    inexact = (error != 0) & error.isfinite() & even
    return torch.where(inexact, odd, total).float()
